"""Copies between tensors in host memory whose dimensions lie in another order."""

from __future__ import annotations

import torch


__all__ = ["copy_strided"]

TILE_BYTES = 2**19
"""Size of a tile. It and its source stay in the second cache of a processor core."""

SMALL_BYTES = 2**20
"""A matrix up to this size stays there as it is."""

FEWEST = 64
"""With fewer rows or columns, tiles gain nothing."""


def copy_strided(destination: torch.Tensor, values: torch.Tensor) -> None:
    """``destination.copy_(values)``, with a cast where the dtypes differ; the two have one shape and do not overlap.

    Torch copies single elements where neighbours in `values` are no neighbours in `destination`: each touches another
    cache line, often another page, and a core copies 0.3 to 2 GB/s. It transposes a contiguous matrix in blocks, at 4
    to 6 GB/s. So tiles of whole rows are transposed into a buffer, and copied from there in runs.
    """
    if values.device.type != "cpu" or destination.device.type != "cpu" or values.dim() < 2:
        destination.copy_(values, non_blocking=True)
        return
    column, row = _innermost(values), _innermost(destination)
    rows, columns = values.shape[row], values.shape[column]
    if column == row or min(rows, columns) < FEWEST or rows * columns * values.element_size() <= SMALL_BYTES:
        destination.copy_(values)
        return
    order = [dim for dim in range(values.dim()) if dim not in (row, column)] + [row, column]
    _copy_matrices(destination.permute(order), values.permute(order))


def _innermost(tensor: torch.Tensor) -> int:
    """The dimension along which neighbours are closest together in memory."""
    return min(range(tensor.dim()), key=lambda dim: (tensor.shape[dim] == 1, tensor.stride(dim)))


def _copy_matrices(destination: torch.Tensor, values: torch.Tensor) -> None:
    """Transpose the last two dimensions: columns are close together in `values`, rows in `destination`."""
    if values.dim() > 2:
        for of_destination, of_values in zip(destination, values, strict=True):
            _copy_matrices(of_destination, of_values)
        return
    rows, columns = values.shape
    rows_of_tile = min(rows, max(FEWEST, TILE_BYTES // (columns * values.element_size())))
    buffer = torch.empty(rows_of_tile * columns, dtype=values.dtype)
    for begin in range(0, rows, rows_of_tile):
        tile = values[begin : begin + rows_of_tile]
        transposed = buffer[: tile.numel()].view(columns, len(tile))
        transposed.copy_(tile.contiguous().t())  # torch goes by blocks only where a whole matrix is contiguous
        destination[begin : begin + rows_of_tile].t().copy_(transposed)
