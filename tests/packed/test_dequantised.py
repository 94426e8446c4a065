"""Models that were dequantised while they were loaded are saved as if their checkpoint had never been quantised.

Expected is what stock saves of a plain checkpoint in bf16 with the dequantised values: the same files, bit for bit.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import deepspeed
import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from transformers.distributed import DistributedConfig

import hf_zero_stream
from hf_zero_stream.errors import UnsupportedError
from tests.support.checkpoint_files import differing
from tests.support.cluster import run_ranks
from tests.support.fsdp2 import announce, make_accelerator
from tests.support.packed_training import TARGETS, dequantised, inputs
from tests.support.parity import ds_config
from tests.support.quantised_checkpoints import MODELS, bitsandbytes, quantise_in_blocks
from tests.support.saving import different
from tests.support.trainings import Training


FORMATS = {name: make for name, make in MODELS.items() if not name.startswith(("nf4", "fp4", "double nf4", "int8,"))}
SAMPLE = ["FP8 by blocks, mixture", "FP8 with experts in float4, mixture", "MXFP4, mixture", "int4 by group, mixture"]

Folders = dict[str, Path]


def make_formats(names: list[str], root: Path) -> Folders:
    """Quantised checkpoints below `root`, and for each what is expected of a save beside it."""
    found = {name: root / name for name in names}
    for name, folder in found.items():
        folder.mkdir(parents=True)
        FORMATS[name](folder)
        expect(load(folder), expected_of(folder))
    return found


def expected_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name} expected")


def load(folder: Path, **kwargs: Any) -> Any:
    """Dequantised, by whoever is in charge here."""
    folder, how = dequantised(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **how, **kwargs)


def expect(model: Any, folder: Path) -> None:
    """Have stock save, in `folder`, a model that it has loaded from a plain checkpoint with the values of `model`."""
    plain = type(model)(transformers.AutoConfig.for_model(**model.config.to_dict())).to(model.dtype)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder / "source")
    type(model).from_pretrained(folder / "source").save_pretrained(folder)
    for path in (folder / "source").iterdir():
        path.unlink()
    (folder / "source").rmdir()


def streaming() -> AbstractContextManager[Any]:
    return hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False))


# ---------------------------------------------------------------------------------------------- every home of weights


def in_zero3(folder: Path) -> Any:
    return load(folder, ds_config=ds_config(torch.bfloat16))


def in_an_engine(folder: Path, stage: int) -> Any:
    config = ds_config(torch.bfloat16)
    config["zero_optimization"]["stage"] = stage
    model = load(folder, ds_config=config)
    return deepspeed.initialize(model=model, config=config)[0]


def in_replicas(folder: Path) -> Any:
    return load(folder)


def by_distributed_config(folder: Path) -> Any:
    return load(folder, distributed_config=DistributedConfig(fsdp_size=dist.get_world_size()))


def by_accelerate(folder: Path) -> Any:
    announce(cpu_ram_efficient_loading=True)
    accelerator = make_accelerator()
    model = load(folder)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters()))[0]


def unprepared(folder: Path) -> Any:
    """As accelerate will shard it, and saved before."""
    announce(cpu_ram_efficient_loading=True)
    make_accelerator()
    return load(folder)


HOMES: dict[str, Callable[[Path], Any]] = {
    "ZeRO-3": in_zero3,
    "ZeRO-3 engine": lambda folder: in_an_engine(folder, 3),
    "stage 2": lambda folder: in_an_engine(folder, 2),
    "stage 1": lambda folder: in_an_engine(folder, 1),
    "replicas": in_replicas,
    "distributed_config": by_distributed_config,
    "accelerate": by_accelerate,
    "unprepared": unprepared,
}


def save_in_home(home: str, folders: Folders, root: Path) -> list[str]:
    """Save each model in every way; what is left of quantisation in any."""
    left = []
    for name, folder in folders.items():
        with streaming():
            wrapped = HOMES[home](folder)
            model = getattr(wrapped, "module", wrapped)
            is_whole = not any(hasattr(p, "ds_id") or hasattr(p, "device_mesh") for p in model.parameters())
            left += [f"{name}: {each}" for each in remains(model)]
            hf_zero_stream.save_pretrained(wrapped, root / name / "ours")
            if not is_whole or dist.get_rank() == 0:
                model.save_pretrained(root / name / "stock's call")
        if is_whole and dist.get_rank() == 0:
            model.save_pretrained(root / name / "outside")
        dist.barrier()
    return left


def remains(model: Any) -> list[str]:
    """What a model knows of quantisation."""
    found = [name for name in ("hf_quantizer", "quantization_method") if hasattr(model, name)]
    ops = [op for each in model._weight_conversions or () for op in getattr(each, "operations", ())]
    found += [type(op).__name__ for op in ops if hasattr(op, "hf_quantizer")]
    return (
        found
        + [key for key in model.config.to_dict() if "quantization" in key]
        + ["is_quantized"] * model.is_quantized
    )


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Folders]:
    """`formats(name)` gives that format's folder, with what is expected beside it; made once."""
    root, made = tmp_path_factory.mktemp("formats"), {}

    def of(name: str) -> Folders:
        if name not in made:
            made.update(make_formats([name], root))
        return {name: made[name]}

    return of


