"""FSDP2's records of the parameters that it shards, and the boxes that DTensors of any kind hold.

This module alone of the core touches FSDP2's private classes.

``fully_shard`` cuts what it is given, a whole parameter or the local shard of tensor or expert parallelism, into
chunks along one dimension, and pads them to equal sizes. It all-gathers from a flat storage that includes the padding.
``FSDPParam.reset_sharded_param`` takes a parameter as it is if the parameter lies in that storage.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .. import accelerators
from ..errors import UnsupportedError, refuse_unknown_version, require_names
from ..planning.boxes import Cut, ParameterBox
from .holding import PARAMETERS, LocalShard, cut_shard_of, refuse_unknown
from .introspection import has_partition, is_cut
from .own_names import modules


Managed = Any
"""FSDP2's record of a parameter that it shards, an ``FSDPParam``."""

RELIED_ON = (
    *("_module_info", "_sharded_param_data", "_sharding_spec", "device", "fsdp_placement", "mesh_info", "mp_policy"),
    *("offload_to_cpu", "padded_sharded_param_size", "pin_memory", "sharded_param", "sharded_size"),
    "_unsharded_dtensor_spec|_tp_spec",
)
"""The attributes of a record that this module reads, or one of several; `tests.drift` looks for them in versions."""


@functools.cache
def param_class() -> Any:
    """The class of FSDP2's records. Looked for at first use: loads that FSDP2 has no part in need none.

    Raises a VersionError if this version of torch has another one.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    except ImportError:
        refuse_unknown_version("torch", ["FSDPParam"], "FSDP2")
        raise
    require_names(
        "torch",
        FSDPParam,
        *("init_dtype_attrs", "reset_sharded_param", "to_sharded_dtensor", "_init_sharded_param"),
        purpose="FSDP2",
    )
    require_names("torch", FSDPModule, "_get_fsdp_state", purpose="FSDP2")
    return FSDPParam


class _OnlyBytes(SimpleNamespace):
    """Stands for a record of a parameter of bytes; what it does not have is off."""

    def __getattr__(self, name: str) -> Any:
        return None


@functools.cache
def no_byte_shards_reason() -> str:
    """Why parameters of bytes cannot be sharded by this version of torch; "" if they can."""
    record: Any = _OnlyBytes(sharded_param=torch.tensor([], dtype=torch.uint8))
    try:
        param_class().init_dtype_attrs(record, MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    except Exception as error:  # a private function, which may ask for anything
        return f"it is not known how FSDP2 of torch {torch.__version__} treats packed bytes ({error})"
    if record.param_dtype is None:
        return ""
    return "FSDP2 of this version of torch would cast packed bytes to the dtype of training"


def managed_params(model: nn.Module) -> dict[str, Managed]:
    """FSDP2's records of the parameters of `model`, by all names of each."""
    by_place: dict[tuple[int, str], Managed] = {}
    for managed in [managed for group in groups(model) for managed in group.fsdp_params]:
        info = managed._module_info
        modules, names = (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names)
        for module, name in zip(modules, names, strict=True):
            by_place[id(module), name] = managed
    if not by_place:
        return {}
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name in module._parameters:
            if (id(module), name) in by_place:
                found[f"{prefix}.{name}" if prefix else name] = by_place[id(module), name]
    return found


def records_by_id(model: nn.Module) -> dict[int, Managed]:
    """FSDP2's records of the parameters of `model`, by the ``id`` of each."""
    return {id(model.get_parameter(name)): record for name, record in managed_params(model).items()}


def groups(model: nn.Module) -> Iterator[Any]:
    """FSDP2's groups of parameters that are gathered together, each once."""
    seen = set()
    for module in modules(model):
        if isinstance(module, FSDPModule):
            param_class()
            state: Any = module._get_fsdp_state()
            # Versions of torch without `_fsdp_param_groups` have one group for each module.
            several = getattr(state, "_fsdp_param_groups", None)
            for group in [state._fsdp_param_group] if several is None else several:
                if group is not None and id(group) not in seen:
                    seen.add(id(group))
                    yield group


def chunk_of(managed: Managed) -> Cut | None:
    """FSDP2's own cut; None if it only replicates."""
    mesh: Any = managed.mesh_info
    if not hasattr(mesh, "shard_mesh_size"):
        return None
    return Cut(managed.fsdp_placement.dim, mesh.shard_mesh_size, mesh.shard_mesh_rank)


def inner_spec(managed: Managed) -> Any:
    """The spec of the DTensor that ``fully_shard`` was given; None if that was a plain tensor."""
    if hasattr(managed, "_unsharded_dtensor_spec"):
        return managed._unsharded_dtensor_spec
    return getattr(managed, "_tp_spec", None)  # in torch 2.11 and 2.12, where it is missing for a plain tensor


