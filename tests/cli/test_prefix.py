"""``hf-zero-stream run COMMAND``: every rank of any launcher streams, and the command sees no difference."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.moe_checkpoint import make_moe_checkpoint
from hf_zero_stream.prefix import FOLDER, environment
from tests.support.cluster import ROOT
from tests.support.commands import command_environment, run_command, run_to_its_end


PREFIX = ("hf-zero-stream", "run")
LINES = "import sys; print(sys.path, 'sitecustomize' in sys.modules, sys.argv, {'torch', 'psutil'} & set(sys.modules))"


def result(*command: str, standard_input: str = "", **variables: str) -> tuple[int, str, str]:
    done = subprocess.run(
        command,
        env=command_environment() | variables,
        cwd=tempfile.gettempdir(),  # the metadata of a working tree would come first
        input=standard_input,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("python", "-c", LINES, "--help", "-m"),
        ("sh", "-c", "cat; echo told >&2; exit 7", "--help"),
        ("sh", "-c", "kill -9 $$"),
        ("python", "-c", "raise ValueError('told to')"),
    ],
)
def test_exit_codes_streams_and_arguments_are_the_commands(command: tuple[str, ...]) -> None:
    assert result(*PREFIX, *command, standard_input="said") == result(*command, standard_input="said")


def test_a_script_needs_no_python_before_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:], sys.prefix)")
    assert result(*PREFIX, f"{tmp_path}/train.py", "--a") == (0, f"['--a'] {sys.prefix}\n", "")


def test_stock_states_is_a_setting() -> None:
    show = ("sh", "-c", "echo $HF_ZERO_STREAM_TRAINING_STATE $0", "--stock-states")
    assert result(*PREFIX, "--stock-states", *show)[1] == "0 --stock-states\n"
    assert result(*PREFIX, *show)[1] == "--stock-states\n"


@pytest.mark.parametrize(
    ("name", "code", "why"), [("absent", 127, "No such file"), ("/etc/passwd", 126, "Permission")]
)
def test_a_command_that_cannot_be_run(name: str, code: int, why: str) -> None:
    found, out, err = result(*PREFIX, name, "--option")
    assert (found, out) == (code, "") and err.startswith(f"hf-zero-stream run: cannot run {name}: {why}")


def test_a_wrong_setting_is_refused_before_the_command_runs() -> None:
    code, out, err = result(*PREFIX, "echo", "run", HF_ZERO_STREAM_STAGING_BYTES="lots")
    assert (code, out) == (2, "") and "HF_ZERO_STREAM_STAGING_BYTES: expected a whole" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_the_commands(number: signal.Signals) -> None:
    script = "import signal, sys; signal.signal(%d, lambda *_: sys.exit(5)); print('on', flush=True); signal.pause()"
    command = [*PREFIX, "python", "-c", script % number]
    with subprocess.Popen(command, env=command_environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "on\n"
        process.send_signal(number)
        assert process.wait(30) == 5


def test_the_variables() -> None:
    once = environment({"PYTHONPATH": f"a{os.pathsep}b", "OTHER": "1"})
    assert once == {"HF_ZERO_STREAM_RUN": "1", "OTHER": "1", "PYTHONPATH": os.pathsep.join([FOLDER, "a", "b"])}
    assert environment(once) == once  # inside another one
    assert environment({})["PYTHONPATH"] == FOLDER


@pytest.mark.parametrize("own", ["print('own')", "raise ValueError('of mine')", "import absent_module", None])
def test_a_users_own_sitecustomize_runs(tmp_path: Path, own: str | None) -> None:
    if own is not None:
        (tmp_path / "sitecustomize.py").write_text(own)
    search_path = f"{tmp_path}{os.pathsep}{command_environment()['PYTHONPATH']}"
    plain = result("python", "-c", LINES, PYTHONPATH=search_path)
    assert own is None or own[:5] == "print" or "Error in sitecustomize" in plain[2]
    assert result("python", "-c", LINES, **environment({"PYTHONPATH": search_path})) == plain


SEEN = "import sys; print(sorted(m for m in sys.modules if m.startswith('hf_zero_stream')))"


def test_a_python_without_the_package() -> None:
    """As without us, in all it imports and prints; one that does not import `site` too."""
    python = Path(sys.base_prefix) / "bin" / "python3"
    for options in ([], ["-S"], ["-I"]):
        code, out, err = result(str(python), *options, "-c", SEEN, PYTHONPATH=FOLDER)
        assert (code, out, err) == (0, "[]\n", "")


def test_what_is_broken_in_us_breaks_no_import(tmp_path: Path) -> None:
    """A plug-in that cannot be imported, or our own code: the rank's `import transformers` goes on, with a warning."""
    (tmp_path / "transformers.py").touch()
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[hf_zero_stream.plugins]\nbroken = no_such_module:PLUGIN\n")
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{command_environment()['PYTHONPATH']}", "LOCAL_RANK": "0"}
    script = "import transformers; from hf_zero_stream.settings import scope; print(len(scope.active_configs()))"
    code, out, err = result(*PREFIX, "python", "-c", script, **environment)
    assert (code, out) == (0, "1\n") and "broken of broken (no_such_module:PLUGIN: ModuleNotFoundError" in err
    ours = "import hf_zero_stream.bindings.streaming as own; own.enter_with_ranks = own.no_such_function = None; "
    code, out, err = result(*PREFIX, "python", "-c", ours + script, **environment)
    assert (code, out) == (0, "0\n") and "what this process loads and saves is left to transformers" in err


