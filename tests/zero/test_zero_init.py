"""Loads inside a `zero.Init` of the caller's: what Lightning and Fabric wrap around the code that makes a model."""

import sys
from contextlib import ExitStack, nullcontext
from hashlib import sha1
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import hf_zero_stream
from benchmarks.moe_checkpoint import make_moe_checkpoint
from hf_zero_stream import streaming
from hf_zero_stream.holdings.deepspeed.partitions import own_range
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.homes import HPZ, OFFLOAD
from tests.support.parity import ds_config, three_losses, unequal
from tests.support.zoo import ZOO, Checkpoint


BF16 = torch.bfloat16
OF_16_BITS = torch.float16 if get_accelerator().is_fp16_supported() else BF16
"""What DeepSpeed takes without a config: some CPUs have fp16."""


def held(model: nn.Module) -> dict[str, Any]:
    """What this rank holds of each parameter and buffer, and where; not the padding, which stock leaves undefined."""
    found: dict[str, tuple[Any, ...]] = {
        name: (buffer.dtype, _digest(buffer)) for name, buffer in model.named_buffers()
    }
    for name, param in model.named_parameters():
        _, start, stop = own_range(param)
        part: torch.Tensor = param.ds_tensor  # type: ignore[attr-defined]
        digest = _digest(part[: stop - start])
        found[name] = part.dtype, str(part.device), part.is_pinned(), part.numel(), param.requires_grad, digest
    return found


