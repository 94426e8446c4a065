"""Runs the optimizers that people train with: what is saved, in whose format, and what goes on from it.

``python -m tests.state.optimizers [name ...]`` makes the table of docs/state.md: each row is trained, saved, resumed
in new processes by as many ranks and by others, and its losses are compared with those of training that never stopped
and with those of DeepSpeed's own resume. What we refuse under FSDP2 is saved and resumed by accelerate.
"""

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor

import hf_zero_stream
from hf_zero_stream.errors import UnsupportedError
from tests.support.cluster import RankFailure, RankTimeout, run_ranks
from tests.support.fsdp2 import announce, load, make_accelerator
from tests.support.messages import outcome_of
from tests.support.parity import ds_config
from tests.support.training_state import accelerated_steps
from tests.support.trainings import Training
from tests.support.zoo import VOCAB, make_checkpoint


Make = Callable[[Any], torch.optim.Optimizer]
"""Makes an optimizer of a model's parameters."""

ZERO = {"ZeRO-3": 3, "ZeRO-2": 2, "ZeRO-1": 1, "DeepSpeed, stage 0": 0}
FSDP2, ONE = "FSDP2", "one process"
TIMEOUT = 400
"""Seconds for all rows on one number of ranks."""

HOMES = (FSDP2, "ZeRO-3", "ZeRO-2")


def parameters_of(model: Any) -> list[Any]:
    return [param for param in model.parameters() if param.requires_grad]


def of_module(module: str, name: str, **options: Any) -> Make:
    """Makes an optimizer of this class, whose module is imported when it is needed."""

    def make(model: Any) -> torch.optim.Optimizer:
        kind = getattr(importlib.import_module(module), name)
        return kind(parameters_of(model), **{"lr": 1e-3, **options})

    return make


def matrices_apart(module: str, name: str, of_matrices: dict[str, Any], **options: Any) -> Make:
    """Makes one that treats matrices in another way: a group for them, and one for the rest."""

    def make(model: Any) -> torch.optim.Optimizer:
        kind = getattr(importlib.import_module(module), name)
        shapes = {id(param): len(getattr(param, "ds_shape", param.shape)) for param in parameters_of(model)}
        matrices = [param for param in parameters_of(model) if shapes[id(param)] == 2]
        others = [param for param in parameters_of(model) if shapes[id(param)] != 2]
        return kind([{"params": others}, {"params": matrices, **of_matrices}], **{"lr": 1e-3, **options})

    return make


def adam_mini(model: Any) -> torch.optim.Optimizer:
    kind = importlib.import_module("adam_mini").Adam_mini
    config = model.config
    heads = {"dim": config.hidden_size, "n_heads": config.num_attention_heads}
    return kind(model.named_parameters(), lr=1e-3, **heads, n_kv_heads=config.num_key_value_heads)


def of_deepspeed(module: str, name: str) -> Make:
    """Makes one that goes by addresses in memory, and would write beside those of DTensors."""
    make = of_module(module, name)

    def made(model: Any) -> torch.optim.Optimizer:
        if any(isinstance(param, DTensor) for param in model.parameters()):
            raise UnsupportedError("it belongs to DeepSpeed's engines")
        return make(model)

    return made


def muon_of_torch(model: Any) -> torch.optim.Optimizer:
    """Trains matrices alone."""
    for param in model.parameters():
        param.requires_grad_(len(getattr(param, "ds_shape", param.shape)) == 2)
    return torch.optim.Muon(parameters_of(model), lr=1e-3)


def lora_plus(model: Any) -> torch.optim.Optimizer:
    """Two rates, as PEFT's ``create_loraplus_optimizer`` gives matrices B and the rest."""
    params = parameters_of(model)
    return torch.optim.AdamW([{"params": params[::2], "lr": 1e-3}, {"params": params[1::2], "lr": 16e-3}])


