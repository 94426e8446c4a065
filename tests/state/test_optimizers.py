"""The optimizers of the table in docs/state.md whose packages are installed: saved, and gone on from."""

from pathlib import Path

import pytest

from tests.state.optimizers import FSDP2, run, verdict


ANY = "any number of ranks"
TORCH_ENDINGS = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "ASGD", "SGD")
WITH_OPTIONS = ("AdamW, amsgrad", "SGD, momentum", "RMSprop, centered", "LoRA+ (AdamW)")
IN_32_BIT = ("AdamW32bit", "PagedAdamW32bit", "Lion32bit", "RMSprop32bit", "Adagrad32bit")
IN_8_BIT = ("AdamW8bit", "PagedAdamW8bit", "Lion8bit", "AdEMAMix8bit")

REFUSED = {"Adafactor": "keeps RMS in group 0, which differs between ranks"}
"""By its name: why a state cannot be cut for other ranks. DeepSpeed saves it, and goes on from it."""


def check(found: dict[tuple[str, str], object]) -> None:
    for (name, home), row in found.items():
        said = verdict(row)
        if name in REFUSED:
            assert REFUSED[name] in said and said.endswith("DeepSpeed's own: goes on"), (name, home, said)
        elif name.endswith("8bit"):
            assert said == "as many ranks; others are an error", (name, home, said)
        else:
            assert said.startswith(ANY), (name, home, said)


def test_in_engines(cluster: None, tmp_path: Path) -> None:
    """With a ``state_dict`` of their own, by blocks, by matrices, and with numbers of a rank's own."""
    muon, names = "Muon of DeepSpeed", ["bitsandbytes PagedAdamW32bit", "bitsandbytes AdamW8bit", "Adafactor"]
    found = run([*names, muon], ["ZeRO-3", "ZeRO-2"], tmp_path)
    said = verdict(found.pop((muon, "ZeRO-2")))
    assert "momentum of whole matrices" in said and said.endswith("DeepSpeed's own: goes on")
    check(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "homes"),
    [
        ([*TORCH_ENDINGS, *WITH_OPTIONS, "Muon of torch"], [FSDP2]),
        ([*TORCH_ENDINGS, *WITH_OPTIONS, "Rprop", "Adafactor of torch"], ["ZeRO-3", "ZeRO-2"]),
        ([f"bitsandbytes {name}" for name in (*IN_32_BIT, *IN_8_BIT)], ["ZeRO-3", "ZeRO-2"]),
    ],
    ids=["torch's, FSDP2", "torch's, ZeRO", "bitsandbytes'"],
)
def test_all(cluster: None, tmp_path: Path, names: list[str], homes: list[str]) -> None:
    check(run(names, homes, tmp_path))
