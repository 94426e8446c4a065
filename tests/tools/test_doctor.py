"""`doctor`: the command about this machine."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers

from hf_zero_stream.cli import checkpoints
from hf_zero_stream.errors import VersionError
from hf_zero_stream.plugins.tools import doctor
from hf_zero_stream.plugins.tools.versions import TRIED
from hf_zero_stream.registry import OURS
from hf_zero_stream.sources.local import kind_of_file_system
from tests.drift.stacks import STACKS
from tests.support.cli import run, run_json
from tests.support.parity import ds_config


PROBLEM = "problem"
ROOT = Path(__file__).parents[2]


# ------------------------------------------------------------------------------------------------------ doctor


def statuses(group: list[dict[str, str]]) -> dict[str, str]:
    return {check["what"]: check["status"] for check in group}


@pytest.fixture
def no_accelerate(tmp_path: Path) -> list[str]:
    """Options that keep the machine's own config of accelerate out of a test."""
    (tmp_path / "plain.yaml").write_text("distributed_type: MULTI_CPU\n")
    return ["--accelerate-config", str(tmp_path / "plain.yaml")]


def test_versions_that_were_tried() -> None:
    """The table of the documentation is what constraints and sets of versions install, and what doctor goes by."""
    rows = re.findall(r"^\| (\S+) \|((?: [\d.]+ \|){3})$", (ROOT / "docs" / "support.md").read_text(), re.MULTILINE)
    shown = {package: tuple(re.findall(r"[\d.]+", versions)) for package, versions in rows}
    assert {package: (lowest, newest) for package, (lowest, _, newest) in shown.items()} == TRIED
    pinned = [
        dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / name).read_text(), re.MULTILINE))
        for name in ("constraints-oldest.txt", "constraints.txt")
    ]
    newest = pinned[1] | STACKS["newest, torch for CUDA and no driver"]
    assert shown == {package: tuple(each[package] for each in (*pinned, newest)) for package in TRIED}


@pytest.mark.parametrize(
    ("version", "status"), [("5.24.0", "ok"), ("5.24.1", "note"), ("6.0.0.dev0", "note"), ("5.0.0", "problem")]
)
def test_doctor_says_what_is_newer_than_what_was_tried(
    no_accelerate: list[str], monkeypatch: pytest.MonkeyPatch, version: str, status: str
) -> None:
    installed = doctor.metadata.version
    monkeypatch.setattr(
        doctor.metadata, "version", lambda name: version if name == "transformers" else installed(name)
    )
    checks = {check.what: check for check in doctor._check_versions()}
    assert checks["transformers"].status == status and checks["torch"].status == "ok"
    assert ("newer than 5.24.0" in checks["transformers"].text) == (status == "note")


def test_doctor_of_this_machine(no_accelerate: list[str]) -> None:
    found = run_json("doctor", *no_accelerate)
    assert found["healthy"] is True and found["storage"] == []
    texts = {check["what"]: check["text"] for check in found["versions"]}
    assert texts["deepspeed"] == deepspeed.__version__ and texts["transformers"] == transformers.__version__
    features = {check["what"]: check for check in found["features"]}
    whats = ("streaming under ZeRO-3", "FSDP2 by accelerate", "distributed_config", "saves and training states")
    assert {features[what]["status"] for what in (*whats, "buckets and servers (s3://, hf://)")} == {"ok"}
    assert found["ops"]["cpu_adam"] is True
    text = run("doctor", *no_accelerate).stdout
    assert "must be made before from_pretrained" in text and text.endswith("No problem found.\n")


@pytest.mark.plugin(*OURS)
def test_doctor_counts_what_the_page_counts(no_accelerate: list[str]) -> None:
    features = {check["what"]: check for check in run_json("doctor", *no_accelerate)["features"]}
    count = re.search(r"^(\d+) functions are replaced", (ROOT / "docs" / "replaced.md").read_text(), re.MULTILINE)
    assert count and f" of {count[1]}, in what is installed" in features["replaced functions"]["text"]


