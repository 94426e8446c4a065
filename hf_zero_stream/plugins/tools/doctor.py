"""``hf-zero-stream doctor``: can this machine, with what is installed and configured, do what it should?"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from warnings import catch_warnings

import typer

from ...errors import PACKAGE, ConfigError, HfZeroStreamError, ReadError, UnsupportedError, requirements
from ...plugin_api import (
    DISABLE,
    StreamingConfig,
    announces_zero3,
    announces_zero3_init,
    count_text,
    frame,
    is_disabled,
    is_on_network,
    kind_of_file_system,
    share_reads_advice,
    unknown_variables,
    values_in,
    without_own_section,
)
from .versions import newer_than_tried


EXAMPLE = "hf-zero-stream doctor /data/checkpoints --ds-config ds.json"

_MOST_READ_BYTES = 256 << 20
_REQUEST_BYTES = 8 << 20
_TURN_INIT_ON = "each rank would load the whole model. Set zero3_init_flag: true."


class Check(NamedTuple):
    """One thing that was looked at; `status` is "ok", "note", "no" (not available here) or "problem": exit code 1."""

    what: str
    status: str
    text: str


def run(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="PATH", help="A folder or file, or an id in the Hub's cache: its storage is looked at, and read."
        ),
    ] = None,
    ds_config: Annotated[
        dict[str, Any] | None,
        typer.Option(metavar="FILE", parser=frame.json_object, help="A DeepSpeed config to look for mistakes in."),
    ] = None,
    accelerate_config: Annotated[
        str | None, typer.Option(metavar="FILE", help="accelerate's config file; default: its own default.")
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=frame.file_to_write(".json"),
            help="Write all that an issue needs, without secrets: .json.",
        ),
    ] = None,
    report: Annotated[
        dict[str, Any] | None,
        typer.Option(
            metavar="FILE", parser=frame.json_object, help="model.streaming_report.to_json() of a load, for --bundle."
        ),
    ] = None,
    replaced: Annotated[
        bool, typer.Option("--replaced", help="Only show which functions of other libraries are replaced, and when.")
    ] = False,
    form: frame.FormatOption = "table",
) -> None:
    """Check versions, DeepSpeed's ops, storage and settings.

    Exit code 1 if anything is a problem. With PATH, reads the largest file there to measure the speed, at most 256 MiB
    of it. If PATH is a checkpoint, also looks for faults in it.
    """
    if replaced:
        from .replaced import blocks, data

        frame.emit({"replaced": data()}, blocks(), form)
        return
    if report is not None and bundle is None:
        raise typer.BadParameter("--report: expected --bundle, which it goes into")
    ops: dict[str, bool] = {}
    folder, missing = _folder_of(path)
    checks: dict[str, tuple[str, Callable[[], Iterable[Check]]]] = {
        "versions": ("Versions", _check_versions),
        "storage": ("Storage", lambda: missing or (() if folder is None else _check_storage(folder))),
        "checkpoint": ("Checkpoint", lambda: () if folder is None else _check_checkpoint(folder)),
        "settings": ("Settings", lambda: _check_settings(accelerate_config, ds_config)),
        # The last: it takes seconds, or ends the process where a library is broken.
        "features": ("What works here", lambda: _check_features(ops)),
    }
    results: dict[str, list[Check]] = {}
    for name, (title, run_checks) in checks.items():
        with frame.quiet():
            results[name] = list(run_checks())
        if form == "table" and results[name]:
            frame.show(frame.table((title, "", ""), results[name], left=3), first=name == "versions")
        if name == "versions":
            print("importing all libraries in which functions are replaced ...", file=sys.stderr, flush=True)
    problems = sum(check.status == "problem" for group in results.values() for check in group)
    result = {
        "healthy": not problems,
        **{name: [check._asdict() for check in group] for name, group in results.items()},
        "ops": ops,
    }
    if bundle is not None:
        from .bundle import write_bundle

        path_of_accelerate = accelerate_config or _default_config()
        write_bundle(bundle, path_of_accelerate, doctor=result, ds_config=ds_config, report=report)
    if form == "table":
        print()
    frame.emit(result, _verdict(ops, problems), form, ok=not problems)


def _verdict(ops: Mapping[str, bool], problems: int) -> Iterator[str]:
    can, cannot = ([name for name, works in ops.items() if works is wanted] for wanted in (True, False))
    if ops:
        yield f"DeepSpeed's ops that compile here, or are compiled: {', '.join(can) or 'none'}"
    if cannot:
        yield f"and that do not: {', '.join(cannot)}"
    yield f"{count_text(problems, 'problem')} found." if problems else "No problem found."


def _check_versions() -> Iterator[Check]:
    """Check the versions of the packages that we need."""
    yield Check("python", "ok", platform.python_version())
    try:
        wanted = requirements()
        yield Check(PACKAGE, "ok", metadata.version(PACKAGE))
    except metadata.PackageNotFoundError:
        yield Check(PACKAGE, "problem", "not installed, only imported: pip install it, so that its needs are known")
        return
    for requirement in wanted:
        try:
            found = metadata.version(requirement.name)
            fits = requirement.specifier.contains(found, prereleases=True)
            text = found if fits else f"{found} is installed, but {requirement} is needed"
        except metadata.PackageNotFoundError:
            if requirement.name == "deepspeed":
                yield Check("deepspeed", "note", "not installed: there is no ZeRO, and no plan for it; the rest works")
                continue
            fits, text = False, f"not installed; {requirement} is needed"
        newest = newer_than_tried(requirement.name, found) if fits else ""
        if newest:
            text += f": newer than {newest}, the newest that was tried. A load works, or names what it misses"
        yield Check(requirement.name, "note" if newest else "ok" if fits else "problem", text)


def _check_features(ops: dict[str, bool]) -> Iterator[Check]:
    """Check what works with the installed packages; fills `ops` with DeepSpeed's."""
    import torch

    from ...plugin_api import kind, stale_lock_advice, stale_locks

    accelerator = kind()
    yield Check(
        "accelerator",
        "ok" if accelerator else "no",
        accelerator or "none that this process can use: ranks run on CPUs",
    )
    built = torch.distributed.is_nccl_available()
    nccl = (
        "this torch is built without it"
        if not built
        else "in this torch" + ("" if accelerator else "; there is no GPU")
    )
    yield Check("NCCL", "ok" if built and accelerator == "cuda" else "no", f"communication between GPUs: {nccl}")
    yield from _check_table()
    yield from (Check("lock", "problem", stale_lock_advice(lock)) for lock in stale_locks())
    yield _imports("FSDP2 by accelerate", "problem", "loading.prepare", "destinations.parallel")
    from ...plugin_api import is_known

    why = "" if is_known() else ", which this transformers does not have"
    yield Check("distributed_config", "no" if why else "ok", f"FSDP2 and tensor parallelism by transformers{why}")
    if find_spec("deepspeed"):
        from ...plugin_api import zero3

        ops |= zero3.compatible_ops()
        rooms = "destinations.deepspeed.partitioned", "loading.integration"
        yield _imports("streaming under ZeRO-3", "problem", *rooms)
        yield _imports("saves and training states", "problem", "saving.save", "state.save")
        yield _imports("expert_parallel (AutoEP)", "no", "plugins.autoep.experts")
        for what, op in (("offload to NVMe", "async_io"), ("Adam on the CPU (offload_optimizer)", "cpu_adam")):
            yield Check(what, "ok" if ops.get(op) else "no", f"DeepSpeed's op {op}")
    uses = {
        "obstore": "buckets and servers (s3://, hf://)",
        "compressed_tensors": "compressed-tensors checkpoints",
        "gguf": "GGUF checkpoints",
        "matplotlib": "plan --plot",
    }
    for package, what in uses.items():
        yield Check(what, "ok" if find_spec(package) else "no", f"package {package}")
    # DeepSpeed compiles its ops with these at first use, unless they were installed compiled.
    for program, advice in (("ninja", "pip install ninja"), ("g++", "install a C++ compiler")):
        is_there = shutil.which(program) is not None
        yield Check(program, "ok" if is_there else "note", "on the path" if is_there else f"not on the path: {advice}")