def new_shard(managed: Managed, dtype: torch.dtype, *, requires_grad: bool) -> nn.Parameter:
    """A parameter with new memory, in a storage that FSDP2 will own: not initialised, its padding zero."""
    device = torch.device("cpu") if managed.offload_to_cpu else managed.device
    pins = managed.pin_memory and accelerators.kind() is not None  # else FSDP2 itself says so when training begins
    padded = torch.empty(managed.padded_sharded_param_size, dtype=dtype, device=device, pin_memory=pins)
    dim = managed.fsdp_placement.dim
    length = managed.sharded_size[dim] if managed.sharded_size.numel() else 0
    padded.narrow(dim, length, padded.shape[dim] - length).zero_()
    new = with_local(managed.sharded_param, padded.narrow(dim, 0, length), requires_grad=requires_grad)
    _take(managed, new, padded.view(-1))
    return new


def recut(managed: Managed, shape: torch.Size, dtype: torch.dtype) -> Any:
    """Have FSDP2 cut a frozen parameter of this `shape` and `dtype` in place of the one, on the meta device, that it
    was given; returns its DTensor.
    """
    param = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    mesh = {"mesh_info": managed.mesh_info}  # later versions of torch take it here
    known = inspect.signature(managed._init_sharded_param).parameters
    managed._init_sharded_param(
        param, managed.device, None, **{name: value for name, value in mesh.items() if name in known}
    )
    if managed.post_forward_mesh_info is not None:
        managed._init_sharded_post_forward_param_metadata(param)
    return managed.sharded_param


def computes_in(managed: Managed) -> torch.dtype | None:
    """The dtype to which mixed precision casts gathered values; None if it does not."""
    found: torch.dtype | None = managed.mp_policy.param_dtype
    return found


