"""Weights of a sharded training for engines beside it: pass after pass, in buckets, and nothing is gathered."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ...errors import ConfigError, HfZeroStreamError, StreamError, UnsupportedError
from ...plugin_api import (
    Coordinator,
    Layout,
    LazyParameters,
    NewParameters,
    NotedShard,
    Parameters,
    Selection,
    adapter_names,
    circumstances,
    collector_paused,
    dtype_of_argument,
    expected_at,
    is_packed,
    lay_out_adapters,
    lay_out_pretrained,
    make_ready,
    materialise_reason,
    meeting,
    named_buffers,
    named_parameters,
    override_methods,
    quiet,
    refuse_cut,
    refuse_differing,
    refuse_meta,
    settle,
    smaller_ones,
    unwrapped,
)
from .arguments import STREAM, refuse_different_values, refuse_other_models, refuse_unknown_values
from .buckets import Bucket, filled
from .deltas import SentSnapshot, patches
from .merging import (
    AdaptedLayers,
    active_adapter,
    base_of,
    has_adapters,
    merge_plan_of,
    state_of_adapters,
    trained_copies,
)
from .plan import BucketPlan, NamedView, Planner, StreamedTensor, by_layers, with_whole_layers
from .vllm_source import weight_source
from .wire import Patch


logger = logging.get_logger(__name__)

T = TypeVar("T")

BUCKET_BYTES = 256 * 2**20

_numbers = itertools.count(1)


def weight_stream(
    model: Any,
    to: Literal["rank0", "all", "owners"] = "rank0",
    *,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | str | None = None,
    only: Literal["all", "trainable"] = "all",
    layout: Literal["hub", "model"] = "hub",
    deltas: bool = False,
) -> WeightStream:
    """The weights of a model that ranks share, in buckets, as often as they are wanted (all ranks).

    Each pass over the stream gives what the ranks hold by then: what ``save_pretrained`` would save, bit for bit,
    under the same names. Nothing is gathered on ranks that do not want it, and the plan is made once. Adapters of PEFT
    are merged into what is given, and not into the model.

    Args:
        model: the model, or the engine, or what ``accelerator.prepare`` made of it.
        to: who gets the tensors: ``"rank0"``, ``"all"`` ranks, or the ``"owners"``: each tensor goes to one rank,
            which holds much of it already, and all ranks get about as many bytes.
        bucket_bytes: size of a bucket. A larger tensor has a bucket of its own.
        dtype: of the floating-point tensors; default: the model's own. ``torch.float32`` gives the fp32 values that
            the optimizer trains, if it has them.
        only: ``"trainable"`` leaves out layers of which nothing is trained; of a model with adapters it gives the
            active one alone, under the names of PEFT's files.
        layout: names and shapes are those of the ``"hub"``, or the ``"model"``'s own parameters.
        deltas: keep a copy of what this rank gives, in host memory, so that :meth:`WeightStream.deltas` can tell what
            has changed since.

    Raises:
        ConfigError, UnsupportedError: an argument or its value is not known, or cannot be honoured.
        StreamError, PeerError: on all ranks, if one of them fails, does not come, or dies.

    Examples:
        >>> stream = hf_zero_stream.weight_stream(engine, to="rank0")
        >>> for bucket in stream:  # on all ranks
        ...     engine_client.load_weights(bucket.tensors)  # empty on other ranks than 0
    """
    with expected_at(STREAM):
        return WeightStream(model, to, bucket_bytes, dtype_of_argument(dtype), only, layout, deltas=deltas)


@dataclass(frozen=True)
class _Plan:
    """The plan that is kept from pass to pass. `circumstances`: what it depends on beside the `layout`."""

    circumstances: Any
    layout: Layout
    buckets: Sequence[BucketPlan]
    metadata: Sequence[StreamedTensor]
    adapted: AdaptedLayers | None


class WeightStream:
    """The weights of a model, again and again; see :func:`weight_stream`.

    All ranks go through each pass together: ``for bucket in stream``. A bucket of which a rank owns nothing is empty
    there. If a loop ends early or raises on one rank, the pass ends with an error on all.

    Attributes:
        name: what errors call it; the same on all ranks.
        version: the number of passes that have begun.
    """

    def __init__(
        self,
        model: Any,
        to: str,
        bucket_bytes: int,
        dtype: torch.dtype | None,
        only: str,
        layout: str,
        *,
        overfull: bool = False,
        deltas: bool = False,
    ) -> None:
        arguments = {
            **{"to": to, "bucket_bytes": bucket_bytes, "dtype": dtype, "only": only, "layout": layout},
            **{"overfull": overfull, "deltas": deltas},
        }
        refuse_unknown_values(arguments)
        self._model = unwrapped(model)
        self._base = base_of(self._model)
        refuse_other_models(self._base)
        make_ready(model, self._base, "weight_stream", "Or give engines what its state_dict() gathers.")
        self._adapters = has_adapters(self._base)
        self._to, self._bucket_bytes, self._dtype, self._only, self._layout = to, bucket_bytes, dtype, only, layout
        if is_packed(self._base) and (layout == "model" or self._adapters) and not self._gives_adapters:
            raise UnsupportedError(
                "The weights of this model are quantised and packed (hf_zero_stream's keep_quantized): they are "
                'streamed as their save would hold them, with layout="hub", and nothing can be merged into them. '
                'Stream adapters by themselves, with only="trainable".'
            )
        self._overfull, self._deltas = overfull, deltas
        self.version = 0
        self._sent: SentSnapshot | None = None
        self._is_complete = False
        """Whether the last pass came to its end: what is kept is what it gave."""
        self._open: Coordinator | None = None
        """The coordinator of the pass that has begun and not ended."""
        self._plan: _Plan | None = None
        with meeting(STREAM, "a new weight stream") as coordinator:
            refuse_different_values(arguments, coordinator)
            number = coordinator.broadcast(lambda: next(_numbers))
            self.name = f"weight stream {number} of {type(self._base).__name__} to {to}"
            self._plan, _ = self._planned(coordinator)

    @property
    def metadata(self) -> Sequence[StreamedTensor]:
        """All tensors, in the order in which they come; the same on all ranks."""
        assert self._plan is not None
        return self._plan.metadata

    @property
    def buckets(self) -> Sequence[BucketPlan]:
        """The plan; another object if it was made anew."""
        assert self._plan is not None
        return self._plan.buckets

    @property
    def bucket_count(self) -> int:
        """The number of buckets that a pass gives, empty ones too."""
        assert self._plan is not None
        return len(self._plan.buckets)

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model whose weights are streamed."""
        return self._base

    def __iter__(self) -> Generator[Bucket]:
        return self.passing()

    def passing(
        self, coordinator: Coordinator | None = None, give: Callable[..., Any] | None = None
    ) -> Generator[Any]:
        """A pass, perhaps within a meeting that has this `coordinator` (all ranks).

        It yields what `give` makes of a bucket's plan, of the parameters that are held now, and of adapters to merge.
        """
        return self._passing(coordinator, f"a pass of {self.name}", self._planned, give or filled)

    def deltas(self, coordinator: Coordinator | None = None) -> Generator[Sequence[Patch]]:
        """A pass that gives what has changed since the last one, of each bucket (all ranks).

        Who owns a tensor gets a patch of it, if any element has changed. Every rank compares what it holds with what
        it has given before, of which it keeps a copy in host memory: make the stream with ``deltas=True``.

        Raises:
            ConfigError: the stream keeps nothing.
            StreamError: on all ranks: no complete pass over this model came before, so that nobody can tell what has
                changed. Make a whole pass first, also after an error, or if anything but values has changed.
        """
        if not self._deltas:
            raise ConfigError("deltas: this stream keeps nothing to compare with. Make it with deltas=True.")
        return self._passing(coordinator, f"the changes of {self.name}", self._sent_plan, self._patches)

    def weight_source(self) -> Any:
        """This stream as a ``WeightSource`` for vLLM's trainer engines ``"nccl"`` and ``"ipc"``, of 0.32 or 0.33.

        Raises:
            ConfigError: each tensor goes to another rank: expected ``to="rank0"`` for ``"nccl"``, else ``"all"``.
            ImportError, VersionError: there is no vLLM here, or none that has such sources.
        """
        if self._to == "owners":
            raise ConfigError("weight_source: expected a stream to 'rank0' or 'all'; got to='owners'")
        return weight_source(self)

    def can_compare(self, coordinator: Coordinator) -> bool:
        """Whether :meth:`deltas` can tell what has changed (all ranks)."""
        return self._comparable(coordinator) is not None

    def _comparable(self, coordinator: Coordinator) -> tuple[_Plan, Parameters] | None:
        has_sent = self._sent is not None and self._is_complete
        return self._unchanged_plan(coordinator) if all(coordinator.all_gather(has_sent)) else None

    def _passing(
        self,
        coordinator: Coordinator | None,
        what: str,
        planned: Callable[[Coordinator], tuple[_Plan, Parameters]],
        give: Callable[[BucketPlan, Parameters, AdaptedLayers | None, Coordinator], T],
    ) -> Generator[T]:
        self._cancel_open_pass()
        with meeting(STREAM, what, coordinator) as coordinator:
            self._plan, parameters = planned(coordinator)
            self._open = coordinator
            self.version += 1
            self._is_complete = False
            settle(self._base.parameters())
            try:
                for plan in self._plan.buckets:
                    given = give(plan, parameters, self._plan.adapted, coordinator)
                    yield given
                    if self._open is not coordinator:
                        raise StreamError("Another pass of this weight stream has begun before this one ended.")
                    del given  # before the next one is there
                    coordinator.agree()  # a rank that has left the loop takes no part in the next exchange
            except GeneratorExit:
                if self._open is coordinator:
                    self._cancel_open_pass()
                return
            finally:
                if self._open is coordinator:
                    self._open = None
            if self._deltas:
                with coordinator.reporting():
                    if self._sent is not None and self._sent.buckets is self._plan.buckets:
                        self._sent.update(parameters.holdings)
                    else:
                        self._sent = SentSnapshot(self._plan.buckets, parameters.holdings, coordinator.rank)
            self._is_complete = True

    def _cancel_open_pass(self) -> None:
        """End the pass that is open, if there is one, with an error on the other ranks."""
        coordinator, self._open = self._open, None
        if coordinator is not None:
            error = StreamError(
                f"A pass of a weight stream ended before its last bucket on rank {coordinator.rank}: the loop over it "
                "was left there, or raised."
            )
            with suppress(HfZeroStreamError):
                coordinator.agree(error)

    def _sent_plan(self, coordinator: Coordinator) -> tuple[_Plan, Parameters]:
        """As :meth:`_planned`, if there is something to compare with."""
        found = self._comparable(coordinator)
        if found is None:
            raise StreamError(
                "What has changed since the last pass cannot be told, because no complete pass over this model came "
                "before. Go through the whole stream first."
            )
        return found

    def _patches(
        self, plan: BucketPlan, parameters: Parameters, adapted: AdaptedLayers | None, coordinator: Coordinator
    ) -> Sequence[Patch]:
        assert self._sent is not None
        return patches(plan, parameters.holdings, self._sent, adapted, coordinator)

    def _planned(self, coordinator: Coordinator) -> tuple[_Plan, Parameters]:
        """The plan of the pass that begins, and what is held now (all ranks)."""
        with torch.no_grad(), collector_paused():
            return self._unchanged_plan(coordinator) or self._new_plan(coordinator)

    @property
    def _gives_adapters(self) -> bool:
        return self._adapters and self._only == "trainable"

    def _circumstances(self) -> Any:
        trained = [param.requires_grad for param in self._model.parameters()]
        return circumstances(self._model), trained, state_of_adapters(self._model) if self._adapters else ()

    def _unchanged_plan(self, coordinator: Coordinator) -> tuple[_Plan, Parameters] | None:
        plan = self._plan
        with coordinator.reporting():
            if plan is not None:  # else the stream is made, which needs no values
                refuse_meta(dict(self._held.named_parameters()))
            is_same = plan is not None and plan.circumstances == self._circumstances()
        held = partial(self._selection.holdings, self._held, coordinator)
        layout = plan.layout if plan is not None and is_same else None
        parameters, _ = Parameters.following(layout, held, coordinator, compares=False, threads=1, beside=None)
        return None if parameters is None or plan is None else (plan, parameters)

    @property
    def _held(self) -> nn.Module:
        """The model whose parameters are streamed, by their own names in it."""
        return self._model if self._gives_adapters else self._base

    @property
    def _selection(self) -> Selection:
        return Selection(dtype=self._dtype)

    def _new_plan(self, coordinator: Coordinator) -> tuple[_Plan, Parameters]:
        parameters = NewParameters(self._held, coordinator, [self._selection], compares=False, threads=1)
        (lazy,) = parameters.lazy
        with coordinator.reporting():
            adapted = AdaptedLayers(self._base) if self._adapters and not self._gives_adapters else None
            with tempfile.TemporaryDirectory() as elsewhere, quiet(coordinator.is_main):
                tensors = by_layers(list(map(NamedView.of, *self._lay_out(Path(elsewhere), lazy))))
            if self._only == "trainable" and not self._gives_adapters:
                trained = {name for name, param in named_parameters(self._base) if param.requires_grad}
                tensors = with_whole_layers(tensors, trained.__contains__)
            gathered = {name for name, holding in parameters.holdings.items() if holding.is_gathered}
            planner = Planner(
                parameters.sources,
                parameters.sources.replicas - gathered,
                merge_plan_of(adapted, parameters.layout),
                [0] if self._to == "rank0" else range(coordinator.world_size),
                self._to == "owners",
                self._bucket_bytes,
                self._overfull,
            )
            buckets = list(planner.buckets(tensors))
            metadata = [
                StreamedTensor(entry.tensor.name, entry.tensor.dtype, entry.tensor.shape, entry.owners)
                for bucket in buckets
                for entry in bucket.entries
            ]
            found = sha256(repr(metadata).encode()).digest(), smaller_ones(self._held, parameters, lazy.holdings)
        digests, smaller = zip(*coordinator.all_gather(found), strict=True)
        refuse_differing(digests, "would stream other tensors")
        refuse_cut(self._held, smaller)
        # Looked at afterwards: transformers completes a model's config when it lays it out.
        plan = _Plan(self._circumstances(), parameters.layout, buckets, metadata, adapted)
        computed = list(filter(planner.is_computed, tensors)) if coordinator.is_main else []
        if computed:
            reason = materialise_reason(computed[0].view.node) or "adapters are merged into it"
            logger.info(
                f"Weight stream: whole parameters go to the ranks that compute {len(computed)} of {len(metadata)} "
                f"tensors, for instance {computed[0].name}: {reason}."
            )
        return plan, parameters

    def _lay_out(self, folder: Path, parameters: LazyParameters) -> tuple[Sequence[str], Sequence[Any], Sequence[Any]]:
        """Names, lazy tensors, and what has the dtype and the shape of each."""
        if self._gives_adapters and self._model is not self._base:
            noted = lay_out_adapters(self._model, folder, parameters.entries(), [active_adapter(self._model)])
        elif self._layout == "model" and not self._gives_adapters:
            buffers = {name for name, _ in named_buffers(self._base, remove_duplicate=False)}
            entries = {name: each for name, each in self._entries(parameters).items() if name not in buffers}
            noted = [NotedShard("", entries, {})]
        else:
            entries = parameters.entries() if self._gives_adapters else self._entries(parameters)
            how = {"own_code": False, "in_one_shard": True}
            with override_methods(self._base, _hf_peft_config_loaded=self._gives_adapters):
                noted = lay_out_pretrained(
                    self._base, folder, dict(entries), entries, parameters.numel, self._dtype, **how
                )
        found = {name: tensor for shard in noted for name, tensor in shard.tensors.items()}
        described = found | {name: entry for shard in noted for name, entry in shard.packed.items()}
        return list(found), list(found.values()), [described[name] for name in found]

    def _entries(self, parameters: LazyParameters) -> dict[str, Any]:
        """The model's state dict, lazy, without adapters, and with the copies in use of what is trained in full."""
        entries = parameters.own_entries() if self._adapters or self._layout == "model" else parameters.entries()
        copies = {name: entries[in_use] for name, in_use in trained_copies(self._base).items()}
        adapters = adapter_names(self._base)
        return {name: copies.get(name, entry) for name, entry in entries.items() if name not in adapters}
