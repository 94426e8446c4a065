"""The settings of a streaming load, and where they come from; and what launchers announce in environment variables.

Launchers announce the ranks of a host, and what accelerate is going to shard by.
"""

from __future__ import annotations

import difflib
import functools
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_type_hints

from ..errors import ConfigError
from .log import LOG_VARIABLE, follow_levels, level_in
from .values import Size, value_of


logger = logging.getLogger(__name__)

_SECTION = "hf_zero_stream"  # the top-level key of a DeepSpeed config that holds our settings
_PREFIX = "HF_ZERO_STREAM_"  # of environment variables; the field's name in capitals follows

DISABLE = _PREFIX + "DISABLE"
"""The variable that, set to 1, leaves all loads and saves to stock, also inside ``streaming()``."""

REPORT_VARIABLE = "HF_ZERO_STREAM_REPORT"
_OF_PROCESSES = (DISABLE, _PREFIX + "RUN", LOG_VARIABLE, REPORT_VARIABLE)
"""Variables that are no fields of a config, and count also where code gives one: the switches of all and of
``hf-zero-stream run``, the level of the log, and the file that reports are added to."""

READS_STAGED = 8
"""Least number of reads that have a buffer at the same time, so that several threads share the reading."""

DEVICE_REQUEST_BYTES = 8 * 2**20
"""A read of a local file for an accelerator. An H100 gets 12 GB/s by 2 MiB, and 39 by 8: threads wait for Python's
lock."""


