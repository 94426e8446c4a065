"""Trials of weights that stay quantised, on paper GPUs: adapters train beside them, under ZeRO-3 and under FSDP2."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hf_zero_stream
from hf_zero_stream.holdings.introspection import packed_weights
from tests.paper_gpu.trials import COMMON, streaming, zero_config
from tests.support.packed_training import dequantised, inputs, packed_names, with_adapters
from tests.support.parity import differences
from tests.support.sharded import sharded_differences


class Training:
    """Adapters on a model under ZeRO-3."""

    def __init__(self, model: Any) -> None:
        self.model = with_adapters(model)
        trainable = [param for param in self.model.parameters() if param.requires_grad]
        config = zero_config(3, {})
        self.engine, *_ = deepspeed.initialize(model=self.model, config=config, model_parameters=trainable)

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        loss = self.engine(**batch, use_cache=False).loss
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def save(self, target: Path) -> Any:
        return hf_zero_stream.save_state(self.engine, target, asynchronous=True)

    def resume(self, target: Path) -> None:
        hf_zero_stream.load_state(self.engine, target)

    def end(self) -> None:
        self.engine.destroy()

    @staticmethod
    def load(folder: Path, **kwargs: Any) -> Any:
        keep = HfDeepSpeedConfig(zero_config(3, {}))
        with streaming({}):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, **COMMON, **kwargs)
        model.keeps_zero3_on = keep
        return model

    @staticmethod
    def untrained(config: Any) -> Any:
        keep = HfDeepSpeedConfig(zero_config(3, {}))
        model = transformers.AutoModelForCausalLM.from_config(config, **COMMON)
        model.keeps_zero3_on = keep
        return model

    @staticmethod
    def whole(param: Any) -> AbstractContextManager[None]:
        return deepspeed.zero.GatheredParameters([param])

    @staticmethod
    def differences(model: Any, plain: Any) -> list[str]:
        found = differences(model, plain, torch.bfloat16)
        return [each for each in found if "padding" not in each]  # that of a live model is DeepSpeed's


class ShardedTraining(Training):
    """Adapters on a model that ``distributed_config`` has sharded."""

    def __init__(self, model: Any) -> None:
        self.model = with_adapters(model).train()
        trainable = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=1e-3)

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        loss = self.model(**batch, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def save(self, target: Path) -> Any:
        return hf_zero_stream.save_state(self.model, target, optimizer=self.optimizer, asynchronous=True)

    def resume(self, target: Path) -> None:
        hf_zero_stream.load_state(self.model, target, optimizer=self.optimizer)

    def end(self) -> None:
        pass

    @staticmethod
    def load(folder: Path, **kwargs: Any) -> Any:
        sharding = {"distributed_config": {"fsdp_size": dist.get_world_size()}}
        with streaming({}):
            return transformers.AutoModelForCausalLM.from_pretrained(folder, **sharding, **COMMON, **kwargs)

    @staticmethod
    def untrained(config: Any) -> Any:
        model = transformers.AutoModelForCausalLM.from_config(config, **COMMON).to("cuda")
        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)

    @staticmethod
    def whole(param: Any) -> AbstractContextManager[None]:
        return nullcontext()

    @staticmethod
    def differences(model: Any, plain: Any) -> list[str]:
        return sharded_differences(model, plain)


HOW: dict[str, type[Training]] = {"ZeRO-3": Training, "FSDP2": ShardedTraining}


def _steps(training: Training, count: int, first: int = 0) -> list[float]:
    batches = [inputs(seed=first + number) for number in range(count)]
    return [training.step({name: values.to("cuda") for name, values in batch.items()}) for batch in batches]


def _wrong(model: Any, plain: Any, how: type[Training]) -> list[str]:
    """Names of parameters whose values, dequantised on the device, are not those of a plain load (all ranks)."""
    found, expected = [], dict(plain.named_parameters())
    for prefix, module in model.named_modules():
        for key, param in module.named_parameters(recurse=False):
            name, packed = f"{prefix}.{key}".lstrip("."), packed_weights(module).get(key)
            wanted = expected[name].detach()
            with how.whole(param), torch.no_grad():
                values = param.full_tensor() if isinstance(param, DTensor) else param.data
                assert values.device.type == "cuda"
                if packed is None:
                    is_same = torch.equal(values.cpu(), wanted)
                else:
                    parts = wanted if packed.is_stack else [wanted]
                    is_same = all(
                        torch.equal(packed.matrix(values, number).cpu(), part) for number, part in enumerate(parts)
                    )
            if not is_same:
                found.append(name)
    return found


def packed_states(name: str, folder: Path, target: Path, loads_into: bool) -> dict[str, Any]:
    """Load, save the weights, train, save the state while training goes on, go back to it and go on; then load_into.

    Beside that the losses of the same weights dequantised. `loads_into` a model that is not quantised.
    """
    how = HOW[name]
    unset_hf_deepspeed_config()
    where, dequantising = dequantised(folder)
    plain = transformers.AutoModelForCausalLM.from_pretrained(where, **dequantising, **COMMON)
    training = how(how.load(where, **dequantising))
    found: dict[str, Any] = {"dequantised": _steps(training, 3), "loaded into": []}
    training.end()
    unset_hf_deepspeed_config()
    model = how.load(folder)
    found["packed"] = len(packed_names(model))
    found["differences"] = _wrong(model, plain, how)
    hf_zero_stream.save_pretrained(model, target / "weights")
    training = how(model)
    found["losses"] = _steps(training, 3)
    pending = training.save(target / "state")
    found["going on"] = _steps(training, 2, first=3)
    pending.wait()
    training.resume(target / "state")
    found["again"] = _steps(training, 2, first=3)
    training.end()
    unset_hf_deepspeed_config()
    if loads_into:
        config = transformers.AutoConfig.from_pretrained(folder)
        del config.quantization_config
        live = how.untrained(config).eval()
        hf_zero_stream.load_into(live, str(folder))
        found["loaded into"] = how.differences(live, plain)
    unset_hf_deepspeed_config()
    return found


def packed_resumed(name: str, folder: Path, target: Path) -> list[float]:
    """The losses of the steps after the state in `target`, at another number of ranks."""
    unset_hf_deepspeed_config()
    training = HOW[name](HOW[name].load(folder))
    training.resume(target / "state")
    losses = _steps(training, 2, first=3)
    training.end()
    return losses
