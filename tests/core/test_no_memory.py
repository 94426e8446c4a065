"""A lazy tensor that is pickled, or asked for its memory, says what it is; its addresses can be compared."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch

from hf_zero_stream.checkpoint.lazy import LazyTensor
from hf_zero_stream.checkpoint.nodes import Stored, View, no_memory_error
from hf_zero_stream.errors import UnsupportedError


def refuse_values(view: View) -> torch.Tensor:
    raise no_memory_error(view.node, "there are no values")


def lazy(shape: tuple[int, ...] = (2, 3)) -> LazyTensor:
    return LazyTensor.whole(Stored(shape, torch.float32, "weight"), refuse_values)


@pytest.mark.parametrize(
    "use",
    [
        pickle.dumps,
        lambda tensor: torch.save({"weight": tensor}, io.BytesIO()),
        lambda tensor: safetensors.torch.save({"weight": tensor}),
        lambda tensor: tensor.numpy(),
        numpy.asarray,
        numpy.from_dlpack,
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor[0, 0].item(),
        float,
        lambda tensor: tensor.storage()[0],
        lambda tensor: tensor.untyped_storage().tolist(),
        lambda tensor: hex(tensor.data_ptr()),
        lambda tensor: torch.empty(2, 3).copy_(tensor),
    ],
)
def test_what_has_no_values_says_so(use: Callable[[LazyTensor], Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"lazy.*GatheredParameters") as caught:
        use(lazy((1,)) if use is float else lazy())
    assert not isinstance(caught.value, ValueError)


def test_addresses_can_be_compared() -> None:
    """As transformers, huggingface_hub and safetensors do to find tensors that share memory."""
    tensor, other = lazy(), lazy()
    assert tensor.data_ptr() == tensor.view(-1).data_ptr() != other.data_ptr()
    assert tensor.data_ptr() == tensor.untyped_storage().data_ptr()
    assert tensor[1].data_ptr() - tensor.data_ptr() == 12
    assert tensor.data_ptr() < tensor[1].data_ptr() < tensor.data_ptr() + 24
    assert tensor.data_ptr() % 16 == 0 and tensor[1].data_ptr() % 16 == 12
    assert len({tensor.data_ptr(), tensor.view(-1).data_ptr(), other.data_ptr()}) == 2
    assert lazy((0,)).data_ptr() == 0
