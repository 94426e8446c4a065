"""What ranks run to stream a model's weights, and to compare them with what a save of the model holds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import peft
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import hf_zero_stream
from tests.support.checkpoint_files import differing, tensors_of
from tests.support.live_sharded import Way
from tests.support.packed_training import load as load_packed
from tests.support.parity import ds_config, load_with, three_losses
from tests.support.zoo import ZOO


def taken(stream: Any) -> dict[str, torch.Tensor]:
    """What this rank gets in one pass; each bucket is looked at as a receiver of the packed bytes would."""
    found: dict[str, torch.Tensor] = {}
    for bucket in stream:
        total = sum(tensor.nbytes for _, tensor in bucket)
        assert total <= bucket.packed.nbytes < total + 16 * len(bucket) + 1
        for name, tensor in bucket:
            assert tensor.untyped_storage().data_ptr() == bucket.packed.untyped_storage().data_ptr()
            assert name not in found
            found[name] = tensor.clone()
    return found


def compared(model: Any, folder: Path, to: str, **options: Any) -> dict[str, Any]:
    """Save `model`, stream it, and say what differs on this rank, and what the metadata say wrongly (all ranks)."""
    dtype = options.get("dtype")
    hf_zero_stream.save_pretrained(model, folder, dtype=dtype)
    stream = hf_zero_stream.weight_stream(model, to, **options)
    found = taken(stream)
    expected = tensors_of(folder)
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine = {each.name for each in stream.metadata if rank in each.owners}
    described = {each.name: (each.dtype, each.shape) for each in stream.metadata}
    return {
        "differing": differing(found, {name: expected[name] for name in expected if name in mine}),
        "metadata": described == {name: (each.dtype, tuple(each.shape)) for name, each in expected.items()},
        "owned": sorted(mine),
        "names": sorted(expected),
        "bytes": sum(tensor.nbytes for tensor in found.values()),
    }


def stream_zero(checkpoints: dict[str, Path], folder: Path, to: str, options: dict[str, Any]) -> list[Any]:
    """Of each model of the zoo, loaded under ZeRO-3."""
    found = []
    for name, checkpoint in checkpoints.items():
        model = load_with("streamed", ZOO[name].auto_class, checkpoint, ds_config(), {})
        found.append(compared(model, folder / f"{name} {to}", to, **options))
    return found


def odd_model(folder: Path) -> Any:
    """Its conversions reorder elements, compute with them, and need all of them; saved into `folder` (all ranks)."""
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping

    from tests.saving.test_conversions import CONVERSIONS, OddConfig, OddModel

    register_checkpoint_conversion_mapping("odd_to_save", CONVERSIONS, overwrite=True)
    if dist.get_rank() == 0:
        OddModel(OddConfig()).save_pretrained(folder)
    dist.barrier()
    with hf_zero_stream.streaming():
        return OddModel.from_pretrained(folder, ds_config=ds_config())


def stream_odd(folder: Path, to: str) -> list[Any]:
    return [compared(odd_model(folder / "odd"), folder / "saved", to, bucket_bytes=1000)]


def stream_trained(checkpoint: Path, folder: Path, config: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Of an engine after three steps, twice, and after three more; gathers are counted."""
    model = load_with("streamed", "AutoModelForCausalLM", checkpoint, config, {})
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    stream = hf_zero_stream.weight_stream(engine, **options)
    plan = stream._plan
    found = []
    for number in range(2):
        three_losses(engine, ZOO["qwen3_moe"].inputs)
        where = folder / str(number)
        hf_zero_stream.save_pretrained(engine, where, dtype=options.get("dtype"))
        with counted_gathers() as gathers:
            tensors = taken(stream)
        expected = tensors_of(where) if tensors else {}
        found.append(differing(tensors, expected))
        assert not gathers and stream.version == number + 1
    assert stream._plan is plan, "the plan was made anew"
    return {"differing": found, "tensors": len(tensors)}


class counted_gathers:  # noqa: N801 - used as a function
    """Inside, the calls of DeepSpeed's and torch's that gather parameters are noted."""

    def __enter__(self) -> list[str]:
        noted: list[str] = []
        gathered, full = deepspeed.zero.GatheredParameters.__enter__, DTensor.full_tensor

        def enter(self: Any) -> Any:
            if self.enabled and self.params:
                noted.append("GatheredParameters")
            return gathered(self)

        def full_tensor(self: Any, *args: Any, **kwargs: Any) -> Any:
            noted.append("full_tensor")
            return full(self, *args, **kwargs)

        self._patches = [
            patch.object(deepspeed.zero.GatheredParameters, "__enter__", enter),
            patch.object(DTensor, "full_tensor", full_tensor),
        ]
        for each in self._patches:
            each.start()
        return noted

    def __exit__(self, *_: Any) -> None:
        for each in self._patches:
            each.stop()


@contextmanager
def counted_buckets() -> Iterator[list[int]]:
    """Inside, it is noted of each bucket that is filled how many others are in memory then."""
    from hf_zero_stream.plugins.stream import buckets, weights  # the sweep imports this module without the plug-in too

    memory: list[StorageWeakRef] = []
    noted: list[int] = []

    def counting(*args: Any) -> Any:
        noted.append(sum(not each.expired() for each in memory))
        bucket = buckets.filled(*args)
        if bucket.packed.numel():
            memory.append(StorageWeakRef(bucket.packed.untyped_storage()))
        return bucket

    with patch.object(weights, "filled", counting):
        yield noted