def _digest(tensor: torch.Tensor) -> str:
    return sha1(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


# --------------------------------------------------------------------------------- models that are loaded inside of it


def load_inside(
    how: str, folder: Path, inits: list[dict[str, Any]], known: dict[str, Any] | None, trains_by: dict[str, Any]
) -> dict[str, Any]:
    """Load inside `inits`, the outermost first; transformers finds the config `known`, if there is one."""
    keeps_zero3_on = None if known is None else HfDeepSpeedConfig(known)
    with ExitStack() as stack:
        for init in inits:
            stack.enter_context(deepspeed.zero.Init(**init))
        with streaming() if how == "streamed" else nullcontext():
            model = AutoModelForCausalLM.from_pretrained(folder)
        is_wrapped = hasattr(torch.empty, "__globals__")
    del keeps_zero3_on
    found = held(model)
    engine, *_ = deepspeed.initialize(model=model, config=trains_by, model_parameters=model.parameters())
    return {"held": found, "wrapped": is_wrapped, "losses": three_losses(engine, ZOO["qwen3_moe"].inputs)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inits", "trains_by"),
    [
        ([{"config_dict_or_path": ds_config()}], ds_config()),
        ([{"config_dict_or_path": ds_config(BF16, **OFFLOAD)}], ds_config(BF16, **OFFLOAD)),
        ([{}], ds_config(OF_16_BITS)),
        ([{"remote_device": "cpu", "config_dict_or_path": ds_config()}], ds_config(**OFFLOAD)),
        ([{"config_dict_or_path": ds_config(BF16)}, {"config_dict_or_path": ds_config()}], ds_config(BF16)),
        ([{"config_dict_or_path": ds_config(BF16)}, {"enabled": False}], ds_config(BF16)),
    ],
    ids=["config", "offload", "without_config", "remote_device", "nested", "disabled_inside"],
)
def test_an_open_init_is_zero3(
    cluster: None, zoo_checkpoint: Checkpoint, inits: list[dict[str, Any]], trains_by: dict[str, Any]
) -> None:
    """As stock by a config of transformers' that says the same; if another is there, too, it does not count.

    Stock fails inside of it without a config. With one, it computes rotary embeddings in the dtype of the weights.
    """
    folder = zoo_checkpoint("qwen3_moe", BF16)
    streamed = run_ranks(2, load_inside, "streamed", folder, inits, None, trains_by)
    with_other = run_ranks(2, load_inside, "streamed", folder, inits, ds_config(), trains_by)
    stock = run_ranks(2, load_inside, "stock", folder, [], trains_by, trains_by)
    assert streamed == with_other
    assert [rank["wrapped"] for rank in streamed] == [True] * 2
    for name in ("held", "losses"):
        assert [rank[name] for rank in streamed] == [rank[name] for rank in stock]
    assert len(set(streamed[0]["losses"])) == 3


def test_with_hpz(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """Stock would make hpZ's groups twice, and fails; it copies values and changes none."""
    folder = zoo_checkpoint("qwen3_moe")
    inside = [{"config_dict_or_path": ds_config(**HPZ)}], None, ds_config(**HPZ)
    streamed = run_ranks(2, load_inside, "streamed", folder, *inside)
    stock = run_ranks(2, load_inside, "stock", folder, [], ds_config(), ds_config())
    assert [rank["losses"] for rank in streamed] == [rank["losses"] for rank in stock]


def load_to_swap_files(how: str, checkpoint: Path, config: dict[str, Any]) -> tuple[list[float], int]:
    keeps_zero3_on = HfDeepSpeedConfig(config) if how == "stock" else None
    with deepspeed.zero.Init(config_dict_or_path=config, remote_device="nvme") if how == "streamed" else nullcontext():
        with streaming() if how == "streamed" else nullcontext():
            model = AutoModelForCausalLM.from_pretrained(checkpoint)
    del keeps_zero3_on
    swapped = sum(param.ds_tensor.final_location == "nvme" for param in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    return three_losses(engine, ZOO["qwen3_moe"].inputs), swapped


@pytest.mark.plugin("nvme")
@pytest.mark.slow
@pytest.mark.usefixtures("async_io")
def test_swap_files(cluster: None, tmp_path: Path) -> None:
    checkpoint = make_moe_checkpoint(tmp_path / "moe", 2e7, num_layers=2, num_experts=16)

    def config(folder: str) -> dict[str, Any]:
        nvme = {"device": "nvme", "nvme_path": str(tmp_path / folder), "buffer_count": 4, "buffer_size": 2**22}
        return ds_config(BF16, offload_param=nvme)

    streamed = run_ranks(2, load_to_swap_files, "streamed", checkpoint, config("ours"))
    stock = run_ranks(2, load_to_swap_files, "stock", checkpoint, config("stock"))
    assert streamed == stock
    assert streamed[0][1] >= 4, "the fused experts should be in swap files"


def load_by_others(folder: Path) -> dict[str, Any]:
    """Where no `zero.Init` is open, models are whole; `module=` partitions one that is there."""
    config = ds_config()
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=False), streaming():
        whole = AutoModelForCausalLM.from_pretrained(folder)
        planned = hf_zero_stream.plan(str(folder), world_size=2).load.cost.bytes_read
    plain = AutoModelForCausalLM.from_pretrained(folder)
    found = {"whole": unequal(whole, plain), "is whole": not any(hasattr(p, "ds_id") for p in whole.parameters())}
    with deepspeed.zero.Init(config_dict_or_path=config, module=whole), streaming():
        partitioned = AutoModelForCausalLM.from_pretrained(folder)
        found["planned"] = hf_zero_stream.plan(str(folder), world_size=2).load.cost.bytes_read == planned
    for name, model in (("module", whole), ("inside", partitioned)):
        found[name] = unequal(model, plain)
        found[f"{name} is partitioned"] = all(hasattr(p, "ds_id") for p in model.parameters())
    return found


@pytest.mark.plugin("forecast")
def test_inits_that_are_not_open(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    expected = {"whole": [], "is whole": True, "planned": True}
    expected |= {"module": [], "module is partitioned": True, "inside": [], "inside is partitioned": True}
    assert run_ranks(2, load_by_others, zoo_checkpoint("qwen3_moe")) == [expected] * 2


def load_in_own_group(folder: Path) -> None:
    group = [torch.distributed.new_group([rank]) for rank in range(2)][torch.distributed.get_rank()]
    with deepspeed.zero.Init(data_parallel_group=group, dtype=torch.float32), streaming():
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_group_of_some_ranks_is_refused(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for outcome in run_ranks_expecting_errors(2, load_in_own_group, zoo_checkpoint("llama")):
        assert outcome.error_type == "UnsupportedError"
        assert "expected a data_parallel_group of all 2 ranks; got one of 1" in outcome.error_message


# ------------------------------------------------------------------------ classes that are first imported inside of it

MODELING = "transformers.models.olmoe.modeling_olmoe"


def import_inside(how: str, folder: Path) -> list[Any]:
    """Losses of two models of a class that is imported inside; then its decorated class outside, where it works."""
    import torch._dynamo  # noqa: F401 - else stock's import of it fails inside

    assert MODELING not in sys.modules
    config, losses = ds_config(), []
    keeps_zero3_on = HfDeepSpeedConfig(config)
    with deepspeed.zero.Init(config_dict_or_path=config), streaming() if how == "streamed" else nullcontext():
        models = [AutoModelForCausalLM.from_pretrained(folder) for _ in range(2)]
    del keeps_zero3_on
    for model in models:
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
        losses += three_losses(engine, ZOO["qwen3_moe"].inputs)
    if how == "streamed":  # stock leaves the class without transformers' decorator
        experts = sys.modules[MODELING].OlmoeExperts(model.config)
        assert experts.config is model.config
        assert not any(hasattr(param, "ds_id") for param in experts.parameters())
    return losses


def test_a_class_that_is_first_imported_inside(cluster: None, tmp_path: Path) -> None:
    sizes = {"vocab_size": 1000, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    run_ranks(1, make_olmoe, tmp_path, {**sizes, **heads, "experts_implementation": "eager"})
    streamed = run_ranks(2, import_inside, "streamed", tmp_path)
    assert streamed == run_ranks(2, import_inside, "stock", tmp_path)
    assert len(set(streamed[0])) == 3


def make_olmoe(folder: Path, config: dict[str, Any]) -> None:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    OlmoeForCausalLM(OlmoeConfig(**config)).save_pretrained(folder)


def load_under_patches(folder: Path) -> dict[str, Any]:
    """Somebody has put functions around DeepSpeed's: they are there afterwards."""
    empty_calls: list[Any] = []
    with deepspeed.zero.Init(config_dict_or_path=ds_config()):
        deepspeeds, deepspeeds_init = torch.empty, nn.Linear.__init__

        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            empty_calls.append(args)
            return deepspeeds(*args, **kwargs)

        def init(self: nn.Linear, *args: Any, **kwargs: Any) -> None:
            deepspeeds_init(self, *args, **kwargs)
            self.is_marked = True

        torch.empty, nn.Linear.__init__ = empty, init  # type: ignore[method-assign, assignment]
        try:
            with streaming():
                model = AutoModelForCausalLM.from_pretrained(folder)
            found = {"empty stays": torch.empty is empty, "loads through it": bool(empty_calls)}
            made = nn.Linear(3, 5)
            found |= {"init stays": made.is_marked, "partitions": hasattr(made.weight, "ds_id")}
        finally:
            torch.empty, nn.Linear.__init__ = deepspeeds, deepspeeds_init  # type: ignore[method-assign]
    found["marks"] = all(module.is_marked for module in model.modules() if isinstance(module, nn.Linear))
    # DeepSpeed takes its own dtype, whatever it is given, where the processor has no arithmetic in fp16.
    plain = AutoModelForCausalLM.from_pretrained(folder).to(model.dtype)
    return {**found, "unequal": unequal(model, plain)}


def test_what_others_have_put_around_deepspeeds_functions_stays(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    [found] = run_ranks(1, load_under_patches, zoo_checkpoint("llama"))
    flags = {"empty stays": True, "loads through it": False, "init stays": True, "partitions": True, "marks": True}
    assert found == {**flags, "unequal": []}
