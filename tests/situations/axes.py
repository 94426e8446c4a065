"""The axes of situations, and which values go together."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.situations.drawn import Drawn


AXES: dict[str, tuple[str, ...]] = {
    "model": ("llama", "even", "tied", "gpt2", "moe", "bert_classifier"),
    "change": (
        "none",
        "resized",
        "frozen",
        "head",
        "buffer",
        "own_buffer",
        "shared_layer",
        "lora",
        "lora_resized",
        "lora_modules_to_save",
        "lora_frozen_head",
        "lora_edited_base",
        "lora_merged_before",
        "lora_two_adapters",
        "lora_buffer",
        "lora_dora",
        "lora_ia3",
        "lora_vera",
        "lora_prompt",
        "fp32_head",
        "extra_state",
    ),
    "home": (
        "zero3",
        "zero3_offload",
        "zero3_sub_groups",
        "zero3_nvme",
        "zero0",
        "zero1",
        "zero2",
        "zero2_offload",
        "fsdp2",
        "fsdp2_at_load",
        "tp_at_load",
        "replicas",
        "autotp0",
        "autotp1",
        "autotp2",
        "mpu0",
        "mpu1",
        "mpu2",
        "pipeline0",
        "pipeline1",
        "autoep3",
    ),
    "precision": ("fp32", "bf16"),
    "optimizer": (
        "adamw",
        "sgd",
        "momentum",
        "amsgrad",
        "adagrad",
        "rprop",
        "adafactor",
        "none_entry",
        "own_state_dict",
        "odd_entries",
        "dtype_entry",
        "late_entries",
        "group_counter",
        "global_entry",
        "other_dtype",
        "bnb_adamw_32bit",
        "bnb_paged_adamw_32bit",
        "bnb_adamw_8bit",
        "bnb_lion_8bit",
    ),
    "groups": ("one", "two", "own_keys"),
    "scheduler": ("none", "lambda"),
    "accumulation": ("1", "2"),
    "wrapper": ("engine", "accelerate", "trainer", "loop"),
    "saver": ("theirs", "ours", "ours_async"),
    "weights": (
        "none",
        "save_pretrained",
        "ours",
        "ours_shards",
        "stream",
        "state_dict",
        "state_dict_rank0",
        "torch_save_rank0",
        "save_model",
    ),
    "extra": ("none", "registered"),
    "habit": ("none", "checkpointing", "new_rate", "dropout"),
    "follows": ("resume", "resume_1", "resume_4", "same_process", "saved_twice"),
}
"""The values of each axis, simplest first."""


@dataclass(frozen=True)
class Situation(Drawn):
    """One training: a value of each axis of :data:`AXES`."""

    model: str = "llama"
    change: str = "none"
    home: str = "zero3"
    precision: str = "fp32"
    optimizer: str = "adamw"
    groups: str = "one"
    scheduler: str = "none"
    accumulation: str = "1"
    wrapper: str = "engine"
    saver: str = "theirs"
    weights: str = "none"
    extra: str = "none"
    habit: str = "none"
    follows: str = "resume"

    AXES = AXES
    NAMED = "home"

    @classmethod
    def choice(cls, source: random.Random, name: str) -> str:
        """About half of the axes have the simplest value, so that failures show."""
        free = name in ("model", "change", "home", "optimizer", "wrapper", "saver", "follows", "weights")
        return AXES[name][0] if not free and source.random() < 0.5 else source.choice(AXES[name])

    def contradiction(self) -> str | None:
        return contradiction(self)

    @property
    def stage(self) -> int | None:
        """The stage of ZeRO, if DeepSpeed trains."""
        return next((int(digit) for digit in self.home if digit in "0123"), None) if self.by_deepspeed else None

    @property
    def by_deepspeed(self) -> bool:
        return self.home.startswith(("zero", "autotp", "mpu", "pipeline", "autoep"))

    @property
    def has_parts(self) -> bool:
        """Whether ranks hold parts of layers, and make each step together."""
        return self.home.startswith(("autotp", "mpu", "tp", "pipeline"))

    @property
    def by_fsdp(self) -> bool:
        return self.home.startswith("fsdp2")

    @property
    def adapts(self) -> bool:
        return self.change.startswith("lora")

    @property
    def world_size(self) -> int:
        return 2

    @property
    def resumed_world_size(self) -> int:
        return {"resume_1": 1, "resume_4": 4}.get(self.follows, self.world_size)

    @property
    def is_ours(self) -> bool:
        """Whether our own functions are called where there is a stock one, too."""
        return self.saver != "theirs"


def contradiction(situation: Situation) -> str | None:
    """Why a situation cannot be, or why stock does not have it."""
    s = situation
    wrappers = {"fsdp2": ("accelerate", "trainer", "loop"), "replicas": ("loop",)}
    wrappers |= dict.fromkeys(("mpu0", "mpu1", "mpu2", "pipeline0", "pipeline1", "autoep3"), ("engine",))
    wrappers |= dict.fromkeys(("fsdp2_at_load", "tp_at_load"), ("loop",))
    rules = {
        "this home has other wrappers": s.wrapper not in wrappers.get(s.home, ("engine", "accelerate", "trainer")),
        "a loop of one's own has no saver of others": s.wrapper == "loop" and s.saver == "theirs",
        "the Trainer saves by itself": s.wrapper == "trainer" and (s.is_ours or s.extra != "none"),
        "a loop of one's own registers nothing": s.wrapper == "loop" and s.extra != "none",
        "the Trainer makes groups and schedules": s.wrapper == "trainer"
        and (s.groups != "one" or s.scheduler != "none"),
        "the Trainer multiplies losses by the number of ranks, also those that no tokens divide": s.wrapper
        == "trainer"
        and (s.change in ("head", "lora_frozen_head") or s.model == "bert_classifier")
        and s.resumed_world_size != s.world_size,
        "the Trainer loads into new processes": s.wrapper == "trainer"
        and s.follows in ("same_process", "saved_twice"),
        "DeepSpeed counts the steps of accumulation itself": s.accumulation != "1" and s.wrapper == "loop",
        "layers of plain models are cut": s.has_parts
        and (s.change not in ("none", "frozen") or s.model not in ("llama", "even", "tied")),
        "parts want all their ranks": s.has_parts
        and s.follows in (("resume_4",) if s.home == "tp_at_load" else ("resume_1", "resume_4")),
        "transformers leaves a new head that it shards as the memory was": s.home == "fsdp2_at_load"
        and s.model == "bert_classifier",
        "with cpu_ram_efficient_loading, which stock's arm lacks, what follows a new head differs between ranks": (
            s.home == "fsdp2"
            and s.wrapper == "loop"
            and s.model == "bert_classifier"
            and s.change not in ("none", "frozen", "buffer")
        ),
        "transformers shards plain models": s.home == "fsdp2_at_load" and s.change not in ("none", "frozen"),
        "stock has no whole model of these": s.home.startswith(("mpu", "pipeline", "autoep")) and s.weights != "none",
        "stages are made of plain layers": s.home.startswith("pipeline") and s.model == "tied",
        "experts want a model that has some, and two ranks": s.home == "autoep3"
        and (s.model != "moe" or s.follows == "resume_1"),
        "random numbers belong to a number of ranks, and are restored by who says so": s.habit == "dropout"
        and (
            s.resumed_world_size != s.world_size
            or s.has_parts
            or s.follows == "saved_twice"
            or (s.saver == "theirs" and s.wrapper == "engine")
        ),
        "what is each rank's own belongs to a number of ranks": s.change == "own_buffer"
        and (s.resumed_world_size != s.world_size or s.has_parts),
        "a schedule or the Trainer sets the rate": s.habit == "new_rate"
        and (s.scheduler != "none" or s.wrapper == "trainer"),
        "stages have no model to enable checkpointing of": s.habit == "checkpointing"
        and s.home.startswith("pipeline"),
        "blocks of 8 bits belong to a number of ranks": s.optimizer.endswith("8bit")
        and s.resumed_world_size != s.world_size,
        "bitsandbytes does not step DTensors": s.optimizer.startswith("bnb") and (s.by_fsdp or s.home == "tp_at_load"),
        "weights are saved by a wrapper that can": not _can_save_weights(s),
        "adapters are saved in PEFT's way": s.adapts and s.weights != "none",
        "layers share in these; stock saves no such weights": s.change == "shared_layer"
        and (s.model not in ("llama", "even", "tied") or s.weights != "none" or s.by_fsdp),
        "safetensors hold tensors only": s.change == "extra_state" and s.weights != "none",
        "DeepSpeed and FSDP2 want one dtype": s.change == "fp32_head"
        and (s.home != "replicas" or s.precision != "bf16"),
        "embeddings of a classifier stay": s.model == "bert_classifier" and "resized" in s.change,
        "DeepSpeed has no accumulating stage 2 of offload at stage 0": s.home == "zero0" and s.precision == "bf16",
        "torch's distributed checkpoints have no dtypes": s.optimizer == "dtype_entry" and s.by_fsdp,
        "Rprop has no bf16": s.optimizer == "rprop" and s.precision == "bf16",
        **_not_of_stock(s),
    }
    return next((reason for reason, holds in rules.items() if holds), None)


def _not_of_stock(s: Situation) -> dict[str, bool]:
    """What stock fails to train or save, each as it was found: there is nothing to compare with."""
    by_accelerate_of_fsdp = s.home == "fsdp2" and s.wrapper != "loop"
    other_ranks = s.resumed_world_size != s.world_size
    return {
        "DeepSpeed makes an Adagrad anew, with one group": s.optimizer == "adagrad"
        and s.by_deepspeed
        and (s.groups != "one" or s.wrapper == "trainer"),
        "Adagrad makes its state at once, of what is cut later": s.optimizer == "adagrad"
        and (by_accelerate_of_fsdp or s.home.startswith("autotp")),
        "torch's distributed checkpoints know entries of parameters only": s.optimizer == "global_entry"
        and by_accelerate_of_fsdp,
        "Adafactor and Rprop do not step DTensors": s.optimizer in ("adafactor", "rprop")
        and (s.by_fsdp or s.home == "tp_at_load"),
        "Adafactor clips by the norm of a partition, which is another at another number of ranks": s.optimizer
        == "adafactor"
        and s.by_deepspeed
        and other_ranks,
        "below stage 3 DeepSpeed gives all ranks the buffers of rank 0": s.change == "own_buffer"
        and s.saver == "theirs"
        and s.stage in (0, 1, 2),
        "DeepSpeed finds no experts under PEFT's names": s.home == "autoep3" and s.adapts,
        "PEFT has no layers for these by default": s.model == "moe" and s.change in ("lora_vera", "lora_ia3"),
        "stage 3 wants one dtype of what is trained, and PEFT makes adapters alone fp32": s.stage == 3
        and s.change == "lora_modules_to_save"
        and s.precision == "bf16",
        "accelerate shards a module of BERT's twice": s.model == "bert_classifier" and by_accelerate_of_fsdp,
        "transformers trains a tied head of stale values, other than a plain model's": s.home == "fsdp2_at_load"
        and s.model in ("tied", "gpt2"),
        "torch's load makes a generator's name of a string, in DeepSpeed's format that is taken for extra states": (
            s.optimizer == "odd_entries" and s.change == "extra_state" and s.by_deepspeed
        ),
    }


def _can_save_weights(s: Situation) -> bool:
    by_rank0 = s.home in ("zero0", "zero1", "zero2", "zero2_offload")
    allowed = {
        "none": True,
        "ours": True,
        "ours_shards": True,
        "stream": True,
        "save_pretrained": s.wrapper != "trainer" and (by_rank0 or s.home == "replicas"),
        "state_dict": s.wrapper == "accelerate",
        "state_dict_rank0": s.wrapper == "accelerate" and by_rank0,
        "torch_save_rank0": s.wrapper == "accelerate" and by_rank0,
        "save_model": s.wrapper in ("accelerate", "trainer"),
    }
    return allowed[s.weights] and not (s.wrapper == "trainer" and s.weights in ("ours", "ours_shards", "stream"))
