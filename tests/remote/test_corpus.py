"""What servers answer wrongly: the object is read as it is, or refused as our error (fuzz/server.py)."""

import pytest

from fuzz.seeds import CORPUS
from fuzz.server import OF_REMOTE


@pytest.mark.parametrize("target", OF_REMOTE)
def test_corpus(target: str) -> None:
    """What fuzzing found worth keeping, through the function that it called."""
    inputs = sorted((CORPUS / target).iterdir())
    assert len(inputs) > 20
    assert {OF_REMOTE[target](path.read_bytes()) for path in inputs} - {"damaged"} == {"same", "refused"}
    assert max(path.stat().st_size for path in inputs) <= 4096
