"""`streaming()` finds ZeRO-3 as transformers does, and always puts transformers back."""

import gc
import threading
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers
from transformers import Trainer, modeling_utils
from transformers.integrations import deepspeed as transformers_deepspeed

import hf_zero_stream
from hf_zero_stream import StreamingConfig, streaming
from hf_zero_stream.bindings.table import TABLE, installed
from hf_zero_stream.errors import ConfigError
from hf_zero_stream.holdings.introspection import is_streamed
from hf_zero_stream.loading import arguments
from hf_zero_stream.registry import PatchScope
from hf_zero_stream.seams.ds_config import _ConfigReference
from hf_zero_stream.settings import config, scope
from tests.support.cluster import run_ranks
from tests.support.messages import warnings_of
from tests.support.parity import ds_config
from tests.support.zoo import Checkpoint


def patched_attributes() -> dict[Any, Any]:
    places = [place for rows in TABLE.values() for row in rows for place in row.places()]
    return {(owner, name): vars(owner).get(name) for owner, name in places}


@pytest.fixture(autouse=True)
def nothing_stays_patched() -> Any:
    before = patched_attributes()
    yield
    after = patched_attributes()  # of modules that have been imported since, too
    assert {place: after[place] for place in before} == before
    assert not isinstance(transformers_deepspeed._hf_deepspeed_config_weak_ref, _ConfigReference)


def is_patched() -> bool:
    return hasattr(modeling_utils.PreTrainedModel.from_pretrained, "__wrapped__") and bool(installed(PatchScope.BLOCK))


def test_nested_and_reentered() -> None:
    context = streaming()
    with context, streaming(), context:
        assert is_patched()
    assert not is_patched()


def test_settings_hold_inside_what_has_none_of_its_own() -> None:
    """Such as the Streaming classes, which open a streaming() themselves."""

    def threads() -> int | None:
        settings = scope.active_configs()[-1]
        return settings and settings.reader_threads

    with streaming(StreamingConfig(reader_threads=7)):
        with streaming():
            assert threads() == 7
            with streaming(StreamingConfig(reader_threads=3)):
                assert threads() == 3
        assert threads() == 7
    with streaming():
        assert threads() is None


def test_restored_after_an_exception() -> None:
    with pytest.raises(KeyError), streaming():
        raise KeyError
    assert not is_patched()


def test_a_trainer_that_is_not_known(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its saves and states are left to it, with a word."""
    monkeypatch.delattr(Trainer, "_save")
    with streaming():
        assert is_patched() and not hasattr(Trainer.save_model, "__wrapped__")
    said = [record.getMessage() for record in caplog.records if record.name == "hf_zero_stream"]
    assert len(said) == 1
    assert "has no trainer.Trainer._save; left to it: saves and training states of the Trainer" in said[0]
    monkeypatch.undo()
    with streaming():
        assert hasattr(Trainer.save_model, "__wrapped__")


def test_threads_that_overlap() -> None:
    """The first to leave must not take the patches from the one that stays."""
    entered, leave = threading.Event(), threading.Event()

    def first() -> None:
        with streaming():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=first)
    thread.start()
    assert entered.wait(60)
    with streaming():
        pass
    assert is_patched()
    leave.set()
    thread.join()
    assert not is_patched()


def test_another_thread_sees_stock(zoo_checkpoint: Checkpoint) -> None:
    """Patches look at the thread's own context."""
    found: list[Any] = []

    def load() -> None:
        found.append(transformers.AutoModelForCausalLM.from_pretrained(zoo_checkpoint("llama")))

    with streaming():
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    assert not is_streamed(found[0])


def test_methods_that_were_taken_before(zoo_checkpoint: Checkpoint) -> None:
    """Of an Auto class it streams, because that calls the model class by its name; of a model class it is stock's."""
    auto, concrete = transformers.AutoModelForCausalLM.from_pretrained, transformers.LlamaForCausalLM.from_pretrained
    with streaming():
        auto(zoo_checkpoint("llama"), strict=True)
        with pytest.raises(TypeError, match="strict"):  # an argument that only we know
            concrete(zoo_checkpoint("llama"), strict=True)


def test_without_zero3_it_is_transformers(zoo_checkpoint: Checkpoint) -> None:
    folder = zoo_checkpoint("llama")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with streaming():
        inside, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    by_class = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder)
    assert not info["missing_keys"]
    for model in (inside, by_class):
        assert type(model) is type(plain)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_wrong_config_type() -> None:
    with pytest.raises(ConfigError, match="StreamingConfig"):
        streaming({"staging_bytes": 1})  # type: ignore[arg-type]