def test_doctor_finds_old_and_missing_packages(monkeypatch: pytest.MonkeyPatch, no_accelerate: list[str]) -> None:
    wanted = ["torch>=999", "not-a-package>=1", 'not-needed>=1; extra == "test"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: wanted)
    found = statuses(run_json("doctor", *no_accelerate, code=1)["versions"])
    assert (found["torch"], found["not-a-package"]) == (PROBLEM, PROBLEM) and "not-needed" not in found
    assert "torch>=999 is needed" in run("doctor", *no_accelerate, code=1).stdout


def test_doctor_finds_libraries_that_are_not_known(monkeypatch: pytest.MonkeyPatch, no_accelerate: list[str]) -> None:
    def import_module(name: str) -> Any:
        raise VersionError(f"DeepSpeed 9 has no {name}")

    monkeypatch.setattr(doctor, "import_module", import_module)
    found = statuses(run_json("doctor", *no_accelerate, code=1)["features"])
    assert found["streaming under ZeRO-3"] == PROBLEM
    assert found["expert_parallel (AutoEP)"] == "no", "what can be left out is no problem"


@pytest.mark.parametrize(
    ("owner", "name", "status", "means"),
    [
        ("accelerate.accelerator", "save_fsdp_model", "note", "training states of accelerate: left to stock"),
        ("transformers.modeling_utils", "unwrap_model", "note", "loads are slower"),
        ("transformers.modeling_utils", "get_checkpoint_shard_files", PROBLEM, "ends in a VersionError"),
    ],
)
def test_doctor_says_what_a_missing_function_takes_away(
    monkeypatch: pytest.MonkeyPatch, no_accelerate: list[str], owner: str, name: str, status: str, means: str
) -> None:
    monkeypatch.delattr(importlib.import_module(owner), name)
    found = run_json("doctor", *no_accelerate, code=status == PROBLEM)["features"]
    (row,) = [check for check in found if name in check["text"] and "has no" in check["text"]]
    assert row["status"] == status and row["text"].endswith(means)
    assert not [check for check in found if check["what"] == "replaced functions"]


def test_doctor_finds_a_lock_that_nobody_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_accelerate: list[str]
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "lock").touch()
    (row,) = [check for check in run_json("doctor", *no_accelerate, code=1)["features"] if check["what"] == "lock"]
    assert row["status"] == PROBLEM and f"rm {tmp_path}/cpu_adam/lock" in row["text"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="is about machines without an accelerator")
def test_doctor_has_no_nccl_without_a_gpu(no_accelerate: list[str]) -> None:
    found = {check["what"]: check["status"] for check in run_json("doctor", *no_accelerate)["features"]}
    assert (found["accelerator"], found["NCCL"], found["replaced functions"]) == ("no", "no", "ok")


def test_versions_are_there_before_anything_heavy_is_imported() -> None:
    """What follows may take seconds, or end the process: here the first such import does."""
    code = "import sys\nfrom hf_zero_stream.cli import main\nsys.modules['torch'] = None\nmain()"
    done = subprocess.run([sys.executable, "-c", code, "doctor", "/nowhere"], capture_output=True, text=True)
    assert done.returncode == 1 and "torch" in done.stderr and "importing all libraries" in done.stderr
    assert "| transformers " in done.stdout and "/nowhere: there is no such file or folder" in done.stdout


def test_without_accelerates_own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_default_config", lambda: str(tmp_path / "none.yaml"))
    assert statuses(run_json("doctor")["settings"])["accelerate's config"] == "no"


