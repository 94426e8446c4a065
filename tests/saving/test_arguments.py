"""What a save cannot do is refused on all ranks, before anything is written; nothing is ignored."""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from hf_zero_stream.errors import ConfigError, UnsupportedError, UrlError
from hf_zero_stream.saving.arguments import refuse_url
from tests.saving.test_hooks import prepared
from tests.support.cluster import run_ranks
from tests.support.zoo import ZOO, Checkpoint


URL = "https://host/x"


@pytest.fixture(scope="module")
def model(zoo_checkpoint: Checkpoint) -> Any:
    return getattr(transformers, ZOO["llama"].auto_class).from_pretrained(zoo_checkpoint("llama"))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"nonsense": 1}, ConfigError, "unknown argument nonsense; known are distributed_checkpoint, .*variant"),
        ({"repo_id": "a/b"}, ConfigError, "unknown argument repo_id"),
        ({"verify": True}, ConfigError, r"verify: .*got a setting. .*streaming\(verify=True\)"),
        ({"config": StreamingConfig()}, ConfigError, r"config: .*got a setting. .*streaming\(config\)"),
        ({"max_shard_size": -1}, ConfigError, "max_shard_size: expected bytes, at least 1, .*; got -1"),
        ({"max_shard_size": "5 apples"}, ConfigError, "max_shard_size: .*got '5 apples'"),
        ({"max_shard_size": None}, ConfigError, "max_shard_size: .*got None"),
        ({"variant": "../x"}, ConfigError, "variant: expected a part of a file's name.*got '../x'"),
        ({"variant": "a\\b"}, ConfigError, "variant: "),
        ({"state_dict": {}}, ConfigError, "state_dict: expected at least one tensor"),
        ({"safe_serialization": False}, UnsupportedError, "safe_serialization=False: files of torch.save"),
    ],
    ids=str,
)
def test_refused(model: Any, tmp_path: Path, arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        hf_zero_stream.save_pretrained(model, tmp_path / "saved", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_taken(model: Any, tmp_path: Path) -> None:
    """Arguments as in accelerate's examples; and of a state dict, the values that are in it."""
    given = {name: value + 1 for name, value in list(model.state_dict().items())[:2]}
    hf_zero_stream.save_pretrained(
        model,
        tmp_path,
        is_main_process=True,
        save_function=torch.save,
        safe_serialization=True,
        token=None,
        max_shard_size="1 GB",
        variant="other",
        state_dict=given,
    )
    found = load_file(tmp_path / "model.other.safetensors")
    assert found.keys() == given.keys() and all(torch.equal(found[name], given[name]) for name in given)


@pytest.mark.parametrize("dtype", ["bf16", "float16", torch.bfloat16])
def test_dtypes(model: Any, tmp_path: Path, dtype: Any) -> None:
    hf_zero_stream.save_pretrained(model, tmp_path, dtype=dtype)
    found = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in found.values()} == {torch.float16 if dtype == "float16" else torch.bfloat16}


@pytest.mark.parametrize("url", ["hf://a/b", "https://host/x", "gcs://bucket/x", "S3://b", Path(URL)], ids=str)
def test_urls(url: str | Path) -> None:
    with pytest.raises(UrlError, match="it: expected a local folder; got a URL, "):
        refuse_url(url, "it")


@pytest.mark.parametrize("folder", ["s3", "a:b", "./s3://x", "/s3:/x", Path("x"), "C:\\x"])
def test_local_folders(folder: str | Path) -> None:
    refuse_url(folder, "it")


def save_to_urls(checkpoint: Path, folder: Path) -> list[str]:
    accelerator, engine = prepared(checkpoint)
    bad = URL if dist.get_rank() == 1 else "saved"
    found = []
    with contextlib.chdir(folder), hf_zero_stream.streaming():
        for save in (
            lambda: hf_zero_stream.save_pretrained(engine, URL),
            lambda: hf_zero_stream.save_pretrained(engine, bad),
            lambda: hf_zero_stream.save_state(engine, URL),
            lambda: hf_zero_stream.save_state(engine, bad),
            lambda: hf_zero_stream.save_state(engine, "saved", nonsense=1),
            lambda: hf_zero_stream.save_state(engine, "saved", tag="a/b" if dist.get_rank() else "ab"),
            lambda: engine.module.save_pretrained(URL),
            lambda: engine.module.save_pretrained(bad),
            lambda: accelerator.save_model(engine, URL),
            lambda: accelerator.save_state(URL),
        ):
            with pytest.raises(ConfigError) as caught:
                save()
            found.append(f"{type(caught.value).__name__}: {caught.value}")
        dist.barrier()
        assert os.listdir() == []
    return found


@pytest.mark.plugin("remote")
def test_all_ranks_alike(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    ranks = run_ranks(2, save_to_urls, zoo_checkpoint("llama", torch.bfloat16), tmp_path, timeout=60)
    for rank, found in enumerate(ranks):
        for number, message in enumerate(found):
            kind = {4: "ConfigError: .*unknown argument nonsense", 5: "ConfigError: .*tag"}
            assert re.match(
                kind.get(number, "UrlError: .*(got a URL, https://|read from https:// and not written there)"), message
            ), message
            assert rank == 1 or number not in (1, 3, 5, 7) or "rank 1" in message, message


def save_by_trainer(checkpoint: Path, folder: Path) -> None:
    """Of one rank: transformers' own save, which would make a local folder of this name."""
    with contextlib.chdir(folder), hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
        arguments = transformers.TrainingArguments(output_dir="run", report_to=[], use_cpu=True)
        trainer = transformers.Trainer(model=model, args=arguments)  # makes the folder
        arguments.output_dir = URL
        for save in (trainer.save_model, lambda: trainer.save_model("hf://b/x"), lambda: model.save_pretrained(URL)):
            with pytest.raises(UrlError):
                save()
        assert os.listdir() == ["run"] and os.listdir("run") == []
        model.save_pretrained("run", nonsense=1)  # as stock
        assert "model.safetensors" in os.listdir("run")


@pytest.mark.plugin("remote")
def test_trainer(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    run_ranks(1, save_by_trainer, zoo_checkpoint("llama"), tmp_path)


@pytest.mark.plugin("forecast")
def test_settings_are_no_arguments_of_loads(model: Any, zoo_checkpoint: Checkpoint) -> None:
    folder = str(zoo_checkpoint("llama"))
    with pytest.raises(ConfigError, match=r"progress: .*streaming\(progress=False\)"):
        hf_zero_stream.load_into(model, folder, progress=False)
    with pytest.raises(ConfigError, match=r"config: .*got a setting"):
        hf_zero_stream.plan(folder, world_size=2, config=StreamingConfig())