def with_local(like: Any, local: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
    """A parameter that is sharded as the DTensor `like` is, of `local` values and their dtype."""
    old = like._spec
    spec = DTensorSpec(old.mesh, old.placements, tensor_meta=TensorMeta(old.shape, old.stride, local.dtype))
    return nn.Parameter(DTensor(local, spec, requires_grad=False), requires_grad=requires_grad)


def _take(managed: Managed, param: Any, storage: torch.Tensor) -> None:
    managed.sharded_param, managed._sharded_param_data, managed._sharding_spec = param, storage, param._spec


def join_ties(model: nn.Module) -> None:
    """Have all of FSDP2's records of a tied parameter use the memory of one of them, now and when it changes.

    A tied name that a module of its own shards has a record of its own. Each would pad an uneven shard in new memory,
    when training begins and after a cast, and the parameter be in that of the last: optimizers would train that alone.
    """
    records = {name: (model.get_parameter(name), managed) for name, managed in managed_params(model).items()}
    apart = {name: both for name, both in records.items() if "reset_sharded_param" not in vars(both[1])}
    owners: dict[int, Managed] = {}
    for param, managed in apart.values():
        if id(param) not in owners or managed.sharded_param is param:
            owners[id(param)] = managed
    for name, (param, managed) in apart.items():
        owner = owners[id(param)]
        if owner is not managed and cut_of(name, param, owner) == cut_of(name, param, managed):
            managed.reset_sharded_param = functools.partial(_reset_joined, managed, owner)
            managed.reset_sharded_param()


def _reset_joined(managed: Managed, owner: Managed) -> None:
    """Stands for ``FSDPParam.reset_sharded_param``, which FSDP2 calls when a parameter may be another."""
    owner.reset_sharded_param()
    info = managed._module_info
    if getattr(info.module, info.param_name) is owner.sharded_param:
        _take(managed, owner.sharded_param, owner._sharded_param_data)
    else:
        type(managed).reset_sharded_param(managed)


def cut_of(name: str, param: Any, managed: Managed | None) -> tuple[list[int], list[Cut]]:
    """The shape of a parameter as FSDP2 has it on record, or of a DTensor or whole tensor, and the cuts into parts."""
    sharded = param if managed is None else managed.sharded_param
    cuts = cuts_of(name, sharded, managed) if isinstance(sharded, DTensor) else []
    return [*sharded.shape], [cut for cut in cuts if cut.parts > 1]


def original_class(model: nn.Module) -> type[nn.Module]:
    """The class of `model` before ``fully_shard`` put another in its place."""
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters that FSDP2 keeps after a forward pass, as ``model.state_dict()`` does.

    They may belong to a module around `model`, such as one that holds a policy and its value model.
    """
    for module in modules(model):
        if isinstance(module, FSDPModule):
            module.reshard()
        for hook in list(module._state_dict_pre_hooks.values()):
            if getattr(hook, "__qualname__", "").startswith("FSDPParamGroup."):
                hook(module, "", True)


def shard_of(name: str, param: Any, record: Managed | None, rank: int, world_size: int) -> LocalShard:
    """What this rank has memory for of parameter `name`: what loads fill, saves give and optimizers train.

    `record` is FSDP2's of it, if there is one. Raises an UnsupportedError for a parameter of no kind that is known.
    """
    if has_partition(param):
        from .deepspeed.partitions import own_range  # imports deepspeed, which takes seconds

        box = getattr(param, "_hf_zero_stream_box", None)  # where ranks have experts of their own
        if is_cut(param):
            box = cut_shard_of(name, param).box
        return LocalShard(box or ParameterBox.whole(param.ds_shape), part=own_range(param))
    if isinstance(param, DTensor):
        return dtensor_shard_of(name, param, record)
    if is_cut(param):
        return cut_shard_of(name, param)
    refuse_unknown({name: param}, PARAMETERS, "an optimizer's parameter")
    return LocalShard(ParameterBox.whole(param.shape), rank, world_size)


def dtensor_shard_of(name: str, param: DTensor, managed: Managed | None) -> LocalShard:
    """Return this rank's local shard of `param`; `managed` is FSDP2's record of it, if there is one.

    FSDP2 cuts last, although its placement comes first. Where tensor parallelism cuts a fused weight along the same
    dimension, the placements alone do not say what FSDP2 all-gathers; its record does.

    Raises:
        UnsupportedError: a placement is a partial sum, whose values no rank holds.
    """
    copy, copies = 0, 1
    for placement, size, coordinate in _placed(name, param):
        if isinstance(placement, Replicate):
            copy, copies = copy * size + coordinate, copies * size
    is_on_other_meshes = int(param.device_mesh.mesh.min()) != 0
    return LocalShard(
        ParameterBox.of_cuts(param.shape, cuts_of(name, param, managed)), copy, copies, is_on_other_meshes
    )


def cuts_of(name: str, param: DTensor, managed: Managed | None) -> list[Cut]:
    """Return the cuts that leave this rank's shard of `param`, in order; for the rest see :func:`dtensor_shard_of`."""
    if managed is None:
        return list(_cuts(list(_placed(name, param))))
    inner, chunk = inner_spec(managed), chunk_of(managed)
    cuts = [] if inner is None else list(_cuts(list(_placed(name, inner))))
    return cuts if chunk is None else [*cuts, chunk]


_Placed = tuple[Any, int, int]
"""A placement, the number of ranks along its dimension of the mesh, and this rank's coordinate there."""


def _placed(name: str, sharded: Any) -> Iterator[_Placed]:
    """The placements of a DTensor or of a spec."""
    mesh = sharded.device_mesh
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        raise UnsupportedError(
            f"{name}: expected that all ranks hold the same model between them; this rank has no part in {mesh}, on "
            "which this parameter is. Stages of a pipeline cannot be loaded or saved together."
        )
    for number, placement in enumerate(sharded.placements):
        if isinstance(placement, Partial):
            raise UnsupportedError(
                f"{name}: its placement is {placement}, a partial sum, whose values no rank holds. Redistribute it to "
                "Shard or Replicate first."
            )
        yield placement, mesh.size(number), coordinates[number]


def replicated_dims(sharded: Any) -> tuple[int, ...]:
    """The dimensions of the mesh of a DTensor along which ranks hold the same."""
    return tuple(number for number, placement in enumerate(sharded.placements) if isinstance(placement, Replicate))


@functools.lru_cache(maxsize=1024)
def ranks_at(mesh: Any, coordinate: tuple[int, ...], free: tuple[int, ...] | None) -> Sequence[int]:
    """The rank at the `coordinate` of a mesh; with `free` dimensions all along these, in order.

    Those too at the same places of other meshes that are cut from the same one: of tensor parallelism under FSDP2,
    what only FSDP2 shards is on a mesh of its own for each rank of tensor parallelism.
    """
    wanted = tuple(slice(None) if number in (free or ()) else at for number, at in enumerate(coordinate))
    ranks: list[int] = sorted(mesh.mesh[wanted].reshape(-1).tolist())
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    if free is None or root.mesh.numel() == mesh.mesh.numel():
        return ranks
    place_of = {
        rank: place for place, rank in zip(product(*map(range, root.mesh.shape)), root.mesh.reshape(-1).tolist())
    }
    places = [place_of[rank] for rank in mesh.mesh.reshape(-1).tolist()]
    varies = [dim for dim in range(root.ndim) if len({place[dim] for place in places}) > 1]
    if prod(root.mesh.shape[dim] for dim in varies) != len(places):
        return ranks  # it is no slice of the other, so nothing says which meshes are beside it
    mine = {tuple(place_of[rank][dim] for dim in varies) for rank in ranks}
    return sorted(rank for rank, place in place_of.items() if tuple(place[dim] for dim in varies) in mine)


def _cuts(placed: Sequence[_Placed]) -> Iterator[Cut]:
    """The cuts in the order in which they were made: one whose groups are those of the cuts behind it came last."""
    last: list[Cut] = []
    for number, (placement, size, coordinate) in enumerate(placed):
        if isinstance(placement, Replicate):
            continue
        groups = getattr(placement, "split_factor", 1)
        behind = [size for other, size, _ in placed[number + 1 :] if getattr(other, "dim", None) == placement.dim]
        if behind and groups == prod(behind):
            last.insert(0, Cut(placement.dim, size, coordinate))
        else:
            yield Cut(placement.dim, size, coordinate, groups)
    yield from last
