# ruff: noqa: F401 - the imports are what this module is
"""All of the core that plug-ins use, beside :mod:`.errors` and what users call: the interface behind the fence.

A plug-in imports nothing else of the core; ``make quality`` checks that for this package's own. A name that is here
may not change without the plug-ins; what is not here may. The imports are for type checkers and for people: at run
time a name is imported when it is first asked for, so that a plug-in pays for what it uses.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Every declaration of a plug-in needs these, and each load reads all declarations.
from .registry import (
    METADATA,
    TORCH_ENDINGS,
    FileFormat,
    FolderFormat,
    PatchScope,
    Plugin,
    Row,
    Severity,
    Source,
    has_tool,
    import_object,
    plugins,
    rows,
    tool,
)


if TYPE_CHECKING:
    from . import accelerators
    from .accelerators import (
        all_gather,
        collective_device,
        free_bytes,
        is_accelerator,
        kind,
        pinned,
        settle,
        sleeping_event,
        stream,
        synchronise,
    )
    from .bindings import history
    from .bindings.install import override_methods
    from .bindings.streaming import streaming
    from .bindings.table import ROWS_OF_CORE, TABLE, install_model_rows, installed
    from .checkpoint import safetensors
    from .checkpoint.deepspeed_names import GUARD, OPTIMIZER, SWAPPED, ZERO_2_MODEL, names_in, zero_folder_of
    from .checkpoint.digests import BLOCK, WORD, bits_of, digest_of_bytes, digest_of_range, digest_of_values
    from .checkpoint.format import (
        MAX_DIMENSIONS,
        NotAMap,
        Shard,
        ShardHeader,
        TensorEntry,
        are_sizes,
        dtypes,
        excerpt,
        file_dtype_name,
        parse_object,
    )
    from .checkpoint.formats import UNFINISHED, contents_of, folder_format, holds_values, map_from_headers, read_map
    from .checkpoint.index import (
        INDEX,
        SINGLE,
        WEIGHTS,
        Fault,
        check_files,
        fault_of_name,
        named_shards,
        read_index_file,
        read_weight_map,
        shards_of,
        without_path,
    )
    from .checkpoint.lazy import LazyTensor, copy_attributes, materialise_written
    from .checkpoint.map import CheckpointMap, view_of
    from .checkpoint.nodes import (
        Blockwise,
        Cat,
        Computed,
        Copy,
        FileTensor,
        HostTensor,
        Leaf,
        Node,
        Opaque,
        Pointwise,
        Stored,
        View,
        WritableParameter,
        entries_of,
        is_computed,
        row_major_strides,
        sources_of,
    )
    from .checkpoint.safetensors import NotedShard, ShardToWrite, lay_out_shard, parse_entry
    from .checkpoint.state_folder import state_folder_of
    from .checkpoint.urls import UrlCheckpoints, checkpoints_at, without_secrets
    from .cli import frame
    from .cli.checkpoints import loadable, refuse_unloadable, share_reads_advice
    from .cli.models import lazy_model, load_arguments, quantisation_of, transformers_errors
    from .cli.page import svg_of, write_page
    from .destinations.base import Batch, Destination, Item, allocating, fill_whole
    from .destinations.deepspeed import zero3
    from .destinations.deepspeed.partitioned import Partitioned
    from .destinations.fill import Targets, allocate, chunk_bytes
    from .destinations.parallel import DTensors, Replicated, will_be_flattened
    from .engine.compute import MemoryEvaluator
    from .engine.execute import HugePages, execute_reads, run_in_threads
    from .engine.load import Load
    from .engine.opened import OpenCheckpoint
    from .engine.places import cached_folder, place_of, read_checkpoint_map
    from .engine.reader import Reader
    from .extensions import stale_lock_advice, stale_locks
    from .holdings import fsdp
    from .holdings.deepspeed.partitions import local_device, own_range
    from .holdings.holder import refuse_meta
    from .holdings.holding import Holding, LocalShard, open_flat
    from .holdings.introspection import (
        CONVERTED,
        CUT,
        PACKED,
        has_partition,
        is_adapted,
        is_cut,
        is_dtensor,
        is_packed,
        is_sharded,
        lies_in_files,
        local_of,
        ops_of_quantizer,
        packed_weights,
        shards_modules,
    )
    from .holdings.own_names import adapter_names, named_buffers, named_parameters, own_names
    from .holdings.slots import STEPS, VALUES, Member, Slot, Training
    from .loading.arguments import may_be_at_url, url_of
    from .loading.choice import is_pipeline, refuse_sharding, settings_for, warn_of_open_dtype
    from .loading.deferral import Deferral, InPlace, deferrals_of
    from .loading.dry_load import lazily_loaded, load_of_layouts, model_class_of
    from .loading.integration import outside_zero_init
    from .planning.boxes import Cut, Interval, ParameterBox
    from .planning.plan import BatchPlan, LoadPlan, Target, materialise_reason, partition_range, plan_batch
    from .ranks.background import BackgroundCoordinator
    from .ranks.coordinator import Coordinator, expected_at, meeting
    from .ranks.presence import Location, Presence, digest_of, is_alone
    from .ranks.rendezvous import LOAD, MeetingKind
    from .ranks.store import PREFIX, Verdict, pauses
    from .reports.load import Verification
    from .reports.measures import AnonymousMemory, GrowthPeak, collector_paused
    from .reports.save import SaveReport, SavingRank
    from .reports.text import Tabular, bytes_text, count_text, fold, folded_names, wrapped
    from .saving.arguments import dtype_of_argument, make_ready, refuse_url
    from .saving.background import Staged, StagedFiles
    from .saving.count import refuse_cut, smaller_ones
    from .saving.files import Comparison, ShardWriter, make_file, reserve
    from .saving.lazy_parameters import LazyParameters, Selection, stored_names
    from .saving.parameters import Layout, NewParameters, Parameters, Values, evaluated, opened, refuse_differing
    from .saving.pending import PendingSave, finish_pending, note_state, operation, save_under_way, when_whole
    from .saving.places import Place, Written, write_files
    from .saving.plan import (
        Computation,
        ExchangeRound,
        SavePlan,
        Segment,
        SegmentPart,
        Sources,
        Step,
        computation_of,
        exchange_rounds,
        in_dtype,
        rounds_of,
        segments_of,
    )
    from .saving.preparation import Finalizer, PlacedItem, WritePlan, as_save_error, circumstances, quiet
    from .saving.publication import Publication, is_of_save, outdated_weights, taken_place
    from .saving.room import pinned_parts
    from .saving.snapshot import Copies
    from .saving.write import Work, begin_exchange, bytes_of, new_buffer, take
    from .seams.adapters import lay_out_adapters, put_adapters_on, tensors_of_adapter
    from .seams.ds_config import settings_in_force
    from .seams.saving import lay_out_pretrained, note_dtype, reverse_all_conversions
    from .seams.session import Original, QuantisedLoad, Session, in_session
    from .seams.sharding import cuts_matrices, device_type, distributed_config_of, is_known
    from .seams.wrappers import accelerate_config_file, checkpoint_number, is_fsdp2, unwrapped
    from .settings import scope
    from .settings.config import (
        DISABLE,
        StreamingConfig,
        announced_local_rank,
        announces_zero3,
        announces_zero3_init,
        buildable_config,
        config_without_auto,
        is_disabled,
        refuse_settings,
        unknown_variables,
        values_in,
        without_own_section,
    )
    from .settings.scope import resource_around, set_in_context
    from .settings.values import dtype_name, dtype_named, floating_dtype
    from .sources.base import (
        RETRIES,
        ByteSource,
        Hints,
        ReadableFile,
        Retries,
        SourceFile,
        advance,
        as_read_error,
        is_plain_name,
        is_url,
    )
    from .sources.by_path import mounted
    from .sources.local import (
        READS_PER_EXCHANGE,
        LocalFiles,
        is_on_network,
        kind_of_file_system,
        open_nonblocking,
        status_of_regular,
    )
    from .sources.page_cache import drop_from_cache, fill_cache, free_memory
    from .state.base import quantised_names
    from .state.callers import look_for_state, name_in
    from .state.forms import ADAMS
    from .state.hooks import note_steps, trained_with
    from .state.load import Resumed, resume
    from .state.record import CLIENT, FILE, Form, GroupRecord, StateRecord
    from .state.refusals import keeps_packing, training_of
    from .state.save import save_state
    from .state.schedules import class_of


@cache
def _homes() -> dict[str, str]:
    """The module that each name comes from: what the imports above say."""
    assert __spec__ is not None and __spec__.loader is not None
    source = __spec__.loader.get_source(__name__)  # type: ignore[attr-defined]
    imports = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.level)
    return {name.name: f".{node.module or ''}" for node in imports for name in node.names}


def _find(name: str) -> Any:
    # Whoever imports from a module asks it for `__path__`: no reason to read the source.
    if name.startswith("__") or (home := _homes().get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(home, __package__)
    if not hasattr(module, name):  # a module that nobody has imported yet
        import_module(f"{home.removesuffix('.')}.{name}", __package__)
    found = globals()[name] = getattr(module, name)
    return found


if not TYPE_CHECKING:  # to a type checker, a module with a __getattr__ has every name
    __getattr__ = _find


def __dir__() -> list[str]:
    return sorted(_homes())
