"""Checkpoints that a pickle describes: ``torch.save``, torch.distributed.checkpoint, DeepSpeed's ZeRO. None is run.

And ``hf-zero-stream convert``, which makes safetensors of all formats.
"""

from __future__ import annotations

from ...plugin_api import METADATA, TORCH_ENDINGS, FileFormat, FolderFormat, Plugin


PLUGIN = Plugin(
    "pickled",
    commands={"convert": f"{__name__}.command"},
    files=[
        FileFormat("torch.save", TORCH_ENDINGS, f"{__name__}.torch_files", is_always_map=False),
        FileFormat("torch.distributed.checkpoint", (f"/{METADATA}",), f"{__name__}.distcp", holds_values=False),
    ],
    folders=[
        FolderFormat(
            "ZeRO",
            ".checkpoint.deepspeed_names:zero_folder_of",
            f"{__name__}.zero_folder:map_of_zero",
            "this is a ZeRO checkpoint of DeepSpeed, which from_pretrained cannot load. `hf-zero-stream convert` "
            "writes a folder that it can; load_state goes on with the training.",
        ),
        FolderFormat(
            "torch.distributed.checkpoint",
            ".checkpoint.formats:distributed_file",
            f"{__name__}.distcp:map_of_file",
        ),
    ],
    tools={
        "read_deepspeed_state": f"{__name__}.zero_state:read_state",
        "write_guard_files": f"{__name__}.guard_files:write",
    },
)
