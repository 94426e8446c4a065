"""What a weight stream gives of adapters, of changed tensors, and to loaders.

- Adapters of PEFT are merged into what a weight stream gives, as PEFT merges them, or streamed by themselves.
- What has changed since the last pass: applied to what was got before, it gives what a save holds, bit for bit.
- What a loader reads of the tensors that a worker gets is seen, whatever it does with them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist

import hf_zero_stream
from hf_zero_stream.errors import ConfigError, StreamError, UnsupportedError
from hf_zero_stream.plugins.stream.merging import merges_values
from hf_zero_stream.plugins.stream.reads import Ranges, Reads, whole
from tests.support import live_sharded as live
from tests.support.checkpoint_files import differing, tensors_of
from tests.support.cluster import run_ranks
from tests.support.packed_training import load as load_packed
from tests.support.packed_training import with_adapters
from tests.support.parity import ds_config, load_with
from tests.support.quantised_checkpoints import Folders
from tests.support.streams import (
    Adapt,
    change,
    dora,
    lora,
    lora_of_experts,
    odd_model,
    patched,
    randomised,
    stream_adapted,
    stream_changes,
    taken,
    under_fsdp2,
    under_zero_3,
)
from tests.support.zoo import ZOO, Checkpoint, build_model


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "adapt"),
    [("llama", lora), ("llama", dora), ("qwen3_moe", lora_of_experts)],
    ids=["lora", "dora", "experts"],
)
@pytest.mark.parametrize("home", [under_zero_3, under_fsdp2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merged(
    cluster: None,
    zoo_checkpoint: Checkpoint,
    tmp_path: Path,
    name: str,
    adapt: Adapt,
    home: Callable[..., object],
    dtype: torch.dtype,
) -> None:
    found, others = run_ranks(2, stream_adapted, zoo_checkpoint(name), tmp_path, home, adapt, dtype)
    assert found == {"merged": [], "again": [], "model's": [], "adapters": [], "changed": True}
    assert others == {"merged": [], "model's": [], "adapters": []}


def test_what_the_plan_depends_on() -> None:
    """Not on how a model describes itself, which is another after a step of DeepSpeed's; but on what is merged."""
    model = lora(build_model("llama"))
    stream = hf_zero_stream.weight_stream(model)
    before, plan = taken(stream), stream.buckets
    model.base_model.model.model.norm.extra_repr = lambda: "trained"
    assert differing(before, taken(stream)) == [] and stream.buckets is plan
    model.merge_adapter()
    with pytest.raises(UnsupportedError, match="unmerge_adapter"):
        taken(stream)
    model.unmerge_adapter()
    assert taken(stream).keys() == before.keys()


