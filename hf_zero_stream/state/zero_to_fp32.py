#!/usr/bin/env python
"""The fp32 values of a training state that hf_zero_stream saved, as DeepSpeed's script of this name gives its own.

A copy of this file lies beside each state of a ZeRO training, where DeepSpeed puts its script. It needs neither
DeepSpeed nor hf_zero_stream::

    python zero_to_fp32.py . output_dir [--safe_serialization] [--max_shard_size 5GB] [-t TAG]

Its functions have the names, arguments and results of those in ``deepspeed.utils.zero_to_fp32``.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open


NAMES = "names.json"
"""The file in a state's folder that says what there is beside what is trained, and where."""

OUTPUT_DTYPE_NAMES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}

debug = False

Others = Callable[[str, Sequence[str]], Mapping[str, torch.Tensor]]
"""Gives tensors of a folder's weights by the model's names for them, which are not the names in the files."""


class _Tensors:
    """The tensors of the safetensors files ``STEM.safetensors``, or of the shards that the index `index` names."""

    def __init__(self, folder: str, stem: str, index: str) -> None:
        files = [f"{stem}.safetensors"]
        if os.path.isfile(os.path.join(folder, index)):
            files = sorted(set(_json(os.path.join(folder, index))["weight_map"].values()))
        paths = [os.path.join(folder, file) for file in files if os.path.isfile(os.path.join(folder, file))]
        self._opened = [safe_open(path, framework="pt") for path in paths]
        self._shards = {name: shard for shard in self._opened for name in shard.keys()}

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def shape(self, name: str) -> list[int]:
        return list(self._shards[name].get_slice(name).get_shape())

    def __getitem__(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self._shards[name].get_tensor(name)
        return value


def _json(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


def state_dict_of(
    place: str, exclude_frozen_parameters: bool = False, others: Others | None = None
) -> dict[str, torch.Tensor]:
    """The state dict of the state in the folder `place`: buffers, frozen parameters, fp32 values of what is trained.

    Raises:
        ValueError: the weights beside the state have something under other names than the model, and there is no way
            to `others`.
    """
    record = _json(os.path.join(place, "training_state.json"))
    names = _json(os.path.join(place, NAMES)) if os.path.isfile(os.path.join(place, NAMES)) else {}
    masters = _Tensors(place, "model.fp32", "model.safetensors.index.fp32.json")
    folder = os.path.dirname(os.path.abspath(place))
    weights = _Tensors(folder, "model", "model.safetensors.index.json")
    trained = [name for group in record["groups"] for name in group["parameters"]]
    if "fp32" in record["keys"] and (lacking := [name for name in trained if name not in masters]):
        raise ValueError(
            f"{place}: it lacks the fp32 values of {len(lacking)} parameters, among them {lacking[0]}. A state of an "
            "earlier version has other names: load it into the training, and save it again."
        )
    buffers, frozen = names.get("buffers", {}), names.get("frozen", {})
    wanted = {**buffers, **({} if exclude_frozen_parameters else frozen)}
    wanted |= {name: names.get("trained", {}).get(name, [name, None]) for name in trained if name not in masters}
    exact = _Tensors(place, "model.exact", "model.safetensors.index.exact.json") if record.get("exact") else None
    left_out_frozen = frozen if exclude_frozen_parameters else {}
    found: dict[str, torch.Tensor] = {
        name: exact[name] for name in record.get("exact", ()) if exact is not None and name not in left_out_frozen
    }
    elsewhere = []
    for name, (stored, shape) in wanted.items():
        if name in found:
            continue
        found[name] = torch.empty(0)  # keeps the place
        if stored is None or stored not in weights or shape not in (None, weights.shape(stored)):
            elsewhere.append(name)
        else:
            found[name] = weights[stored].clone()  # the file may be written over by what comes of this
    if elsewhere:
        found.update(_converted(folder, elsewhere, others))
    found |= {name: masters[name] for name in trained if name in masters}
    for name in found.keys() - frozen.keys():
        found[name] = found[name].float() if found[name].is_floating_point() else found[name]
    live = names.get("live", {})  # states have parameters' own names, without wrappers' parts
    found = {live.get(name, name): value for name, value in found.items()}
    for alias, name in names.get("shared", {}).items():
        if name in found:
            found[alias] = found[name]
    if left_out := names.get("left_out"):
        print(f"{place}: {left_out} frozen parameters of the model that the adapters are for are not saved with them")
    for name in found if debug else ():
        print(name, found[name].dtype, list(found[name].shape))
    return found


def _converted(folder: str, names: Sequence[str], others: Others | None) -> Mapping[str, torch.Tensor]:
    if others is None:
        try:
            from hf_zero_stream.state.zero_tools import tensors_of_model
        except ImportError as error:
            raise ValueError(
                f"{folder}: its weights have {len(names)} tensors under other names than the model, among them "
                f"{names[0]}. Install hf_zero_stream, which converts them, and run this again; or leave frozen "
                "parameters out (exclude_frozen_parameters)."
            ) from error
        others = tensors_of_model
    return others(folder, names)


def _tag_folder(checkpoint_dir: str, tag: str | None) -> str:
    if tag is None:
        latest = os.path.join(checkpoint_dir, "latest")
        if not os.path.isfile(latest):
            raise ValueError(f"Unable to find 'latest' file at {latest}")
        with open(latest, encoding="utf-8") as file:
            tag = file.read().strip()
    place = os.path.join(checkpoint_dir, tag)
    if not os.path.isdir(place):
        raise FileNotFoundError(f"Directory '{place}' doesn't exist")
    return place


def state_in(place: str) -> str | None:
    """The folder of a state that DeepSpeed's name `place` for it means; None if it is DeepSpeed's own."""
    inner = os.path.join(place, "latest")
    candidates = [place]
    if os.path.isfile(inner):
        with open(inner, encoding="utf-8") as file:
            candidates.append(os.path.join(place, file.read().strip()))
    return next((each for each in candidates if os.path.isfile(os.path.join(each, "training_state.json"))), None)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> Any:
    """The state dict, in host memory; with `lazy_mode` too each tensor is read when its values are needed."""
    place = _tag_folder(checkpoint_dir, tag)
    state = state_in(place)
    if state is None:  # DeepSpeed has saved into the folder as well
        from deepspeed.utils import zero_to_fp32

        return zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
            checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode
        )
    print(f"Processing the training state of hf_zero_stream in '{state}'")
    return state_dict_of(state, exclude_frozen_parameters)


def _in_dtype(value: Any, dtype: torch.dtype) -> torch.Tensor:
    value = value.contiguous()
    return value.to(dtype) if value.is_floating_point() else value


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    dtype: Any = torch.float32,
    max_shard_size: Any = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the state dict into files of ``torch.save``, or of safetensors, with floating-point tensors of `dtype`."""
    if isinstance(dtype, str):
        dtype = OUTPUT_DTYPE_NAMES[dtype.removeprefix("torch.").lower()]
    state_dict = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters, True)
    stem, end = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    os.makedirs(output_dir, exist_ok=True)
    weight_map: dict[str, str] = {}
    shards = list(_shards(state_dict, dtype, max_shard_size, stem, end))
    for number, (file, names, _) in enumerate(shards, start=1):
        print(f"Saving {file} ({number} of {len(shards)})")
        shard = {name: _in_dtype(state_dict[name], dtype) for name in names}
        path = os.path.join(output_dir, file)
        if safe_serialization:
            _save_safely(shard, path)
        else:
            torch.save(shard, path)
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        index = {"metadata": shards[0][2], "weight_map": weight_map}
        with open(os.path.join(output_dir, f"{stem}{end}.index.json"), "w", encoding="utf-8") as out:
            out.write(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _shards(
    state_dict: Mapping[str, Any], dtype: torch.dtype, size: Any, stem: str, end: str
) -> Iterator[tuple[str, list[str], Any]]:
    """Name, tensors and metadata of each file."""
    if size is None:
        yield f"{stem}{end}", list(state_dict), None
        return
    from huggingface_hub import split_torch_state_dict_into_shards

    kept = {id(value): value for value in state_dict.values()}  # tied ones stay so
    empty = {
        key: torch.empty(value.shape, dtype=dtype if value.dtype.is_floating_point else value.dtype)
        for key, value in kept.items()
    }
    split = split_torch_state_dict_into_shards(
        {name: empty[id(value)] for name, value in state_dict.items()},
        filename_pattern=f"{stem}{{suffix}}{end}",
        max_shard_size=size,
    )
    for file, names in split.filename_to_tensors.items():
        yield file, list(names), split.metadata


def _save_safely(shard: dict[str, torch.Tensor], path: str) -> None:
    from safetensors.torch import save_file

    seen: set[int] = set()
    for name, value in shard.items():
        if value.data_ptr() in seen:  # tied; a file of safetensors has each tensor by itself
            shard[name] = value.clone()
        seen.add(value.data_ptr())
    save_file(shard, path, metadata={"format": "pt"})


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    max_shard_size: Any = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the state dict into files of ``torch.save``, or of safetensors."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def load_state_dict_from_zero_checkpoint(model: Any, checkpoint_dir: str, tag: str | None = None) -> Any:
    """Put the state dict into `model`, in host memory, and return it."""
    state_dict = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state_dict, strict=False)
    return model


def main(arguments: Sequence[str] | None = None, *, asks_dtype: bool = False) -> None:
    """The command; ``zero_to_torch.py`` asks for a dtype as well."""
    global debug
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint_dir", help="the folder of the checkpoint, such as path/checkpoint-12")
    parser.add_argument("output_dir", help="the folder for the files of the state dict")
    if asks_dtype:
        parser.add_argument("--dtype", choices=sorted(OUTPUT_DTYPE_NAMES), required=True, help="of the output")
    parser.add_argument("--max_shard_size", default="5GB", help="largest size of a file, such as 5GB or 500MB")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors, and not torch.save")
    parser.add_argument("-t", "--tag", help="the name of the state, such as global_step1; default: the newest")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="only what is trained")
    parser.add_argument("-d", "--debug", action="store_true", help="print what is found")
    given = vars(parser.parse_args(arguments))
    debug = given.pop("debug")
    convert_zero_checkpoint_to_state_dict(**given)


if __name__ == "__main__":
    main()
