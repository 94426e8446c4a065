"""The plan of a weight stream for more ranks than there are here: who sends how much, and nothing twice."""

from __future__ import annotations

from collections import Counter

import hf_zero_stream
from benchmarks.scale import MODELS
from benchmarks.stream_plan import model_of, world_on_paper
from hf_zero_stream.stream.direct import MESSAGE_BYTES, shares_of


WORLD = 64


def test_bytes_of_each_rank() -> None:
    """Of two layers of Qwen3-30B-A3B in their true size: each rank sends what it holds, once, in small messages."""
    config = MODELS["qwen3-30b-a3b"][0]()
    config.num_hidden_layers = 2
    model = model_of(config)
    nbytes = sum(param.nbytes for param in model.parameters())
    with world_on_paper(model, WORLD):
        stream = hf_zero_stream.weight_stream(model)
    assert sum(max(bucket.nbytes.values()) for bucket in stream.buckets) == nbytes > 3e9
    sent: Counter[int] = Counter()
    for bucket in stream.buckets:
        layout = shares_of(bucket).layout
        assert sum(piece.message_bytes for each in layout.messages for piece in each.pieces) == layout.nbytes
        for message in layout.messages:
            size = sum(piece.message_bytes for piece in message.pieces)
            assert size <= MESSAGE_BYTES or len(message.pieces) == 1
            sent[message.giver] += size
    assert sent.total() == nbytes and len(sent) == WORLD
    assert max(sent.values()) < 1.01 * nbytes / WORLD
