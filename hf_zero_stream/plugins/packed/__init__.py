"""Quantised checkpoints: weights that stay quantised, parameters of bytes; dequantising and quantising while loading.

:mod:`.load` decides what becomes of a checkpoint's weights. :mod:`.quantised` and :mod:`.bitsandbytes` dequantise
lazy tensors. :mod:`.packing` makes parameters of the bytes that these come from (:mod:`.weights`, :mod:`.programs`),
and modules that dequantise in the forward pass (:mod:`.modules`). :mod:`.quantising` quantises while loading.
"""

from __future__ import annotations

from ...plugin_api import PatchScope, Plugin, Severity, rows


COMPRESSED = PatchScope("COMPRESSED", "while compressed-tensors dequantises lazy tensors")

_HERE = __name__

PLUGIN = Plugin(
    "packed",
    tools={
        "PackedLoad": f"{_HERE}.load:PackedLoad",
        "mapped_gguf_values": f"{_HERE}.quantised:mapped_gguf_values",
        "dequantising": f"{_HERE}.dequantised:dequantising",
        "forget_quantizer": f"{_HERE}.dequantised:forget_quantizer",
        "take_packed": f"{_HERE}.packing:take_packed",
        "inject_adapter": f"{_HERE}.adapters:inject_adapter",
        "quantiser fp8": f"{_HERE}.quantisers:by_transformers",
        "quantiser mxfp4": f"{_HERE}.quantisers:by_transformers",
        "quantiser compressed-tensors": f"{_HERE}.quantisers:of_compressed_tensors",
        "quantiser bitsandbytes": f"{_HERE}.quantisers:of_bitsandbytes",
    },
    rows={
        PatchScope.MODELS: rows(
            "_inject_parameters adapters:inject_parameters peft_config model >=0.17",
            "peft.tuners.tuners_utils:BaseTuner.",
            f"{_HERE}.",
            feature="adapters on models of ours",
        ),
        PatchScope.LOAD: [
            *rows(
                """
                mxfp4:convert_moe_packed_tensors                        quantised:convert_moe_packed_tensors
                finegrained_fp8:Fp8Dequantize._dequantize_one           quantised:dequantize_one             >=5.8
                compressed_tensors:CompressedTensorsDequantize.convert  quantised:merge_dequantised_experts  >=5.21
                gguf.gguf_conversion_mapping:dequantize_blocks          quantised:dequantize_blocks          >=5.17
                """,
                "transformers.integrations.",
                f"{_HERE}.",
                feature="dequantising",
            ),
            *rows(
                "remove_quantization_config load:remove_quantization_config",
                "transformers.quantizers.base:HfQuantizer.",
                f"{_HERE}.",
                feature="weights that stay quantised",
            ),
        ],
        COMPRESSED: rows(
            """
            unpack_from_int32                       quantised:unpack_from_int32
            PackedQuantizationCompressor.decompress quantised:decompress_packed
            """,
            "compressed_tensors.compressors.pack_quantized.base:",
            f"{_HERE}.",
            severity=Severity.ESSENTIAL,
        ),
    },
)
