"""Training states of adapters.

- Training states of PEFT's models: the adapter, its masters and moments; the base is what it was.
- States of adapters have all of the base that its checkpoint has not, and are refused on another base.
"""

import shutil
from pathlib import Path
from typing import Any

import deepspeed
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

import hf_zero_stream
from hf_zero_stream.errors import ConfigError, UnsupportedError
from hf_zero_stream.state.digests import Visitor
from tests.state.test_changed import train_here
from tests.support.changed_bases import CHANGES, OWN, AdapterTraining, in_state, resume, train_and_save
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.fsdp2 import announce, load, make_accelerator
from tests.support.training_state import different_states, state_config, train
from tests.support.zoo import Checkpoint


def with_adapter(model: Any) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))


def adapted_engine(folder: Path, stage: int) -> Any:
    config = state_config(stage)
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, ds_config=config)
    model = with_adapter(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trained)
    return engine


def train_both_ways(folder: Path, target: Path) -> tuple[list[float], list[float]]:
    """Three steps; save by ours, and by the engine inside ``streaming()``; two more steps, and two after a resume."""
    engine = adapted_engine(folder, 3)
    train(engine, range(3))
    hf_zero_stream.save_state(engine, target / "ours", data={"position": 7})
    with hf_zero_stream.streaming():
        engine.save_checkpoint(str(target / "engine"), exclude_frozen_parameters=True)
    continued = train(engine, (3, 4))
    engine = adapted_engine(folder, 3)
    with hf_zero_stream.streaming():
        engine.load_checkpoint(str(target / "engine"), load_module_strict=False)
    return continued, train(engine, (3, 4))


def resume_and_save(folder: Path, source: Path, stage: int, again: Path) -> None:
    engine = adapted_engine(folder, stage)
    hf_zero_stream.load_state(engine, source)
    train(engine, [3])
    hf_zero_stream.load_state(engine, source)
    hf_zero_stream.save_state(engine, again, data={"position": 7})


def resume_under_fsdp2(folder: Path, source: Path, again: Path) -> None:
    announce(cpu_ram_efficient_loading=True)
    accelerator = make_accelerator()
    model = with_adapter(load("llama", folder, dtype=torch.float32))
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    hf_zero_stream.load_state(model, source, optimizer=optimizer)
    hf_zero_stream.save_state(model, again, optimizer=optimizer, data={"position": 7})


ADAPTER = "adapter_model.safetensors"


def assert_same_adapter(first: Path, second: Path, what: str) -> None:
    """ZeRO-3 keeps adapters in the dtype that PEFT gives them, fp32, and other stages in 16 bit."""
    tensors = [
        {name: value.bfloat16() for name, value in load_file(folder / ADAPTER).items()} for folder in (first, second)
    ]
    assert tensors[0].keys() == tensors[1].keys() and tensors[0], what
    assert [name for name, value in tensors[0].items() if not torch.equal(value, tensors[1][name])] == [], what


@pytest.mark.slow
def test_adapters(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = zoo_checkpoint("llama", torch.bfloat16)
    for continued, resumed in run_ranks(2, train_both_ways, folder, tmp_path):
        assert resumed == continued
    source = tmp_path / "ours"
    names = {path.name for path in source.iterdir()}
    assert names - {"zero_to_fp32.py"} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "latest",
        "global_step3",
    }
    for world_size, stage in ((3, 3), (1, 2)):
        again = tmp_path / f"by {world_size}"
        run_ranks(world_size, resume_and_save, folder, source, stage, again)
        assert set(different_states(source, again)) <= {ADAPTER}
        assert_same_adapter(source, again, f"{world_size} ranks, stage {stage}")
    run_ranks(3, resume_under_fsdp2, folder, source, tmp_path / "fsdp2")
    assert set(different_states(source, tmp_path / "fsdp2")) <= {ADAPTER, "groups"}
    assert_same_adapter(source, tmp_path / "fsdp2", "FSDP2")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(base, str(source))
    assert any(param.any() for name, param in loaded.named_parameters() if "lora_B" in name)