def stream_live(checkpoint: Path, folder: Path, ways: list[Way], to: str) -> dict[str, Any]:
    """Of models of DTensors."""
    return {way.__name__: compared(way(checkpoint), folder / way.__name__, to) for way in ways}


def stream_packed(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Of a model whose weights stay quantised."""
    return compared(load_packed(checkpoint, ds_config(torch.bfloat16)), folder / "saved", "rank0")


Adapt = Callable[[Any], Any]
"""Puts adapters on a model."""


def lora(model: Any) -> Any:
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    return peft.get_peft_model(model, config)


def dora(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=3, use_dora=True, target_modules=["q_proj"]))


def lora_of_experts(model: Any) -> Any:
    """Of parameters that the hub has in another layout."""
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["q_proj"], target_parameters=names))


def randomised(model: Any) -> Any:
    """With random values in all that is trained; the same on all ranks."""
    trained = [param for param in model.parameters() if param.requires_grad]
    with deepspeed.zero.GatheredParameters([each for each in trained if hasattr(each, "ds_id")], modifier_rank=0):
        torch.manual_seed(11)
        with torch.no_grad():
            for param in trained:
                param.normal_(std=0.1)
    return model


def under_zero_3(checkpoint: Path, adapt: Adapt, dtype: torch.dtype) -> Any:
    model = load_with("streamed", "AutoModelForCausalLM", checkpoint, ds_config(dtype), {"dtype": dtype})
    return randomised(adapt(model))


def under_fsdp2(checkpoint: Path, adapt: Adapt, dtype: torch.dtype) -> Any:
    model = randomised(adapt(build_for(checkpoint, dtype)))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    return fully_shard(model)


def build_for(checkpoint: Path, dtype: torch.dtype) -> Any:
    return load_with("plain", "AutoModelForCausalLM", checkpoint, {}, {"dtype": dtype})


def stream_adapted(
    checkpoint: Path, folder: Path, home: Callable[..., Any], adapt: Adapt, dtype: torch.dtype
) -> dict[str, Any]:
    """Merged, and the adapters alone; what differs from a plain model with the same adapters (all ranks)."""
    plain = adapt(build_for(checkpoint, dtype))  # first: a streamed model keeps ZeRO-3 on
    model = home(checkpoint, adapt, dtype)
    streams = {
        name: hf_zero_stream.weight_stream(model, bucket_bytes=20_000, **options)
        for name, options in {"merged": {}, "model's": {"layout": "model"}, "adapters": {"only": "trainable"}}.items()
    }
    found = {name: taken(stream) for name, stream in streams.items()}
    again = taken(streams["merged"])
    if home is under_zero_3:
        with hf_zero_stream.streaming():
            model.save_pretrained(folder / "adapters")
        dist.barrier()
    if dist.get_rank() > 0:
        return {name: sorted(tensors) for name, tensors in found.items()}
    adapters = tensors_of(folder / "adapters") if home is under_zero_3 else found["adapters"]  # PEFT saves no DTensors
    peft.set_peft_model_state_dict(plain, adapters)
    before = tensors_of(checkpoint)
    merged = plain.merge_and_unload()
    merged.save_pretrained(folder / "merged")
    expected = tensors_of(folder / "merged")
    parameters = {name: param.detach() for name, param in merged.named_parameters()}
    return {
        "merged": differing(found["merged"], expected),
        "again": differing(again, expected),
        "model's": differing(found["model's"], parameters),
        "adapters": differing(found["adapters"], adapters),
        "changed": differing(expected, {name: tensor.to(dtype) for name, tensor in before.items()}) != [],
    }


def patched(tensors: dict[str, torch.Tensor], stream: Any) -> int:
    """Apply what has changed to what this rank has got before; returns how many elements that were (all ranks)."""
    count = 0
    for patches in stream.deltas():
        for name, shape, indices, values in patches:
            assert tensors[name].shape == shape and tensors[name].dtype == values.dtype
            assert indices.dtype == torch.int32 and (indices.diff() > 0).all()
            tensors[name].view(-1)[indices.long()] = values
            count += len(values)
    return count


def change(model: Any, step: int) -> None:
    """A few elements of every parameter and buffer, other ones on each rank and in each step."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            local = getattr(tensor, "ds_tensor", tensor)
            local = local.to_local() if hasattr(local, "to_local") else local
            if local.is_floating_point():
                local.view(-1)[step::7] *= 1.5


def stream_changes(model: Any, folder: Path, to: str, **options: Any) -> list[Any]:
    """What differs from a save after each of three steps, and how much of all has changed (all ranks)."""
    stream = hf_zero_stream.weight_stream(model, to, deltas=True, **options)
    tensors = taken(stream)
    numel = sum(tensor.numel() for tensor in tensors.values())
    found = []
    for step in range(3):
        change(model, step)
        count = patched(tensors, stream)
        hf_zero_stream.save_pretrained(model, folder / str(step), dtype=options.get("dtype"))
        expected = tensors_of(folder / str(step)) if tensors else {}
        differences = differing(tensors, {name: expected[name] for name in tensors})
        found.append((differences, count / numel if numel else 0.1))
    assert patched(tensors, stream) == 0
    return found
