"""Tiny random checkpoints of every model type of transformers, made from the types' own shrunk configs."""

import gc
import importlib
import inspect
import pkgutil
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from tests.sweep.fixes import FILES
from tests.sweep.shrink import WAYS, Way, tiny_config


MAX_PARAMETERS = 8_000_000

# The mapping whose class a checkpoint of the type is most likely saved from comes first.
_PREFERRED = (
    "IMAGE_TEXT_TO_TEXT MULTIMODAL_LM SPEECH_SEQ_2_SEQ SEQ_TO_SEQ_CAUSAL_LM MASKED_LM PRETRAINING CAUSAL_LM "
    "TEXT_TO_WAVEFORM TEXT_TO_SPECTROGRAM CTC OBJECT_DETECTION UNIVERSAL_SEGMENTATION ZERO_SHOT_IMAGE_CLASSIFICATION "
    "IMAGE_CLASSIFICATION"
).split()

_HEADS = ("ForConditionalGeneration", "ForCausalLM")


@dataclass(frozen=True)
class Built:
    """A model and how it was made."""

    model: PreTrainedModel
    parameters: int
    way: Way


class CannotBuild(Exception):
    """No way to shrink the type's config gives a model; the message says why."""


class TooLarge(Exception):
    """A shrunk model that still has too many parameters."""


def all_types() -> list[str]:
    """Every model type that transformers has a config for."""
    return sorted(CONFIG_MAPPING.keys())


# ---------------------------------------------------------------------------------------------------------- classes


@cache
def _auto_classes() -> tuple[tuple[str, type], ...]:
    found = [(name, getattr(modeling_auto, name)) for name in modeling_auto.__all__]
    found = [(name, auto) for name, auto in found if inspect.isclass(auto) and getattr(auto, "_model_mapping", None)]
    names = {id(value): name for name, value in vars(modeling_auto).items() if name.endswith("_MAPPING")}

    def rank(item: tuple[str, type]) -> int:
        mapping = names.get(id(item[1]._model_mapping), "")
        task = mapping.removeprefix("MODEL_FOR_").removesuffix("_MAPPING")
        if task in _PREFERRED:
            return _PREFERRED.index(task)
        return len(_PREFERRED) + (mapping != "MODEL_MAPPING")

    return tuple(sorted(found, key=rank))


def candidate_classes(model_type: str) -> list[type[PreTrainedModel]]:
    """The classes that take the type's config, the one that checkpoints are saved from first.

    Raises:
        ImportError: one needs a package that is not installed.
    """
    config_class = CONFIG_MAPPING[model_type]
    found: list[type[PreTrainedModel]] = []
    for _, auto in _auto_classes():
        found += _classes_of(auto, config_class)
    own = sorted(_classes_in_module(config_class), key=lambda cls: not cls.__name__.endswith(_HEADS))
    return list(dict.fromkeys([*found, *own]))


def _classes_of(auto: Any, config_class: type) -> list[type[PreTrainedModel]]:
    """The classes that an Auto class makes of a config; none for an entry that names no class that exists."""
    try:
        classes = auto._model_mapping[config_class] if config_class in auto._model_mapping else []
    except ValueError:
        return []
    return list(classes) if isinstance(classes, (list, tuple)) else [classes]


def _classes_in_module(config_class: type) -> Iterator[type[PreTrainedModel]]:
    """Classes with this very config class that no Auto class knows, such as the parts of a composite model."""
    for module in _modeling_modules(config_class):
        for value in vars(module).values():
            if not inspect.isclass(value) or not issubclass(value, PreTrainedModel):
                continue
            if value.__module__ != module.__name__ or "PreTrainedModel" in value.__name__:
                continue
            if getattr(value, "config_class", None) is config_class:
                yield value