def train_and_save_by_deepspeed(folder: Path, target: Path, stage: int) -> tuple[list[float], list[float]]:
    """Three steps; save by ours and by DeepSpeed; two more steps, and two after a resume from DeepSpeed's folder."""
    engine = adapted_engine(folder, stage)
    train(engine, range(3))
    hf_zero_stream.save_state(engine, target / "ours", data={"position": 7})
    for name, excludes in (("stock", True), ("all", False)):
        engine.save_checkpoint(str(target / name), client_state={"epoch": 2}, exclude_frozen_parameters=excludes)
    continued = train(engine, (3, 4))
    engine = adapted_engine(folder, stage)
    resumed = hf_zero_stream.load_state(engine, target / "stock")
    assert resumed.data == {"client_state": {"epoch": 2}} and engine.global_steps == 3
    return continued, train(engine, (3, 4))


def resume_from_deepspeeds(folder: Path, target: Path, stages: list[int]) -> dict[Any, list[float]]:
    """Saves what stages load, and the losses after a resume by the engine at the first one, from ours and theirs."""
    for stage in stages:
        resume_and_save(folder, target / "stock", stage, target / f"by {stage}")
    losses = {}
    for name in ("ours", "stock", "all"):
        engine = adapted_engine(folder, stages[0])
        with hf_zero_stream.streaming():
            engine.load_checkpoint(str(target / name), load_module_strict=False)
        losses[name] = train(engine, (3, 4))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_from_deepspeeds_own_folders(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, stage: int) -> None:
    """Goes on as if nothing had happened; at another size and stage, and under FSDP2, as from a state of ours."""
    folder = zoo_checkpoint("llama", torch.bfloat16)
    for continued, resumed in run_ranks(2, train_and_save_by_deepspeed, folder, tmp_path, stage):
        assert resumed == continued
    stages = [3, 2] if stage == 3 else [stage, 3]
    losses = run_ranks(3, resume_from_deepspeeds, folder, tmp_path, stages)[0]
    assert losses["ours"] == losses["stock"] == losses["all"]
    for other in stages:
        assert set(different_states(tmp_path / "ours", tmp_path / f"by {other}")) <= {ADAPTER}
        assert_same_adapter(tmp_path / "ours", tmp_path / f"by {other}", f"stage {other}")
    run_ranks(2, resume_under_fsdp2, folder, tmp_path / "stock", tmp_path / "fsdp2")
    assert set(different_states(tmp_path / "ours", tmp_path / "fsdp2")) <= {ADAPTER, "groups"}


def test_buffers_that_layers_share(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """VeRA's projections are buffers, each of which all its layers have."""

    def made() -> tuple[Any, torch.optim.Optimizer]:
        base = transformers.AutoModelForCausalLM.from_pretrained(zoo_checkpoint("llama"), dtype=torch.float32)
        torch.manual_seed(0)
        model = peft.get_peft_model(base, peft.VeraConfig(r=3, target_modules=["q_proj", "v_proj"]))
        return model, torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)

    model, optimizer = made()
    train_here(model, optimizer, range(2))
    hf_zero_stream.save_state(model, tmp_path, optimizer=optimizer)
    continued = train_here(model, optimizer, (2, 3))
    model, optimizer = made()
    hf_zero_stream.load_state(model, tmp_path, optimizer=optimizer)
    assert train_here(model, optimizer, (2, 3)) == continued


PROMPTS = {
    "prompts": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "projected": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, prefix_projection=True),
}


