"""Copies between tensors in host memory whose dimensions lie in another order."""

from __future__ import annotations

import torch


TILE_BYTES = 2**20
"""Size of a tile. Smaller ones give shorter runs in the destination; from 2 MiB on, caches are too small for bytes."""

SMALL_BYTES = 2**16
"""Below this size, calling torch for each tile takes longer than what tiles gain."""

FEWEST = 64
"""With fewer rows or columns, tiles gain nothing."""

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.float32}
"""By the size of an element: the dtype to transpose it as."""


def copy_strided(destination: torch.Tensor, values: torch.Tensor) -> None:
    """``destination.copy_(values)``, with a cast where the dtypes differ; the two have one shape and do not overlap.

    Torch copies single elements where neighbours in `values` are no neighbours in `destination`: each touches another
    cache line, often another page, and a core copies 0.3 to 6 GB/s. So matrices are transposed in tiles.
    """
    if values.device.type != "cpu" or destination.device.type != "cpu" or values.dim() < 2:
        destination.copy_(values, non_blocking=True)
        return
    column, row = _innermost(values), _innermost(destination)
    rows, columns = values.shape[row], values.shape[column]
    is_small = min(rows, columns) < FEWEST or values.numel() * values.element_size() < SMALL_BYTES
    if column == row or is_small or values.element_size() not in WORDS:
        destination.copy_(values)
        return
    order = [dim for dim in range(values.dim()) if dim not in (row, column)] + [row, column]
    _copy_matrices(destination.permute(order), values.permute(order))


def _innermost(tensor: torch.Tensor) -> int:
    """The dimension along which neighbours are closest together in memory."""
    return min(range(tensor.dim()), key=lambda dim: (tensor.shape[dim] == 1, tensor.stride(dim)))


def _copy_matrices(destination: torch.Tensor, values: torch.Tensor) -> None:
    """Copy matrices in tiles: columns are close together in `values`, rows in `destination`."""
    sizes = values.shape
    if len(sizes) > 3 or (len(sizes) == 3 and values[0].nbytes > TILE_BYTES):
        for of_destination, of_values in zip(destination, values, strict=True):
            _copy_matrices(of_destination, of_values)
    elif len(sizes) == 3:
        matrices = max(1, TILE_BYTES // values[0].nbytes)
        for to, tile in zip(destination.split(matrices), values.split(matrices), strict=True):
            _transpose(to.transpose(1, 2), tile.contiguous())
    else:
        rows = max(FEWEST, TILE_BYTES // values[0].nbytes // FEWEST * FEWEST)
        for to, tile in zip(destination.split(rows), values.split(rows), strict=True):
            _transpose(to.t()[None], tile.contiguous()[None])


def _transpose(destination: torch.Tensor, values: torch.Tensor) -> None:
    """``destination.copy_(values.transpose(1, 2))``, for contiguous `values`."""
    columns, dtype, word = values.shape[2], values.dtype, WORDS[values.element_size()]
    in_pairs = word == torch.int16 and columns % 2 == 0 and values.data_ptr() % 4 == 0
    if in_pairs and destination.dtype == dtype:
        # Two neighbours in a row move as one word of four bytes. Then the lower halves are one column, the upper ones
        # another: a cast to two bytes keeps the lower half.
        pairs = _shuffled(values.view(torch.float32)).view(torch.int32)
        halves = destination.view(torch.int16)
        halves[:, 0::2].copy_(pairs)
        halves[:, 1::2].copy_(pairs.bitwise_right_shift_(16))
    elif word == torch.int16:
        destination.copy_(torch.stack([matrix.t().contiguous() for matrix in values]))
    else:
        destination.copy_(_shuffled(values.view(word)).view(dtype))


def _shuffled(values: torch.Tensor) -> torch.Tensor:
    """``values.transpose(1, 2).contiguous()``, for contiguous `values`.

    A channel shuffle is a transpose of the matrix (groups, channels of a group), and for elements of one byte and
    floats of four torch has one with vector instructions, at 20 to 45 GB/s of a core; its copies give 2 to 12.
    """
    matrices, rows, columns = values.shape
    numel = rows * columns
    images = values.as_strided((matrices, numel, 1, 1), (numel, 1, numel, numel))
    shuffled = torch.native_channel_shuffle(images, rows)
    return shuffled.as_strided((matrices, columns, rows), (numel, rows, 1))