def assert_as_expected(folders: Folders, root: Path) -> None:
    for name, folder in folders.items():
        saved = sorted((root / name).iterdir())
        assert saved, name
        for each in saved:
            assert different(each, expected_of(folder)) == [], (name, each.name)
            assert "quantization" not in (each / "config.json").read_text()


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.slow) for n in FORMATS])
def test_saved_as_plain(cluster: None, formats: Any, tmp_path: Path, home: str, name: str) -> None:
    folders = formats(name)
    assert run_ranks(2, save_in_home, home, folders, tmp_path) == [[], []]
    assert_as_expected(folders, tmp_path)


# ------------------------------------------------------------ into a model that is not quantised, by load_into


def load_into_home(home: str, folders: Folders, root: Path) -> None:
    """Load each quantised checkpoint into a model of zeros, and save it; with and without a word on how."""
    for name, folder in folders.items():
        with streaming():
            for wish in ({}, dequantised(folder)[1]):
                model = HOMES[home](folder)
                with torch.no_grad():
                    for param in model.parameters():
                        (getattr(param, "ds_tensor", None) if hasattr(param, "ds_id") else param).zero_()
                hf_zero_stream.load_into(model, str(folder), **wish)
                hf_zero_stream.save_pretrained(model, root / name / f"{len(wish)}")


@pytest.mark.parametrize("home", [pytest.param("replicas", marks=pytest.mark.slow), "ZeRO-3", "distributed_config"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if "4, m" in n else ()) for n in SAMPLE])
def test_loaded_into_a_plain_model(cluster: None, formats: Any, tmp_path: Path, home: str, name: str) -> None:
    folders = formats(name)
    run_ranks(2, load_into_home, home, folders, tmp_path)
    expected = load_file(expected_of(folders[name]) / "model.safetensors")
    for saved in sorted((tmp_path / name).iterdir()):  # in which order tensors lie depends on how the model was made
        assert differing(load_file(saved / "model.safetensors"), expected) == [], saved.name
        assert "quantization" not in (saved / "config.json").read_text()


def test_what_transformers_does_not_dequantise_is_refused(tmp_path: Path) -> None:
    bitsandbytes(tmp_path / "model", "nf4", width=64)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").dequantize()
    with pytest.raises(UnsupportedError, match=r"quantised by bitsandbytes.*call dequantize\(\), and save that"):
        hf_zero_stream.load_into(model, str(tmp_path / "model"), strict=False)


# ------------------------------------------------------------------------------------------ in one process, and merged


def adapted(base: Any) -> Any:
    return peft.get_peft_model(base, peft.LoraConfig(target_modules=TARGETS, init_lora_weights=False))


@pytest.mark.parametrize("name", SAMPLE)
def test_merged_in_one_process(formats: Any, tmp_path: Path, name: str) -> None:
    """As docs/quantised.md says: the base dequantised, the saved adapters put on it, merged, and saved."""
    folder = formats(name)[name]
    adapted(load(folder)).save_pretrained(tmp_path / "adapters")
    with streaming():
        base = load(folder)
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").merge_and_unload()
    expect(merged, tmp_path / "expected")
    merged.save_pretrained(tmp_path / "loaded inside, saved outside")
    by_stock = peft.PeftModel.from_pretrained(load(folder), tmp_path / "adapters").merge_and_unload()
    hf_zero_stream.save_pretrained(by_stock, tmp_path / "loaded outside, saved by us")
    by_stock = peft.PeftModel.from_pretrained(load(folder), tmp_path / "adapters").merge_and_unload()
    with streaming():
        by_stock.save_pretrained(tmp_path / "loaded outside, saved inside")
    for saved in tmp_path.glob("loaded *"):
        assert different(saved, tmp_path / "expected") == [], saved.name