def save_sharded_prompts(folder: Path, target: Path, kind: str) -> str:
    """Save under FSDP2; what PEFT's file has must be what the ranks hold. Returns our error, if there is one."""
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), PROMPTS[kind])
    fully_shard(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    try:
        hf_zero_stream.save_state(model, target, optimizer=torch.optim.AdamW(trained))
    except UnsupportedError as error:
        return str(error)
    held = model.prompt_encoder["default"].embedding.weight.full_tensor()
    assert torch.equal(load_file(target / ADAPTER)["prompt_embeddings"], held)
    assert not model.peft_config["default"].inference_mode
    return ""


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_that_ranks_share(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, kind: str) -> None:
    """PEFT takes a prompt from its module, which cannot run where a rank has a part of it."""
    target = tmp_path / "saved"
    errors = run_ranks(2, save_sharded_prompts, zoo_checkpoint("llama"), target, kind)
    if kind == "projected":
        assert all("PrefixEncoder of several parameters" in error for error in errors), errors
        assert not list(target.rglob("*")), list(target.rglob("*"))
    else:
        assert errors == ["", ""]


@pytest.fixture
def bases(zoo_checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A checkpoint, and beside it another one of the same sizes."""
    folder = tmp_path / "base"
    shutil.copytree(zoo_checkpoint("llama"), folder)
    other = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(1.25)
    other.save_pretrained(f"{folder}-other")
    return folder


@pytest.mark.parametrize("home", ["zero3", "zero2", "fsdp2", "one process"])
def test_resumes_on_a_changed_base(cluster: None, bases: Path, tmp_path: Path, home: str) -> None:
    """Losses are those of stock's resume, or where it has none for adapters, of stock's training without a stop."""
    ranks = 1 if home == "one process" else 2
    changes = [*CHANGES]
    (tmp_path / "stock").mkdir()
    stock = run_ranks(ranks, train_and_save, bases, tmp_path / "stock", home, changes, False)[0]
    if home.startswith("zero"):
        resumed = run_ranks(ranks, resume, bases, tmp_path / "stock", home, changes, False)[0]
        assert {change: losses for change, (losses, _) in resumed.items()} == stock
    ours = tmp_path / "ours"
    ours.mkdir()
    assert run_ranks(ranks, train_and_save, bases, ours, home, changes, True)[0] == stock
    for change, (losses, wrong) in run_ranks(ranks, resume, bases, ours, home, changes, True)[0].items():
        assert wrong == [], change
        assert losses == stock[change], change
        found, is_new = in_state(ours / change), CHANGES[change][1]
        assert all(map(is_new, found)) and bool(found) == (change not in ("none", "two bases")), (change, found)


@pytest.mark.parametrize("home", ["zero3", "zero2", "fsdp2", "one process"])
def test_adapters_of_ones_own(cluster: None, bases: Path, tmp_path: Path, home: str) -> None:
    """``exclude_frozen`` does for them what is done for PEFT's; losses are those of a training without a stop."""
    ranks = 1 if home == "one process" else 2
    changes = [OWN + change for change in ("none", "resized", "by hand", "new buffer")]
    losses = run_ranks(ranks, train_and_save, bases, tmp_path, home, changes, True)[0]
    for change, (resumed, wrong) in run_ranks(ranks, resume, bases, tmp_path, home, changes, True)[0].items():
        assert wrong == [], change
        assert resumed == losses[change], change
        found, is_new = in_state(tmp_path / change), CHANGES[change.removeprefix(OWN)][1]
        assert all(map(is_new, found)) and bool(found) == (change != OWN + "none"), (change, found)
        assert not [*(tmp_path / change).glob("*.safetensors")]


@pytest.mark.slow
@pytest.mark.plugin("pickled")
@pytest.mark.parametrize("home", ["zero3", "zero2"])
def test_from_deepspeeds_folder(cluster: None, bases: Path, tmp_path: Path, home: str) -> None:
    """It has the whole base, which comes from it at another number of ranks and another stage."""
    changes = ["resized", "by hand", "new buffer"]
    run_ranks(2, train_and_save, bases, tmp_path, home, changes, False)
    for ranks, other in ((3, home), (1, "zero2" if home == "zero3" else "zero3"), (2, "fsdp2")):
        for change, (_, wrong) in run_ranks(ranks, resume, bases, tmp_path, other, changes, True)[0].items():
            assert wrong == [], (ranks, other, change)


def save_once(folder: Path, target: Path, home: str) -> None:
    with hf_zero_stream.streaming():
        training = AdapterTraining(folder, home, "none", 1, True)
        training.train([0])
        training.save(target)


def resume_on(folder: Path, source: Path, home: str) -> None:
    with hf_zero_stream.streaming():
        AdapterTraining(folder, home, "none", 1, True).load(source)


@pytest.mark.parametrize("home", ["zero3", "fsdp2"])
def test_another_base(cluster: None, bases: Path, tmp_path: Path, home: str) -> None:
    run_ranks(2, save_once, bases, tmp_path / "state", home)
    for outcome in run_ranks_expecting_errors(3, resume_on, Path(f"{bases}-other"), tmp_path / "state", home):
        assert outcome.error_type == "ConfigError", outcome
        assert f"{bases}, and now from {bases}-other" in str(outcome.error_message)
    run_ranks(3, resume_on, bases, tmp_path / "state", home)


def made(folder: Path, dtype: torch.dtype, loaded_in: torch.dtype | None = None) -> tuple[Any, Any]:
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=loaded_in or dtype)
    torch.manual_seed(0)
    model = peft.get_peft_model(base.to(dtype), peft.LoraConfig(target_modules=["q_proj"], r=3))
    return model, torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


@pytest.mark.parametrize("saved_in", [torch.float32, torch.bfloat16])
def test_base_in_another_dtype(bases: Path, tmp_path: Path, saved_in: torch.dtype) -> None:
    """The base of a resume may be in another dtype; another base is an error still."""
    other = torch.bfloat16 if saved_in == torch.float32 else torch.float32
    model, optimizer = made(bases, saved_in)
    train_here(model, optimizer, [0])
    hf_zero_stream.save_state(model, tmp_path / "state", optimizer=optimizer)
    assert in_state(tmp_path / "state") == set()
    for folder in (bases, Path(f"{bases}-other")):
        model, optimizer = made(folder, other)
        if folder == bases:
            hf_zero_stream.load_state(model, tmp_path / "state", optimizer=optimizer)
        else:
            with pytest.raises(ConfigError, match="trained on another base: 21 of 21"):
                hf_zero_stream.load_state(model, tmp_path / "state", optimizer=optimizer)


def test_cast_after_the_load(bases: Path, tmp_path: Path) -> None:
    """Values that were rounded by the load, and cast to a wider dtype, are the checkpoint's."""
    model, optimizer = made(bases, torch.float32, loaded_in=torch.bfloat16)
    hf_zero_stream.save_state(model, tmp_path, optimizer=optimizer)
    assert in_state(tmp_path) == set()


def test_changed_between_saves(bases: Path, tmp_path: Path) -> None:
    """Each save looks at the values of its moment: parameters and buffers that were changed since are in the state."""
    model, optimizer = made(bases, torch.float32)
    base = model.get_base_model()
    base.register_buffer("kept", torch.ones(3))
    for step, names in enumerate(({"kept"}, {"kept", "model.norm.weight"}, {"kept", "model.norm.weight", "late"})):
        if step == 1:
            base.model.norm.weight.data[0] = 7.0
        if step == 2:
            base.register_buffer("late", torch.full((2,), 3.0))
        hf_zero_stream.save_state(model, tmp_path, optimizer=optimizer, tag=f"{step}")
        assert in_state(tmp_path) == names
    base.model.norm.weight.data[0], base.late[0] = 1.0, 0.0
    hf_zero_stream.load_state(model, tmp_path, optimizer=optimizer)
    assert base.model.norm.weight[0] == 7.0 and base.late.tolist() == [3.0, 3.0]


def test_few_large_reads(bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save reads the checkpoint of the base in pieces of the default size of a buffer, and not in small ones."""
    model, optimizer = made(bases, torch.float32)
    sizes: list[int] = []
    look = Visitor.__init__

    def noted(self: Any, see: Any, part: int, parts: int, buffer_bytes: int) -> None:
        sizes.append(buffer_bytes)
        look(self, see, part, parts, buffer_bytes)

    monkeypatch.setattr(Visitor, "__init__", noted)
    hf_zero_stream.save_state(model, tmp_path, optimizer=optimizer)
    assert sizes == [64 * 2**20]


def test_checkpoint_that_is_gone(bases: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be compared is saved, and a warning says why."""
    model, optimizer = made(bases, torch.float32)
    bases.rename(f"{bases}-moved")
    hf_zero_stream.save_state(model, tmp_path / "state", optimizer=optimizer)
    assert len(in_state(tmp_path / "state")) == 21
    assert f"{bases} cannot be read again" in caplog.text


def test_frozen_adapters_come_back(bases: Path, tmp_path: Path) -> None:
    """A second adapter that is not trained, such as the reference of DPO, is in no base."""

    def with_reference(seed: int) -> tuple[Any, Any]:
        model, optimizer = made(bases, torch.float32)
        torch.manual_seed(seed)
        model.add_adapter("reference", peft.LoraConfig(target_modules=["v_proj"], r=2, init_lora_weights=False))
        return model, optimizer

    model, optimizer = with_reference(1)
    before = {name: param.clone() for name, param in model.named_parameters() if "reference" in name}
    hf_zero_stream.save_state(model, tmp_path, optimizer=optimizer)
    model, optimizer = with_reference(2)
    hf_zero_stream.load_state(model, tmp_path, optimizer=optimizer)
    after = dict(model.named_parameters())
    assert before and all(torch.equal(value, after[name]) for name, value in before.items())


def test_no_token_is_kept(bases: Path) -> None:
    """A model that knows where it came from may be pickled, and sent elsewhere."""
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(bases, token="hf_secret", dtype=torch.float32)
    assert str(bases) in str(vars(model)) and "hf_secret" not in str(vars(model))
