"""Optimizers that keep what optimizers of others keep: each kind of entry, and each habit, that a save must know."""

from collections.abc import Callable
from typing import Any

import torch


class Momentum(torch.optim.Optimizer):
    """Steps by the sign of an average, and keeps what `keep` makes at the first step."""

    def __init__(self, params: Any, lr: float = 1e-2, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, **defaults})

    def keep(self, param: torch.Tensor) -> dict[str, Any]:
        return {}

    def used(self, state: dict[str, Any], gradient: torch.Tensor) -> float:
        """A factor of the step that depends on what is kept."""
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                for name, value in self.keep(param).items():
                    if name not in state:  # another value, too, begins anew
                        state["average"] = torch.zeros_like(param)
                        state[name] = value
                if "average" not in state:
                    state["average"] = torch.zeros_like(param)
                state["average"].lerp_(param.grad, 0.1)
                param.add_(state["average"].sign(), alpha=-group["lr"] * self.used(state, param.grad))


class NoneEntry(Momentum):
    """As torch-optimi's, of which ``kahan_comp`` is None for fp32."""

    def keep(self, param: torch.Tensor) -> dict[str, Any]:
        return {"compensation": None}


class OddEntries(Momentum):
    """One of each type, all of which change the steps."""

    def keep(self, param: torch.Tensor) -> dict[str, Any]:
        return {
            "count": 0,
            "warm": True,
            "rule": "sign",
            "scale": 0.5,
            "seen": torch.tensor(0, dtype=torch.int64),
            "betas": (0.9, torch.ones(())),
            "history": [0.0],
            "nested": {"factor": 1.0, "none": None},
        }

    def used(self, state: dict[str, Any], gradient: torch.Tensor) -> float:
        state["count"] += 1
        state["seen"] += 1
        state["history"].append(state["count"] / 4)
        state["nested"]["factor"] *= 0.9
        state["warm"] = not state["warm"]
        factor = state["scale"] * state["nested"]["factor"] * (2.0 if state["warm"] else 1.0)
        return float(factor * state["betas"][0] / (len(state["history"]) + float(state["seen"])))


class DtypeEntry(Momentum):
    """What torch's distributed checkpoints refuse."""

    def keep(self, param: torch.Tensor) -> dict[str, Any]:
        return {"dtype": param.dtype}


class LateEntries(Momentum):
    """A second average from the third step on, for parameters with many elements only."""

    def used(self, state: dict[str, Any], gradient: torch.Tensor) -> float:
        state["count"] = state.get("count", 0) + 1
        if state["count"] >= 2 and gradient.ndim:
            state.setdefault("slow", torch.zeros_like(gradient)).lerp_(gradient, 0.5)
        return 1.0 / state["count"]


class GroupCounter(Momentum):
    """Counts the steps in its groups, as apex and Prodigy do, and keeps a number of its own there."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr, k=0, d=1.0)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 0.8
        super().step()

    def used(self, state: dict[str, Any], gradient: torch.Tensor) -> float:
        group = self.param_groups[0]
        return float(group["d"] / group["k"])


class GlobalEntry(Momentum):
    """Keeps a number under a name of its own in `state`."""

    def step(self, closure: Any = None) -> None:
        everywhere = self.state["everywhere"]
        everywhere["count"] = everywhere.get("count", 0) + 1
        super().step()

    def used(self, state: dict[str, Any], gradient: torch.Tensor) -> float:
        return 1.0 / float(self.state["everywhere"]["count"])


class OwnStateDict(torch.optim.AdamW):
    """With a `state_dict` of its own, as bitsandbytes' and grokadamw have one."""

    def state_dict(self) -> dict[str, Any]:
        return dict(super().state_dict())


class OtherDtype(Momentum):
    """Keeps an average in fp64, which a cast to the parameter's dtype would change."""

    def keep(self, param: torch.Tensor) -> dict[str, Any]:
        return {"wide": torch.zeros_like(param, dtype=torch.float64)}

    def used(self, state: dict[str, Any], gradient: torch.Tensor) -> float:
        state["wide"].add_(gradient.double(), alpha=1 / 3)
        return 1.0


def optimizer_of(name: str) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """Class and arguments; one of bitsandbytes', a string in the table, is imported when it is needed."""
    kind, arguments = OPTIMIZERS[name]
    if isinstance(kind, str):
        import bitsandbytes

        kind = getattr(bitsandbytes.optim, kind)
    return kind, dict(arguments)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "sgd": (torch.optim.SGD, {"lr": 1e-1}),
    "momentum": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9}),
    "amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-3}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "none_entry": (NoneEntry, {}),
    "own_state_dict": (OwnStateDict, {"lr": 1e-2}),
    "odd_entries": (OddEntries, {}),
    "dtype_entry": (DtypeEntry, {}),
    "late_entries": (LateEntries, {}),
    "group_counter": (GroupCounter, {}),
    "global_entry": (GlobalEntry, {}),
    "other_dtype": (OtherDtype, {}),
    "bnb_adamw_32bit": ("AdamW32bit", {"lr": 1e-2}),
    "bnb_paged_adamw_32bit": ("PagedAdamW32bit", {"lr": 1e-2}),
    "bnb_adamw_8bit": ("AdamW8bit", {"lr": 1e-2, "min_8bit_size": 16}),
    "bnb_lion_8bit": ("Lion8bit", {"lr": 1e-3, "min_8bit_size": 16}),
}
"""Class and arguments of each; of bitsandbytes, the name of the class."""