_galore = {"rank": 4, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
_apollo = {"rank": 4, "proj": "random", "scale_type": "channel", "scale": 1, "update_proj_gap": 2, "proj_type": "std"}

OPTIMIZERS: dict[str, Make | str] = {
    **{name: of_module("torch.optim", name) for name in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad")},
    **{name: of_module("torch.optim", name) for name in ("Adadelta", "RMSprop", "Rprop", "ASGD", "SGD")},
    "AdamW, amsgrad": of_module("torch.optim", "AdamW", amsgrad=True),
    "SGD, momentum": of_module("torch.optim", "SGD", momentum=0.9),
    "RMSprop, centered": of_module("torch.optim", "RMSprop", momentum=0.9, centered=True),
    "Adafactor of torch": of_module("torch.optim", "Adafactor"),
    "Muon of torch": muon_of_torch,
    "LoRA+ (AdamW)": lora_plus,
    "FusedAdam": of_deepspeed("deepspeed.ops.adam", "FusedAdam"),
    "DeepSpeedCPUAdam": of_deepspeed("deepspeed.ops.adam", "DeepSpeedCPUAdam"),
    "DeepSpeedCPULion": of_deepspeed("deepspeed.ops.lion", "DeepSpeedCPULion"),
    "DeepSpeedCPUAdagrad": of_deepspeed("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad"),
    "Muon of DeepSpeed": "Muon",
    "Adafactor": of_module("transformers.optimization", "Adafactor", relative_step=False, scale_parameter=False),
    **{
        f"bitsandbytes {name}": of_module("bitsandbytes.optim", name)
        for name in ("AdamW32bit", "PagedAdamW32bit", "Lion32bit", "AdEMAMix32bit", "RMSprop32bit", "Adagrad32bit")
    },
    **{
        f"bitsandbytes {name}": of_module("bitsandbytes.optim", name, min_8bit_size=16)
        for name in ("AdamW8bit", "PagedAdamW8bit", "Lion8bit", "AdEMAMix8bit")
    },
    "torch-optimi StableAdamW": of_module("optimi", "StableAdamW"),
    "torch-optimi Lion": of_module("optimi", "Lion"),
    "torch-optimi Adan": of_module("optimi", "Adan"),
    "grokadamw": of_module("grokadamw", "GrokAdamW"),
    "schedulefree AdamW": of_module("schedulefree", "AdamWScheduleFree"),
    "schedulefree SGD": of_module("schedulefree", "SGDScheduleFree"),
    "torchao AdamW8bit": of_module("torchao.optim", "AdamW8bit", block_size=2),
    "torchao AdamW4bit": of_module("torchao.optim", "AdamW4bit", block_size=2),
    "torchao AdamWFp8": of_module("torchao.optim", "AdamWFp8", block_size=2),
    "GaLore AdamW": matrices_apart("galore_torch", "GaLoreAdamW", _galore),
    "Apollo AdamW": matrices_apart("apollo_torch", "APOLLOAdamW", _apollo),
    "Adam-mini": adam_mini,
    "AdaLomo": lambda model: importlib.import_module("lomo_optim").AdaLomo(model, lr=1e-3),
    "Prodigy": of_module("prodigyopt", "Prodigy", lr=1.0),
    **{
        f"pytorch_optimizer {name}": of_module("pytorch_optimizer", name)
        for name in ("SOAP", "Shampoo", "Lion", "CAME", "StableAdamW", "Muon", "Adan", "Prodigy")
    },
}
"""By its name: how it is made, or its type in DeepSpeed's config."""


# ----------------------------------------------------------------------------------------------------------- trainings


@dataclass
class Trained(Training):
    """A model in a home, and what trains it."""

    home: str = ""

    @property
    def inner(self) -> Any:
        """The optimizer itself."""
        wrapper = self.optimizer or self.trains.optimizer
        return getattr(wrapper, "optimizer", wrapper)


def training_in(home: str, folder: Path, make: Make | str, dtype: torch.dtype = torch.float32) -> Trained:
    """A new training of the model in `folder`."""
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, folder, dtype=dtype)
    if home in ZERO:
        import deepspeed

        config: dict[str, Any] = {**ds_config(dtype), "zero_optimization": {"stage": ZERO[home]}}
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        config.pop("optimizer", None)
        if isinstance(make, str):
            config["optimizer"] = {"type": make, "params": {"lr": 1e-3}}
            config["zero_optimization"]["reduce_scatter"] = False
        with hf_zero_stream.streaming():
            model = load(ds_config=config)
        optimizer = None if isinstance(make, str) else make(model)
        params = parameters_of(model) if optimizer is None else None
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=params, config=config)
        made = Trained(engine, home=home)
    else:
        if isinstance(make, str):
            raise UnsupportedError("it belongs to DeepSpeed's engines")
        sizes: dict[str, Any] = {}
        if home == FSDP2:
            from transformers.distributed import DistributedConfig

            sizes["distributed_config"] = DistributedConfig(fsdp_size=torch.distributed.get_world_size())
        with hf_zero_stream.streaming():
            model = load(**sizes)
        made = Trained(model, make(model), home=home)
    if hasattr(made.inner, "train"):  # schedule-free
        made.inner.train()
    return made