@dataclass(frozen=True, kw_only=True)
class StreamingConfig:
    """Settings of a streaming load or save: its use of memory, disks, threads and the terminal.

    None of the settings but `keep_quantized` and `random_numbers` changes what is loaded, only how, and what `strict`
    refuses. Each rank may have its own settings, except for `read_from`, `share_reads`, `strict`, `verify`,
    `destination`, `keep_quantized`, `frozen_weights`, `random_numbers` and, where ranks share the reading,
    `staging_bytes`.

    Raises:
        ConfigError: a value has the wrong type or lies outside its range.
    """

    staging_bytes: Size = 0
    """Bound, in bytes or as in `"64MiB"`, of all staging buffers of one rank together; a single read takes an eighth
    of it at most.

    0: 64 MiB, and up to 192 MiB of pinned memory, 16 for each thread, where the rank's weights go to an accelerator.
    """

    reader_threads: int = 0
    """Threads that read, per rank; each has a staging buffer, so `staging_bytes` bounds their number too.

    0: from a local disk the cores per local rank, 4 to 8, or to 12 for an accelerator; over a network 64 per host, 4
    to 32 per rank; from a URL 128 per host, up to 32 per rank.
    """

    read_from: Literal["all", "rank0", "local_rank0"] = "all"
    """Which ranks read the shards: `"all"`; `"rank0"`, where other nodes cannot see them; `"local_rank0"`, one a node.

    The readers send every other rank only its own bytes. Every rank must still see the checkpoint's small files
    (config, index), and files that are not safetensors.
    """

    share_reads: bool = False
    """Outside ZeRO-3 (stages 0 to 2, data parallelism), each of N ranks reads 1/N and gets the rest from the others:
    all ranks make this load.

    Worth it where not all ranks read from one page cache: on several hosts, or from a slow file system. False leaves
    such loads to transformers. (Shards that several ranks hold, or hold columns of, these read together in any case,
    unless `verify` compares values.)
    """

    keep_quantized: bool | Literal["auto"] = "auto"
    """Under ZeRO-3 and FSDP2, keep a quantised checkpoint's weights as they are in the file: frozen packed bytes, of
    which each rank holds its part.

    They are dequantised in the forward pass, and adapters (PEFT) train beside them; see docs/quantised.md for the
    formats. So are those that a `BitsAndBytesConfig` quantises while they are loaded. A `quantization_config` with
    `dequantize=True` counts more. False dequantises where transformers would, and leaves the rest to stock. True
    raises where weights cannot be kept so in a sharded model; `"auto"` warns, and loads as with False.
    """

    frozen_weights: Literal["memory", "files"] = "memory"
    """Under ZeRO-3, where weights lie that no optimizer trains: `"memory"`, or the checkpoint's `"files"`.

    From there a rank reads its part of a weight whenever DeepSpeed is about to gather it, as a step needs each layer
    twice. What an optimizer has at `deepspeed.initialize` is read into memory then. See docs/from_files.md.
    """

    frozen_bytes: Size = 0
    """The most host memory that a rank takes for weights that stay in files; 0: its parts of the two largest layers.

    In it are weights that are in use, those that come next, and those that were in use last.
    """

    micro_batches_in_layers: int = 1
    """In a step with weights in files, how many micro-batches each layer takes of a batch while its weights are there.

    So a step reads them twice, and not twice for each micro-batch, as with accumulation of gradients. The batch of a
    rank is that many times larger, and steps of accumulation are fewer.
    """

    random_numbers: Literal["plain", "stock"] = "plain"
    """Under ZeRO-3, which load uses up as many random numbers as this one: a plain one, or stock's under ZeRO-3.

    They differ for models whose `__init__` draws values that the checkpoint replaces (CLIP, ViT, SigLIP, DINOv2,
    BLIP): stock draws them, and a plain load does not. Loaded values are equal; what is drawn next is not.
    """

    destination: str = ""
    """Name of the plug-in's destination that weights go to; "": where DeepSpeed, accelerate or the call say."""

    strict: bool = False
    """Raise on all ranks, before any weights are read, if a key is missing, unexpected or of another shape.

    Otherwise missing keys are initialised, and reported. `from_pretrained(strict=True)` sets it for one call.
    """

    verify: Literal["off", "sizes", "sample", "full"] = "sizes"
    """The checks beyond structure: `"sizes"`, that no shard changed while it was read, which is free.

    `"sample"`: besides, some chunks of every parameter are read again and compared with what was placed. `"full"`: all
    chunks, which costs one more pass over this rank's bytes; and of a save, the files are compared with what the ranks
    hold, before they get their final names. `"off"`: nothing.
    """

    write_from: Literal["auto", "all", "rank0"] = "auto"
    """Which ranks write when a model is saved: `"all"`, or `"rank0"`, to which the others send what they hold.

    `"auto"`: all, if all can write into the folder that rank 0 has made; else rank 0. Rank 0's setting counts.
    """

    training_state: bool = True
    """Have DeepSpeed's engines save, inside `streaming()`, states that any number of ranks can load (`save_state`).

    False leaves `engine.save_checkpoint`, and so the checkpoints of the Trainer and of accelerate, to DeepSpeed.
    """

    asynchronous_save: bool = False
    """Have these states written in the background, while training goes on (`save_state(asynchronous=True)`)."""

    snapshot_bytes: Size | Literal["all"] = 0
    """The most host memory that copies for such a state take on each rank; 0: 1/8 of what the rank writes.

    Only what a step is about to change is copied; without room the step waits. `"all"`: copy everything at the call.
    """

    host_states_every: int = 0
    """Steps between two training states that the Trainer and DeepSpeed's engines save on their hosts, inside
    `streaming()`, beside their own checkpoints; a resume takes the newer one. 0: none. See `HostStates`.
    """

    host_states_folder: str = "/dev/shm"
    """Where these states lie on each host: on a disk of its own, or in its memory."""

    host_states_copies: int = 1
    """Other hosts that keep a copy of what a host has of such a state."""

    progress: bool = True
    """Show a progress bar on the main process of each node, if HF_HUB_DISABLE_PROGRESS_BARS and transformers allow it.

    Where stderr is a log file, rank 0 alone writes it.
    """

    def staging_on(self, device_type: str) -> int:
        """The bound of staging buffers, in bytes, for weights that go to a device of this type."""
        return int(self.staging_bytes) or (64 if device_type == "cpu" else 192) * 2**20

    def temporary_on(self, device_type: str) -> int:
        """Bytes on the device itself through which values pass that it casts or scatters: two reads."""
        return (
            0 if device_type == "cpu" else 2 * min(DEVICE_REQUEST_BYTES, self.staging_on(device_type) // READS_STAGED)
        )

    @property
    def compares_values(self) -> bool:
        """Whether each rank compares what it holds with the files again."""
        return self.verify in ("sample", "full")

    def __post_init__(self) -> None:
        for name, annotation in _annotations().items():
            object.__setattr__(self, name, value_of(annotation, getattr(self, name), name, is_written=False))

    @classmethod
    def resolve(
        cls,
        explicit: StreamingConfig | None = None,
        ds_config: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> StreamingConfig:
        """The settings of a load or save.

        If settings are made in code (`explicit`), only they count. Else each field comes from the environment variable
        `HF_ZERO_STREAM_<FIELD>`, or else the section `"hf_zero_stream"` of the DeepSpeed config, or is the default.

        Fields in bytes also accept a size with a unit, in small letters or capitals: KB, MB, GB, TB (or K, M, G, T)
        are powers of 1000 and KiB, MiB, GiB, TiB powers of 1024 (`"64MiB"`, `"1.5 GB"`). Outside code, booleans accept
        1, 0, true, false, yes, no.

        Variables with other names of this kind are ignored, with a warning (see :func:`unknown_variables`).

        Raises:
            ConfigError: a key of the section is not known, or a value cannot be understood or lies outside its range.
        """
        follow_levels()
        if explicit is not None:
            return explicit
        if environ is os.environ:
            check_environment()
        section = {} if ds_config is None else ds_config.get(_SECTION, {})
        if not isinstance(section, Mapping):
            raise ConfigError(f'"{_SECTION}" in the DeepSpeed config: expected a mapping; got {section!r}')
        values: dict[str, Any] = {}
        for name, value in section.items():
            _check_known(name, _annotations(), f'key of "{_SECTION}" in the DeepSpeed config')
            values[name] = value_of(_annotations()[name], value, f'"{_SECTION}.{name}" in the DeepSpeed config')
        return cls(**{**values, **values_in(environ)})


def values_in(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The settings in the environment.

    Raises:
        ConfigError: a value cannot be understood or lies outside its range; the message names the variable.
    """
    level_in(environ)
    return {
        name: value_of(annotation, environ[variable], f"environment variable {variable}")
        for name, annotation in _annotations().items()
        if (variable := _PREFIX + name.upper()) in environ
    }


def is_disabled() -> bool:
    """Whether :data:`DISABLE` is set in the environment; raises a ConfigError if its value is no boolean."""
    text = os.environ.get(DISABLE)
    return text is not None and bool(value_of(bool, text, f"environment variable {DISABLE}"))


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables that look like settings and are none, each with the nearest name, or ""."""
    known = {name.upper(): _PREFIX + name.upper() for name in _annotations()}
    known |= {variable.removeprefix(_PREFIX): variable for variable in _OF_PROCESSES}
    strange = [name for each in environ if (name := each.removeprefix(_PREFIX)) != each and name not in known]
    return {_PREFIX + name: known.get(_nearest(name.upper(), known), "") for name in strange}


def check_environment() -> None:
    """Raise a ConfigError if a setting there is wrong; warn of each of :func:`unknown_variables`, once per host."""
    is_disabled()
    values_in()
    for variable, near in unknown_variables().items():
        _warn_of_variable(variable, near)


@functools.cache
def _warn_of_variable(variable: str, near: str) -> None:
    if announced_local_rank() == 0:
        hint = f" Did you mean {near}?" if near else " See docs/settings.md for those that are."
        logger.warning(f"The environment variable {variable} is no setting of hf_zero_stream, and is ignored.{hint}")


@functools.cache  # looking them up takes longer than the rest of `StreamingConfig()`
def _annotations() -> dict[str, Any]:
    """The annotation of each field, by its name."""
    return get_type_hints(StreamingConfig, include_extras=True)


def refuse_settings(arguments: Mapping[str, Any]) -> None:
    """Raise a ConfigError if one of a function's further `arguments` is a setting of ours."""
    for name, value in arguments.items():
        if name in _annotations() or isinstance(value, StreamingConfig):
            config = "config" if isinstance(value, StreamingConfig) else f"{name}={value!r}"
            raise ConfigError(
                f"{name}: expected an argument of this function; got a setting. Call it inside "
                f"`with streaming({config}):`."
            )


def with_settings(config: StreamingConfig | None, settings: Mapping[str, Any]) -> StreamingConfig:
    """`config`, or the default settings, with these ones changed; a ConfigError if one is not known or not allowed."""
    config = config or StreamingConfig()
    for name in settings:
        _check_known(name, _annotations(), "setting")
    return replace(config, **settings)


def without_own_section(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """A shallow copy of a DeepSpeed config without our section, for readers that refuse unknown keys."""
    return {key: value for key, value in ds_config.items() if key != _SECTION}


def _check_known(name: str, known: Iterable[str], kind: str) -> None:
    if name not in known:
        near = _nearest(str(name), known)
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"unknown {kind}: {name!r}{hint} Known: {', '.join(sorted(known))}")


def _nearest(name: str, known: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1)), "")


def buildable_config(ds_config: Any) -> Any:
    """A DeepSpeed config with which a model can be built before the batch size is known, as accelerate makes it."""
    if not isinstance(ds_config, Mapping):
        with open(ds_config, encoding="utf-8") as file:
            ds_config = json.load(file)
    config = dict(ds_config)
    zero = config.get("zero_optimization")
    if zero is not None and not isinstance(zero, Mapping):
        raise ConfigError(f"zero_optimization: expected a JSON object in the DeepSpeed config; got {zero!r}")
    if zero and isinstance(zero.get("stage"), str):  # transformers would not see ZeRO-3 in it
        raise ConfigError(f"zero_optimization.stage: expected a number, 0 to 3; got {zero['stage']!r}")
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if config.get(key, "auto") == "auto":
            config[key] = 1
    if config.get("train_batch_size") == "auto":
        del config["train_batch_size"]
    return config


def config_without_auto(ds_config: Any) -> dict[str, Any]:
    """Make a :func:`buildable_config` without our section and without ``"auto"``, which DeepSpeed takes for absent."""
    return _without_auto(without_own_section(buildable_config(ds_config)))


def _without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value != "auto" or key == "reduce_bucket_size"  # transformers and accelerate compute it from the model
    }


LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""A rank's number on its host: torchrun, accelerate and deepspeed; Open MPI; Hydra (MPICH, Intel MPI); Slurm."""

_MPI_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", *_MPI_LOCAL_SIZES, "SLURM_NTASKS_PER_NODE")
"""Ranks on this host: torchrun and accelerate; deepspeed; Open MPI; Hydra; Slurm."""

WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""All ranks: torch's launchers; Open MPI; Hydra; Slurm's srun. A batch script has SLURM_NTASKS too, and is no rank."""


def announced_local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """This rank's number on its host; 0 if no launcher announces it."""
    return _first_number(LOCAL_RANKS, environ, 0)


def announces_local_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher announces this rank's number on its host."""
    return any(name in environ for name in LOCAL_RANKS)


def announced_local_size(environ: Mapping[str, str] = os.environ) -> int:
    """The number of ranks on this host; 1 if no launcher announces it."""
    return _first_number(LOCAL_SIZES, environ, 1)


def announced_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """The number of ranks; 1 if no launcher announces it."""
    return _first_number(WORLD_SIZES, environ, 1)


def announces_zero3() -> bool:
    """Whether accelerate's launcher announces DeepSpeed ZeRO-3."""
    environ = os.environ
    return environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"


def announces_zero3_init() -> bool:
    """Whether accelerate's ``zero3_init_flag`` is on, or not set."""
    return os.environ.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "true") == "true"


def announces_fsdp2() -> bool:
    """Whether accelerate's launcher announces FSDP2, or ``TrainingArguments(fsdp=...)`` announces FSDP.

    Its arguments set one variable, to true or to false, for FSDP of either version; version 1 is what they have to be
    asked for. Without their module somebody else has set it, for instance a job's template.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        return os.environ.get("FSDP_VERSION") == "2"
    return "FSDP_CPU_RAM_EFFICIENT_LOADING" in os.environ and "transformers.training_args" in sys.modules


def _first_number(names: tuple[str, ...], environ: Mapping[str, str], default: int) -> int:
    found = next((environ[name] for name in names if name in environ), "")
    match = re.match(r"\d+", found)  # Slurm may write "2(x3)"
    return int(match[0]) if match else default
