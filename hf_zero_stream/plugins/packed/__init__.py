"""Quantised checkpoints: weights that stay quantised, parameters of bytes; dequantising and quantising while loading.

:mod:`.load` decides what becomes of a checkpoint's weights. :mod:`.quantised` and :mod:`.bitsandbytes` dequantise
lazy tensors. :mod:`.packing` makes parameters of the bytes that these come from (:mod:`.weights`, :mod:`.programs`),
and modules that dequantise in the forward pass (:mod:`.modules`). :mod:`.quantising` quantises while loading.
"""

from __future__ import annotations

from ...plugin_api import PatchScope, Plugin, Row, Weight


COMPRESSED = PatchScope("COMPRESSED", "while compressed-tensors dequantises lazy tensors")

_HERE = __name__

PLUGIN = Plugin(
    "packed",
    tools={
        "a quantised checkpoint": f"{_HERE}.load:PackedLoad",
        "a GGUF file": f"{_HERE}.quantised:mapped_gguf_values",
        "a config that dequantises": f"{_HERE}.dequantised:dequantising",
        "saving a model that was dequantised": f"{_HERE}.dequantised:forget_quantizer",
        "saving packed weights": f"{_HERE}.packing:take_packed",
        "adapters on packed weights": f"{_HERE}.adapters:inject_adapter",
        "quantiser fp8": f"{_HERE}.quantisers:by_transformers",
        "quantiser mxfp4": f"{_HERE}.quantisers:by_transformers",
        "quantiser compressed-tensors": f"{_HERE}.quantisers:of_compressed_tensors",
        "quantiser bitsandbytes": f"{_HERE}.quantisers:of_bitsandbytes",
    },
    rows={
        PatchScope.MODELS: [
            Row(
                "peft.tuners.tuners_utils:BaseTuner._inject_parameters",
                f"{_HERE}.adapters:inject_parameters",
                "peft_config model",
                feature="adapters on models of ours",
                since="0.17",
            ),
        ],
        PatchScope.LOAD: [
            *[
                Row(f"transformers.integrations.{of}", f"{_HERE}.quantised:{to}", feature="dequantising", since=since)
                for of, to, since in (
                    ("mxfp4:convert_moe_packed_tensors", "convert_moe_packed_tensors", ""),
                    ("finegrained_fp8:Fp8Dequantize._dequantize_one", "dequantize_one", "5.8"),
                    ("compressed_tensors:CompressedTensorsDequantize.convert", "merge_dequantised_experts", "5.21"),
                    ("gguf.gguf_conversion_mapping:dequantize_blocks", "dequantize_blocks", "5.17"),
                )
            ],
            Row(
                "transformers.quantizers.base:HfQuantizer.remove_quantization_config",
                f"{_HERE}.load:remove_quantization_config",
                feature="weights that stay quantised",
            ),
        ],
        COMPRESSED: [
            Row(
                f"compressed_tensors.compressors.pack_quantized.base:{of}",
                f"{_HERE}.quantised:{leads_to}",
                weight=Weight.ESSENTIAL,
            )
            for of, leads_to in (
                ("unpack_from_int32", "unpack_from_int32"),
                ("PackedQuantizationCompressor.decompress", "decompress_packed"),
            )
        ],
    },
)