# ----------------------------------------------------------------------------------------------------------- the table


def _place(target: Path, name: str, home: str) -> Path:
    return target / f"{name} {home}".replace(" ", "_").replace(",", "")


def save_rows(folder: Path, target: Path, rows: Sequence[tuple[str, str]]) -> list[Any]:
    """Losses of two more steps after the save, and how it was refused; or an error of the optimizer's own."""

    def row(name: str, home: str) -> Any:
        place = _place(target, name, home)
        training = training_in(home, folder, OPTIMIZERS[name])
        training.train(range(3))
        refused = outcome_of(lambda: training.save(place / "ours"))
        stock = outcome_of(lambda: training.trains.save_checkpoint(str(place / "stock"))) if home in ZERO else None
        left = None
        if isinstance(refused, str) and home in ZERO:
            with hf_zero_stream.streaming():
                left = outcome_of(lambda: training.trains.save_checkpoint(str(place / "left")))
        return {
            "refused": refused if isinstance(refused, str) else "",
            "stock": stock,
            "left": left if isinstance(left, str) else "",
            "losses": training.train((3, 4)),
        }

    return [outcome_of(partial(row, *each)) for each in rows]


def resume_rows(folder: Path, target: Path, rows: Sequence[tuple[str, str]], again: str) -> list[Any]:
    """Losses after the resume, and at as many ranks after DeepSpeed's; what was loaded is saved `again` first."""

    def row(name: str, home: str, whose: str) -> Any:
        place = _place(target, name, home)
        training = training_in(home, folder, OPTIMIZERS[name])
        if whose == "stock":
            training.trains.load_checkpoint(str(place / "stock"))
        else:
            training.load(place / "ours")
            training.save(place / again)
        return training.train((3, 4))

    def whose(home: str) -> tuple[str, ...]:
        return ("ours", "stock") if again == "same" and home in ZERO else ("ours",)

    return [{each: outcome_of(partial(row, *of_row, each)) for each in whose(of_row[1])} for of_row in rows]


def by_accelerate(folder: Path, place: Path, name: str, kind: str, resumes: bool) -> Any:
    """Losses of two steps under accelerate's FSDP2, after a save or a resume; or an error."""
    # One rank's compiled code is for the shapes of its own shards (torchao), and the cache gives it to another one.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place / f"compiled {torch.distributed.get_rank()}")

    def row() -> list[float]:
        announce(cpu_ram_efficient_loading=True, state_dict_type=kind)
        accelerator = make_accelerator()
        with hf_zero_stream.streaming():
            model = load("llama", folder)
            make = OPTIMIZERS[name]
            assert not isinstance(make, str)
            model, optimizer = accelerator.prepare(model, make(model))
            if resumes:
                accelerator.load_state(str(place / kind))
            else:
                accelerated_steps(accelerator, model, optimizer, range(3))
                accelerator.save_state(str(place / kind))
            return accelerated_steps(accelerator, model, optimizer, (3, 4))

    return outcome_of(row)


