"""An estimate of the memory of activations: formulas for transformers in 16 bits, with a fused attention."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError


def of_layer(tokens: int, hidden_size: int, tp_ranks: int = 1) -> int:
    """Bytes that one layer keeps for the backward pass: s b h (10 + 24 / t).

    Source: Korthikanti et al., arXiv:2205.05198, equation 2, without the term 5 a s / (h t) of scores, which a fused
    attention makes again. It is of a layer with dropout and an MLP four times as wide as the model.

    Args:
        tokens: s b, those of a micro-batch on one rank.
    """
    return tokens * hidden_size * (10 * tp_ranks + 24) // tp_ranks


def of_checkpoint(tokens: int, hidden_size: int) -> int:
    """Bytes that one layer keeps with checkpointing, its input: 2 s b h.

    Source: Korthikanti et al., arXiv:2205.05198, section 5.
    """
    return 2 * tokens * hidden_size


def of_head(tokens: int, hidden_size: int, vocab_size: int, tp_ranks: int = 1) -> int:
    """Bytes of the output layer's input, and of its logits in fp32: 2 s b h + 4 s b v / t.

    Source: Korthikanti et al., arXiv:2205.05198, section 4.3.
    """
    return 2 * tokens * hidden_size + 4 * tokens * vocab_size // tp_ranks


def activations(config: Any, tokens: int, tp_ranks: int = 1) -> dict[str, int]:
    """Bytes of the activations of a model, "kept" and "checkpointed", where one layer at a time is computed again.

    Raises:
        ConfigError: the model's config does not say how wide and how deep it is.
    """
    text = config.get_text_config()
    names = ("hidden_size", "num_hidden_layers", "vocab_size")
    sizes: dict[str, Any] = {name: getattr(text, name, None) for name in names}
    if unknown := [name for name, size in sizes.items() if not isinstance(size, int)]:
        raise ConfigError(
            f"tokens: expected a model whose config says {', '.join(unknown)}; got {type(config).__name__}, whose "
            "activations are not estimated. Leave tokens out."
        )
    hidden, layers, vocab = sizes.values()
    layer, head = of_layer(tokens, hidden, tp_ranks), of_head(tokens, hidden, vocab, tp_ranks)
    return {
        "kept": layers * layer + head,
        "checkpointed": layers * of_checkpoint(tokens, hidden) + max(layer, head),
    }