def test_bundle_has_what_an_issue_needs_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ["hunter2", "s3cret", "hf_abcdefghijklmnopqrst", "wandbkey"]
    monkeypatch.setenv("HF_TOKEN", secrets[0])
    monkeypatch.setenv("HF_ENDPOINT", f"https://me:{secrets[1]}@hub.example/x?sig={secrets[1]}")
    monkeypatch.setenv("NCCL_DEBUG", secrets[2])
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("UNRELATED", "nobody's business")
    monkeypatch.setenv("HF_HOME", os.path.expanduser("~/hub"))
    config = {**ds_config(torch.bfloat16), "wandb": {"enabled": False, "api_key": secrets[3]}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    (tmp_path / "accelerate.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    (tmp_path / "report.json").write_text('{"world_size": 2}')
    options = {name: str(tmp_path / f"{name}.json") for name in ("bundle", "report")}
    options |= {"ds-config": str(tmp_path / "ds.json"), "accelerate-config": str(tmp_path / "accelerate.yaml")}
    run("doctor", *(word for name, value in options.items() for word in (f"--{name}", value)))
    text = (tmp_path / "bundle.json").read_text()
    found = json.loads(text)
    assert [secret for secret in [*secrets, "nobody's business"] if secret in text] == []
    assert found["environment"]["HF_TOKEN"] == found["ds_config"]["wandb"]["api_key"] == "(hidden)"
    assert found["environment"]["HF_ENDPOINT"] == "https://(hidden)@hub.example/x?(hidden)"
    assert (found["environment"]["NCCL_SOCKET_IFNAME"], found["environment"]["HF_HOME"]) == ("eth0", "~/hub")
    assert found["packages"]["transformers"] == transformers.__version__ and found["doctor"]["healthy"] is True
    assert found["accelerate_config"]["num_processes"] == 8 and found["report"] == {"world_size": 2}
    assert (
        found["ds_config"]["zero_optimization"]["stage"] == 3 and found["hf_zero_stream"] and found["machine"]["cpus"]
    )
    assert "expected --bundle" in run("doctor", "--report", options["report"], code=2).output


def test_doctor_looks_at_settings_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, no_accelerate: list[str]
) -> None:
    monkeypatch.setenv("HF_ZERO_STREAM_VERIFFY", "full")
    found = {check["what"]: check for check in run_json("doctor", *no_accelerate)["settings"]}
    assert found["environment"]["status"] == "ok"
    assert found["HF_ZERO_STREAM_VERIFFY"]["status"] == "note"
    assert "did you mean HF_ZERO_STREAM_VERIFY?" in found["HF_ZERO_STREAM_VERIFFY"]["text"]

    monkeypatch.setenv("HF_ZERO_STREAM_VERIFY", "fully")
    found = {check["what"]: check for check in run_json("doctor", *no_accelerate, code=1)["settings"]}
    assert found["environment"]["status"] == "problem" and "'fully'" in found["environment"]["text"]


def test_doctor_survives_ops_that_raise(monkeypatch: pytest.MonkeyPatch, no_accelerate: list[str]) -> None:
    from deepspeed.ops.op_builder import all_ops

    class Broken:
        def is_compatible(self, verbose: bool) -> bool:
            raise RuntimeError("no CUDA")

    monkeypatch.setattr(all_ops, "ALL_OPS", {"fused_adam": Broken()})
    found = run_json("doctor", *no_accelerate)
    assert found["ops"] == {"fused_adam": False}
    assert statuses(found["features"])["offload to NVMe"] == "no"
    assert "and that do not: fused_adam" in run("doctor", *no_accelerate).stdout


def test_doctor_reads_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_accelerate: list[str]) -> None:
    (tmp_path / "small").write_bytes(b"x")
    (tmp_path / "large").write_bytes(bytes(3_000_001))
    found = run_json("doctor", str(tmp_path), *no_accelerate)
    (file_system, speed) = found["storage"]
    assert file_system["text"].startswith(kind_of_file_system(str(tmp_path)) or "unknown")
    assert "3.0 MB of large" in speed["text"] and float(speed["text"].split()[0]) > 0
    (tmp_path / "empty").mkdir()
    assert statuses(run_json("doctor", str(tmp_path / "empty"), *no_accelerate)["storage"])["speed"] == "no"
    missing = run_json("doctor", str(tmp_path / "nowhere"), *no_accelerate, code=1)
    assert statuses(missing["storage"]) == {"path": PROBLEM}
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes(b"{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cached = run_json("doctor", "someone/tiny", *no_accelerate, code=1)
    assert "config.json" in cached["storage"][1]["text"]
    assert statuses(cached["checkpoint"]) == {"files": PROBLEM}, "there are no weights"
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (check,) = run_json("doctor", str(tmp_path), *no_accelerate, code=1)["checkpoint"]
    assert check["status"] == PROBLEM and check["text"].startswith("2 faults;")


def settings(tmp_path: Path, config: dict[str, Any], code: int) -> dict[str, str]:
    (tmp_path / "ds.json").write_text(json.dumps(config))
    (tmp_path / "plain.yaml").write_text("distributed_type: MULTI_CPU\n")
    options = ["--accelerate-config", str(tmp_path / "plain.yaml"), "--ds-config", str(tmp_path / "ds.json")]
    return statuses(run_json("doctor", *options, code=code)["settings"])


@pytest.mark.parametrize(
    ("config", "code", "what", "status"),
    [
        (ds_config(torch.bfloat16), 0, "settings", "ok"),
        (ds_config(), 0, "dtype", "note"),
        ({"zero_optimization": {"stage": 2}}, 0, "ZeRO stage", "note"),
        ({**ds_config(), "hf_zero_stream": {"reader_thread": 3}}, 1, "settings", PROBLEM),
        ({**ds_config(), "weight_quantization": {"quantized_initialization": {}}}, 0, "settings", "ok"),
        ({**ds_config(), "weight_quantization": {"quantized_initialization": {"x": 4}}}, 1, "settings", PROBLEM),
        (ds_config(offload_param={"device": "nvme"}), 1, "offload_param.nvme_path", PROBLEM),
        (ds_config(offload_param="cpu"), 1, "offload_param", PROBLEM),
        ({**ds_config(), "bf16": True}, 1, "bf16", PROBLEM),
        ({**ds_config(), "fp16": None}, 0, "settings", "ok"),
        ({"zero_optimization": None}, 1, "zero_optimization", PROBLEM),
        ({"zero_optimization": [3]}, 1, "zero_optimization", PROBLEM),
    ],
)
def test_doctor_looks_at_the_ds_config(
    tmp_path: Path, config: dict[str, Any], code: int, what: str, status: str
) -> None:
    assert settings(tmp_path, config, code)[what] == status


@pytest.mark.parametrize(
    ("kind", "status"), [("ext4", "ok"), ("nfs4", PROBLEM), ("fuse.juicefs", PROBLEM), ("tmpfs", PROBLEM)]
)
def test_doctor_looks_at_swap_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, status: str) -> None:
    """Also of a folder that DeepSpeed will make; its kind is that of the nearest one above it."""
    looked_at = []

    def kind_of(path: str) -> str:
        looked_at.append(path)
        return kind

    monkeypatch.setattr(doctor, "kind_of_file_system", kind_of)
    monkeypatch.setattr(doctor, "is_on_network", lambda path: kind_of(path) not in ("ext4", "tmpfs"))
    swap = {"device": "nvme", "nvme_path": str(tmp_path / "swap" / "here")}
    config = ds_config(torch.bfloat16, offload_optimizer=swap)
    assert settings(tmp_path, config, int(status != "ok"))["offload_optimizer.nvme_path"] == status
    assert set(looked_at) == {str(tmp_path)}


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n  zero3_init_flag: true\n", "ok"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n  zero3_init_flag: false\n", PROBLEM),
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n", PROBLEM),
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n", "ok"),
        ("distributed_type: MULTI_GPU\n", "note"),
        ("- a list\n", PROBLEM),
        ("{", PROBLEM),
        (None, PROBLEM),
    ],
)
def test_doctor_looks_at_accelerates_config(tmp_path: Path, text: str | None, status: str) -> None:
    if text is not None:
        (tmp_path / "default_config.yaml").write_text(text)
    options = ["--accelerate-config", str(tmp_path / "default_config.yaml")]
    found = run_json("doctor", *options, code=int(status == PROBLEM))
    assert statuses(found["settings"])["accelerate's config"] == status


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("distributed_type: MULTI_GPU\nnum_machines: 4\n", True),
        ("distributed_type: MULTI_GPU\nnum_machines: 1\n", False),
        ("distributed_type: FSDP\nnum_machines: 4\n", False),
        ("distributed_type: DEEPSPEED\nnum_machines: 4\ndeepspeed_config:\n  zero_stage: 2\n", True),
        (
            "distributed_type: DEEPSPEED\nnum_machines: 4\ndeepspeed_config:\n  zero_stage: 3\n  zero3_init_flag: on",
            False,
        ),
    ],
)
def test_doctor_says_when_machines_should_share_reads(tmp_path: Path, text: str, is_told: bool) -> None:
    """ZeRO-3 and FSDP2 need no such setting: there each rank reads what it holds."""
    (tmp_path / "accelerate.yaml").write_text(text)
    found = run_json("doctor", "--accelerate-config", str(tmp_path / "accelerate.yaml"))["settings"]
    told = [check["text"] for check in found if check["what"] == "share_reads"]
    assert len(told) == is_told and all("share_reads=True, because there are 4 nodes:" in line for line in told)


