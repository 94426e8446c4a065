"""What engines keep where no training state looks for it: a place in the data, moments in other optimizers."""

from __future__ import annotations

from typing import Any

from ...errors import UnsupportedError


def refuse_kept_elsewhere(engine: Any) -> None:
    """Raise an UnsupportedError for an engine that keeps more than a training state has a place for."""
    if why := _moments_elsewhere(engine.optimizer) or _place_in_data(engine):
        raise UnsupportedError(why)


def _place_in_data(engine: Any) -> str:
    """Of DeepSpeed's own data pipeline."""
    samples = engine.training_dataloader is not None and engine.curriculum_learning_enabled()
    if not (samples or engine.random_ltd_enabled()):
        return ""
    what = "samples by curriculum learning" if samples else "drops tokens by random-LTD"
    return (
        f"The engine {what} (data_efficiency), and a training state has no place for where that is. Use DeepSpeed's "
        "checkpoints."
    )


def _moments_elsewhere(wrapper: Any) -> str:
    """Of ZeRO-3's sub-groups that the engine's own optimizer does not step."""
    if hasattr(wrapper, "superoffload_cpu_optimizer"):
        return (
            "offload_optimizer.super_offload: a process of its own keeps the moments, which nothing reaches; "
            "DeepSpeed's checkpoints lack them too. Save the weights (save_pretrained), or train without it."
        )
    on_device = [place for place in getattr(wrapper, "subgroup_to_device", {}).values() if place != "cpu"]
    if on_device and hasattr(wrapper, "backup_optimizer"):
        return (
            f"offload_optimizer.ratio below 1: a second optimizer keeps the moments of {len(on_device)} sub-group(s) "
            "that stay on the device; DeepSpeed's checkpoints lack these too. Save the weights (save_pretrained), or "
            "train with a ratio of 1."
        )
    return ""
