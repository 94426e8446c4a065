"""The model that a config describes, and whether tensors fit it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from ...errors import UnsupportedError
from ...plugin_api import model_class_of


def described_model(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model that the config in `folder` describes, without memory."""
    kwargs = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    config = transformers.AutoConfig.from_pretrained(folder, **kwargs)
    cls = model_class_of(str(folder), {"config": config, **kwargs})
    with torch.device("meta"):
        if hasattr(cls, "from_config"):  # an Auto class, for code of the model's own
            model: PreTrainedModel = cls.from_config(config, trust_remote_code=trust_remote_code)
        else:
            model = cls(config)
    if model.can_generate() and (folder / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def fitting(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    """`tensors` in the order of the state dict of `model`, but for the other names of what is tied.

    Raises:
        UnsupportedError: the model has other tensors, or of other shapes; `where` is its config.
    """
    ties = model.all_tied_weights_keys
    expected = model.state_dict()
    lacking = sorted(name for name in expected if name not in tensors and ties.get(name) not in tensors)
    unknown = sorted(name for name in tensors if name not in expected)
    other = sorted(
        name for name, tensor in tensors.items() if name in expected and expected[name].shape != tensor.shape
    )
    for names, what in ((lacking, "lacks"), (unknown, "has, and the model does not,"), (other, "has in other shapes")):
        if names:
            raise UnsupportedError(
                f"{where}: layout: of the tensors of a {type(model).__name__}, the checkpoint {what} "
                f"{', '.join(names[:8])} ({len(names)} in all). Give the config of the model that was trained, or "
                "keep the layout."
            )
    return {name: tensors[name] for name in expected if name in tensors and ties.get(name) not in tensors}