def _check_table() -> Iterator[Check]:
    """Check that the installed versions have every function that is replaced; say what is lost where one lacks."""
    from ...plugin_api import TABLE, Severity, collector_paused
    from .replaced import replaced

    every = [row for rows in TABLE.values() for row in rows]
    rows = [row for row in every if find_spec(row.package)]
    lost: dict[tuple[str, Severity, str], list[str]] = {}
    for row in rows:
        try:
            # Imports take a quarter less time so. Warnings are of modules that call themselves experimental.
            with collector_paused(), catch_warnings(action="ignore"):
                import_module(row.module)
            lacking = row.lacking()
        except Exception as error:  # of their own: a module that is gone, or that fails here
            lacking = f"{row.name} ({error})" if row.exists_in(metadata.version(row.package)) else ""
        if lacking:
            lost.setdefault((row.package, row.severity, row.feature), []).append(lacking)
    if not lost:
        here, called = replaced(rows), {row.of for row in rows if not row.leads_to}
        text = (
            f"{len(here)} of {len(replaced(every))}, in what is installed: as expected, and so are {len(called)} that"
        )
        yield Check("replaced functions", "ok", f"{text} are only called or set")
    for (package, severity, feature), names in lost.items():
        means = {
            Severity.ESSENTIAL: f"{feature or 'each load or save that needs it'} ends in a VersionError",
            Severity.FEATURE: f"{feature or 'what needs it'}: left to stock",
            Severity.PARTITIONS: f"{feature}: left to stock; beside it, loads under ZeRO-3 end in a VersionError",
            Severity.SPEED: "loads are slower",
        }[severity]
        status = "problem" if severity is Severity.ESSENTIAL else "note"
        yield Check(package, status, f"{metadata.version(package)} has no {', '.join(names)}: {means}")