def test_a_wrong_variable_is_an_error_on_entering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_STREAM_VERIFY", "all")
    with pytest.raises(ConfigError, match="variable HF_ZERO_STREAM_VERIFY: expected one of off, .*; got 'all'"):
        streaming().__enter__()
    assert not is_patched()
    with streaming(StreamingConfig()):  # settings made in code count alone
        with streaming():
            assert is_patched()


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_a_variable_with_a_typo_is_named_once_per_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, local_rank: str
) -> None:
    monkeypatch.setenv("HF_ZERO_STREAM_READER_THREDS", local_rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    config._warn_of_variable.cache_clear()
    for _ in range(2):
        with streaming():
            pass
    said = [text for text in caplog.messages if "READER_THREDS" in text]
    assert len(said) == (local_rank == "0")
    assert all("Did you mean HF_ZERO_STREAM_READER_THREADS?" in text for text in said)


@pytest.mark.parametrize(
    ("name", "is_told"), [("tiny-mo", True), ("runs/step-1", True), ("somebody/model", False), ("cached", False)]
)
def test_a_folder_that_is_not_there_is_named_before_the_hub_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_told: bool
) -> None:
    """Once, by one rank of a host, of what may be meant as a path; and the error is transformers' own."""
    for folder in ("runs", "cache/models--cached"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    def load() -> None:
        with pytest.raises(OSError, match=r"couldn't connect|does not appear|is not a"):
            transformers.AutoModelForCausalLM.from_pretrained(name, cache_dir=str(tmp_path / "cache"))

    with streaming(), warnings_of("hf_zero_stream") as said:
        monkeypatch.setenv("LOCAL_RANK", "1")
        load()
    assert said == []
    arguments._warn_of_absent_folder.cache_clear()
    monkeypatch.setenv("LOCAL_RANK", "0")
    with warnings_of("hf_zero_stream") as said:
        load()
        with streaming():
            load()
            load()
    told = f"{name}: there is no such folder in {tmp_path}, and no such repository in the Hub's cache"
    assert [text.startswith(told) for text in said] == [True] * is_told, said


# ---------------------------------------------------------------------------------------------- how ZeRO-3 is found


def load_with(how: str, folder: Path) -> dict[str, Any]:
    config = ds_config()
    kwargs: dict[str, Any] = {}
    keep: Any = None
    if how == "HfDeepSpeedConfig":
        keep = transformers_deepspeed.HfDeepSpeedConfig(config)
    elif how == "TrainingArguments":
        keep = transformers.TrainingArguments(output_dir=str(folder), deepspeed=config, use_cpu=False)
    elif how == "accelerate":
        from accelerate import Accelerator, DeepSpeedPlugin

        keep = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=True))
    else:
        kwargs["ds_config"] = config
    with streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **kwargs)
    del keep
    return {
        "partitioned": all(hasattr(param, "ds_tensor") for param in model.parameters()),
        "report": model.streaming_report.to_dict(),
    }


@pytest.mark.parametrize("how", ["HfDeepSpeedConfig", "TrainingArguments", "accelerate", "ds_config"])
def test_zero3_is_found(cluster: None, zoo_checkpoint: Checkpoint, how: str) -> None:
    for result in run_ranks(2, load_with, how, zoo_checkpoint("llama")):
        assert result["partitioned"]
        assert result["report"]["into"] == "ZeRO-3 partitions"
        assert [rank["rank"] for rank in result["report"]["ranks"]] == [0, 1]


def ds_config_outlives_the_call(folder: Path) -> tuple[bool, bool]:
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=ds_config())
    alive = transformers_deepspeed.is_deepspeed_zero3_enabled()
    del model
    gc.collect()
    return alive, transformers_deepspeed.is_deepspeed_zero3_enabled()


def test_ds_config_lives_with_the_model(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    assert run_ranks(1, ds_config_outlives_the_call, zoo_checkpoint("llama")) == [(True, False)]


def load_quietly(folder: Path, config: StreamingConfig | None, section: dict[str, Any]) -> dict[str, Any]:
    with streaming(config):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, ds_config={**ds_config(), "hf_zero_stream": section}
        )
    return model.streaming_report.to_dict()["ranks"][0]


def test_settings_reach_the_engine(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    folder = zoo_checkpoint("llama")
    (plain,) = run_ranks(1, load_quietly, folder, None, {})
    (by_section,) = run_ranks(1, load_quietly, folder, None, {"staging_bytes": 8 * 1024})
    config = StreamingConfig(staging_bytes=8 * 512)
    (by_argument,) = run_ranks(1, load_quietly, folder, config, {"staging_bytes": 8 * 1024})
    assert plain["reads"] < by_section["reads"] < by_argument["reads"]


def train_with_section(folder: Path) -> float:
    """A DeepSpeed config that carries our section must still be good for `deepspeed.initialize`."""
    config = {**ds_config(), "hf_zero_stream": {"reader_threads": 1}}
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=config)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    ids = torch.arange(6).view(1, 6)
    return engine(input_ids=ids, labels=ids).loss.item()


def test_section_does_not_disturb_deepspeed(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    (loss,) = run_ranks(1, train_with_section, zoo_checkpoint("llama"))
    assert loss == loss


def load_two(folder: Path, other: Path) -> list[bool]:
    """Teacher and student: two loads one after another in one process."""
    with streaming():
        models = [
            transformers.AutoModelForCausalLM.from_pretrained(path, ds_config=ds_config()) for path in (folder, other)
        ]
    return [all(hasattr(param, "ds_tensor") for param in model.parameters()) for model in models]


def test_two_models(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    assert run_ranks(2, load_two, zoo_checkpoint("llama"), zoo_checkpoint("qwen3_moe")) == [[True, True]] * 2


def load_in_inference_mode(folder: Path) -> dict[str, Any]:
    with torch.inference_mode():
        model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(
            folder, ds_config=ds_config(torch.bfloat16)
        )
    assert not any(param.ds_tensor.is_inference() for param in model.parameters())
    return model.streaming_report.to_dict()["ranks"][0]


def test_inference_mode(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for report in run_ranks(2, load_in_inference_mode, zoo_checkpoint("qwen3_moe")):
        assert not report["materialised"]


def build_from_config(folder: Path) -> list[bool]:
    keep = transformers_deepspeed.HfDeepSpeedConfig(ds_config())
    config = transformers.AutoConfig.from_pretrained(folder)
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_config(config)
    del keep
    return [hasattr(param, "ds_tensor") for param in model.parameters()]


def test_from_config_is_stock(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for flags in run_ranks(2, build_from_config, zoo_checkpoint("llama")):
        assert all(flags)
