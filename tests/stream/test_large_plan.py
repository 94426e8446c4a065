"""The plan of a weight stream for more ranks than there are here: who sends how much, and nothing twice."""

import re
from collections import Counter
from math import prod

import hf_zero_stream
from benchmarks.scale import MODELS
from benchmarks.stream_plan import model_of, world_on_paper
from hf_zero_stream.plugins.stream.direct import MESSAGE_BYTES, plan_messages, sliced
from hf_zero_stream.plugins.stream.reads import whole


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
        layout = plan_messages(bucket, 0).layout
        assert sum(piece.message_bytes for each in layout.messages for piece in each.pieces) == layout.nbytes
        for message in layout.messages:
            size = sum(piece.message_bytes for piece in message.pieces)
            assert size <= MESSAGE_BYTES or len(message.pieces) == 1
            sent[message.sender] += size
    assert sent.total() == nbytes and len(sent) == WORLD
    assert max(sent.values()) < 1.01 * nbytes / WORLD


def test_bytes_of_each_worker() -> None:
    """Of experts that are dealt out to workers, each gets its own; the rest goes to one, which shares it."""
    config = MODELS["qwen3-30b-a3b"][0]()
    config.num_hidden_layers = 1
    model = model_of(config)
    with world_on_paper(model, WORLD):
        stream = hf_zero_stream.weight_stream(model)
    sizes = {each.name: each.shape for each in stream.metadata}
    read = [
        {name: whole(shape) for name, shape in sizes.items() if owner_of(name) in (worker, None)}
        for worker in range(4)
    ]
    received: Counter[int] = Counter()
    shared = 0
    for bucket in stream.buckets:
        for layout in (each.layout for each in sliced(bucket, 0, read)):
            assert {slot.name for slot in layout.slots} <= read[layout.worker].keys()
            nbytes = sum(piece.message_bytes for each in layout.messages for piece in each.pieces)
            shared += nbytes if layout.is_shared else 0
            received[layout.worker] += 0 if layout.is_shared else nbytes
    experts = sum(2 * prod(shape) for name, shape in sizes.items() if owner_of(name) is not None)
    assert shared == sum(2 * prod(shape) for name, shape in sizes.items() if owner_of(name) is None)
    assert set(received.values()) == {experts // 4} and experts > 1e9


def owner_of(name: str) -> int | None:
    found = re.search(r"experts\.(\d+)", name)
    return None if found is None else int(found[1]) % 4