def _imports(what: str, otherwise: str, *modules: str) -> Check:
    """Check that our modules can be imported: each then checks what it relies on."""
    try:
        for module in modules:
            import_module(f"{PACKAGE}.{module}")
    except (ImportError, HfZeroStreamError) as error:
        return Check(what, otherwise, str(error))
    return Check(what, "ok", "everything it needs is there")


def _folder_of(path: str | None) -> tuple[Path | None, list[Check]]:
    """The folder or file that is meant, also by the id of a repository in the Hub's cache; or that there is none."""
    from ...plugin_api import cached_folder

    try:
        return None if path is None else cached_folder(path, None), []
    except ReadError as error:
        return None, [Check("path", "problem", str(error))]


def _check_storage(path: Path) -> Iterator[Check]:
    """Tell the kind of file system of `path`, and measure how fast one thread reads the largest file there."""
    where = "on another machine: more and smaller reads at once" if is_on_network(str(path)) else "on this machine"
    yield Check("file system", "ok", f"{kind_of_file_system(str(path)) or 'unknown'}, {where}")
    if advice := share_reads_advice(str(path)):
        yield Check("share_reads", "note", advice)
    files = [entry for entry in (path, *path.glob("*")) if entry.is_file()]
    largest = max(files, key=os.path.getsize, default=None)
    if largest is None or not largest.stat().st_size:
        yield Check("speed", "no", "there is no file to read")
        return
    done, buffer = 0, bytearray(_REQUEST_BYTES)
    with open(largest, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        while done < _MOST_READ_BYTES and (count := file.readinto(buffer)):
            done += count
        seconds = max(time.perf_counter() - start, 1e-9)
    text = f"{done / seconds / 1e6:.0f} MB/s: {done / 1e6:.1f} MB of {largest.name}, one thread"
    yield Check("speed", "ok", f"{text}, after it was dropped from the page cache")


def _check_checkpoint(folder: Path) -> Iterator[Check]:
    """Check that the checkpoint in `folder`, if there is one, is sound."""
    from .soundness import soundness_of

    if not (folder / "config.json").is_file():
        return
    faults = soundness_of(folder).faults
    if faults:
        first = f"{faults[0].file}: {faults[0].message}"
        advice = f"hf-zero-stream verify {folder} shows all"
        yield Check("files", "problem", f"{count_text(len(faults), 'fault')}; {advice}. The first is {first}")
    else:
        yield Check("files", "ok", "sound, as far as headers and sizes show")


def _check_settings(accelerate_config: str | None, ds_config: Mapping[str, Any] | None) -> Iterator[Check]:
    """Check variables, accelerate's config file, what its launcher announces, and a DeepSpeed config."""
    yield from _check_environment()
    path = accelerate_config or _default_config()
    yield from _check_accelerate_config(path, "problem" if accelerate_config else "no")
    if announces_zero3():
        found = ("ok", "true") if announces_zero3_init() else ("problem", f"not true: {_TURN_INIT_ON}")
        yield Check("ACCELERATE_DEEPSPEED_ZERO3_INIT", *found)
    order = "The DeepSpeed config object (Accelerator(), TrainingArguments) must be made before from_pretrained"
    yield Check("order", "note", f"{order}; streaming() warns at run time if it is not.")
    if ds_config is not None:
        yield from _check_ds_config(ds_config)


def _default_config() -> str:
    from ...plugin_api import accelerate_config_file

    return accelerate_config_file()


def _check_accelerate_config(path: str, if_missing: str) -> Iterator[Check]:
    """Check accelerate's config file, and how its ranks read."""
    import yaml

    what = "accelerate's config"
    if not os.path.isfile(path):
        yield Check(what, if_missing, f"there is no {path}")
        return
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        section = config.get("deepspeed_config") or {}
        stage, flag = section.get("zero_stage"), section.get("zero3_init_flag")
        kind, nodes = str(config.get("distributed_type")), int(config.get("num_machines") or 1)
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        yield Check(what, "problem", f"{path}: cannot be read: {error}")
        return
    if kind != "DEEPSPEED":
        yield Check(what, "note", "it does not use DeepSpeed")
    elif stage == 3 and flag is not True:
        yield Check(what, "problem", f"{path}: zero3_init_flag is off: {_TURN_INIT_ON}")
    else:
        yield Check(what, "ok", f"DeepSpeed, zero_stage {stage}, zero3_init_flag {flag}")
    is_whole = kind.startswith("MULTI_") or (kind == "DEEPSPEED" and stage in (0, 1, 2))
    if is_whole and (advice := share_reads_advice(nodes=nodes)):
        yield Check("share_reads", "note", advice)


def _check_environment() -> Iterator[Check]:
    """Check our settings in environment variables: values that are not allowed, names that are no setting."""
    try:
        if is_disabled():
            yield Check(DISABLE, "note", "it is set: all loads and saves are left to stock")
        found = values_in()
        yield Check("environment", "ok", f"{count_text(len(found), 'setting')} in HF_ZERO_STREAM_...")
    except ConfigError as error:
        yield Check("environment", "problem", str(error))
    for variable, near in unknown_variables().items():
        yield Check(variable, "note", f"no such setting, so it is ignored{near and f'; did you mean {near}?'}")


def _check_ds_config(config: Mapping[str, Any]) -> Iterator[Check]:
    """Find settings of a DeepSpeed config that are wrong, or that cost."""
    from ...plugin_api import zero3

    sections = {name: config.get(name, {}) for name in ("zero_optimization", "weight_quantization")}
    sections |= {name: config.get(name) or {} for name in ("bf16", "fp16")}
    zero = sections["zero_optimization"]
    if isinstance(zero, Mapping):
        sections |= {name: zero.get(name) or {} for name in ("offload_param", "offload_optimizer")}
    wrong = {name: section for name, section in sections.items() if not isinstance(section, Mapping)}
    if wrong:
        yield from (Check(name, "problem", f"expected an object; got {found!r}") for name, found in wrong.items())
        return
    if zero.get("stage") != 3:
        what = f"zero_optimization.stage is {zero.get('stage')!r}"
        yield Check("ZeRO stage", "note", f"{what}: only stage 3 partitions parameters")
    try:
        StreamingConfig.resolve(None, config, {})
        zero3.refuse_unsupported(without_own_section(config))
        yield Check("settings", "ok", "known and supported")
    except (ConfigError, UnsupportedError) as error:
        yield Check("settings", "problem", str(error))
    if zero.get("stage") == 3 and not any(sections[name].get("enabled") for name in ("bf16", "fp16")):
        yield Check("dtype", "note", "neither bf16 nor fp16 is enabled, so that parameters take fp32")
    for name in ("offload_param", "offload_optimizer"):
        if sections[name].get("device") == "nvme":
            yield Check(f"{name}.nvme_path", *_swap_path(str(sections[name].get("nvme_path", ""))))


def _swap_path(path: str) -> tuple[str, str]:
    """(status, text) for a folder of swap files."""
    if not path:
        return "problem", "it is not set; name a folder on a local disk"
    # DeepSpeed makes the folder.
    existing = str(next(folder for folder in (Path(path), *Path(path).absolute().parents) if folder.exists()))
    kind = kind_of_file_system(existing)
    if is_on_network(existing) or kind in ("tmpfs", "ramfs"):
        where = "on another machine" if is_on_network(existing) else "in memory"
        return "problem", f"{path} is {where} ({kind}); name a folder on a local disk"
    return "ok", f"{path} is on a disk of this machine ({kind or 'unknown'})"
