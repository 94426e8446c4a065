"""Tensors that most models do not have, tried beside stock: each is saved as stock saves it, or refused by name.

What is refused is refused before the first byte, with an error of this package's own.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.utils._pytree import tree_map

import hf_zero_stream
from hf_zero_stream.errors import LoadError, UnsupportedError
from hf_zero_stream.holdings import holder
from hf_zero_stream.holdings.holding import Holding, LocalShard
from tests.support.checkpoint_files import differing, tensors_of
from tests.support.odd_models import WIDTH, Odd, OddConfig


class Marked(nn.Parameter):
    """A subclass that only marks what it is."""


class Watched(torch.Tensor):
    """Sees each function that is called, and has memory like any tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapping(torch.Tensor):
    """Has no memory of its own, and does not say which tensors it holds in its place."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tree_map(lambda it: it.inner if isinstance(it, cls) else it, args)
        result = func(*args, **(kwargs or {}))
        return cls(result) if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default) else result


class Twice(nn.Linear):
    """Calls its bias by another name in state dicts."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}shift"] = destination.pop(f"{prefix}bias")


Change = Callable[[Any], None]


def parameter(make: Callable[[], torch.Tensor]) -> Change:
    def change(model: Any) -> None:
        value = make()
        trained = value.is_floating_point() or value.is_complex()
        is_made = isinstance(value, nn.Parameter)
        model.first.extra = value if is_made else nn.Parameter(value, requires_grad=trained)

    return change


def buffer(make: Callable[[], torch.Tensor], *, persistent: bool = True) -> Change:
    return lambda model: model.first.register_buffer("extra", make(), persistent=persistent)


def nested(**layout: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], **layout)


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)


def overlapping(model: Any) -> None:
    memory = torch.randn(10)
    model.first.extra, model.second.extra = nn.Parameter(memory[:6]), nn.Parameter(memory[4:])


def unregistered(model: Any) -> None:
    model.first.hidden = [nn.Parameter(torch.randn(3))]


def in_list(model: Any) -> None:
    model.first.extra = nn.ParameterList([nn.Parameter(torch.randn(3)), torch.randn(2)])