def _modeling_modules(config_class: type) -> Iterator[ModuleType]:
    """The modules that the config's classes may be in: the one of its name first, then others beside it."""
    package, _, name = config_class.__module__.rpartition(".")
    own = name.replace("configuration_", "modeling_")
    found = [module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    names = sorted((name for name in found if name.startswith("modeling_")), key=lambda name: name != own)
    for name in names:
        yield importlib.import_module(f"{package}.{name}")


def auto_class_of(model_class: type) -> str | None:
    """The name of an Auto class that makes `model_class` of its config, or None."""
    for name, auto in _auto_classes():
        # Of several classes an Auto class takes the one that the config's `architectures` names.
        if name.startswith("AutoModel") and model_class in _classes_of(auto, model_class.config_class):
            return name
    return None


# ---------------------------------------------------------------------------------------------------------- models


def build(
    model_type: str, class_name: str | None = None, use: Callable[[PreTrainedModel], None] = lambda model: None
) -> Built:
    """A tiny model of `model_type` with random values.

    Args:
        class_name: one of the type's classes; default: the one that checkpoints are most likely saved from.
        use: called with the model; where it raises, another way to shrink is tried.

    Raises:
        CannotBuild: it needs a package that is missing, or no way to shrink its config fits.
    """
    try:
        classes = candidate_classes(model_type)
    except ImportError as error:
        raise CannotBuild(f"needs a package: {_first_line(error)}") from error
    if class_name is not None:
        classes = [cls for cls in classes if cls.__name__ == class_name]
    if not classes:
        raise CannotBuild("no model class takes its config")
    errors: dict[str, str] = {}
    for cls in classes[:2]:
        too_large = 0
        for way in WAYS:
            if way.divisor < too_large:
                continue
            try:
                built = _build(model_type, cls, way)
                use(built.model)
                return built
            except ImportError as error:
                raise CannotBuild(f"needs a package: {_first_line(error)}") from error
            except TooLarge as error:
                too_large = way.divisor
                errors.setdefault(str(error), f"{cls.__name__} / {way.divisor}")
            except Exception as error:
                errors.setdefault(f"{type(error).__name__}: {_first_line(error)}", f"{cls.__name__} / {way.divisor}")
            gc.collect()
    raise CannotBuild("; ".join(f"{where}: {error}" for error, where in list(errors.items())[:3]))


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]


def _build(model_type: str, cls: type[PreTrainedModel], way: Way) -> Built:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            count = _count(cls(tiny_config(model_type, way)))
        if not 0 < count <= MAX_PARAMETERS:
            raise TooLarge(f"{count} parameters")
        torch.manual_seed(0)
        model = cls(tiny_config(model_type, way))
        _randomise(model)
    return Built(model, count, way)


def _count(model: torch.nn.Module) -> int:
    return sum(tensor.numel() for tensor in [*model.parameters(), *model.buffers()])


def _randomise(model: PreTrainedModel) -> None:
    """Noise on every parameter and saved buffer, norms and biases too, so that no two stretches of bytes are alike."""
    with torch.no_grad():
        for tensor in _saved_tensors(model).values():
            if tensor.is_floating_point():
                tensor.nan_to_num_(0.0, 0.0, 0.0)
                tensor.add_(torch.randn_like(tensor), alpha=0.05)


def _saved_tensors(model: PreTrainedModel) -> dict[int, torch.Tensor]:
    values = model.state_dict(keep_vars=True).values()
    return {id(tensor): tensor for tensor in values if isinstance(tensor, torch.Tensor)}


def make_checkpoints(model_type: str, class_name: str | None, folders: dict[torch.dtype, Path]) -> dict[str, Any]:
    """Save a tiny model in the hub's layout once for each dtype; returns facts about it.

    Raises:
        CannotBuild: see :func:`build`.
    """

    def save(model: PreTrainedModel) -> None:
        model.eval()
        for dtype, folder in folders.items():
            shutil.rmtree(folder, ignore_errors=True)
            _cast(model, dtype)
            total = sum(tensor.numel() * tensor.element_size() for tensor in _saved_tensors(model).values())
            model.save_pretrained(folder, max_shard_size=max(20_000, total * 2 // 3))
            for name, value in FILES.get(model_type, {}).items():
                torch.save(value, folder / name)
        try:
            type(model).from_pretrained(folder)
        except Exception as error:
            raise RuntimeError(f"plain loading fails: {type(error).__name__}: {_first_line(error)}") from error

    built = build(model_type, class_name, save)
    cls = type(built.model)
    return {
        "class": cls.__name__,
        "module": cls.__module__,
        "auto_class": auto_class_of(cls),
        "parameters": built.parameters,
        "divisor": built.way.divisor,
        "plans": {way: bool(getattr(built.model, f"{way}_plan", None)) for way in ("tp", "ep")},
    }


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """As in the hub's files, what must stay in fp32 does, whatever the rest is."""
    strict = model._keep_in_fp32_modules_strict or ()
    model.config.dtype = dtype
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if tensor.is_floating_point() and not any(part in name for part in strict):
            tensor.data = tensor.data.to(dtype)