@pytest.mark.parametrize("name", ["llama", "qwen3"], ids=["", "tied"])
def test_trained_tokens(name: str, tmp_path: Path) -> None:
    """PEFT puts the embeddings into two modules, one inside the other."""
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [1, 5]})
    model = randomised(peft.get_peft_model(build_model(name), config))
    found = taken(hf_zero_stream.weight_stream(model))
    model.merge_and_unload().save_pretrained(tmp_path)
    assert differing(found, tensors_of(tmp_path)) == []


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("LNTuningConfig", {"target_modules": ["input_layernorm", "norm"]}),
        ("IA3Config", {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
        ("OFTConfig", {"target_modules": ["q_proj"], "oft_block_size": 4}),
        ("VeraConfig", {"target_modules": ["q_proj"], "r": 2}),
        ("LoKrConfig", {"target_modules": ["q_proj"], "r": 2}),
        ("ShiraConfig", {"target_modules": ["q_proj"], "r": 2}),
    ],
)
def test_other_kinds(kind: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    """Some change weights in place when they are merged, others put a layer in another's place."""
    model = randomised(peft.get_peft_model(build_model("llama"), getattr(peft, kind)(**arguments)))
    found = taken(hf_zero_stream.weight_stream(model))
    model.merge_and_unload().save_pretrained(tmp_path)
    assert differing(found, tensors_of(tmp_path)) == []


def test_disabled() -> None:
    """As the model computes then: without adapters, and with the originals of what is trained in full."""
    expected = {name: param.detach().clone() for name, param in build_model("llama").named_parameters()}
    model = randomised(lora(build_model("llama")))
    stream = hf_zero_stream.weight_stream(model)
    merged = taken(stream)
    with model.disable_adapter():
        assert differing(taken(stream), expected) == []
    assert differing(taken(stream), merged) == [] and "lm_head.weight" in differing(merged, expected)


def test_the_active_adapter(tmp_path: Path) -> None:
    """Files of several adapters have the same names in them."""
    model = lora(build_model("llama"))
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"]))
    stream = hf_zero_stream.weight_stream(model, only="trainable")
    for name in ("default", "other"):
        model.set_adapter(name)
        randomised(model).save_pretrained(tmp_path / name, selected_adapters=[name])
        assert differing(taken(stream), tensors_of(tmp_path / name, "**/*.safetensors")) == []
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(UnsupportedError, match="expects one active adapter; got default, other"):
        taken(stream)


def test_on_weights_that_others_have_quantised() -> None:
    """As bitsandbytes' and others' are in a model that transformers has loaded in each process."""
    model = lora(build_model("llama"))
    assert merges_values(model)
    model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight = torch.nn.Parameter(
        torch.zeros(12, dtype=torch.uint8), requires_grad=False
    )
    assert not merges_values(model)
    with pytest.raises(UnsupportedError, match=r"are quantised \(torch.uint8\): nothing can be merged"):
        hf_zero_stream.weight_stream(model)
    assert taken(hf_zero_stream.weight_stream(model, only="trainable"))


def test_no_adapters_of_layers() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(UnsupportedError, match="expected adapters of layers; PROMPT_TUNING"):
        hf_zero_stream.weight_stream(peft.get_peft_model(build_model("llama"), config))


def stream_beside_packed(checkpoint: Path, folder: Path) -> list[str]:
    model = with_adapters(load_packed(checkpoint, ds_config(torch.bfloat16)))
    with pytest.raises(UnsupportedError, match='Stream adapters by themselves, with only="trainable"'):
        hf_zero_stream.weight_stream(model)
    found = taken(hf_zero_stream.weight_stream(model, "all", only="trainable"))
    with hf_zero_stream.streaming():
        model.save_pretrained(folder)
    dist.barrier()
    return differing(found, tensors_of(folder))


@pytest.mark.plugin("packed")
def test_beside_packed_weights(cluster: None, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    checkpoint = Folders(tmp_path_factory)("nf4, dense")
    assert run_ranks(2, stream_beside_packed, checkpoint, tmp_path) == [[], []]


NAMES = ("qwen3_moe", "qwen3", "deepseek_v3", "gpt_oss", "qwen3_vl_moe")
"""Fused experts, also transposed ones, ties, and a buffer that is saved."""


def of_zero(checkpoints: dict[str, Path], folder: Path, to: str) -> list[Any]:
    found = []
    for name, checkpoint in checkpoints.items():
        model = load_with("streamed", ZOO[name].auto_class, checkpoint, ds_config(torch.bfloat16), {})
        found.append(stream_changes(model, folder / name, to, bucket_bytes=20_000))
    return found


def of_dtensors(checkpoint: Path, folder: Path, ways: list[live.Way]) -> list[Any]:
    return [stream_changes(way(checkpoint), folder / way.__name__, "rank0") for way in ways]


def of_conversions(folder: Path) -> list[Any]:
    """Of tensors that are computed from whole parameters."""
    return [stream_changes(odd_model(folder / "odd"), folder / "saved", "rank0", bucket_bytes=1000)]


def assert_right(of_ranks: list[list[Any]], most: float = 0.3) -> None:
    for models in of_ranks:
        for steps in models:
            assert [differences for differences, _ in steps] == [[]] * 3
            assert all(0 < share < most for _, share in steps)


@pytest.mark.parametrize("to", ["rank0", "all", "owners"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_under_zero_3(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, world_size: int, to: str) -> None:
    checkpoints = {name: zoo_checkpoint(name) for name in NAMES}
    assert_right(run_ranks(world_size, of_zero, checkpoints, tmp_path, to))


def test_of_dtensors(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    ways = [live.mixed_precision, live.partly_sharded, live.tp, live.by_transformers]
    assert_right(run_ranks(2, of_dtensors, zoo_checkpoint("qwen3_moe"), tmp_path, ways))


def test_conversions(cluster: None, tmp_path: Path) -> None:
    """Which may change every element of a tensor, if one of a parameter has changed."""
    assert_right(run_ranks(2, of_conversions, tmp_path), most=1.01)


def merged(checkpoint: Path) -> list[Any]:
    """Whether patches of a model with adapters lead to what a whole pass gives (all ranks)."""
    model = under_zero_3(checkpoint, lora, torch.float32)
    stream = hf_zero_stream.weight_stream(model, deltas=True, bucket_bytes=20_000)
    whole = hf_zero_stream.weight_stream(model)
    tensors = taken(stream)
    found = []
    for step in range(2):
        change(model, step)
        patched(tensors, stream)
        found.append(differing(tensors, taken(whole)))
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 7.0)
    try:
        list(stream.deltas())
    except StreamError as error:
        found.append(str(error))
    return found


def test_adapters(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for differences in run_ranks(2, merged, zoo_checkpoint("llama")):
        assert differences[:2] == [[], []] and "Go through the whole stream first" in differences[2]


def test_only_after_a_whole_pass() -> None:
    """A loop that was left early, and a model that has become another, are no passes to compare with."""
    model = build_model("llama")
    with pytest.raises(ConfigError, match="deltas=True"):
        hf_zero_stream.weight_stream(model).deltas()
    stream = hf_zero_stream.weight_stream(model, deltas=True, bucket_bytes=10_000)
    with pytest.raises(StreamError, match="no complete pass"):
        list(stream.deltas())
    tensors = taken(stream)
    change(model, 1)
    assert patched(tensors, stream) and stream.version == 2
    assert differing(tensors, {name: tensors[name] for name in model.state_dict()}) == []
    for _ in stream.deltas():
        break
    with pytest.raises(StreamError, match="no complete pass"):
        list(stream.deltas())
    taken(stream)
    model.resize_token_embeddings(300)
    with pytest.raises(StreamError, match="no complete pass"):
        list(stream.deltas())
    tensors = taken(stream)
    assert patched(tensors, stream) == 0


def watched(reads: Reads, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Tensors in one piece of memory, as in a bucket."""
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    pieces = torch.arange(sum(sizes), dtype=torch.float32).split(sizes)
    tensors = [(name, piece.view(shape)) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)]
    return dict(reads.watched(tensors, [whole(shape) for shape in shapes.values()]))


def as_parameter(values: torch.Tensor) -> torch.nn.Parameter:
    """Loaders of quantised parameters do this: it has the memory, and is no tensor of ours."""
    param = torch.nn.Parameter(torch.empty(6), requires_grad=False)
    param.data = values
    return param


LOADERS: dict[str, tuple[Callable[[torch.Tensor], Any], Ranges]] = {
    "nothing": (lambda given: (given.shape, given.dim(), given.dtype, given.narrow(0, 1, 2).numel()), ()),
    "rows": (lambda given: torch.empty(2, 6).copy_(given.narrow(0, 1, 2)), ((1, 3), (0, 6))),
    "columns": (lambda given: torch.empty(4, 2).copy_(given[:, 3:5]), ((0, 4), (3, 5))),
    "a transposed block": (lambda given: torch.empty(2, 2).copy_(given.t()[2:4, 1:3]), ((1, 3), (2, 4))),
    "a piece of a chunk": (lambda given: given.chunk(2, dim=1)[1].chunk(2)[0].clone(), ((0, 2), (3, 6))),
    "flat rows": (lambda given: given.view(-1)[7:17].sum(), ((1, 3), (0, 6))),
    "every other row": (lambda given: given[1::2].contiguous(), ((1, 4), (0, 6))),
    "two places": (lambda given: (given[0, 1].item(), given[2, 3].item()), ((0, 3), (1, 4))),
    "bytes": (lambda given: given[2].view(torch.uint8).clone(), ((2, 3), (0, 6))),
    "by assignment": (lambda given: torch.empty(6).__setitem__(slice(None), given[3]), ((3, 4), (0, 6))),
    "its data": (lambda given: torch.empty(6).copy_(given.data[3]), ((3, 4), (0, 6))),
    "a copy of a copy": (lambda given: given[1].to(torch.bfloat16).to(torch.float32)[:2], ((1, 2), (0, 6))),
    "in numpy": (lambda given: given[2].numpy(), ((2, 3), (0, 6))),
    "an address": (lambda given: given[2].data_ptr(), ((2, 3), (0, 6))),
    "an operator": (lambda given: torch.ops.aten.add(given[0], 1), ((0, 1), (0, 6))),
    "as a parameter": (lambda given: as_parameter(given[1]).sum(), ((1, 2), (0, 6))),
    "a test": (lambda given: bool(given[0, 0] > 3), ((0, 1), (0, 1))),
}


@pytest.mark.parametrize("name", LOADERS)
def test_what_is_read(name: str) -> None:
    load, expected = LOADERS[name]
    reads = Reads()
    given = watched(reads, before=(5,), it=(4, 6), behind=(3,))
    plain = torch.arange(5, 29, dtype=torch.float32).view(4, 6)
    with reads:
        found = load(given["it"])
    right = load(plain)
    assert isinstance(found, (tuple, type(None))) or name == "an address" or (torch.as_tensor(found) == right).all()
    del given, found
    assert reads.end() == ({"it": expected} if expected else {})


def test_of_a_tensor_that_is_copied_into_another() -> None:
    reads = Reads()
    given = watched(reads, it=(4,), other=(4,))
    given["it"][:2].copy_(given["other"][2:])
    del given
    assert reads.end()["other"] == ((2, 4),)


def test_of_memory_that_others_get_later() -> None:
    """New tensors may lie where a watched one has been: they are not taken for it."""
    reads = Reads()
    for _ in range(50):
        it = watched(reads, it=(1000,))["it"]
        address = it.data_ptr()
        del it
        mine = torch.empty(1000)
        if mine.data_ptr() == address:
            break
    assert mine.data_ptr() == address
    assert type(mine[:3].as_subclass(type(watched(reads, other=(3,))["other"])).clone()) is torch.Tensor


def test_of_what_is_kept() -> None:
    """Nobody sees what is done with it later."""
    reads = Reads()
    kept = watched(reads, it=(4, 6))["it"][:1]
    assert reads.end() == {"it": whole((4, 6))}
    assert kept.sum() == 15


def test_more_than_there_is() -> None:
    reads = Reads()
    ((_, it),) = reads.watched([("it", torch.zeros(4, 6))], [((0, 2), (0, 6))])
    it[:2].clone()
    with pytest.raises(RuntimeError, match=r"it: .* reads \[\(1, 3\), \(0, 6\)\] of it"):
        it[1:3].clone()


def test_of_nothing() -> None:
    reads = Reads()
    given = watched(reads, empty=(0, 3), scalar=())
    given["empty"].clone()
    given["scalar"].clone()
    del given
    assert reads.end() == {"scalar": ()}
