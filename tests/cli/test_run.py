"""``python -m hf_zero_stream.run``: what it runs sees no difference, but its checkpoints are streamed."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.moe_checkpoint import make_moe_checkpoint
from hf_zero_stream.run import main
from tests.support.cluster import ROOT
from tests.support.commands import command_environment, losses, run_command
from tests.support.zoo import Checkpoint


SCRIPT = """\
import sys
import helper
seen = __name__, __file__, sys.argv, sys.path[0], __spec__ and __spec__.name, __package__
print(*seen, __import__("__main__").seen == seen, {"torch", "transformers"} & set(sys.modules), sep="\\n")
helper.act(sys.argv[1:])
"""
HELPER = """\
import sys
def act(arguments):
    if arguments[-1] == "raise":
        raise ValueError("told to")
    sys.exit({"code": 3, "text": "an error"}.get(arguments[-1], 0))
"""


WORKERS = """\
from .helper import act
import multiprocessing
def work(number):
    return number + 1, __name__, __package__
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [1]))
"""
HOOK = """\
import sys, traceback
print(sys.excepthook is sys.__excepthook__)
def hook(kind, error, trace):
    print([(frame.name, frame.lineno) for frame in traceback.extract_tb(trace)])
sys.excepthook = hook
1 / 0
"""
ABSENT = """\
from transformers import BertModel
def load():
    BertModel.from_pretrained("/absent/folder")
load()
"""


def python(*arguments: str, folder: Path, standard_input: str = "") -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=command_environment(),
        input=standard_input,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for package in (folder, folder / "package"):
        package.mkdir(exist_ok=True)
        (package / "train.py").write_text(SCRIPT)
        (package / "helper.py").write_text(HELPER)
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "__main__.py").write_text(SCRIPT)
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", SCRIPT)
        archive.writestr("helper.py", HELPER)
    (folder / "package" / "workers.py").write_text(WORKERS)
    for name, text in {"hook": HOOK, "absent_model": ABSENT, "syntax": "print(\nx = = 2"}.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "linked.py").symlink_to(folder / "package" / "train.py")
    return folder


@pytest.mark.parametrize(
    ("target", "last", "code"),
    [
        (["train.py"], "", 0),
        (["package/train.py"], "raise", 1),
        (["linked.py"], "code", 3),
        (["package"], "text", 1),
        (["-m", "train"], "raise", 1),
        (["-m", "package"], "code", 3),
        (["-m", "package.train"], "text", 1),
        (["archive.zip"], "raise", 1),
        (["-m", "absent"], "raise", 1),
        (["absent.py"], "raise", 2),
    ],
)
def test_a_script_sees_no_difference(scripts: Path, target: list[str], last: str, code: int) -> None:
    """Arguments, names, paths, exit code, output and traceback are those of plain Python."""
    arguments = [*target, "-m", "--steps=3", last]
    plain = python(*arguments, folder=scripts)
    assert plain[0] == code and (plain[1].endswith("True\nset()\n") or "absent" in target[-1])
    assert python("-m", "hf_zero_stream.run", *arguments, folder=scripts) == plain


@pytest.mark.parametrize("target", [["hook.py"], ["syntax.py"], ["-m", "syntax"], ["-m", "package.workers"]])
def test_hooks_faulty_sources_and_spawned_workers(scripts: Path, target: list[str]) -> None:
    assert python("-m", "hf_zero_stream.run", *target, folder=scripts) == python(*target, folder=scripts)


def test_a_script_from_standard_input(scripts: Path) -> None:
    plain = python("-", "code", folder=scripts, standard_input=SCRIPT)
    assert plain[0] == 3 and "<stdin>" in plain[1]
    assert python("-m", "hf_zero_stream.run", "-", "code", folder=scripts, standard_input=SCRIPT) == plain


@pytest.mark.slow
def test_the_traceback_of_a_load_has_the_scripts_lines(scripts: Path) -> None:
    _, _, shown = python("-m", "hf_zero_stream.run", "absent_model.py", folder=scripts)
    last = shown.rpartition("Traceback (most recent call last):\n")[2].splitlines()
    assert "absent_model.py" in last[0] and last[1:4:2] == [
        "    load()",
        '    BertModel.from_pretrained("/absent/folder")',
    ]
    assert "absent_model.py" in last[2] and last[-1].startswith("OSError")


def test_options_of_python_stay(scripts: Path) -> None:
    (scripts / "flags.py").write_text("import sys; print(sys.flags, sys._xoptions, sys.stdout.line_buffering)")
    options = ("-u", "-B", "-X", "utf8=0", "-W", "error")
    assert python(*options, "-m", "hf_zero_stream.run", "flags.py", folder=scripts) == python(
        *options, "flags.py", folder=scripts
    )


@pytest.mark.parametrize("flag", ["ignore_environment", "no_site"])
def test_a_python_that_would_not_look_for_us(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    flags = {"ignore_environment": 0, "no_site": 0, flag: 1}
    monkeypatch.setattr(sys, "flags", SimpleNamespace(**flags))
    with pytest.raises(SystemExit, match="2"):
        main(["train.py"])
    assert "leave -E, -I and -S out" in capsys.readouterr().err


def test_the_option_of_deepspeeds_launcher_is_the_scripts(scripts: Path) -> None:
    ours = python("-m", "hf_zero_stream.run", "--local_rank=1", "train.py", "--steps", folder=scripts)
    assert ours == python("train.py", "--local_rank=1", "--steps", folder=scripts)


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["-m"], 2), (["--unknown"], 2), (["--help"], 0)])
def test_usage(tmp_path: Path, arguments: list[str], code: int) -> None:
    found, out, err = python("-m", "hf_zero_stream.run", *arguments, folder=tmp_path)
    assert found == code and (err if code else out).startswith("usage: python -m hf_zero_stream.run SCRIPT")


def test_a_wrong_setting_is_refused_before_the_script_runs(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_STREAM_STAGING_BYTES", "lots")
    code, out, err = python("-m", "hf_zero_stream.run", "train.py", folder=scripts)
    assert (code, out) == (2, "")
    assert err.startswith("hf_zero_stream.run: environment variable HF_ZERO_STREAM_STAGING_BYTES: expected a whole")


STREAMS = """\
import os, sys, threading
os.environ["HF_HOME"] = "/a/home/set/by/the/script"
import transformers
from huggingface_hub import constants
from transformers import AutoModel, BertModel, PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig
assert constants.HF_HOME == os.environ["HF_HOME"]
import deepspeed
deepspeed.init_distributed("gloo")
config = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
models = []
def load():
    models.append(AutoModel.from_pretrained(sys.argv[1], output_loading_info=True)[0])
