"""Arguments that do not stream: transformers' own error, the same on every rank, or stock's load with the reason."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.checkpoint.api import CheckpointException
from transformers.distributed import DistributedConfig

from tests.support.cluster import run_ranks
from tests.support.loading import assert_same, compare, errors_of, load_with
from tests.support.messages import Messages
from tests.support.parity import ds_config
from tests.support.zoo import Checkpoint


CAUSAL = "AutoModelForCausalLM"


@pytest.mark.parametrize(
    "device_map", ["auto", "cpu", {"": "cpu"}, 0, torch.device("cpu"), "nonsense"], ids=lambda value: f"{value}"
)
def test_device_map(cluster: None, zoo_checkpoint: Checkpoint, device_map: Any) -> None:
    """Under ZeRO-3 transformers refuses; so do we, with its words."""
    kwargs = {"device_map": device_map, "max_memory": {"cpu": "1GB"}, "offload_folder": "no-such-folder"}
    for stock, streamed in run_ranks(2, errors_of, ["stock", "streamed"], CAUSAL, zoo_checkpoint("llama"), kwargs):
        assert stock is not None and stock == streamed


def distributed_kwargs(name: str) -> dict[str, Any]:
    return {
        "tp_plan": {"tp_plan": "auto"},
        "tp_size": {"tp_size": 2},
        "distributed_config": {"distributed_config": DistributedConfig(tp_size=2)},
        "fsdp": {"distributed_config": DistributedConfig(fsdp_size=2)},
        "both": {"distributed_config": DistributedConfig(tp_size=2), "tp_size": 2},
    }[name]


def distributed_errors(folder: Path, name: str) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return errors_of(["stock", "streamed"], CAUSAL, folder, distributed_kwargs(name))


@pytest.mark.parametrize("name", ["tp_plan", "tp_size", "distributed_config", "fsdp", "both"])
def test_tensor_parallelism(cluster: None, zoo_checkpoint: Checkpoint, name: str) -> None:
    """It sets a device map, which ZeRO-3 does not go with."""
    for stock, streamed in run_ranks(2, distributed_errors, zoo_checkpoint("llama"), name):
        assert stock is not None and stock == streamed


@pytest.mark.parametrize(
    "kwargs",
    [{"device_mesh": None}, {"distributed_config": DistributedConfig(tp_size=1)}],
    ids=["device_mesh", "distributed_config"],
)
def test_distributed_arguments_that_ask_for_nothing(
    cluster: None, zoo_checkpoint: Checkpoint, kwargs: dict[str, Any]
) -> None:
    assert_same(run_ranks(2, compare, CAUSAL, zoo_checkpoint("llama"), kwargs))


def is_missing(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is None


@pytest.mark.skipif(not is_missing("kernels"), reason="the error is that of a missing package")
def test_kernels_without_their_package(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """Asked for after the weights are loaded: the ranks fail together."""
    folder = zoo_checkpoint("llama")
    for kwargs in ({"use_kernels": True}, {"kernel_config": transformers.KernelConfig({})}):
        for plain, streamed in run_ranks(2, errors_of, ["plain", "streamed"], CAUSAL, folder, kwargs):
            assert plain is not None and plain == streamed


def test_backbones(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """AutoBackbone takes every path for an id on the hub, so a folder fails; in the same way when it streams."""
    kwargs = {"use_timm_backbone": False}
    folder = zoo_checkpoint("bert")
    for plain, streamed in run_ranks(2, errors_of, ["plain", "streamed"], "AutoBackbone", folder, kwargs):
        assert plain is not None and plain == streamed


@pytest.mark.parametrize("kwargs", [{"dtype": "float9"}, {"dtype": 3}], ids=["name", "type"])
def test_wrong_dtype(cluster: None, zoo_checkpoint: Checkpoint, kwargs: dict[str, Any]) -> None:
    for plain, streamed in run_ranks(2, errors_of, ["plain", "streamed"], CAUSAL, zoo_checkpoint("llama"), kwargs):
        assert plain is not None and plain == streamed


def test_no_weights(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Nothing there; a config without weights; neither a path nor a state dict."""
    transformers.AutoConfig.from_pretrained(zoo_checkpoint("llama")).save_pretrained(tmp_path / "config")
    config = transformers.AutoConfig.from_pretrained(zoo_checkpoint("llama"))
    cases: list[tuple[Any, dict[str, Any]]] = [
        (tmp_path / "nowhere", {}),
        (tmp_path / "config", {}),
        (None, {"config": config}),
    ]
    for path, kwargs in cases:
        for plain, streamed in run_ranks(2, errors_of, ["plain", "streamed"], "LlamaForCausalLM", path, kwargs):
            assert plain is not None and plain == streamed


# ---------------------------------------------------------------------------------------------------- handed to stock


def load_and_listen(how: str, folder: Path, kwargs: dict[str, Any]) -> dict[str, Any]:
    messages = Messages()
    transformers.utils.logging.get_logger("transformers").addHandler(messages)
    transformers.utils.logging.get_logger("hf_zero_stream").addHandler(messages)
    model = load_with(how, CAUSAL, folder, ds_config(), kwargs)
    return {
        "values": {name: param.detach().float().sum().item() for name, param in model.named_parameters()},
        "partitioned": sum(hasattr(param, "ds_tensor") for param in model.parameters()),
        "messages": [text for text in messages.found if "hands this load to stock" in text],
        "streamed": hasattr(model, "streaming_report"),
    }


@pytest.mark.plugin("packed")
def test_quantization_config_that_stays(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A model that stays quantised is not partitioned in stock either; the reason is said once."""
    folder = shutil.copytree(zoo_checkpoint("llama"), tmp_path / "bitnet")
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    kwargs: dict[str, Any] = {}
    stock = run_ranks(2, load_and_listen, "stock", folder, kwargs)
    streamed = run_ranks(2, load_and_listen, "streamed", folder, kwargs)
    for expected, found in zip(stock, streamed, strict=True):
        assert found["values"] == expected["values"]
        assert found["partitioned"] == expected["partitioned"] == 0
        assert not found["streamed"]
    assert len(streamed[0]["messages"]) == 1 and "stays quantised" in streamed[0]["messages"][0]
    assert streamed[1]["messages"] == []


def save_distributed(source: Path, folder: Path) -> None:
    """A checkpoint in torch.distributed.checkpoint's layout, each rank writing its part."""
    kwargs = {"distributed_config": DistributedConfig(fsdp_size=2)}
    load_with("plain", CAUSAL, source, {}, kwargs).save_pretrained(folder, distributed_checkpoint=True)


def load_distributed(folder: Path, how: str) -> tuple[str, str] | None:
    try:
        (error,) = errors_of([how], CAUSAL, folder, {})
    except CheckpointException as caught:  # derives from BaseException
        return type(caught).__name__, str(caught)
    return error


def test_distributed_checkpoint(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A folder written with `distributed_checkpoint=True` fails under stock's ZeRO-3, and is an error here too."""
    run_ranks(2, save_distributed, zoo_checkpoint("llama"), tmp_path)
    assert list(tmp_path.glob("shard-*.safetensors"))
    for how, loads in (("plain", True), ("stock", False), ("streamed", False)):
        for error in run_ranks(2, load_distributed, tmp_path, how):
            assert (error is None) is loads
