"""Arguments that do not stream, or that say which files are read.

- Arguments that do not stream: transformers' own error, the same on every rank, or stock's load with the reason.
- Arguments of `from_pretrained` that say which files are read; docs/settings.md lists them all.
- A URL needs the plug-in that reads from URLs: where it is not there, each entry says so, and no rank goes on.
"""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from transformers.distributed import DistributedConfig
from transformers.utils import hub

import hf_zero_stream
from hf_zero_stream.engine.places import place_of
from hf_zero_stream.errors import MissingPluginError
from hf_zero_stream.holdings.introspection import is_streamed
from tests.support.cli import run
from tests.support.cluster import SOON_S, run_ranks, run_ranks_expecting_errors
from tests.support.messages import Messages
from tests.support.parity import assert_same, compare, ds_config, errors_of, load_with
from tests.support.plugins import without_plugin
from tests.support.zoo import Checkpoint, build_model


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
        "streamed": is_streamed(model),
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


def test_subfolder(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(zoo_checkpoint("llama"), tmp_path / "deep" / "model")
    assert_same(run_ranks(2, compare, CAUSAL, tmp_path, {"subfolder": "deep/model"}))


def test_revision_of_a_folder(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """A folder has none: it is ignored."""
    assert_same(run_ranks(2, compare, CAUSAL, zoo_checkpoint("llama"), {"revision": "no-such-branch"}))


def test_variant(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Sharded and not; a variant that is not there is transformers' error."""
    model = build_model("llama")
    model.save_pretrained(tmp_path / "sharded", variant="fp9", max_shard_size="60KB")
    model.save_pretrained(tmp_path / "whole", variant="fp9")
    assert (tmp_path / "sharded" / "model.safetensors.index.fp9.json").exists()
    for name in ("sharded", "whole"):
        assert_same(run_ranks(2, compare, CAUSAL, tmp_path / name, {"variant": "fp9"}))
    for plain, streamed in run_ranks(2, errors_of, ["plain", "streamed"], CAUSAL, tmp_path / "whole", {}):
        assert plain is not None and plain == streamed


def with_both_formats(folder: Path) -> Path:
    """A safetensors file, and a pickled one with other values."""
    model = build_model("bert")
    model.save_pretrained(folder)
    torch.save({key: value + 1 for key, value in model.state_dict().items()}, folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("use", [True, False, None])
def test_use_safetensors(cluster: None, tmp_path: Path, use: bool | None) -> None:
    folder = with_both_formats(tmp_path)
    results = run_ranks(2, compare, "AutoModelForMaskedLM", folder, {"use_safetensors": use})
    assert_same(results)


@pytest.mark.plugin("pickled")
def test_use_safetensors_where_there_are_none(cluster: None, tmp_path: Path) -> None:
    folder = with_both_formats(tmp_path)
    (folder / "model.safetensors").unlink()
    assert_same(run_ranks(2, compare, "AutoModelForMaskedLM", folder, {}))
    for plain, streamed in run_ranks(
        2, errors_of, ["plain", "streamed"], "AutoModelForMaskedLM", folder, {"use_safetensors": True}
    ):
        assert plain is not None and plain == streamed


class Surprise:
    """Unpickling it is what `weights_only` forbids."""


def with_an_object(folder: Path) -> Path:
    model = build_model("bert")
    model.config.save_pretrained(folder)
    torch.save({**model.state_dict(), "surprise": Surprise()}, folder / "pytorch_model.bin")
    return folder


@pytest.mark.slow
@pytest.mark.plugin("pickled")
def test_weights_only(cluster: None, tmp_path: Path) -> None:
    """True refuses, and False loads, a pickle with objects in it; False is also passed for safetensors."""
    folder = with_an_object(tmp_path / "pickled")
    hows = ["plain", "streamed"]
    for plain, streamed in run_ranks(2, errors_of, hows, "AutoModelForMaskedLM", folder, {"weights_only": True}):
        assert plain is not None and streamed is not None and plain[0] == streamed[0]
    build_model("bert").save_pretrained(tmp_path / "safe")
    assert_same(run_ranks(2, compare, "AutoModelForMaskedLM", tmp_path / "safe", {"weights_only": False}))
    model = build_model("bert")
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    for allowed in (True, False):
        results = run_ranks(2, compare, "AutoModelForMaskedLM", folder, {"weights_only": allowed})
        assert_same(results)


@pytest.mark.parametrize("disable", [True, False])
@pytest.mark.plugin("pickled")
def test_disable_mmap(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, disable: bool) -> None:
    """Nothing is mapped for safetensors anyway; for a pickled file it decides how torch.load reads."""
    assert_same(run_ranks(2, compare, CAUSAL, zoo_checkpoint("qwen3_moe"), {"disable_mmap": disable}))
    folder = with_both_formats(tmp_path)
    (folder / "model.safetensors").unlink()
    results = run_ranks(2, compare, "AutoModelForMaskedLM", folder, {"disable_mmap": disable})
    assert_same(results)


# ---------------------------------------------------------------------------------------------------------- hub cache

NAME, MAIN, BRANCH = "somebody/tiny", "a" * 40, "b" * 40


def hub_cache(root: Path, main: Path, branch: Path) -> Path:
    """A cache as huggingface_hub lays it out: blobs, and snapshots of symbolic links to them."""
    repository = root / f"models--{NAME.replace('/', '--')}"
    for commit, source, reference in ((MAIN, main, "main"), (BRANCH, branch, "v2")):
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / reference).write_text(commit)
        for kind in ("blobs", f"snapshots/{commit}"):
            (repository / kind).mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            blob = repository / "blobs" / f"{reference}{file.name}".replace(".", "")
            shutil.copy(file, blob)
            (repository / "snapshots" / commit / file.name).symlink_to(Path("../../blobs") / blob.name)
    return root


@pytest.fixture(scope="module")
def cache(zoo_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hub_cache(tmp_path_factory.mktemp("hub"), zoo_checkpoint("llama"), zoo_checkpoint("qwen3_moe"))


@pytest.mark.parametrize(
    ("revision", "expected"),
    [(None, "LlamaForCausalLM"), ("v2", "Qwen3MoeForCausalLM"), (BRANCH, "Qwen3MoeForCausalLM")],
    ids=["none", "branch", "commit"],
)
def test_repository_in_the_cache(cluster: None, cache: Path, revision: str | None, expected: str) -> None:
    kwargs = {"cache_dir": str(cache), **({"revision": revision} if revision else {})}
    results = run_ranks(2, compare, CAUSAL, NAME, kwargs, torch.float32, see_class)
    assert_same(results)
    assert results[0]["probes"][0] == expected


def see_class(model: Any) -> str:
    return type(model).__name__


@pytest.mark.parametrize("kwargs", [{"revision": "v3"}, {"force_download": True}], ids=["revision", "force_download"])
def test_repository_not_in_the_cache(cluster: None, cache: Path, kwargs: dict[str, Any]) -> None:
    """Offline: transformers' own error."""
    kwargs = {"cache_dir": str(cache), **kwargs}
    assert hub.is_offline_mode()
    for plain, streamed in run_ranks(2, errors_of, ["plain", "streamed"], CAUSAL, NAME, kwargs):
        assert plain == streamed


SAYS = r"needs the plug-in 'remote' of hf_zero_stream \(checkpoints at .*\), which is not installed"


def plan(url: Any) -> None:
    hf_zero_stream.plan(url, world_size=2)


def place(url: Any) -> None:
    with place_of(str(url), None):
        pass


def tensors(url: Any) -> None:
    hf_zero_stream.load_tensors(nn.Linear(2, 2), [str(url)])


def in_a_block(name: str) -> Callable[[Any], None]:
    def load(url: Any) -> None:
        with hf_zero_stream.streaming():
            getattr(transformers, name).from_pretrained(url)

    return load


LOADERS = ("AutoModelForCausalLM", "LlamaForCausalLM", "AutoTokenizer", "PreTrainedTokenizerFast", "AutoProcessor")
ENTRIES = {"plan": plan, "place": place, "tensors": tensors, **{name: in_a_block(name) for name in LOADERS}}
URLS = ("s3://bucket/x", "hf://org/name", "https://me:secret@host/x?sig=secret", Path("gs://bucket/x"))


@pytest.mark.parametrize("url", URLS, ids=str)
@pytest.mark.parametrize(
    "entry", [pytest.param(e, marks=pytest.mark.plugin("forecast")) if e == "plan" else e for e in ENTRIES]
)
def test_each_entry_names_the_plugin(entry: str, url: str | Path) -> None:
    with without_plugin("remote"), pytest.raises(MissingPluginError, match=SAYS) as caught:
        ENTRIES[entry](url)
    assert str(caught.value).startswith(f"'{str(url)[:4]}") and "secret" not in str(caught.value)


@pytest.mark.plugin("forecast", "tools")
@pytest.mark.parametrize("command", ["inspect", "verify", "plan"])
def test_commands_name_the_plugin(command: str) -> None:
    more = ["--world-size", "2"] if command == "plan" else []
    with without_plugin("remote"):
        assert "needs the plug-in 'remote'" in run(command, "s3://bucket/x", *more, code=1).stderr
        if command != "verify":  # a repository that is in no cache would be read where it is
            assert "'hf://nobody/nothing' needs" in run(command, "nobody/nothing", *more, code=1).stderr


def load_without(how: str) -> None:
    with without_plugin("remote"), hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
        cls = transformers.AutoModelForCausalLM if how == "auto" else transformers.LlamaForCausalLM
        kwargs = {"ds_config": ds_config(torch.bfloat16)} if how != "replicas" else {}
        cls.from_pretrained("s3://bucket/x", **kwargs)


@pytest.mark.parametrize("how", ["auto", "class", "replicas"])
def test_all_ranks_raise(cluster: None, how: str) -> None:
    for outcome in run_ranks_expecting_errors(2, load_without, how):
        assert outcome.error_type == "MissingPluginError", outcome.traceback
        assert "'s3://bucket/x' needs the plug-in 'remote'" in str(outcome.error_message)
        assert outcome.seconds < SOON_S
