"""What trains the model of a situation: an engine of DeepSpeed's, accelerate, or a loop of one's own.

`arm` says whether that happens inside `streaming()` ("ours") or without it ("stock").
"""

import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.integrations import HfDeepSpeedConfig

import hf_zero_stream
from tests.situations.axes import Situation
from tests.situations.model_parallel import cut_in_halves, in_stages
from tests.situations.models import inputs_of, load
from tests.situations.optimizers import optimizer_of
from tests.support.autoep import let_autoep_run
from tests.support.fsdp2 import announce, force_fsdp_on_cpu


def ds_config(situation: Situation, folder: Path) -> dict[str, Any]:
    """The DeepSpeed config of a situation's home; swap files lie in `folder`."""
    zero: dict[str, Any] = {"stage": situation.stage}
    if situation.home.endswith("offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if situation.home == "zero3_nvme":
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(folder / "swap"), "buffer_count": 8}
    if situation.home == "zero3_sub_groups":
        zero |= {"sub_group_size": 700, "stage3_param_persistence_threshold": 0}
    if situation.stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": int(situation.accumulation),
        "zero_optimization": zero,
        "bf16": {"enabled": situation.precision == "bf16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if situation.home == "autoep3":
        config["expert_parallel"] = {"enabled": True, "autoep_size": 2, "use_grouped_mm": False}
    if situation.home.startswith("autotp"):
        zero["gather_16bit_weights_on_model_save"] = True
        config["tensor_parallel"] = {"autotp_size": 2}
    return config


def announce_home(situation: Situation, arm: str) -> None:
    """Set what a launcher sets, and begin the process group."""
    if situation.home == "fsdp2":
        # Stock's ranks above 0 have no values of a new head with it.
        announce(cpu_ram_efficient_loading=arm == "ours", state_dict_type="SHARDED_STATE_DICT")
        force_fsdp_on_cpu()
    elif not situation.by_deepspeed:
        PartialState(backend="gloo", cpu=True)
    else:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")


class Session:
    """A training, in the way of an engine.

    Attributes:
        optimizer: what steps; around the user's own, or in its place (DeepSpeed makes an Adagrad anew).
    """

    optimizer: Any

    def __init__(self, situation: Situation, arm: str, checkpoints: Path) -> None:
        self.situation, self.arm = situation, arm
        self.pending: Any = None
        self.prepare(checkpoints)

    def prepare(self, checkpoints: Path) -> None:
        config = ds_config(self.situation, checkpoints)
        self._config = HfDeepSpeedConfig(config)  # transformers keeps a weak reference
        self.model = load(self.situation, checkpoints)
        mpu = cut_in_halves(self.model) if self.situation.home.startswith("mpu") else None
        if self.situation.home.startswith("pipeline"):
            self.model = in_stages(self.model)
        if self.situation.home == "autoep3":
            let_autoep_run()
        self.make_optimizer()
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, lr_scheduler=self.scheduler, config=config, mpu=mpu
        )
        self.model = self.engine.module

    def make_optimizer(self) -> None:
        params = [param for param in self.model.parameters() if param.requires_grad]
        sized = [(getattr(param, "ds_shape", param.shape), param) for param in params]
        groups: list[dict[str, Any]] = [{"params": params}]
        if self.situation.groups != "one":
            large = [param for shape, param in sized if len(shape) > 1]
            small = [param for shape, param in sized if len(shape) <= 1]
            groups = [{"params": large, "lr": 2e-3}, {"params": small}] if small else [{"params": large, "lr": 2e-3}]
        if self.situation.groups == "own_keys":
            groups[0] |= {"name": "large", "flag": None, "factors": (1, 2.5)}
        create, arguments = optimizer_of(self.situation.optimizer)
        self.optimizer = create(groups, **arguments)
        self.scheduler: Any = None
        if self.situation.scheduler == "lambda":
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def batches(self, step: int) -> list[dict[str, torch.Tensor]]:
        """The same for all ranks where their number changes, and where they make one step together."""
        other_ranks = self.situation.resumed_world_size != self.situation.world_size
        same = other_ranks or self.situation.has_parts
        rank = 0 if same else dist.get_rank()
        return [inputs_of(self.situation, step, 2 * rank + part) for part in range(int(self.situation.accumulation))]

    def step(self, step: int) -> float:
        self.engine.train()
        if self.situation.home.startswith("pipeline"):
            batches = ((batch["input_ids"], batch["labels"]) for batch in self.batches(step))
            return float(self.engine.train_batch(batches))
        total = 0.0
        for batch in self.batches(step):
            loss = self.engine(**batch).loss
            self.engine.backward(loss)
            self.engine.step()
            total += float(loss.detach())
        return total

    @property
    def extra(self) -> dict[str, Any]:
        return {"position": 7, "mean": torch.tensor([1.5, 2.5])} if self.situation.extra == "registered" else {}

    def save(self, folder: Path) -> None:
        if self.situation.is_ours and self.arm == "ours":
            self.save_ours(folder)
        else:
            self.engine.save_checkpoint(str(folder), client_state=dict(self.extra))

    def save_ours(self, folder: Path, **trains: Any) -> None:
        """By ours; if asynchronously, the next step changes what is being saved."""
        is_async = self.situation.saver == "ours_async"
        data = self.extra or None
        self.pending = hf_zero_stream.save_state(self.trained, folder, data=data, asynchronous=is_async, **trains)

    def finish(self) -> None:
        """Wait for what is saved in the background."""
        if self.pending is not None and self.situation.saver == "ours_async":
            self.pending.wait()

    def load(self, folder: Path) -> Any:
        """Returns what came back of `extra`."""
        if self.situation.is_ours and self.arm == "ours":
            data = hf_zero_stream.load_state(self.engine, folder).data or {}
        else:
            place, data = self.engine.load_checkpoint(str(folder))
            assert place is not None, "DeepSpeed has loaded nothing"
        return _comparable({name: data.get(name) for name in self.extra})

    @property
    def trained(self) -> Any:
        """What our functions are given."""
        return self.engine

    def save_weights(self, folder: Path, how: str) -> dict[str, Any] | None:
        """Save the weights; returns them where they lie in no files."""
        if how in ("ours", "ours_shards") and self.arm == "ours":
            size = {"max_shard_size": "20KB"} if how == "ours_shards" else {}
            hf_zero_stream.save_pretrained(self.trained, folder, **size)
        elif how == "stream" and self.arm == "ours":
            buckets = hf_zero_stream.weight_stream(self.trained, to="rank0")
            return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}
        elif how in ("ours", "ours_shards", "stream"):
            values = self.whole_state_dict()
            if dist.get_rank() == 0:  # the layout of files, as transformers makes it
                self.model.save_pretrained(folder, state_dict=values)
        else:
            self.model.save_pretrained(folder)
        return None

    def whole_state_dict(self) -> dict[str, Any] | None:
        """Stock's."""
        if self.situation.home.startswith("autotp") or self.situation.stage == 3:
            found: dict[str, Any] | None = self.engine._consolidated_16bit_state_dict()
            return found
        return dict(self.model.state_dict())


