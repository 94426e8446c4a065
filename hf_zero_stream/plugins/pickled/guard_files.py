"""Guard files beside a training state, for those who meet it with DeepSpeed's own tools.

DeepSpeed looks for its own names, and in a folder of ours, where there are none, an ``assert`` without a text fails.
So a guard file has such a name. It is a pickle that asks for one name of a module; the module's name is a sentence. So
``torch.load`` raises an error with that sentence, and runs nothing. That needs no hf_zero_stream. :mod:`.zero_to_fp32`
lies where DeepSpeed puts its script of that name.
"""

from __future__ import annotations

import stat
from pathlib import Path

from ...checkpoint.deepspeed_names import GUARD


_NAMES = (
    "mp_rank_00_model_states.pt",  # stages 1 and 2, and what zero_to_fp32 reads first
    "zero_pp_rank_0_mp_rank_00_model_states.pt",  # stage 3; only rank 0 says the sentence
    "zero_pp_rank_0_mp_rank_00_optim_states.pt",  # what ds_to_universal reads first
)
_TEXT = (
    GUARD
    + b", which DeepSpeed cannot load: go on inside hf_zero_stream's streaming(), at any number of ranks and any ZeRO "
    + b"stage, without ds_to_universal; its fp32 values as safetensors: hf-zero-stream convert\nsign\n."
)
"""Protocol 0 of pickle: "c", a module, its attribute, and the end. No full stop: it would part packages' names."""


def write(folder: Path, tag: str) -> None:
    """Write guard files into the folder `tag` in `folder`, and the script beside it."""
    for name in _NAMES:
        (folder / tag / name).write_bytes(_TEXT)
    script = folder / "zero_to_fp32.py"
    script.write_text(Path(__file__).with_name(script.name).read_text(encoding="utf-8"), encoding="utf-8")
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