def complexes(dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    return torch.randn(3, dtype=dtype)


KNOWN: dict[str, Change] = {
    "a marked parameter": parameter(lambda: Marked(torch.randn(3))),
    "a watched parameter": parameter(lambda: torch.randn(3).as_subclass(Watched)),
    "complex64": parameter(complexes),
    "bool": parameter(lambda: torch.ones(4, dtype=torch.bool)),
    "uint16": parameter(lambda: torch.ones(4, dtype=torch.uint16)),
    "float8": parameter(lambda: torch.ones(4).to(torch.float8_e4m3fn)),
    "expanded": parameter(lambda: torch.randn(1, 3).expand(4, 3)),
    "transposed": parameter(lambda: torch.randn(5, 3).t()),
    "of no dimension": parameter(lambda: torch.tensor(2.0)),
    "of no elements": parameter(lambda: torch.empty(0, 3)),
    "in a list": in_list,
    "in no module": unregistered,
    "nn.Buffer": lambda model: setattr(model.first, "extra", nn.Buffer(torch.randn(3))),
    "a buffer that is not saved": buffer(lambda: torch.randn(3).to_sparse(), persistent=False),
    "a watched buffer": buffer(lambda: torch.randn(3).as_subclass(Watched)),
    "an expanded buffer": buffer(lambda: torch.randn(1, 3).expand(4, 3)),
    "a buffer with a gradient": buffer(lambda: torch.randn(3, requires_grad=True)),
    "weight_norm": lambda model: torch.nn.utils.parametrizations.weight_norm(model.first),
    "spectral_norm": lambda model: torch.nn.utils.parametrizations.spectral_norm(model.first),
    "pruned": lambda model: torch.nn.utils.prune.random_unstructured(model.first, "weight", 0.5),
}
"""Saved as stock saves it."""

UNKNOWN: dict[str, Change] = {
    "a wrapper": parameter(lambda: Wrapping(torch.randn(3))),
    "sparse": parameter(lambda: torch.eye(4).to_sparse()),
    "sparse rows": parameter(lambda: torch.eye(4).to_sparse_csr()),
    "MKL-DNN": parameter(lambda: torch.eye(4).to_mkldnn()),
    "meta": parameter(lambda: torch.empty(3, device="meta")),
    "complex128": parameter(lambda: complexes(torch.complex128)),
    "conjugate": parameter(lambda: complexes().conj()),
    "negative": parameter(lambda: complexes().conj().imag),
    "nested": parameter(nested),
    "jagged": parameter(lambda: nested(layout=torch.jagged)),
    "quantised": parameter(quantised),
    "uninitialised": lambda model: setattr(model.first, "extra", nn.LazyLinear(3)),
    "a wrapper as a buffer": buffer(lambda: Wrapping(torch.randn(3))),
    "a sparse buffer": buffer(lambda: torch.eye(4).to_sparse()),
    "a meta buffer": buffer(lambda: torch.empty(3, device="meta")),
    "a complex128 buffer": buffer(lambda: complexes(torch.complex128)),
    "a conjugate buffer": buffer(lambda: complexes().conj()),
    "a negative buffer": buffer(lambda: complexes().conj().imag),
    "a nested buffer": buffer(nested),
    "a quantised buffer": buffer(quantised),
    "an uninitialised buffer": buffer(nn.parameter.UninitializedBuffer),
    "a buffer that is a row": lambda model: model.first.register_buffer("extra", model.first.weight.detach()[1:2]),
    "a buffer that is a weight": lambda model: model.first.register_buffer("extra", model.first.weight),
    "a parameter that is a row": lambda model: setattr(
        model.first, "extra", nn.Parameter(model.second.weight.detach()[1:2])
    ),
    "parameters that overlap": overlapping,
}
"""Refused: stock fails too, or has a value that memory does not show (conjugate and negative views)."""


def odd(change: Change) -> Any:
    torch.manual_seed(0)
    model = Odd(OddConfig())
    change(model)
    return model


def save(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    hf_zero_stream.save_pretrained(model, folder)
    return tensors_of(folder)


def save_state(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    trained = [param for param in model.parameters() if param.requires_grad]
    hf_zero_stream.save_state(model, folder, optimizer=torch.optim.SGD(trained, lr=0.1))
    return tensors_of(folder)


def stream(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    with closing(iter(hf_zero_stream.weight_stream(model))) as buckets:
        return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


WAYS = [save, save_state, stream]
ROWS_OF_WAYS = [save, save_state, pytest.param(stream, marks=pytest.mark.plugin("stream"))]


@pytest.mark.parametrize("way", ROWS_OF_WAYS)
@pytest.mark.parametrize("kind", KNOWN)
def test_known(tmp_path: Path, kind: str, way: Any) -> None:
    model = odd(KNOWN[kind])
    model.save_pretrained(tmp_path / "stock")
    assert differing(way(model, tmp_path / "ours"), tensors_of(tmp_path / "stock")) == []


SCATTERED: dict[str, Change] = {
    "a transposed buffer": buffer(lambda: torch.randn(5, 3).t()),
    "every second element": buffer(lambda: torch.randn(6)[::2]),
    "a transposed buffer of bytes": buffer(lambda: torch.arange(15, dtype=torch.uint8).view(5, 3).t()),
}
"""In memory, elements do not lie one after the other; as with some :data:`KNOWN`."""


@pytest.mark.parametrize("kind", [*KNOWN, *SCATTERED])
def test_known_in_states(tmp_path: Path, kind: str) -> None:
    """A new model goes on with the values, in the memory that it has."""
    change = {**KNOWN, **SCATTERED}[kind]
    model, new = odd(change), odd(change)
    save_state(model, tmp_path)
    expected = {name: value.contiguous().clone() for name, value in model.state_dict().items()}
    places = {name: (value.data_ptr(), value.stride()) for name, value in new.state_dict().items()}
    with torch.no_grad():
        for tensor in [*new.parameters(), *new.buffers()]:
            tensor.zero_()
    trained = [param for param in new.parameters() if param.requires_grad]
    hf_zero_stream.load_state(new, tmp_path, optimizer=torch.optim.SGD(trained, lr=0.1))
    found = new.state_dict()
    assert {name: (value.data_ptr(), value.stride()) for name, value in found.items()} == places
    assert (
        found.keys() == expected.keys()
        and differing({name: value.contiguous() for name, value in found.items()}, expected) == []
    )


def test_different_values_for_one_place(tmp_path: Path) -> None:
    """What is expanded now has no memory for the values of one that was not."""
    save_state(odd(buffer(lambda: torch.randn(4, 3))), tmp_path)
    model = odd(KNOWN["an expanded buffer"])
    with pytest.raises(LoadError, match=r"first\.extra is expanded: its strides are \(0, 1\)"):
        hf_zero_stream.load_state(model, tmp_path, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("way", ROWS_OF_WAYS)
@pytest.mark.parametrize("kind", UNKNOWN)
def test_unknown(tmp_path: Path, kind: str, way: Any) -> None:
    model = odd(UNKNOWN[kind])
    with pytest.raises(UnsupportedError, match="extra"):
        way(model, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_names_of_state_dicts(tmp_path: Path) -> None:
    """A state dict with names that the model does not have: weights as stock's, and no state that could not go on."""

    def change(model: Any) -> None:
        model.first = Twice(WIDTH, WIDTH + 2)

    model = odd(change)
    model.save_pretrained(tmp_path / "stock")
    assert differing(save(model, tmp_path / "ours"), tensors_of(tmp_path / "stock")) == []
    with pytest.raises(UnsupportedError, match=r"first\.bias: expected 1 tensor.* of the model in its state dict"):
        save_state(model, tmp_path / "state")


@pytest.fixture
def held_by_users() -> Iterator[None]:
    def held(model: Any, params: Any, **ranks: Any) -> dict[str, Holding]:
        wrapped = {name: param.inner for name, param in params.items() if isinstance(param, Wrapping)}
        return {name: LocalShard.whole(inner.shape).holding(inner) for name, inner in wrapped.items()}

    holder.HOLDERS.append(held)
    yield
    holder.HOLDERS.remove(held)


def test_held_by_users(tmp_path: Path, held_by_users: None) -> None:
    """A holder of the user's own makes its kind known, and no other."""
    model = odd(UNKNOWN["a wrapper"])
    assert save(model, tmp_path / "ours")["first.extra"].equal(model.first.extra.inner)
    with pytest.raises(UnsupportedError, match=r"first\.extra, a Parameter .*sparse"):
        save(odd(UNKNOWN["sparse"]), tmp_path / "other")
    assert not [path for path in (tmp_path / "other").rglob("*") if path.is_file()]