class Registered:
    """What a script registers for its checkpoints."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = values


class Accelerated(Session):
    """accelerate, with DeepSpeed or FSDP2."""

    def prepare(self, checkpoints: Path) -> None:
        arguments: dict[str, Any] = {"gradient_accumulation_steps": int(self.situation.accumulation)}
        if self.situation.precision == "bf16":
            arguments["mixed_precision"] = "bf16"
        if self.situation.by_deepspeed:
            arguments["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=ds_config(self.situation, checkpoints))
        self.accelerator = Accelerator(**arguments)
        self.model = load(self.situation, checkpoints)
        self.make_optimizer()
        given = [self.model, self.optimizer, *([self.scheduler] if self.scheduler else [])]
        self.engine, self.wrapped, *scheduler = self.accelerator.prepare(*given)
        self.prepared_scheduler = scheduler[0] if scheduler else None
        self.optimizer = self.engine.optimizer if self.situation.by_deepspeed else self.wrapped.optimizer
        self.model = self.accelerator.unwrap_model(self.engine)
        self.registered = Registered()
        if self.situation.extra == "registered":
            self.accelerator.register_for_checkpointing(self.registered)

    def step(self, step: int) -> float:
        self.engine.train()
        total = 0.0
        for batch in self.batches(step):
            with self.accelerator.accumulate(self.engine):
                loss = self.engine(**batch).loss
                self.accelerator.backward(loss)
                self.wrapped.step()
                if self.prepared_scheduler:
                    self.prepared_scheduler.step()
                self.wrapped.zero_grad()
            total += float(loss.detach())
        return total

    def save(self, folder: Path) -> None:
        self.registered.values = self.extra
        if self.situation.is_ours and self.arm == "ours":
            self.save_ours(folder, **self._trains())
        else:
            self.accelerator.save_state(str(folder))

    def load(self, folder: Path) -> Any:
        if self.situation.is_ours and self.arm == "ours":
            found = hf_zero_stream.load_state(self.trained, folder, **self._trains()).data or {}
        else:
            self.accelerator.load_state(str(folder))
            found = self.registered.values
        return _comparable({name: found.get(name) for name in self.extra})

    def _trains(self) -> dict[str, Any]:
        return {} if self.situation.by_deepspeed else {"optimizer": self.optimizer, "scheduler": self.scheduler}

    def save_weights(self, folder: Path, how: str) -> dict[str, Any] | None:
        if how == "save_model":
            self.accelerator.save_model(self.engine, str(folder))
        elif how.endswith("rank0") and not self.accelerator.is_main_process:
            pass
        elif how in ("state_dict", "state_dict_rank0"):
            values = self.accelerator.get_state_dict(self.engine)
            self.model.save_pretrained(
                str(folder), state_dict=values, is_main_process=self.accelerator.is_main_process
            )
        elif how == "torch_save_rank0":
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.accelerator.get_state_dict(self.engine), folder / "model.pt")
        else:
            return super().save_weights(folder, how)
        return None

    def whole_state_dict(self) -> dict[str, Any] | None:
        if self.situation.home == "fsdp2":
            return dict(self.accelerator.get_state_dict(self.engine))
        return super().whole_state_dict()


class OwnLoop(Session):
    """A loop of one's own, around what `fully_shard` or a load has sharded, or replicas. Stock's arm saves nothing."""

    def prepare(self, checkpoints: Path) -> None:
        self.model = load(self.situation, checkpoints)
        if self.situation.home == "fsdp2":
            bare = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
            layers = next(module for module in bare.modules() if isinstance(module, torch.nn.ModuleList))
            for layer in layers:
                fully_shard(layer)
            fully_shard(self.model)
        self.make_optimizer()

    def step(self, step: int) -> float:
        self.model.train()
        total = 0.0
        for batch in self.batches(step):
            loss = self.model(**batch).loss
            loss.backward()
            total += float(loss.detach())
        if self.situation.home == "replicas" and dist.get_world_size() > 1:
            for param in self.model.parameters():
                if param.grad is not None:
                    dist.all_reduce(param.grad)
                    param.grad /= dist.get_world_size()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler:
            self.scheduler.step()
        return total

    @property
    def trained(self) -> Any:
        return self.model

    def save(self, folder: Path) -> None:
        if self.arm == "ours":
            self.save_ours(folder, optimizer=self.optimizer, scheduler=self.scheduler)

    def load(self, folder: Path) -> Any:
        hf_zero_stream.load_state(self.model, folder, optimizer=self.optimizer, scheduler=self.scheduler)
        return {}

    def save_weights(self, folder: Path, how: str) -> dict[str, Any] | None:
        is_stock = self.arm == "stock" and self.situation.home.endswith("at_load")
        return super().save_weights(folder, "save_pretrained" if is_stock else how)  # all ranks write there

    def whole_state_dict(self) -> dict[str, Any] | None:
        state = self.model.state_dict()
        return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def _comparable(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


SESSIONS = {"engine": Session, "accelerate": Accelerated, "loop": OwnLoop}