@pytest.fixture
def unfit(tmp_path: Path) -> str:
    """A search path on which the package needs what is not installed, and transformers is small."""
    (tmp_path / "transformers.py").touch()
    info = tmp_path / "hf_zero_stream-9.dist-info"
    info.mkdir()
    needed = "".join(f"Requires-Dist: {each}\n" for each in ("absent-package>=1", "packaging>=999"))
    (info / "METADATA").write_text(f"Name: hf_zero_stream\nVersion: 9\n{needed}")
    return f"{tmp_path}{os.pathsep}{command_environment()['PYTHONPATH']}"


def test_versions_that_do_not_fit(unfit: str) -> None:
    """Nothing is replaced; the first rank of a host says so, and a process without ranks says nothing."""
    script = "import sys, transformers; print('hf_zero_stream.bindings.streaming' in sys.modules)"
    for rank in ({}, {"LOCAL_RANK": "1"}):
        assert result(*PREFIX, "python", "-c", script, PYTHONPATH=unfit, **rank) == (0, "False\n", "")
    code, out, err = result(*PREFIX, "python", "-c", script, PYTHONPATH=unfit, LOCAL_RANK="0")
    assert (code, out) == (0, "False\n")
    assert "hf_zero_stream needs packaging>=999: what this process loads and saves is left to transformers" in err


ALONE = """\
import sys
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[1])
print(hasattr(model, "streaming_report"), "hf_zero_stream.settings.scope" in sys.modules)
from hf_zero_stream.settings import scope
print(scope.active_configs(), "hf_zero_stream.loading.entrance" in sys.modules)
import deepspeed
try:
    deepspeed.init_distributed("gloo")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def alone(tmp_path: Path) -> list[str]:
    make_moe_checkpoint(tmp_path / "tiny-moe", 0.001 * 1e9, num_layers=1, num_experts=2)
    return ["python", "-c", ALONE, f"{tmp_path}/tiny-moe"]


def test_a_process_without_ranks_is_left_alone(alone: list[str]) -> None:
    printed, said = result(*PREFIX, *alone)[1].split("False\n")
    assert printed == "False True\n() " and said.startswith("ConfigError DeepSpeed trains on the ranks of a launcher")
    assert "WORLD_SIZE" in said and "torchrun --nproc-per-node N" in said


@pytest.mark.slow
def test_a_rank_that_is_told_to_be_is_left_alone(alone: list[str]) -> None:
    switched_off = (*PREFIX, "env", "HF_ZERO_STREAM_RUN=0", *alone)
    assert result(*switched_off, LOCAL_RANK="0", RANK="0")[1] == (
        "False False\n() False\nModuleNotFoundError No module named 'mpi4py'\n"
    )


RANK = """\
import os
import socket
import sys

import deepspeed
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModel
from transformers.integrations import HfDeepSpeedConfig


def main(number=None):
    if number is not None:
        os.environ |= dict(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="2")
    AutoModel.from_pretrained("tiny-moe")
    deepspeed.init_distributed("gloo")
    config = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    model = AutoModel.from_pretrained("tiny-moe")
    sys.stdout.write(f"rank {dist.get_rank()} of {model.streaming_report.world_size} streamed\\n")
    sys.stdout.flush()
    try:
        AutoModel.from_pretrained(["tiny-moe", "other-moe"][dist.get_rank()])
    except ValueError:
        sys.excepthook(*sys.exc_info())
    dist.barrier()


if __name__ == "__main__":
    if sys.argv[1:] == ["mp.spawn"]:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
        mp.spawn(main, nprocs=2)
    else:
        main()