def run_by_accelerate(folder: Path, place: Path, name: str, ranks: int) -> str:
    """What becomes of its own format, of each kind."""

    def said(kind: str) -> str:
        try:
            losses = run_ranks(ranks, by_accelerate, folder, place, name, kind, False, timeout=TIMEOUT)[0]
            if isinstance(losses, str):
                return f"no save, {losses[:400]}"
            resumed = run_ranks(ranks, by_accelerate, folder, place, name, kind, True, timeout=TIMEOUT)[0]
        except (RankFailure, RankTimeout) as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
        return "goes on" if resumed == losses else f"{str(resumed)[:200]} for {losses}"

    return "; ".join(f"{kind}: {said(kind)}" for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"))


def small_checkpoint(folder: Path) -> Path:
    """For an optimizer of which the state is as large as the square of what a rank trains."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=4, intermediate_size=6, num_hidden_layers=1, num_attention_heads=1
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run(names: Sequence[str], homes: Sequence[str], target: Path, ranks: int = 2, others: int = 3) -> dict[Any, Any]:
    """By name and home: what :func:`save_rows` and :func:`resume_rows` found, and what came back as something else."""
    from tests.support.training_state import different_states

    is_square = any("Shampoo" in name for name in names)
    folder = small_checkpoint(target / "small") if is_square else make_checkpoint("llama", target / "checkpoint")
    rows = [(name, home) for name in names for home in homes]
    saved = run_ranks(ranks, save_rows, folder, target, rows, timeout=TIMEOUT)[0]
    found: dict[Any, Any] = dict(zip(rows, saved, strict=True))
    good = [row for row in rows if isinstance(found[row], dict)]
    for again, count in (("same", ranks), ("others", others)):
        mine = [row for row in good if again == "same" or not found[row]["refused"]]
        for row, result in zip(
            mine, run_ranks(count, resume_rows, folder, target, mine, again, timeout=TIMEOUT)[0], strict=True
        ):
            found[row][again] = result
            place = _place(target, *row)
            if not found[row]["refused"] and not isinstance(result["ours"], str):
                found[row][f"different, {again}"] = different_states(place / "ours", place / again)
    for name, home in good:
        if home == FSDP2 and found[name, home]["refused"]:
            place = _place(target, name, home)
            found[name, home]["accelerate"] = run_by_accelerate(folder, place, name, ranks)
    return found


def verdict(row: Any) -> str:
    """What the table says of what :func:`run` found."""
    if isinstance(row, str):
        return f"does not train: {row[:160]}"
    same, losses = row["same"], row["losses"]
    stock = same.get("stock") if row["stock"] is True else row["stock"]
    if row["refused"]:
        reason = f"refused ({row['refused'][:200]})"
        if row["stock"] is None:  # no engine's
            return f"{reason}; accelerate's own: {row['accelerate']}"
        if row["left"]:
            return f"{reason}; and an error for DeepSpeed's own: {row['left'][-400:]}"
        return f"{reason}; DeepSpeed's own: {'goes on' if stock == losses else f'{str(stock)[:120]} for {losses}'}"
    faults = [f"{again}: {row[again]['ours']}" for again in ("same", "others") if isinstance(row[again]["ours"], str)]
    in_blocks = [
        fault for fault in faults if fault.startswith("others: ConfigError") and "cannot be cut anew" in fault
    ]
    faults = [fault for fault in faults if fault not in in_blocks]
    faults += [f"{key}: {row[key]}" for key in row if key.startswith("different") and row[key]]
    if same["ours"] != losses and not faults:
        faults.append(f"losses {same['ours']} for {losses}")
    said = "" if stock in (None, losses) else f" (DeepSpeed's own resume: {str(stock)[:120]} for {losses})"
    good = "as many ranks; others are an error" if in_blocks else "any number of ranks"
    return ("FAULT " + "; ".join(faults)[:400] if faults else good) + said


def main() -> None:
    names = sys.argv[1:] or list(OPTIMIZERS)
    with tempfile.TemporaryDirectory() as target:
        for name in names:
            try:
                found = run([name], HOMES, Path(target) / name.replace(" ", "_"))
            except (RankFailure, RankTimeout) as error:
                print(f"{name} | {type(error).__name__}: {str(error)[-600:]}", flush=True)
                continue
            for (_, home), row in found.items():
                print(f"{name} | {home} | {verdict(row)}", flush=True)


if __name__ == "__main__":
    main()