@pytest.mark.parametrize("is_remote", [True, False])
def test_doctor_says_when_a_file_system_asks_for_shared_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_accelerate: list[str], is_remote: bool
) -> None:
    monkeypatch.setattr(checkpoints, "is_on_network", lambda path: is_remote and path == str(tmp_path))
    found = run_json("doctor", str(tmp_path), *no_accelerate)["storage"]
    told = [check["text"] for check in found if check["what"] == "share_reads"]
    assert len(told) == is_remote and all("because the checkpoint is on another machine:" in line for line in told)


@pytest.mark.parametrize(
    "path", sorted(Path("examples/accelerate").resolve().glob("zero3*.yaml")), ids=lambda p: p.name
)
def test_our_own_examples_are_healthy(path: Path) -> None:
    assert statuses(run_json("doctor", "--accelerate-config", str(path))["settings"])["accelerate's config"] == "ok"


@pytest.mark.parametrize(("flag", "status"), [("true", "ok"), ("false", PROBLEM)])
def test_doctor_looks_at_what_a_launcher_announces(
    monkeypatch: pytest.MonkeyPatch, no_accelerate: list[str], flag: str, status: str
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_INIT", flag)
    found = run_json("doctor", *no_accelerate, code=int(status == PROBLEM))
    assert statuses(found["settings"])["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == status
    assert os.environ["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == flag
