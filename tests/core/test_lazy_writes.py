"""Lazy parameters that code writes into between from_pretrained and accelerator.prepare, against real ones.

Each program gets the parameters of two checkpoints; what it returns is compared, and so are all parameters afterwards.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero_stream.checkpoint.lazy import LazyTensor, materialise_written
from hf_zero_stream.checkpoint.nodes import WritableParameter
from tests.core.test_lazy import Checkpoint


Parameters = dict[str, nn.Parameter]
Program = Callable[[Parameters, Parameters], Any]


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Those of two seeds have the same names and shapes, and lie at the same places of their files."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(6, 4, generator=generator) for name in ("m", "n", "o", "p")}


def lazy_parameters(checkpoint: Checkpoint) -> Parameters:
    return {
        name: nn.Parameter(LazyTensor.whole(WritableParameter.of(lazy.view_of_node), lazy.reader))
        for name, lazy in checkpoint.lazy().items()
        if isinstance(lazy, LazyTensor)
    }


@pytest.fixture
def both(tmp_path: Path) -> Iterator[tuple[tuple[Parameters, Parameters], tuple[Parameters, Parameters]]]:
    lazy, real = [], []
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        values = tensors(seed)
        lazy.append(lazy_parameters(Checkpoint(tmp_path / str(seed), values)))
        real.append({name: nn.Parameter(value.clone()) for name, value in values.items()})
    yield (lazy[0], lazy[1]), (real[0], real[1])


def value_of(tensor: Any) -> Any:
    tensor = tensor.detach() if isinstance(tensor, torch.Tensor) else tensor
    return tensor.materialise() if isinstance(tensor, LazyTensor) else tensor


def rows(a: Parameters, b: Parameters) -> None:
    with torch.no_grad():
        a["m"][4:] = a["m"][:4].mean(0, keepdim=True)


def data_of_a_view(a: Parameters, b: Parameters) -> None:
    a["m"].data.T[1].mul_(3)


def initialised(a: Parameters, b: Parameters) -> None:
    torch.manual_seed(0)
    nn.init.normal_(a["m"])
    a["n"].data.uniform_(-1, 1)


def kept_before(a: Parameters, b: Parameters) -> Any:
    """What was made of a parameter before it changes keeps the values of then; a view has those of now."""
    clone, twice, view = a["m"].detach().clone(), a["m"].detach() * 2, a["m"].data[1:]
    joined, sliced = torch.cat([a["m"], a["n"]]), a["m"].detach()[2:].clone()
    with torch.no_grad():
        a["m"].mul_(5)
    after = a["m"].detach() + 1
    a["m"].data.zero_()
    return clone, twice, view, joined, sliced, after


def in_lists(a: Parameters, b: Parameters) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(a.values()), 0.5)
        torch._foreach_lerp_([a["m"], a["n"]], [b["n"], b["o"]], 0.25)


def into_out(a: Parameters, b: Parameters) -> None:
    with torch.no_grad():
        torch.add(b["m"], 1, out=a["m"])


def by_numpy(a: Parameters, b: Parameters) -> None:
    a["m"].detach().numpy()[:] = 7


def assigned(a: Parameters, b: Parameters) -> None:
    a["m"].data = a["m"].data.bfloat16()
    a["m"].data[0] = 1
    a["n"].data = a["n"].data.T
    a["n"].data[0] = 2


def shared(a: Parameters, b: Parameters) -> None:
    a["m"].data = a["n"].data
    a["n"].data[0] = 3


def averaged(a: Parameters, b: Parameters) -> None:
    for one, other in zip(a.values(), b.values(), strict=True):
        one.data = (one.data + other.data) / 2


def averaged_in_place(a: Parameters, b: Parameters) -> None:
    with torch.no_grad():
        for one, other in zip(a.values(), b.values(), strict=True):
            one.lerp_(other, 0.3)


def of_two(a: Parameters, b: Parameters) -> Any:
    one, other = a["m"].detach(), b["m"].detach()
    mixed = torch.stack([other, one]), torch.cat([one, other], 1), torch.maximum(one, other), other - one
    return *mixed, torch.dist(one, other), torch.equal(one, other)


def made_of_them(a: Parameters, b: Parameters) -> Any:
    """What ops make of parameters can be written into, too, and random numbers are drawn once, in their order."""
    torch.manual_seed(0)
    noise = torch.randn_like(a["m"])
    a["m"].data = a["m"].data + noise * 0.1
    a["n"].data = nn.functional.dropout(a["n"].data, 0.5)
    mask = torch.ones_like(a["o"])
    mask[mask.abs().flatten().argsort().view(mask.shape) % 3 == 0] = 0
    product = a["o"].detach() * mask
    product[0] = a["p"].new_empty(4).fill_(5)
    cosine = nn.functional.cosine_similarity(a["p"].flatten(), b["p"].flatten(), 0)
    return noise, mask, product, cosine, f"{a['o'][0, 0]:.3f}", torch.randn(2)


def parametrised(a: Parameters, b: Parameters) -> Any:
    torch.manual_seed(0)
    linear = nn.Linear(4, 6, bias=False)
    linear.weight = a["m"]
    nn.utils.parametrizations.spectral_norm(linear)
    return linear.parametrizations.weight.original, linear.weight


PROGRAMS: dict[str, Program] = {
    function.__name__: function
    for function in (
        *(rows, data_of_a_view, initialised, kept_before, in_lists, into_out, by_numpy, assigned, shared),
        *(made_of_them, parametrised, averaged, averaged_in_place, of_two),
    )
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("becomes", [False, True])
def test_as_real_parameters(both: Any, name: str, becomes: bool) -> None:
    lazy, real = both
    found, expected = (PROGRAMS[name](*pair) for pair in (lazy, real))
    if becomes:
        materialise_written([*lazy[0].values(), *lazy[1].values()])
    found, expected = (([] if result is None else list(result)) for result in (found, expected))
    found += [*lazy[0].values(), *lazy[1].values()]
    expected += [*real[0].values(), *real[1].values()]
    for number, (mine, others) in enumerate(zip(found, expected, strict=True)):
        if not isinstance(others, torch.Tensor):
            assert mine == others
            continue
        assert (mine.shape, mine.dtype) == (others.shape, others.dtype), number
        assert torch.equal(value_of(mine), others.detach()), number


def test_only_what_is_written_has_values(both: Any) -> None:
    (lazy, _), _ = both
    lazy["m"].data[0] = 1
    materialise_written(lazy.values())
    assert [name for name, param in lazy.items() if not isinstance(param, LazyTensor)] == ["m"]


def test_what_changes_a_shape_in_place_is_refused(both: Any) -> None:
    (lazy, _), _ = both
    with pytest.raises(NotImplementedError, match="would write"):
        lazy["m"].data.t_()
