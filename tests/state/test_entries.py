"""Whatever an optimizer keeps of a parameter comes back as it was, with its types, in every home."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor

from hf_zero_stream.errors import CheckpointError, ConfigError, UnsupportedError
from hf_zero_stream.state import forms
from hf_zero_stream.state import load as loading
from hf_zero_stream.state.plain import is_same
from tests.state.optimizers import FSDP2, ZERO, training_in
from tests.state.test_changed import load, made, save, train_here
from tests.support.cluster import run_ranks
from tests.support.training_state import different_states
from tests.support.trainings import Training
from tests.support.zoo import Checkpoint


class KeepsAll(torch.optim.Optimizer):
    """Keeps one entry of each kind, and begins anew where one is missing or of another kind."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @staticmethod
    def new(param: torch.Tensor) -> dict[str, Any]:
        return {
            "average": torch.zeros_like(param),
            "compensation": torch.zeros_like(param, dtype=torch.bfloat16),
            "signs": torch.zeros_like(param, dtype=torch.bool),
            "changes": torch.zeros_like(param, dtype=torch.int32),
            "codes": torch.zeros_like(param, dtype=torch.uint8),
            "step": torch.zeros((), dtype=torch.float64),
            "count": torch.zeros(1, dtype=torch.int64),
            "nothing": None,
            "flag": True,
            "number": 7,
            "bound": float("inf"),
            "unknown": float("nan"),
            "mode": "warm",
            "precision": torch.bfloat16,
            "window": (1, (2.5, "x"), None),
            "nested": {"list": [1, {"deep": (True, None)}], 3: "by number", "scale": torch.tensor(0.5)},
            "empty": {},
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, new = self.state[param], self.new(param)
                if kinds_of(state) != kinds_of(new):
                    state.clear()
                    state.update(new)
                state["average"].lerp_(param.grad, 0.1)
                state["compensation"].add_(param.grad.to(torch.bfloat16))
                state["changes"].add_((state["signs"] != (param.grad > 0)).int())
                state["signs"].copy_(param.grad > 0)
                state["codes"].add_((param.grad != 0).to(torch.uint8))  # no padding: nobody saves it
                state["step"] += 1
                state["count"] += 1
                state["number"] += 1
                state["nested"]["list"].append(state["number"])
                scale = 1 + state["step"].item() / (state["number"] * len(state["nested"]["list"]))
                change = (
                    state["average"].sign() + state["compensation"].sign() + state["changes"] / (1 + state["codes"])
                )
                param.sub_(change, alpha=group["lr"] * scale)


def kinds_of(entries: Any) -> Any:
    """The names and the types, of lists that steps make longer only that they are there."""
    return {
        key: (type(value), getattr(value, "dtype", None), getattr(value, "shape", None))
        for key, value in entries.items()
    }


def keeps_all(model: Any) -> torch.optim.Optimizer:
    return KeepsAll(param for param in model.parameters() if param.requires_grad)


def of_this_rank(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What is kept, of each tensor that is trained, in the order of the steps; tensors are copies."""

    def copied(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copied(it) for key, it in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(copied, value))
        value = value.to_local() if isinstance(value, DTensor) else value
        return value.clone() if isinstance(value, torch.Tensor) else value

    return [{key: copied(state[key]) for key in sorted(state)} for state in optimizer.state.values() if state]


def saved_in(folder: Path, target: Path, homes: Sequence[str]) -> Any:
    """What is kept when it is saved, and losses afterwards; saving has changed nothing."""
    found = []
    for home in homes:
        training = training_in(home, folder, keeps_all)
        training.train(range(3))
        kept = of_this_rank(training.inner)
        training.save(target / home)
        assert is_same(of_this_rank(training.inner), kept)
        if home in ZERO:
            training.trains.save_checkpoint(str(target / f"{home} stock"))
        found.append((kept, training.train((3, 4))))
    return found


def resumed_in(folder: Path, target: Path, homes: Sequence[str]) -> Any:
    found = []
    for home in homes:
        training = training_in(home, folder, keeps_all)
        training.load(target / home)
        kept = of_this_rank(training.inner)
        found.append((kept, training.train((3, 4))))
    return found


def saved_again(folder: Path, target: Path, sources: Sequence[str], homes: Sequence[str]) -> None:
    for home in homes:  # FSDP2 first: a live ZeRO-3 engine is in the way of its loads
        for source in sources:
            training = training_in(home, folder, keeps_all)
            training.load(target / source)
            training.save(target / f"{source} by {home}")


EVERY_HOME = ["ZeRO-3", "ZeRO-2", "ZeRO-1", "DeepSpeed, stage 0", FSDP2]


@pytest.mark.slow
def test_every_home(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """With as many ranks all is as it was, and losses are those of training that never stopped."""
    folder = zoo_checkpoint("llama")
    saved = run_ranks(2, saved_in, folder, tmp_path, EVERY_HOME, timeout=200)
    resumed = run_ranks(2, resumed_in, folder, tmp_path, EVERY_HOME, timeout=200)
    for of_saved, of_resumed in zip(saved, resumed, strict=True):
        for home, (kept, losses), (kept_then, losses_then) in zip(EVERY_HOME, of_saved, of_resumed, strict=True):
            assert kept and len(kept[0]) == 17, home
            assert is_same(kept_then, kept), home
            assert losses_then == losses, home
    homes = [FSDP2, "ZeRO-3"]
    run_ranks(3, saved_again, folder, tmp_path, ["ZeRO-3", "ZeRO-2", FSDP2], homes, timeout=200)
    for source in ("ZeRO-3", "ZeRO-2", FSDP2):
        for home in homes:
            found = different_states(tmp_path / source, tmp_path / f"{source} by {home}")
            assert found == [], (source, home)


class OnlyNew(torch.optim.Optimizer):
    """Begins where a parameter has no entry at all, and so takes an empty one for an old one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            if param not in self.state:
                self.state[param] = {"sum": torch.zeros_like(param), "unset": None}
            param.sub_(self.state[param]["sum"].add_(param.grad).sign(), alpha=1e-3)


def test_parameters_without_an_entry(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Neither a save nor a load leaves empty entries behind."""
    model, _ = made(zoo_checkpoint("llama"))
    optimizer = OnlyNew(model.parameters())
    train_here(model, optimizer, range(2), all_since=5)
    trained = set(optimizer.state)
    save(model, tmp_path, optimizer)
    assert set(optimizer.state) == trained
    losses = train_here(model, optimizer, range(2))
    load(model, tmp_path, optimizer)  # takes away what these steps have made
    assert set(optimizer.state) == trained
    assert train_here(model, optimizer, range(2)) == losses
    model, _ = made(zoo_checkpoint("llama"))
    optimizer = OnlyNew(model.parameters())
    load(model, tmp_path, optimizer)
    assert len(optimizer.state) == len(trained)
    assert train_here(model, optimizer, range(2)) == losses


def test_a_parameter_that_is_one_number(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Its moments look like steps, as those of CLIP's logit_scale do; those of the others stay moments."""

    def clip() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(1)
        layers = {"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
        text = transformers.CLIPTextConfig(**layers, vocab_size=50, max_position_embeddings=12, eos_token_id=2)
        vision = transformers.CLIPVisionConfig(**layers, image_size=8, patch_size=4)
        config = transformers.CLIPConfig(
            text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8, attn_implementation="eager"
        )
        model = transformers.CLIPModel(config)
        assert model.logit_scale.shape == ()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def batch(number: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(5, 50, (2, 9), generator=generator)
        return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8, generator=generator), "return_loss": True}

    training = Training(*clip(), batch=batch)
    training.train(range(2))
    training.save(tmp_path)
    losses = training.train((2, 3))
    training = Training(*clip(), batch=batch)
    training.load(tmp_path)
    assert training.train((2, 3)) == losses


def test_moments_wider_than_what_is_trained(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """As bitsandbytes' of parameters in bf16: they stay in fp32."""

    class Wide(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1e-2})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for param in self.param_groups[0]["params"]:
                state = self.state[param]
                state.setdefault("average", torch.zeros_like(param, dtype=torch.float32))
                param.sub_(state["average"].lerp_(param.grad.float(), 1e-3).to(param.dtype), alpha=10)

    model, _ = made(zoo_checkpoint("llama"), torch.bfloat16)
    optimizer = Wide(model.parameters())
    train_here(model, optimizer, range(3))
    save(model, tmp_path, optimizer)
    kept = of_this_rank(optimizer)
    model, _ = made(zoo_checkpoint("llama"), torch.bfloat16)
    optimizer = Wide(model.parameters())
    load(model, tmp_path, optimizer)
    assert kept[0]["average"].dtype == torch.float32 and is_same(of_this_rank(optimizer), kept)


def test_a_load_that_loses_something(
    zoo_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a load what is kept is compared with what the state says, by names and by types."""
    model, _ = made(zoo_checkpoint("llama"))
    optimizer = keeps_all(model)
    train_here(model, optimizer, range(2))
    save(model, tmp_path, optimizer)
    for key, change in (("nothing", lambda it: it.pop("nothing")), ("flag", lambda it: it.update(flag=1))):

        def losing(optimizer: Any, *args: Any, change: Any = change) -> None:
            forms.set_entries(optimizer, *args)
            change(next(iter(optimizer.state.values())))

        monkeypatch.setattr(loading, "set_entries", losing)
        with pytest.raises(CheckpointError, match=f"what the optimizer keeps of .*: {key}: expected .*; found"):
            load(model, tmp_path, optimizer)


class SomeKeepNothing(OnlyNew):
    """Keeps None for matrices, and a tensor for the rest, as torch-optimi does for what is in 16 bit."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for param, state in self.state.items():
            state["unset"] = None if param.dim() == 2 else torch.ones_like(param)


def one_engine(folder: Path, source: Path) -> str:
    training = training_in("ZeRO-3", folder, lambda model: SomeKeepNothing(model.parameters()))
    try:
        training.load(source)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_none_for_some(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Comes back where each parameter has an entry of its own; where many have one, there is no such entry."""
    folder = zoo_checkpoint("llama")
    model, _ = made(folder)
    optimizer = SomeKeepNothing(model.parameters())
    train_here(model, optimizer, range(2))
    save(model, tmp_path, optimizer)
    kept = of_this_rank(optimizer)
    model, _ = made(folder)
    optimizer = SomeKeepNothing(model.parameters())
    load(model, tmp_path, optimizer)
    assert is_same(of_this_rank(optimizer), kept)
    for message in run_ranks(2, one_engine, folder, tmp_path):
        assert "unset differs between" in message and "trained as one tensor now" in message


class OwnStateDict(torch.optim.AdamW):
    """Has a ``state_dict`` of its own, as bitsandbytes' optimizers have, which adds nothing, something, or fails."""

    adds: str = ""

    def state_dict(self) -> Any:
        found = super().state_dict()
        if self.adds == "an error":
            raise RuntimeError("not now")
        if self.adds == "a name":
            return {**found, "history": [1]}
        if self.adds == "an option":
            found["param_groups"] = [{**group, "history": [1]} for group in found["param_groups"]]
        if self.adds == "an entry":
            found["state"] = {key: {**entries, "history": [1]} for key, entries in found["state"].items()}
        return found


def own_state_dicts(folder: Path, target: Path) -> Any:
    found: dict[str, str] = {}
    for home in ("ZeRO-3", "ZeRO-2", FSDP2):
        training = training_in(home, folder, lambda model: OwnStateDict(list(model.parameters()), lr=1e-3))
        training.train(range(2))
        for adds in ("an error", "a name", "an option", "an entry"):
            training.inner.adds = adds
            try:
                training.save(target / "refused")
            except UnsupportedError as error:
                found[f"{home} {adds}"] = str(error)
        training.inner.adds = ""
        training.save(target / home)
        losses = training.train((3, 4))
        again = training_in(home, folder, lambda model: OwnStateDict(list(model.parameters()), lr=1e-3))
        again.load(target / home)
        assert again.train((3, 4)) == losses
    return found


def test_a_state_dict_of_its_own(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Is called with the groups that it expects, which ZeRO-3 empties; what it adds, or that it fails, is refused."""
    for found in run_ranks(2, own_state_dicts, zoo_checkpoint("llama"), tmp_path):
        assert len(found) == 12
        for name, message in found.items():
            expected = "has failed.*RuntimeError: not now" if "an error" in name else "keeps history beside its groups"
            assert re.search(expected, message), (name, message)
    assert not (tmp_path / "refused").exists()


def saved_by_deepspeed(folder: Path, target: Path) -> None:
    training = training_in("ZeRO-3", folder, lambda model: OnlyNew(model.parameters()))
    training.train(range(2))
    training.trains.save_checkpoint(str(target))


def loaded_from_deepspeeds(folder: Path, source: Path) -> list[Any]:
    training = training_in("ZeRO-2", folder, lambda model: OnlyNew(model.parameters()))
    training.load(source)
    return [{**state, "sum": float(state["sum"].abs().sum())} for state in training.inner.state.values()]


@pytest.mark.plugin("pickled")
def test_none_in_a_folder_of_deepspeeds(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Comes back at another number of ranks, where we read the folder."""
    folder = zoo_checkpoint("llama")
    run_ranks(2, saved_by_deepspeed, folder, tmp_path)
    for states in run_ranks(3, loaded_from_deepspeeds, folder, tmp_path):
        assert [state["unset"] for state in states] == [None] and all(state["sum"] for state in states)
        assert all(state.keys() == {"sum", "unset"} for state in states)
