"""What OpenRLHF and verl do with the weights of a training, in their order, as modules by their names.

The frameworks themselves are run by ``make ecosystem``.
"""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def put(name: str, **functions: Any) -> Any:
    """A module of this name, with these functions in it."""
    module: Any = ModuleType(name)
    vars(module).update(functions)
    sys.modules[name] = module
    return module


class Engines:
    """Engines, and the group in which they get what is broadcast. A call of number `fails` is an error."""

    def __init__(self, count: int, fails: int = -1) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.loaded: dict[str, torch.Tensor] = {}
        self._fails = fails
        call = SimpleNamespace(update_weight=self._of(self._update), update_weight_cuda_ipc=self._of(self._take))
        self.all = [call] * count

    @staticmethod
    def _of(function: Any) -> Any:
        return SimpleNamespace(remote=function)

    def _update(self, name: str, *, dtype: torch.dtype, shape: torch.Size, empty_cache: bool) -> None:
        if len(self.calls) == self._fails:
            raise RuntimeError("an engine is out of memory")
        self.calls.append((name, dtype, tuple(shape), empty_cache))

    def _take(self, name: str, *, dtype: torch.dtype, shape: torch.Size, ipc_handles: Any, empty_cache: bool) -> None:
        self._update(name, dtype=dtype, shape=shape, empty_cache=empty_cache)
        first, *others = ipc_handles.values()
        assert others and all(torch.equal(first, each) for each in others)
        self.loaded[name] = first

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        name, dtype, shape, _ = self.calls[-1]
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape) and src == 0
        self.loaded[name] = tensor.clone()


class ActorPPOTrainer:
    """OpenRLHF's, of which this is the part that gives weights to engines (0.11.2)."""

    def __init__(
        self, model: Any, engines: Engines, *, ipc: bool = False, vlm: bool = False, tensor_parallel: int = 1
    ):
        self.actor = SimpleNamespace(model=SimpleNamespace(module=model), is_vlm=vlm)
        ds = SimpleNamespace(zero_stage=3, tensor_parallel_size=tensor_parallel)
        self.strategy = SimpleNamespace(args=SimpleNamespace(ds=ds))
        self.engines, self.use_cuda_ipc = engines, ipc

    def broadcast_to_vllm(self) -> None:
        model, last = self.actor.model.module, None
        if dist.get_rank() == 0:
            self.engines.calls.append(("reset",))
        params = [
            (name, param)
            for name, param in model.named_parameters()
            if param.requires_grad or not getattr(self.actor, "is_vlm", False)
        ]
        for number, (name, param) in enumerate(params, 1):
            last = number == len(params)
            with deepspeed.zero.GatheredParameters([param], enabled=self.strategy.args.ds.zero_stage == 3):
                said = {"dtype": param.dtype, "shape": param.ds_shape, "empty_cache": last}
                if self.use_cuda_ipc:
                    handles: list[Any] = [None] * dist.get_world_size()
                    dist.all_gather_object(handles, {dist.get_rank(): param.data.clone()})
                    if dist.get_rank() == 0:
                        every = {rank: handle for each in handles for rank, handle in each.items()}
                        for engine in self.engines.all:
                            engine.update_weight_cuda_ipc.remote(name, ipc_handles=every, **said)
                    dist.barrier()
                elif dist.get_rank() == 0:
                    for engine in self.engines.all:
                        engine.update_weight.remote(name, **said)
                    self.engines.broadcast(param.data, src=0)
        dist.barrier()


def openrlhf() -> type[ActorPPOTrainer]:
    return put("openrlhf.trainer.ray.ppo_actor", ActorPPOTrainer=ActorPPOTrainer).ActorPPOTrainer


class FSDPEngine:
    """verl's, of which this is the part that gives weights to rollouts (0.9.1)."""

    def __init__(self, module: Any, *, merges: bool = False, quantises: bool = False) -> None:
        self.module, self._qat_enabled = module, quantises
        self.model_config = SimpleNamespace(lora={"merge": merges}, hf_config=module.config)

    def get_per_tensor_param(self, layered_summon: bool = False, base_sync_done: bool = False) -> Any:
        if hasattr(self.module, "peft_config"):
            return iter(()), self.module.peft_config["default"].to_dict()
        whole = (
            (name, param.full_tensor() if isinstance(param, DTensor) else param)
            for name, param in convert_weight_keys(self.module.state_dict(), self.module).items()
        )
        return unfuse_moe_params(whole, self.module.config.model_type), None


def normalize_peft_param_name(params: dict[str, Any]) -> dict[str, Any]:
    names = {name: name.replace("base_model.model.", "").replace(".base_layer", "") for name in params}
    return {new: params[name] for name, new in names.items() if "lora_" not in name}


def convert_weight_keys(state_dict: dict[str, Any], model: Any) -> dict[str, Any]:
    """As with a model that is called otherwise in its checkpoint."""
    return {name.replace("model.embed_tokens", "embeddings"): value for name, value in state_dict.items()}


def unfuse_moe_params(weights: Iterator[tuple[str, torch.Tensor]], model_type: str | None = None) -> Iterator[Any]:
    for name, tensor in weights:
        if model_type == "gpt_oss" or not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            yield name, tensor
            continue
        base, _, kind = name.rpartition(".")
        for number, expert in enumerate(tensor):
            parts = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True) if kind == "gate_up_proj" else None
            for part, value in parts or [(kind, expert)]:
                yield f"{base}.{number}.{part}.weight", value.contiguous()


def verl(lacks: str = "") -> type[FSDPEngine]:
    functions = (FSDPEngine, normalize_peft_param_name, convert_weight_keys, unfuse_moe_params)
    put(
        "verl.workers.engine.fsdp.transformer_impl",
        **{each.__name__: each for each in functions if each.__name__ != lacks},
    )
    return FSDPEngine
