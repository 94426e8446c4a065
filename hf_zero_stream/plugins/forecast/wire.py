"""The bytes that a rank sends over the wire in a step of training, beside those of a load and of a save.

An all-gather or a reduce-scatter of M bytes over N ranks sends M (N - 1) / N from each, an all-reduce twice that (ring
algorithms). Not counted: norms, flags, and what a launcher or a sampler sends.
"""

from __future__ import annotations

from typing import NamedTuple

from ...errors import ConfigError


class ZeroTraffic(NamedTuple):
    """The settings of a DeepSpeed config that matter for traffic, with DeepSpeed's defaults.

    Attributes:
        quantised_weights: ZeRO++ qwZ: weights are gathered in 8 bits.
        quantised_gradients: ZeRO++ qgZ: gradients are reduced in 4 bits.
        secondary_ranks: ranks that share hpZ's second copy of the parameters; 1: there is none.
        all_reduces: whether stages 1 and 2 all-reduce gradients (``use_multi_rank_bucket_allreduce``).
        kept_numel: elements that stay gathered between the two passes, because their next use is near.
        passes: of a step (``gradient_accumulation_steps``).
    """

    quantised_weights: bool = False
    quantised_gradients: bool = False
    secondary_ranks: int = 1
    all_reduces: bool = True
    kept_numel: int = 0
    passes: int = 1


def one_way(nbytes: int, ranks: int) -> int:
    """Bytes that each rank sends in an all-gather or a reduce-scatter of `nbytes`; an all-reduce is one of each.

    Source: ZeRO, arXiv:1910.02054, section 7.1, which leaves out the factor (N - 1) / N.
    """
    return nbytes * (ranks - 1) // ranks


def of_stages_1_and_2(
    trained_bytes: int, gradient_bytes: int, ranks: int, stage: int, traffic: ZeroTraffic
) -> dict[str, int]:
    """Two times the parameters' bytes: gradients are reduced, and new values gathered.

    DeepSpeed all-reduces the gradients by default, which makes it three times. Stage 2 reduces them in each pass.

    Source: ZeRO, arXiv:1910.02054, section 7.2.1; DeepSpeed 0.19.8, `runtime/zero/stage_1_and_2.py`.
    """
    reduced = one_way(gradient_bytes, ranks) * (1 + traffic.all_reduces) * (traffic.passes if stage == 2 else 1)
    return {"gradients": reduced, "new values": one_way(trained_bytes, ranks)}


def of_stage_3(numel: int, itemsize: int, gradient_bytes: int, ranks: int, traffic: ZeroTraffic) -> dict[str, int]:
    """Three times the parameters' bytes: gathered in both passes, and gradients reduced.

    What is used within ``stage3_max_reuse_distance`` again, at the end of the model, is not gathered again. ZeRO++
    halves a gather in 16 bits (qwZ), keeps the backward pass's within a node (hpZ), and quarters the gradients (qgZ);
    scales are not counted.

    Source: ZeRO, arXiv:1910.02054, section 7.2.2; ZeRO++, arXiv:2306.10209, table 1; DeepSpeed 0.19.8,
    `runtime/zero/partitioned_param_coordinator.py`.

    Args:
        numel: elements of all parameters, of `itemsize` bytes each.
    """
    gathered_itemsize = 1 if traffic.quantised_weights else itemsize
    whole, again = numel * gathered_itemsize, max(0, numel - traffic.kept_numel) * gathered_itemsize
    reduced = gradient_bytes // 4 if traffic.quantised_gradients else gradient_bytes
    within, over = traffic.secondary_ranks, ranks
    backward = {"backward gathers": one_way(again, over)}
    if within > 1:
        backward = {"backward gathers within a node": one_way(again, within)}
    once = {"forward gathers": one_way(whole, over), **backward, "gradients": one_way(reduced, over)}
    return {name: nbytes * traffic.passes for name, nbytes in once.items()}


def of_fsdp2(shard_bytes: int, trained_bytes: int, shards: int, replicas: int) -> dict[str, int]:
    """As ZeRO's stage 3; replicas all-reduce the gradients of their shards (HSDP).

    Source: ZeRO, arXiv:1910.02054, section 7.2.2.

    Args:
        shard_bytes: of this rank's shards of all parameters.
        trained_bytes: of those that are trained.
    """
    gathers = shard_bytes * (shards - 1)
    found = {"forward gathers": gathers, "backward gathers": gathers, "gradients": trained_bytes * (shards - 1)}
    return {**found, "gradients of replicas": 2 * one_way(trained_bytes, replicas)} if replicas > 1 else found


def of_tensor_parallelism(tokens: int, hidden_size: int, layers: int, itemsize: int, ranks: int) -> int:
    """Two all-reduces of a layer's output in the forward pass, and two in the backward pass.

    Source: ZeRO, arXiv:1910.02054, section 8, which also counts two of a recomputation.
    """
    return 4 * layers * 2 * one_way(tokens * hidden_size * itemsize, ranks)


def seconds(nbytes: int, link_gbps: float) -> float:
    """The least time for which a link of `link_gbps` gigabits a second sends `nbytes`."""
    if link_gbps <= 0:
        raise ConfigError(f"link_gbps: expected more than 0 gigabits a second; got {link_gbps}")
    return nbytes * 8 / (link_gbps * 1e9)