@pytest.mark.plugin("forecast", "pickled")
def test_saved_is_planned_and_converted(formats: Any, tmp_path: Path) -> None:
    """What is saved is a plain checkpoint to everything else of ours, too."""
    from hf_zero_stream.plugins.pickled.convert import convert

    folder = formats(SAMPLE[0])[SAMPLE[0]]
    with streaming():
        model = load(folder)
    hf_zero_stream.save_pretrained(model, tmp_path / "saved")
    assert hf_zero_stream.plan(str(tmp_path / "saved"), world_size=2).load.cost.bytes_read
    for layout in ("same", "hub", "model"):
        convert(tmp_path / "saved", tmp_path / layout, layout=layout)
        again = type(model).from_pretrained(tmp_path / layout).state_dict()
        assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items()), layout


@pytest.mark.parametrize("kind", ["nf4", "double nf4", "int8"])
def test_bitsandbytes_dequantised_afterwards(tmp_path: Path, kind: str) -> None:
    """``model.dequantize()``, after which stock's own save raises NotImplementedError."""
    bitsandbytes(tmp_path / "model", kind, width=64)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").dequantize()
    expect(model, tmp_path / "expected")
    hf_zero_stream.save_pretrained(model, tmp_path / "ours")
    assert different(tmp_path / "ours", tmp_path / "expected") == []


def test_config_in_the_text_config(tmp_path: Path) -> None:
    """Where multimodal checkpoints may have it, and where stock leaves it."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 48, "num_key_value_heads": 2, "head_dim": 16}
    vision = {**sizes, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    folder = tmp_path / "model"
    quantise_in_blocks(transformers.Gemma3ForConditionalGeneration(config), folder)
    fields = json.loads((folder / "config.json").read_text())
    fields["text_config"]["quantization_config"] = fields.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(fields))
    with streaming():
        model = transformers.Gemma3ForConditionalGeneration.from_pretrained(
            folder, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
        )
    model.save_pretrained(tmp_path / "saved")
    assert "quantization" not in (tmp_path / "saved" / "config.json").read_text()
    again = type(model).from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items())


# --------------------------------------------------------------------------------------------------- training goes on


def batch(number: int) -> dict[str, torch.Tensor]:
    return inputs(seed=number)


def by_an_engine(folder: Path, stage: int, by: str = "engine") -> Training:
    return Training(in_an_engine(folder, stage), by=by, batch=batch)


def of_a_model(folder: Path, home: Callable[[Path], Any]) -> Training:
    model = home(folder)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def with_accelerate(folder: Path) -> Training:
    announce(cpu_ram_efficient_loading=True, state_dict_type="SHARDED_STATE_DICT")
    accelerator = make_accelerator()
    model = load(folder)
    prepared = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return Training(*prepared, accelerator, by="accelerate", batch=batch)


TRAININGS: dict[str, Callable[[Path], Any]] = {
    "ZeRO-3 engine": lambda folder: by_an_engine(folder, 3),
    "stage 2 engine": lambda folder: by_an_engine(folder, 2),
    "ZeRO-3, save_state": lambda folder: by_an_engine(folder, 3, "ours"),
    "stage 1, save_state": lambda folder: by_an_engine(folder, 1, "ours"),
    "replicas": lambda folder: of_a_model(folder, in_replicas),
    "distributed_config": lambda folder: of_a_model(folder, by_distributed_config),
    "accelerate": with_accelerate,
}


def train_on(training: str, folders: Folders, root: Path) -> dict[str, Any]:
    """Two steps, a save, and the losses of two more."""
    found = {}
    for name, folder in folders.items():
        with streaming():
            run = TRAININGS[training](folder)
            run.train(range(2))
            run.save(root / name)
            found[name] = run.train(range(2, 4))
    return found


def resume(training: str, folders: Folders, root: Path) -> dict[str, Any]:
    found = {}
    for name, folder in folders.items():
        with streaming():
            run = TRAININGS[training](folder)
            run.load(root / name)
            found[name] = run.train(range(2, 4))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("name", FORMATS)
def test_resumed(cluster: None, formats: Any, tmp_path: Path, training: str, name: str) -> None:
    folders = formats(name)
    went_on = run_ranks(2, train_on, training, folders, tmp_path)
    assert went_on[0][name][0] != went_on[0][name][1]
    assert run_ranks(2, resume, training, folders, tmp_path) == went_on
