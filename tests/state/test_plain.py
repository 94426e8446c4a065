"""What a user gives to go with a training comes back from JSON as it was, or is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_zero_stream.errors import UnsupportedError
from hf_zero_stream.state.plain import plain, restored


DTYPES = [torch.bfloat16, torch.float64, torch.bool, torch.uint16, torch.complex64, torch.float8_e4m3fn]
TENSORS = [
    *(torch.arange(6).reshape(2, 3).mT.to(dtype) for dtype in DTYPES),
    *(torch.tensor(-0.0), torch.tensor(float("nan")), torch.empty(0, 3), torch.ones(2, requires_grad=True)),
]
BYTES = "(dtype, shape, base64)"


def through_json(value: Any) -> Any:
    return restored(json.loads(json.dumps(plain(value, "data", exactly=True, with_tensors=True))))


@pytest.mark.parametrize("given", TENSORS, ids=lambda tensor: f"{tensor.dtype} {list(tensor.shape)}")
def test_tensors(given: torch.Tensor) -> None:
    found = through_json([given])[0]
    assert (found.dtype, found.shape, found.requires_grad) == (given.dtype, given.shape, False)
    bits = [each.detach().contiguous().reshape(-1).view(torch.uint8).tolist() for each in (found, given)]
    assert bits[0] == bits[1]


@pytest.mark.parametrize(
    "given", [np.arange(3, dtype=np.uint32), np.float16(0.1), np.float64(0.1), np.array([[True]])], ids=str
)
def test_arrays(given: Any) -> None:
    found = through_json(given)
    assert type(found) is type(given) and found.dtype == given.dtype and np.array_equal(found, given)


def test_numbers_of_numpy() -> None:
    """In options of an optimizer too, where no arrays are; NumPy's float64 is a float as well."""
    for given in (np.float64(0.1), np.int64(-3), np.bool_(True)):
        found = restored(json.loads(json.dumps(plain(given, "an option", exactly=True))))
        assert type(found) is type(given) and found == given


def test_others() -> None:
    given = {"dtype": torch.bfloat16, "path": Path("a/b"), "like one": {BYTES: 1}, "pairs": {1: {"(path)": (2,)}}}
    assert through_json(given) == given
    assert repr(through_json(np.random.RandomState(0).get_state())) == repr(np.random.RandomState(0).get_state())


@pytest.mark.parametrize(
    "given",
    [{1}, object(), np.array(["a"]), torch.nn.Parameter(torch.ones(1)), torch.eye(2).to_sparse()],
    ids=["set", "object", "strings", "parameter", "sparse"],
)
def test_what_else_is_refused(given: Any) -> None:
    with pytest.raises(UnsupportedError, match="data: expected numbers, strings"):
        through_json([given])


def test_tensors_are_refused_that_are_large_or_not_asked_for() -> None:
    with pytest.raises(UnsupportedError, match="tensors of at most 1048576 bytes; got one of 1048577"):
        through_json(torch.ones(2**20 + 1, dtype=torch.int8))
    with pytest.raises(UnsupportedError, match="got Tensor"):
        plain(torch.ones(1), "an option", exactly=True)


@pytest.mark.parametrize(
    "written",
    [
        {BYTES: ["int8", [2], "AA=="]},
        {BYTES: ["int8", [-1, -1], "AA=="]},
        {BYTES: ["float32", [0, 2**62, 2**62], ""]},
        {BYTES: ["int8", [1], "A"]},
        {BYTES: ["load", [1], "AA=="]},
        {BYTES: 3},
        {"(dtype)": "load"},
        {"(dtype)": 3},
        {"(array)": ["bfloat16", [1], "AAA="]},
        {"(path)": 3},
    ],
    ids=str,
)
def test_what_nobody_has_written(written: Any) -> None:
    """The errors that a record from anywhere turns into one of ours."""
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        restored(written)
