"""Optimizers with states of their own kinds.

- What belongs to a slot as a whole, as blocks of 8 bits: as many ranks go on as stock does, to the last bit; others
  are refused, but where each rank trains whole parameters.
- The optimizers of the table in docs/state.md whose packages are installed: saved, and gone on from.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import hf_zero_stream
from hf_zero_stream.errors import CheckpointError, ConfigError, SaveError, UnsupportedError
from hf_zero_stream.holdings.slots import Member, Slot, Training
from hf_zero_stream.planning.boxes import ParameterBox
from hf_zero_stream.state import tensors, wholes
from hf_zero_stream.state.forms import kept_here
from hf_zero_stream.state.plain import is_same
from hf_zero_stream.state.record import Form, GroupRecord, StateRecord
from tests.state.optimizers import FSDP2, ONE, ZERO, of_module, parameters_of, run, training_in, verdict
from tests.state.test_entries import of_this_rank
from tests.support.cluster import run_ranks
from tests.support.training_state import different_states
from tests.support.zoo import Checkpoint


STAGE_0 = "DeepSpeed, stage 0"
HOMES = ["ZeRO-3", "ZeRO-2", STAGE_0, FSDP2]


class Rounded(torch.optim.Optimizer):
    """Keeps a momentum in codes of 8 bits, with a scale for two of them: bitsandbytes takes no DTensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            values, gradient = (it.to_local() if isinstance(it, DTensor) else it for it in (param, param.grad))
            state = self.state[param]
            if not state:
                state["codes"] = torch.full(values.shape, 128, dtype=torch.uint8)
                state["scales"] = torch.zeros(-(-values.numel() // 2))
            numel = values.numel()
            scales = state["scales"].repeat_interleave(2)[:numel]
            momentum = (state["codes"].float().view(-1) - 128) * scales / 127
            momentum = momentum.lerp(gradient.reshape(-1), 0.3)
            pairs = torch.nn.functional.pad(momentum, (0, numel % 2)).view(-1, 2)
            state["scales"].copy_(pairs.abs().amax(1))
            codes = momentum / state["scales"].clamp(min=1e-12).repeat_interleave(2)[:numel] * 127
            state["codes"].copy_((codes.round() + 128).to(torch.uint8).view(values.shape))
            values.sub_(momentum.view(values.shape).sign(), alpha=self.param_groups[0]["lr"])


def make(home: str) -> Any:
    if home == FSDP2:
        return lambda model: Rounded(parameters_of(model))
    return of_module("bitsandbytes.optim", "AdamW8bit", min_8bit_size=1000, lr=1e-2)


def saved(folder: Path, target: Path, homes: Sequence[str]) -> list[Any]:
    """By home: what is kept, and losses after the save; saved in the background too, and by stock."""
    found = []
    for home in homes:
        training = training_in(home, folder, make(home))
        training.train(range(3))
        training.save(target / home)
        for _ in range(2):  # the second by the plan of the first
            hf_zero_stream.save_state(
                training.trains, target / f"{home} later", asynchronous=True, **training.own
            ).wait()
        if home in ZERO:
            training.trains.save_checkpoint(str(target / f"{home} stock"))
        found.append((of_this_rank(training.inner), training.train((3, 4))))
    return found


def resumed(folder: Path, target: Path, homes: Sequence[str], whose: str) -> list[Any]:
    found = []
    for home in homes:
        training = training_in(home, folder, make(home))
        if whose == "stock":
            training.trains.load_checkpoint(str(target / f"{home} stock"))
        else:
            training.load(target / home)
        found.append((of_this_rank(training.inner), training.train((3, 4))))
    return found


def resumed_by_others(folder: Path, target: Path, homes: Sequence[str]) -> list[Any]:
    """The error, and whether anything has changed; or losses, of replicas."""
    found: list[Any] = []
    for home in homes:
        training = training_in(home, folder, make(home))
        if home == STAGE_0:
            training.load(target / home)
            found.append(training.train((3, 4)))
            continue
        training.train([7])
        before = of_this_rank(training.inner), [param.clone() for param in _trained(training)]
        try:
            training.load(target / home)
        except ConfigError as error:
            after = of_this_rank(training.inner), _trained(training)
            found.append((str(error), is_same(before[0], after[0]) and all(map(torch.equal, before[1], after[1]))))
        else:
            found.append(("no error", False))
    return found


def _trained(training: Any) -> list[torch.Tensor]:
    masters = {"ZeRO-3": "fp32_partitioned_groups_flat", "ZeRO-2": "single_partition_of_fp32_groups"}
    if training.home in masters:
        return [*getattr(training.trains.optimizer, masters[training.home])]
    return [param.to_local() for param in parameters_of(training.trains)]


def test_as_stock(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """By 3 ranks, which have padding; what they keep, padding too, and losses are those of DeepSpeed's resume."""
    folder = zoo_checkpoint("llama")
    of_saved = run_ranks(3, saved, folder, tmp_path, HOMES, timeout=200)
    by_ours = run_ranks(3, resumed, folder, tmp_path, HOMES, "ours", timeout=200)
    zero = [home for home in HOMES if home in ZERO]
    by_stock = run_ranks(3, resumed, folder, tmp_path, zero, "stock", timeout=200)
    for rank in range(3):
        for home, mine, then in zip(HOMES, of_saved[rank], by_ours[rank], strict=True):
            assert mine[0] and is_same(then[0], mine[0]), (home, rank)
            assert then[1] == mine[1], (home, rank)
        for home, mine, then in zip(zero, by_stock[rank], by_ours[rank], strict=False):
            assert is_same(then, mine), (home, rank)
    for home in HOMES:
        assert different_states(tmp_path / home, tmp_path / f"{home} later") == [], home
        (file,) = (tmp_path / home).glob("*/state.safetensors")
        assert any(name.startswith("whole/") for name in load_file(file)), home
    losses = of_saved[0][HOMES.index(STAGE_0)][1]
    for home, found in zip(HOMES, run_ranks(2, resumed_by_others, folder, tmp_path, HOMES)[0], strict=True):
        if home == STAGE_0:
            assert found == pytest.approx(losses, rel=1e-5)  # blocks are those of whole parameters
        else:
            message, is_as_before = found
            assert "belong to all that a rank trains as one, and cannot be cut anew. 3 ranks saved" in message, message
            assert "Go on with as many ranks" in message and is_as_before, (home, message)


def test_one_process(zoo_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parameters are kept in 32 bit, of all elements; a record and files that do not fit are errors."""
    folder = zoo_checkpoint("llama")
    training = training_in(ONE, folder, make(ONE))
    training.train(range(3))
    kept = of_this_rank(training.inner)
    assert {state["state1"].dtype for state in kept} == {torch.uint8, torch.float32}
    training.save(tmp_path)
    losses = training.train((3, 4))
    again = training_in(ONE, folder, make(ONE))
    for each in (training, again):  # in a training that has gone on, and in a new one
        each.load(tmp_path)
        assert is_same(of_this_rank(each.inner), kept)
        assert each.train((3, 4)) == losses
    held = wholes.held_of_parts
    monkeypatch.setattr(tensors, "held_of_parts", lambda *args: dict([*held(*args).items()][1:]))
    with pytest.raises(SaveError, match="expected .* tensors that this rank keeps whole in the files"):
        training.save(tmp_path / "less")
    assert [*(tmp_path / "less").iterdir()] == []
    monkeypatch.undo()
    (file,) = tmp_path.glob("*/state.safetensors")
    shown = file.read_bytes()
    file.write_bytes(shown.replace(b'"U8"', b'"I8"', 1))
    with pytest.raises(CheckpointError, match=r"expected torch.uint8 of shape .*; found torch.int8"):
        again.load(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match="this file of the training state is gone"):
        again.load(tmp_path)


class SomeRanks:
    """Stands in for the coordinator of three ranks, of which the last has other parts."""

    world_size = 3

    def all_gather(self, mine: Any) -> list[Any]:
        return [mine, mine, ([], [])]


def test_parts_that_some_ranks_share() -> None:
    values = torch.zeros(8)
    entries = {"codes": torch.zeros(8, dtype=torch.uint8), "scales": torch.zeros(4)}
    slot = Slot(0, values, entries, [Member("weight", ParameterBox.whole((8,)), 0, 0, 8)])
    optimizer = torch.optim.SGD([torch.nn.Parameter(values)], lr=1.0)
    training = Training(model=torch.nn.Module(), optimizer=optimizer, slots=[slot])
    record = StateRecord(optimizer="SGD", keys=[], groups=[GroupRecord({}, ["weight"], [[8]], [0])], forms=[Form()])
    kept, _ = kept_here(training)
    assert kept.whole == {0: ["codes", "scales"]}
    with pytest.raises(UnsupportedError, match="keeps codes, scales as a whole, and 2 of 3 ranks train"):
        wholes.with_parts(record, training, kept, SomeRanks())  # type: ignore[arg-type]


class Odd(torch.optim.SGD):
    """Keeps what nobody can cut: norms of rows, columns first, a count that one rank has, a number of each rank's own.

    Options are a rank's own, too, one of which another rank has not. Steps depend on all of it.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        group = self.param_groups[0]
        group["scale"] = group.get("scale", 1.0) + rank
        if rank == 1:
            group["alone"] = group.get("alone", 0.0) + 1
        for param in group["params"]:
            values, gradient = (it.to_local() if isinstance(it, DTensor) else it for it in (param, param.grad))
            state = self.state[param]
            if "norms" not in state:
                state |= {"norms": torch.zeros(3), "turned": torch.zeros(2, 3).t(), "own": 0.5}
                if rank == 1:
                    state["count"] = torch.zeros(1, dtype=torch.int64)
            state["norms"] += gradient.float().abs().sum() if gradient.numel() else 0
            state["turned"] += torch.arange(6.0).view(3, 2)
            state["own"] += rank
            if "count" in state:
                state["count"] += 1
            change = (state["norms"] @ state["turned"]).sum() / (1 + state["norms"].sum()) * group["scale"]
            change = change + state["own"] + state.get("count", torch.zeros(1)).sum() + group.get("alone", 0.0)
            values.sub_(gradient, alpha=float(1e-3 * change))


def odd(model: Any) -> torch.optim.Optimizer:
    return Odd(parameters_of(model), lr=1e-3)


def save_odd(folder: Path, target: Path, homes: Sequence[str]) -> list[Any]:
    found = []
    for home in homes:
        training = training_in(home, folder, odd)
        training.train(range(3))
        training.save(target / home)
        found.append((of_this_rank(training.inner), training.train((3, 4))))
    return found


def resume_odd(folder: Path, target: Path, homes: Sequence[str]) -> list[Any]:
    found: list[Any] = []
    for home in homes:
        training = training_in(home, folder, odd)
        try:
            training.load(target / home)
        except ConfigError as error:
            found.append(str(error))
        else:
            kept = of_this_rank(training.inner)
            strides = {state["turned"].stride() for state in training.inner.state.values()}
            found.append((kept, training.train((3, 4)), strides))
    return found


def test_whatever_cannot_be_cut(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, homes = zoo_checkpoint("llama"), ["ZeRO-3", "ZeRO-2", FSDP2]
    saved = run_ranks(2, save_odd, folder, tmp_path, homes, timeout=200)
    resumed = run_ranks(2, resume_odd, folder, tmp_path, homes, timeout=200)
    for of_saved, of_resumed in zip(saved, resumed, strict=True):
        for home, (kept, losses), (kept_then, losses_then, strides) in zip(homes, of_saved, of_resumed, strict=True):
            assert is_same(kept_then, kept) and losses_then == losses, home
            assert strides == {(1, 3)}, home
    for message in run_ranks(3, resume_odd, folder, tmp_path, homes, timeout=200)[0]:
        assert "belong to all that a rank trains as one, and cannot be cut anew. 2 ranks saved" in message


def test_factors_in_one_process(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Adafactor's moments of matrices are sums of rows and of columns."""
    folder = zoo_checkpoint("llama")
    make = of_module("torch.optim", "Adafactor")
    training = training_in(ONE, folder, make)
    training.train(range(3))
    kept = of_this_rank(training.inner)
    assert any("row_var" in state for state in kept)
    training.save(tmp_path)
    losses = training.train((3, 4))
    again = training_in(ONE, folder, make)
    again.load(tmp_path)
    assert is_same(of_this_rank(again.inner), kept) and again.train((3, 4)) == losses


ANY = "any number of ranks"
TORCH_ENDINGS = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "ASGD", "SGD")
WITH_OPTIONS = ("AdamW, amsgrad", "SGD, momentum", "RMSprop, centered", "LoRA+ (AdamW)")
IN_32_BIT = ("AdamW32bit", "PagedAdamW32bit", "Lion32bit", "RMSprop32bit", "Adagrad32bit")
IN_8_BIT = ("AdamW8bit", "PagedAdamW8bit", "Lion8bit", "AdEMAMix8bit")


def check(found: dict[tuple[str, str], object]) -> None:
    for (name, home), row in found.items():
        said = verdict(row)
        if name.endswith("8bit") or name == "Adafactor":  # which computes of what each rank has
            assert said == "as many ranks; others are an error", (name, home, said)
        else:
            assert said.startswith(ANY), (name, home, said)


@pytest.mark.parametrize(
    ("names", "home"),
    [
        (["bitsandbytes AdamW8bit", "Adafactor"], "ZeRO-3"),
        pytest.param(["bitsandbytes PagedAdamW32bit", "Muon of DeepSpeed"], "ZeRO-3", marks=pytest.mark.slow),
        pytest.param(
            ["bitsandbytes PagedAdamW32bit", "bitsandbytes AdamW8bit", "Adafactor"], "ZeRO-2", marks=pytest.mark.slow
        ),
    ],
)
def test_in_engines(cluster: None, tmp_path: Path, names: list[str], home: str) -> None:
    """With a ``state_dict`` of their own, by blocks, and with numbers of a rank's own."""
    check(run(names, [home], tmp_path))


@pytest.mark.slow
def test_whole_matrices(cluster: None, tmp_path: Path) -> None:
    ((_, row),) = run(["Muon of DeepSpeed"], ["ZeRO-2"], tmp_path).items()
    said = verdict(row)
    assert "momentum of whole matrices" in said and said.endswith("DeepSpeed's own: goes on")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "homes"),
    [
        ([*TORCH_ENDINGS, *WITH_OPTIONS, "Muon of torch"], [FSDP2]),
        ([*TORCH_ENDINGS, *WITH_OPTIONS, "Rprop", "Adafactor of torch"], ["ZeRO-3", "ZeRO-2"]),
        ([f"bitsandbytes {name}" for name in (*IN_32_BIT, *IN_8_BIT)], ["ZeRO-3", "ZeRO-2"]),
    ],
    ids=["torch's, FSDP2", "torch's, ZeRO", "bitsandbytes'"],
)
def test_all(cluster: None, tmp_path: Path, names: list[str], homes: list[str]) -> None:
    check(run(names, homes, tmp_path))