taken = BertModel.from_pretrained
for _ in range(2):
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
models += [BertModel.from_pretrained(sys.argv[1]), taken(sys.argv[1])]
print([model.streaming_report.world_size for model in models], PreTrainedModel.from_pretrained.__doc__ is not None)
models[0].save_pretrained(sys.argv[2])
engine = deepspeed.initialize(model=models[0], config=config.config)[0]
from hf_zero_stream.state import hooks
print(engine.save_checkpoint.__wrapped__.__name__, vars(type(engine))["save_checkpoint"] is not None)
print(os.path.exists(os.path.join(sys.argv[2], "model.safetensors")))
"""


@pytest.mark.slow
def test_all_threads_stream_and_variables_are_read_late(
    compiler: None, zoo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Of loads in other threads too; what the script sets before its imports still counts."""
    (tmp_path / "train.py").write_text(STREAMS)
    arguments = ["train.py", str(zoo_checkpoint("bert")), str(tmp_path / "saved")]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "hf_zero_stream.run", *arguments],
        cwd=tmp_path,
        env=command_environment() | rank | {"HF_ZERO_STREAM_PROGRESS": "false"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-3:] == ["[1, 1, 1, 1] True", "save_checkpoint True", "True"]


LAUNCHERS = {
    "torchrun": "torchrun --nproc_per_node 2 -m hf_zero_stream.run examples/finetune_trainer.py",
    "accelerate": "accelerate launch --config_file examples/accelerate/zero3_cpu_gloo.yaml -m hf_zero_stream.run "
    "examples/finetune_accelerate.py",
}
ARGUMENTS = " --model tiny-moe --steps 3 --loader stock"


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.slow
def test_a_script_without_a_word_of_ours_is_streamed(launcher: str, tmp_path: Path) -> None:
    make_moe_checkpoint(tmp_path / "tiny-moe", 0.01 * 1e9, num_layers=2, num_experts=8)
    command = LAUNCHERS[launcher] + ARGUMENTS
    ours = run_command(command, tmp_path)
    stock = run_command(command.replace("-m hf_zero_stream.run ", ""), tmp_path)
    assert "Streaming weights: 100%" in ours and "Streaming weights" not in stock
    assert len(losses(ours)) == 3 and losses(ours) == losses(stock)


def test_its_launchers_are_documented() -> None:
    """Every form in the module's docstring is in the documentation too."""
    import hf_zero_stream.run

    forms = re.findall(r"^    (\w.*hf_zero_stream\.run .*)$", hf_zero_stream.run.__doc__ or "", re.MULTILINE)
    assert len(forms) == 4
    assert all(form in (ROOT / "docs" / "use.md").read_text() for form in forms)
