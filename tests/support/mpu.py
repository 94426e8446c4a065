"""The `mpu` by which DeepSpeed hears that a script has cut a model itself, as Megatron-DeepSpeed does."""

from typing import Any

import torch.distributed as dist


class Mpu:
    """All ranks hold the parts of one model, and no other ranks have the same data."""

    def __init__(self) -> None:
        self._parts = dist.new_group()
        self._alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]

    def get_model_parallel_group(self) -> Any:
        return self._parts

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size()

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> Any:
        return self._alone

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_world_size(self) -> int:
        return 1