"""
ON_CPU = "examples/accelerate/zero3_cpu_gloo.yaml"
CPU_OPTIONS = "--bf16 false --dtype float32"
LAUNCHERS = {
    "torchrun": "torchrun --nproc_per_node 2 rank.py",
    "accelerate": f"accelerate launch --config_file {ON_CPU} rank.py",
    "deepspeed": "deepspeed --num_accelerators 2 rank.py",
    "mp.spawn": "python rank.py mp.spawn",
    "shell": "sh -c 'torchrun --standalone --nproc_per_node 2 rank.py'",
}


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "launcher", [each if each == "torchrun" else pytest.param(each, marks=pytest.mark.slow) for each in LAUNCHERS]
)
def test_ranks_of_any_launcher_stream(launcher: str, tmp_path: Path) -> None:
    """The script has no word of ours, and `mp.spawn` tells a rank its number when transformers is imported already.

    A load that comes before the process group is spoken of, by default one line says what was loaded, and `--report`
    keeps it, beside what the file has. Of an error, where it is raised, the lines of others are shown, and one line on
    the other rank.
    """
    for name, size in (("tiny-moe", 0.001), ("other-moe", 0.002)):
        make_moe_checkpoint(tmp_path / name, size * 1e9, num_layers=1, num_experts=2)
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "reports").write_text('{"kind": "of an earlier run"}\n')
    printed = run_command(f"hf-zero-stream run --report reports {LAUNCHERS[launcher]}", tmp_path)
    assert len(re.findall(r"^hf_zero_stream: loaded .* into .* on 2 ranks in ", printed, re.MULTILINE)) == 1, printed
    reports = [json.loads(line) for line in (tmp_path / "reports").read_text().splitlines()]
    assert [report["kind"] for report in reports[:2]] == ["of an earlier run", "load"]
    assert [len(report["ranks"]) for report in reports[1:]] == ([2] if launcher == "mp.spawn" else [0, 2])
    assert sorted(re.findall(r"rank . of 2 streamed", printed)) == ["rank 0 of 2 streamed", "rank 1 of 2 streamed"]
    assert printed.count("Move the line that creates") == (launcher != "mp.spawn")
    shown = [re.findall(rf"^\[rank{rank}\]: (.*)", printed, re.MULTILINE) for rank in (0, 1)]
    assert len(shown[0]) == 1 and "CheckpointError: rank 1: other-moe" in shown[0][0]
    assert len(shown[1]) < 20 and "rank 0 loads tiny-moe" in shown[1][-1]
    assert not [line for line in shown[1] if "/hf_zero_stream/" in line] and "rank.py" in shown[1][1]


GLOO = """\
import os
if "RANK" in os.environ:
    from accelerate import PartialState
    original = PartialState.__init__
    def init(self, cpu=False, **kwargs):
        original(self, cpu, **{**kwargs, "backend": "gloo"})
    PartialState.__init__ = init
"""
"""A user's own `sitecustomize`. `trl` cannot be told of gloo: it asks for the process group in its own process too."""

PAGE = (ROOT / "docs" / "use.md").read_text()
ON_A_CPU = re.findall(r"^hf-zero-stream run (accelerate .* -m trl.*)$", PAGE, re.MULTILINE)
BY_TRL = f"trl sft --accelerate_config {ON_CPU} --config examples/trl/sft.yaml --main_process_port 0 "


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("command", "loads"), [*zip(ON_A_CPU, (1, 2), strict=True), (BY_TRL + CPU_OPTIONS, 1)])
@pytest.mark.slow
def test_trl_streams(command: str, loads: int, tmp_path: Path) -> None:
    """With what examples/tiny.py makes. Loads and saves stream, of dpo's reference model too; losses are stock's."""
    run_command("python examples/tiny.py", tmp_path)
    (tmp_path / "own").mkdir()
    if command.startswith("trl"):
        (tmp_path / "own" / "sitecustomize.py").write_text(GLOO)
    ours = run_command(f"hf-zero-stream run {command}", tmp_path, search_path=[tmp_path / "own"])
    assert ours.count("Streaming weights: 100%") == loads and "Writing weights: 100%" in ours
    stock = run_to_its_end(command, tmp_path, "Training completed", search_path=[tmp_path / "own"])
    assert "Streaming weights" not in stock and "Writing weights" not in stock
    found = [re.findall(r"'loss': '([^']+)'", output) for output in (ours, stock)]
    assert len(set(found[0])) == 3 and found[0] == found[1]
