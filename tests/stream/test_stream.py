"""Weight streams.

- A weight stream gives what a save holds, bit for bit, on the ranks that want it, in buckets.
- A weight stream in the shape of vLLM's WeightSource: what it says, and what it gives, on all ranks.
- What the engine's side imports.
"""

import itertools
import os
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from tests.core.test_imports import imports_of
from tests.support import live_sharded as live
from tests.support.checkpoint_files import differing
from tests.support.cluster import ROOT, run_ranks
from tests.support.live_sharded import fully_sharded
from tests.support.parity import ds_config, load_with, three_losses
from tests.support.quantised_checkpoints import MODELS, Folders
from tests.support.rl_trainers import put
from tests.support.streams import compared, stream_live, stream_odd, stream_packed, stream_trained, stream_zero, taken
from tests.support.vllm_sources import ParamMeta, Source32, Source33
from tests.support.zoo import ZOO, Checkpoint, build_model


FUSED_EXPERTS, TIED = "qwen3_moe", "qwen3"


def assert_complete(of_ranks: Sequence[dict[str, Any]], to: str) -> None:
    """Nothing differs, and who should get a tensor got it."""
    names = of_ranks[0]["names"]
    assert [found["differing"] for found in of_ranks] == [[]] * len(of_ranks)
    assert all(found["metadata"] for found in of_ranks)
    owned = [found["owned"] for found in of_ranks]
    if to == "owners":
        assert sorted(name for mine in owned for name in mine) == names
        nbytes = [found["bytes"] for found in of_ranks]
        assert max(nbytes) < 2 * sum(nbytes) / len(nbytes)
    else:
        assert owned == [names if to == "all" or rank == 0 else [] for rank in range(len(owned))]


@pytest.mark.parametrize("bucket_bytes", [1000, 2**20])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("to", ["rank0", "all", "owners"])
def test_under_zero_3(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, to: str, world_size: int, bucket_bytes: int
) -> None:
    """Buckets of 1,000 bytes are smaller than most tensors."""
    checkpoints = {name: zoo_checkpoint(name) for name in ("llama", FUSED_EXPERTS, TIED, "llama4", "gpt_oss")}
    found = run_ranks(world_size, stream_zero, checkpoints, tmp_path, to, {"bucket_bytes": bucket_bytes})
    for of_ranks in zip(*found, strict=True):
        assert_complete(of_ranks, to)


@pytest.mark.parametrize("to", ["rank0", "all", "owners"])
def test_conversions(cluster: None, tmp_path: Path, to: str) -> None:
    for of_ranks in zip(*run_ranks(2, stream_odd, tmp_path, to), strict=True):
        assert_complete(of_ranks, to)


def test_in_another_dtype(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoints = {name: zoo_checkpoint(name) for name in (FUSED_EXPERTS, TIED)}
    found = run_ranks(2, stream_zero, checkpoints, tmp_path, "rank0", {"dtype": torch.bfloat16})
    for of_ranks in zip(*found, strict=True):
        assert_complete(of_ranks, "rank0")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dtype": torch.float32}, {"to": "all", "bucket_bytes": 5000}], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_of_a_training(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, stage: int, options: dict[str, Any]
) -> None:
    """The plan is made once; each pass gives the values of its moment, and nothing is gathered."""
    checkpoint = zoo_checkpoint(FUSED_EXPERTS)
    config = ds_config(torch.bfloat16)
    config["zero_optimization"]["stage"] = stage
    found = run_ranks(2, stream_trained, checkpoint, tmp_path, config, options)
    assert [of_rank["differing"] for of_rank in found] == [[[], []]] * 2
    assert found[0]["tensors"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("to", ["rank0", "all", "owners"])
@pytest.mark.parametrize(
    ("world_size", "ways"),
    [
        (2, [live.after_a_step_and_an_eval, live.mixed_precision, live.partly_sharded, live.tp, live.by_transformers]),
        (2, [live.inside_another]),
        pytest.param(4, [live.hsdp, live.fsdp_of_tp, live.by_transformers_in_two_ways], marks=pytest.mark.slow),
    ],
    ids=["2", "part", "4"],
)
def test_of_dtensors(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, world_size: int, ways: list[live.Way], to: str
) -> None:
    found = run_ranks(world_size, stream_live, zoo_checkpoint("llama"), tmp_path, ways, to)
    for way in ways:
        assert_complete([of_rank[way.__name__] for of_rank in found], to)


@pytest.mark.plugin("packed")
@pytest.mark.parametrize("name", MODELS)
def test_of_packed_weights(cluster: None, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, name: str) -> None:
    checkpoint = Folders(tmp_path_factory)(name)
    assert_complete(run_ranks(2, stream_packed, checkpoint, tmp_path), "rank0")


def test_in_one_process(tmp_path: Path) -> None:
    """Without a process group; a buffer is streamed as it is saved, and each bucket is new memory."""
    model = build_model("llama")
    assert_complete([compared(model, tmp_path, "rank0")], "rank0")
    stream = hf_zero_stream.weight_stream(model, bucket_bytes=10_000)
    kept = [bucket for bucket in stream]
    assert len({bucket.packed.data_ptr() for bucket in kept}) == len(kept) > 2
    tensors = dict(itertools.chain.from_iterable(kept))
    assert differing(tensors, {name: tensors[name].clone() for name in model.state_dict()}) == []
    assert [name for name, _ in itertools.chain.from_iterable(kept)] == [each.name for each in stream.metadata]
    assert stream.version == 1


def test_a_changed_model_is_planned_anew(tmp_path: Path) -> None:
    model = build_model("llama")
    stream = hf_zero_stream.weight_stream(model)
    before = taken(stream)
    model.resize_token_embeddings(300)
    after = taken(stream)
    assert after["model.embed_tokens.weight"].shape[0] == 300 != before["model.embed_tokens.weight"].shape[0]
    assert {each.name: each.shape for each in stream.metadata} == {name: each.shape for name, each in after.items()}


def test_what_is_trained() -> None:
    """Of a layer all or nothing, because engines put its tensors together."""
    model = build_model("llama").requires_grad_(False)
    model.model.layers[1].self_attn.q_proj.weight.requires_grad = True
    model.lm_head.weight.requires_grad = True
    found = taken(hf_zero_stream.weight_stream(model, only="trainable"))
    expected = {name for name in model.state_dict() if name.startswith(("model.layers.1.", "lm_head."))}
    assert found.keys() == expected


def test_own_layout() -> None:
    """The model's own parameters: experts are fused, and there are no buffers."""
    model = build_model(FUSED_EXPERTS)
    found = taken(hf_zero_stream.weight_stream(model, layout="model"))
    assert differing(found, {name: param.detach() for name, param in model.named_parameters()}) == []


def run_documented(checkpoint: Path, code: str) -> list[int]:
    """How often this rank got each tensor."""
    config = ds_config(torch.bfloat16)
    model = load_with("streamed", "AutoModelForCausalLM", checkpoint, config, {})
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    got: Counter[str] = Counter()

    def receive(name: str, tensor: torch.Tensor) -> None:
        assert tensor.dtype == torch.bfloat16
        got[name] += 1

    def train(engine: Any) -> None:
        three_losses(engine, ZOO["llama"].inputs)

    exec(code, {**globals(), "engine": engine, "train": train, "receive": receive})
    return sorted(got.values())


def test_code_of_the_page(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "rl.md").read_text(), re.MULTILINE | re.DOTALL)
    first, other = run_ranks(2, run_documented, zoo_checkpoint("llama"), code)
    assert set(first) == {3} and other == []


