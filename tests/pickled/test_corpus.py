"""Pickled checkpoints that somebody else made: read as torch reads them, or refused as our error (fuzz/pickled.py)."""

import pytest

from fuzz.pickled import OF_PICKLED
from fuzz.seeds import CORPUS


TORCH_ENDINGS = {"same", "no map", "refused"}
EXPECTED = {
    "torch": TORCH_ENDINGS,
    "pickle": TORCH_ENDINGS,
    "zero": {"read", "refused", "unsupported"},
    "distcp": {"same", "refused"},
}


@pytest.mark.parametrize("target", OF_PICKLED)
def test_corpus(target: str) -> None:
    """What fuzzing found worth keeping, through the function that it called."""
    inputs = sorted((CORPUS / target).iterdir())
    assert len(inputs) > 20
    assert {OF_PICKLED[target](path.read_bytes()) for path in inputs} - {"damaged"} == EXPECTED[target]
    assert max(path.stat().st_size for path in inputs) <= 4096
