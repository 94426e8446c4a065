"""Decides what becomes of a checkpoint's quantised weights, or of those that shall be quantised now, in one load.

Where ZeRO-3 or FSDP2 shards them they stay as they are in the file. For that transformers is told to dequantise, which
it does on lazy tensors; :mod:`.packing` then keeps the bytes that these come from.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging

from ...errors import UnsupportedError
from ...plugin_api import Original, QuantisedLoad, Session, in_session, is_packed, is_url
from .packing import pack_model
from .quantised import dequantising
from .quantisers import dequantiser_of, refuse_sparse
from .quantising import QuantisingQuantizer, is_quantisable, wanted_config


logger = logging.get_logger(__name__)


class PackedLoad(QuantisedLoad):
    """One load of a quantised checkpoint, or one that quantises.

    Attributes:
        kept_config: the quantization config of a model whose weights are to stay quantised; None: of no such model.
        quantiser: quantises them while they are loaded; None: they are quantised in the checkpoint.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.kept_config: dict[str, Any] | None = None
        self.quantiser: QuantisingQuantizer | None = None

    def quantizer(
        self, original: Original, config: Any, quantization_config: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any, Any]:
        """Have transformers dequantise what will be kept quantised, unless the user wants it dequantised."""
        in_text = getattr(config, "quantization_config", None) is None
        holder = config.get_text_config(decoder=True) if in_text else config
        found = getattr(holder, "quantization_config", None)
        if found is None and quantization_config is None:  # a GGUF file, which says so itself
            result: tuple[Any, Any, Any] = original(config, quantization_config, *args, **kwargs)
            return result
        fields = found if isinstance(found, Mapping) else getattr(found, "to_dict", dict)()
        refuse_sparse(fields, getattr(config, "name_or_path", "") or "this checkpoint")
        is_dequantised = fields.get("dequantize") or getattr(quantization_config, "dequantize", False)
        load, device_map = self._session.load, args[0] if args else kwargs.get("device_map")
        # DeepSpeed decides the dtype where it hides.
        dequantiser = None if is_dequantised else dequantiser_of(fields, casts=not load.destination.hides_zero3)
        wanted = None if fields else wanted_config(quantization_config)
        if wanted is not None and not is_quantisable(wanted):
            wanted = None
        packs = load.config.keep_quantized and load.destination.takes_packed and self._session.inside is None
        if packs and wanted is not None and kwargs.get("gguf_file") is None:
            load.destination.refuse_packed()
            self.quantiser = QuantisingQuantizer(wanted)
            self.quantiser.validate_environment()
            config.quantization_config = self.kept_config = wanted.to_dict()  # ranks compare it
            return self.quantiser, config, device_map
        if packs and dequantiser is not None:
            load.destination.refuse_packed()
            self.kept_config = dict(fields)
            if isinstance(dequantiser, HfQuantizer):
                return dequantiser, config, device_map
            if quantization_config is not None:
                quantization_config = copy.copy(quantization_config)
                quantization_config.dequantize = True
            holder.quantization_config = dequantiser
        result = original(config, quantization_config, *args, **kwargs)
        if self.kept_config is not None and in_text:
            holder.quantization_config = self.kept_config
        if self.kept_config is None and result[0] is not None:
            could_be_packed = dequantiser is not None or (wanted is not None and not is_dequantised)
            self._explain(result[0], could_be_packed, config)
        return result

    def _explain(self, quantizer: Any, could_be_packed: bool, config: Any) -> None:
        """Say why weights in a format that is kept under ZeRO-3 and FSDP2 are not kept here.

        Raises an UnsupportedError if the user asked for it, and in a plan of what would not be streamed: before
        transformers prepares the model for its own way, for which compressed-tensors needs a true process group.
        """
        load, stays = self._session.load, _stays_quantised(quantizer)
        because, keeps = load.destination.packing_unsupported_reason, load.config.keep_quantized
        if could_be_packed and because and keeps is True:
            raise UnsupportedError(
                f"keep_quantized: this checkpoint's weights cannot stay quantised here: {because}. Use ZeRO-3 or "
                "FSDP2 alone, or leave the setting out, and have them dequantised (a quantization_config with "
                "dequantize=True)."
            )
        place = getattr(config, "name_or_path", "") or "this checkpoint"
        if self._session.is_dry:
            device = load.destination.trains_on
            if stays or (could_be_packed and device not in ("", "cpu")):
                on = f" on {device}" if device and not stays else ""
                raise UnsupportedError(
                    f"{place} cannot be streamed: the model stays quantised{on}, and then transformers loads it. Plan "
                    "a load with dequantize=True, where the format has it (--dequantize)."
                )
        elif could_be_packed and because and keeps and load.coordinator.is_main:
            then = (
                "transformers loads them its own way" if stays else "they are dequantised, as transformers does here"
            )
            logger.warning(
                f"hf_zero_stream does not keep the weights of {place} quantised (keep_quantized): {because}. So "
                f"{then}."
            )

    def leave_to_stock(self, files: Any, load_config: Any) -> None:
        """Leave a model that stays quantised to stock; raise an UnsupportedError where that cannot have it."""
        path, session = load_config.pretrained_model_name_or_path, self._session
        if self.quantiser is not None:
            if session.has_nested:
                raise UnsupportedError(
                    f"{path}: a model whose __init__ calls from_pretrained cannot be quantised while it is loaded. "
                    "Load with keep_quantized=False, or without a quantization_config."
                )
            return
        if not _stays_quantised(load_config.hf_quantizer):
            return
        if session.inside is not None or session.has_nested:
            raise UnsupportedError(
                f"{path}: this checkpoint stays quantised, and it belongs to a model whose __init__ calls "
                "from_pretrained: the two cannot be streamed together. Pass a quantization_config with "
                "dequantize=True, where the format has one, or load without streaming()."
            )
        session.stock_reason = (
            "the model stays quantised, and then every rank holds all of it. To fine-tune it under ZeRO-3, pass a "
            "quantization_config with dequantize=True, where the format has one"
        )
        if files and is_url(files[0]):
            raise UnsupportedError(
                f"{path}: cannot be loaded from a URL, because {session.stock_reason}. Or download the checkpoint."
            )
        if session.load.coordinator.is_main and session.load.destination.hides_zero3:  # elsewhere stock is no surprise
            logger.warning(
                f"hf_zero_stream hands this load to stock transformers and DeepSpeed, because {session.stock_reason}."
            )

    def converting(self, hf_quantizer: Any) -> AbstractContextManager[None]:
        return dequantising(hf_quantizer)

    def pack(self, model: PreTrainedModel, dtype: torch.dtype | None, loading_info: Any) -> None:
        if self.kept_config is not None:
            method = self.kept_config.get("quant_method")
            method = str(getattr(method, "value", method))
            if _quantises_activations(self.kept_config) and self._session.load.coordinator.is_main:
                logger.warning_once(
                    f"The quantization_config of this checkpoint ({method}) also quantises what goes into layers. "
                    "hf_zero_stream keeps its weights quantised, and computes with them as they are dequantised: "
                    "outputs are those of the dequantised model, and not to the last digit those of stock."
                )
            pack_model(model, dtype, loading_info, self._session.load, method, self.quantiser)


def _quantises_activations(config: Mapping[str, Any]) -> bool:
    """Whether layers quantise what goes into them, by a config of compressed-tensors or of FP8."""
    groups = (config.get("config_groups") or {}).values()
    return "activation_scheme" in config or any(group.get("input_activations") for group in groups)


def _stays_quantised(hf_quantizer: Any) -> bool:
    """Whether the model keeps a quantised form, which ZeRO-3 cannot partition."""
    return hf_quantizer is not None and not (
        hf_quantizer.pre_quantized and getattr(hf_quantizer.quantization_config, "dequantize", False)
    )


@in_session
def remove_quantization_config(session: Session, original: Original, self: Any, model: Any) -> None:
    """A packed model's config goes on saying how its weights are quantised: that is how it is saved."""
    conversions = getattr(model, "_weight_conversions", None)
    original(self, model)
    if conversions is not None:  # from transformers 5.24 on it forgets the model's own, too, by which it is saved
        model._weight_conversions = conversions
    kept = session.quantised.kept_config if isinstance(session.quantised, PackedLoad) else None
    if kept is not None and is_packed(model):
        model.config.quantization_config = kept
