"""Python imports this when a process of either arm starts: launchers, scripts and ranks know nothing of it.

In the arm "ours" the process enters ``streaming()`` as under ``hf-zero-stream run``, and what streams is written down.
In both arms what asks for GPUs runs on a CPU, and data sets and metrics of the Hub are made here.
"""

import functools
import os
import random
from typing import Any

from hf_zero_stream.bindings.install import ImportWatch
from hf_zero_stream.prefix import reach


def _noted(owner: Any, name: str, what: str) -> None:
    """Write `what` into the list of events after each call of ``owner.name`` on rank 0."""
    original = vars(owner)[name]

    @functools.wraps(original)
    def noted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if os.environ.get("RANK", "0") == "0":
            with open(os.environ["PEERS_EVENTS"], "a") as file:
                file.write(f"{what}\n")
        return result

    setattr(owner, name, noted)


def _over_gloo(module: Any) -> None:
    original = module.init_process_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original("gloo" if backend in (None, "nccl") else backend, *args, **kwargs)

    module.init_process_group = init_process_group


def _on_cpu(module: Any) -> None:
    """DeepSpeed over gloo; FSDP, which accelerate has on accelerators only, with ranks that pass for those of one."""
    original, with_fsdp = module.PartialState.__init__, os.environ.get("ACCELERATE_USE_FSDP") == "true"

    def init(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        if not with_fsdp and kwargs.get("backend") is None:
            kwargs["backend"] = "gloo"
        original(self, cpu or with_fsdp, **kwargs)
        if with_fsdp and self.distributed_type == module.DistributedType.MULTI_CPU:
            self.distributed_type = module.DistributedType.MULTI_GPU

    module.PartialState.__init__ = init


def _glue(module: Any) -> None:
    """The data set that accelerate's scripts train on, of random pairs."""
    original = module.load_dataset

    def load_dataset(path: str, *args: Any, **kwargs: Any) -> Any:
        if path != "nyu-mll/glue":
            return original(path, *args, **kwargs)
        words, choice = ["a", "small", "model", "learns", "words"], random.Random(3)

        def pair(number: int) -> dict[str, Any]:
            first, second = (" ".join(choice.choices(words, k=6)) for _ in range(2))
            return {"sentence1": first, "sentence2": second, "label": choice.randint(0, 1), "idx": number}

        sizes = {"train": 64, "validation": 32}
        pairs = {part: module.Dataset.from_list([pair(number) for number in range(sizes[part])]) for part in sizes}
        return module.DatasetDict(pairs)

    module.load_dataset = load_dataset


_AFTER = {"torch.distributed.distributed_c10d": _over_gloo, "datasets": _glue}
if "RANK" in os.environ and "true" in map(os.environ.get, ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")):
    _AFTER["accelerate.state"] = _on_cpu
if os.environ.get("PEERS_ARM") == "ours":
    _AFTER |= {
        "hf_zero_stream.engine.load": lambda module: _noted(module.Load, "finish", "load"),
        "hf_zero_stream.saving.save": lambda module: _noted(module.Save, "run", "save"),
        "hf_zero_stream.state.save": lambda module: _noted(module, "save_state", "state saved"),
        "hf_zero_stream.state.load": lambda module: _noted(module, "load_state", "state loaded"),
    }


if "PEERS_ARM" in os.environ:
    ImportWatch(_AFTER, lambda module: _AFTER[module.__name__](module)).__enter__()
if os.environ.get("PEERS_ARM") == "ours":
    reach()