def given(folder: Path, shape: Any, to: str) -> list[str]:
    """What two passes over a source give otherwise than it says, or than a pass over the stream gives."""
    put("vllm")
    put(
        "vllm.distributed",
        weight_transfer=put("vllm.distributed.weight_transfer", ParamMeta=ParamMeta, WeightSource=shape),
    )
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, ds_config=ds_config(torch.float32))
    stream: Any = hf_zero_stream.weight_stream(model, to, bucket_bytes=20_000)  # type: ignore[arg-type]
    source = stream.weight_source()
    rank = dist.get_rank()
    if shape is Source33:
        assert source.metadata is source.metadata
        said, owned = source.metadata, source.owned_names(rank)
    else:
        said = source.metadata()
        owned = [each.name for each in said] if to == "all" or rank == 0 else []
    wrong = []
    for _ in range(2):
        found = list(source.iter_full() if shape is Source33 else source)
        mine = [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in found]
        stated = [ParamMeta(each.name, each.dtype, each.shape) for each in said if each.name in owned]
        assert mine == stated and [name for name, _ in found] == owned
        wrong += differing(dict(found), {name: tensor for bucket in stream for name, tensor in bucket})
    assert len(owned) > 5 or (to, rank) == ("rank0", 1)
    return wrong


@pytest.mark.sample(4)
@pytest.mark.parametrize("to", ["rank0", "all"])
@pytest.mark.parametrize("shape", [Source32, Source33])
def test_it_gives_what_it_says(cluster: None, zoo_checkpoint: Checkpoint, shape: type[Any], to: str) -> None:
    assert run_ranks(2, given, zoo_checkpoint("qwen3_moe"), shape, to) == [[], []]


def refused(folder: Path) -> str:
    stream = hf_zero_stream.weight_stream(fully_sharded(folder), "owners")
    with pytest.raises(hf_zero_stream.errors.ConfigError) as caught:
        stream.weight_source()
    return str(caught.value)


def test_owners(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for message in run_ranks(2, refused, zoo_checkpoint("llama")):
        assert "expected a stream to 'rank0' or 'all'; got to='owners'" in message


@pytest.mark.slow
def test_vllms_own_engine(vllm: str, zoo_checkpoint: Checkpoint) -> None:
    """It sends the same from our source as from its own, which gathers."""
    torchrun = [
        str(Path(vllm).with_name("python")),
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    command = [
        *torchrun,
        "-m",
        "tests.support.vllm_sources",
        str(zoo_checkpoint("llama")),
        sysconfig.get_path("purelib"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "rank 0: 42 equal tensors" in done.stdout and "rank 1: 0 equal tensors" in done.stdout, done.stdout


def test_an_engine_needs_torch_alone() -> None:
    """What runs in vLLM's process, where the package is installed without what it depends on."""
    of_engine = {
        f"hf_zero_stream.plugins.stream.{name}" for name in ("wire", "receiver", "reads", "vllm_plugin", "vllm_engine")
    } | {"hf_zero_stream.settings.values", "hf_zero_stream.errors"}
    imported_by_type_checkers = "hf_zero_stream.plugin_api"  # at run time it gives names as they are asked for
    for module in of_engine:
        sources = {source for source, _ in imports_of(module)}
        own = {source for source in sources if source.startswith("hf_zero_stream")}
        assert own <= {*of_engine, imported_by_type_checkers}
        others = {source.partition(".")[0] for source in sources - own} - sys.stdlib_module_names
        assert others <= {"torch", "vllm", "packaging"}, module  # the last, which vLLM has, in one message of an error
