"""ZeRO checkpoints that DeepSpeed wrote: read as maps of bytes, converted, and resumed from at any number of ranks."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from hf_zero_stream.cli import app
from hf_zero_stream.engine.opened import OpenCheckpoint
from hf_zero_stream.errors import CheckpointError, ConfigError, UnsupportedError
from hf_zero_stream.plugins.pickled import convert as converting
from hf_zero_stream.plugins.pickled.convert import convert
from hf_zero_stream.plugins.pickled.zero_folder import ZeroFolder, read_zero_folder
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.sources.local import LocalFiles
from tests.support.checkpoint_files import tensors_of
from tests.support.cli import run, run_json
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.training_state import (
    Prepare,
    all_in_one_group,
    different_states,
    engine_of,
    frozen_embeddings,
    resume_and_save,
    resume_plain,
    state_config,
    train,
    train_and_save,
    two_groups,
)
from tests.support.zoo import Checkpoint


CPU_ADAM: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_force_ds_cpu_optimizer": True,
}
KINDS: dict[str, tuple[int, str, dict[str, Any], Prepare]] = {
    "one group": (2, "llama", state_config(3), all_in_one_group),
    "stage 3": (2, "deepseek_v3", state_config(3), all_in_one_group),
    "stage 3, tied": (2, "qwen3", state_config(3, torch.float32), all_in_one_group),
    "stage 2": (2, "deepseek_v3", state_config(2), all_in_one_group),
    "stage 1, fp32": (2, "qwen3", state_config(1, torch.float32), all_in_one_group),
    "frozen": (2, "llama", state_config(3), frozen_embeddings),
    "frozen, stage 1": (2, "llama", state_config(1), frozen_embeddings),
    "CPUAdam": (2, "llama", state_config(3, offload_optimizer={"device": "cpu"}) | CPU_ADAM, all_in_one_group),
    "two groups": (2, "llama", state_config(3), two_groups),
    "sub-groups": (3, "llama", state_config(3, sub_group_size=2000), two_groups),
    "two groups, stage 2": (3, "llama", state_config(2, round_robin_gradients=True), two_groups),
}
"""Ranks, model, config, groups."""


def train_kinds(folders: list[Path], target: Path, names: list[str]) -> dict[str, list[float]]:
    """Train each kind, save by ours and by DeepSpeed; the losses of two more steps."""
    kinds = [KINDS[name][2:] for name in names]
    found = {}
    for name, folder, (config, prepare) in zip(names, folders, kinds, strict=True):
        found[name] = train_and_save(folder, target / name, [config], [prepare])[0]
    return found


class Trained:
    """Folders of all kinds, made when they are first asked for; the losses of the steps that followed."""

    def __init__(self, target: Path, zoo_checkpoint: Checkpoint) -> None:
        self.losses: dict[str, list[float]] = {}
        self.target = target
        self.models = {name: zoo_checkpoint(model) for name, (_, model, _, _) in KINDS.items()}
        for world_size in (2, 3):
            names = [name for name, kind in KINDS.items() if kind[0] == world_size]
            models = [self.models[name] for name in names]
            self.losses |= run_ranks(world_size, train_kinds, models, target, names, timeout=400)[0]

    def stock(self, name: str) -> Path:
        return self.target / name / "stock 0"

    def ours(self, name: str) -> Path:
        return self.target / name / "ours 0"


@pytest.fixture(scope="module")
def trained(cluster: None, zoo_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("zero"), zoo_checkpoint)


# ------------------------------------------------------------------------------------------------------------- reading


def values_of(zero: ZeroFolder, key: str) -> dict[str, torch.Tensor]:
    """The trained values and what is not trained, or a moment."""
    with closing(OpenCheckpoint(StreamingConfig(progress=False), Coordinator(0, 1, alone=True))) as checkpoint:
        checkpoint.add(zero.shards)
        views = zero.views(key)
        if key == "fp32":
            views = {**zero.buffers(), **zero.frozen(), **views}
        values = {name: checkpoint.materialise(view) for name, view in views.items()}
    return values | ({alias: values[name] for alias, name in zero.shared.items()} if key == "fp32" else {})


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and bool(torch.equal(first, second))


@pytest.mark.parametrize("name", KINDS)
def test_values_are_those_of_zero_to_fp32(trained: Trained, name: str) -> None:
    zero = read_zero_folder(LocalFiles(), trained.stock(name) / "global_step3")
    ours, theirs = values_of(zero, "fp32"), get_fp32_state_dict_from_zero_checkpoint(str(trained.stock(name)))
    lost_by_deepspeed = {"model.embed_tokens.weight"} if name == "frozen, stage 1" else set()
    assert ours.keys() - lost_by_deepspeed == theirs.keys()
    assert [key for key, value in theirs.items() if not same(ours[key].to(value.dtype), value)] == []
    assert zero.lacking == [] and zero.keys == ["exp_avg", "exp_avg_sq"]
    assert [group.numbers["step"][0] for group in zero.groups] == [3] * len(zero.groups)


# ------------------------------------------------------------------------------------------------------------ resuming


def resume(folder: Path, source: Path, config: dict[str, Any], prepare: Prepare) -> list[float]:
    engine = engine_of(folder, config, prepare)
    resumed = hf_zero_stream.load_state(engine, source)
    assert resumed.tag == "global_step3" and engine.global_steps == 3
    return train(engine, (3, 4))


def resume_kinds(folders: list[Path], sources: list[Path], names: list[str]) -> dict[str, list[float]]:
    cases = zip(names, folders, sources, strict=True)
    return {name: resume(folder, source, *KINDS[name][2:]) for name, folder, source in cases}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_at_the_same_size_are_those_of_going_on(trained: Trained, world_size: int) -> None:
    names = [name for name, kind in KINDS.items() if kind[0] == world_size]
    sources, models = ([of(name) for name in names] for of in (trained.stock, trained.models.get))
    found = run_ranks(world_size, resume_kinds, models, sources, names, timeout=400)[0]
    assert found == {name: trained.losses[name] for name in names}


def resume_and_save_many(cases: list[tuple[Path, Path, dict[str, Any], Prepare, Path]]) -> None:
    for case in cases:
        resume_and_save(*case)


OTHERS: list[tuple[str, int, dict[str, Any], Prepare]] = [
    ("stage 3", 1, state_config(3), all_in_one_group),
    ("two groups, stage 2", 1, state_config(3), two_groups),
    ("sub-groups", 2, state_config(3), two_groups),
    ("two groups, stage 2", 2, state_config(1), two_groups),
    ("stage 2", 3, state_config(3), all_in_one_group),
    ("two groups", 3, state_config(3, sub_group_size=3000), two_groups),
    ("frozen", 3, state_config(2), frozen_embeddings),
    ("frozen, stage 1", 3, state_config(3), frozen_embeddings),
    ("CPUAdam", 3, state_config(2), all_in_one_group),
    ("two groups", 4, state_config(3), two_groups),
]
"""A kind, and where it goes on: ranks, config, groups."""


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))])
def test_other_numbers_of_ranks(trained: Trained, tmp_path: Path, world_size: int) -> None:
    """Saved again, what was loaded is what we saved when DeepSpeed did: values, moments, steps, options."""
    here = [(name, config, prepare) for name, size, config, prepare in OTHERS if size == world_size]
    cases = [
        (trained.models[name], trained.stock(name), config, prepare, tmp_path / str(number))
        for number, (name, config, prepare) in enumerate(here)
    ]
    run_ranks(world_size, resume_and_save_many, cases, timeout=400)
    for number, (name, _, _) in enumerate(here):
        found = different_states(trained.ours(name), tmp_path / str(number))
        assert [each for each in found if each != "groups"] == [], name  # which may be in another order
        assert steps_of(trained.ours(name)) == steps_of(tmp_path / str(number)), name


def number_in(written: Any) -> float:
    """Kinds differ between the makers of an optimizer."""
    return float(written["(tensor)"]["value"] if isinstance(written, dict) else written)


def steps_of(folder: Path) -> list[Any]:
    """The options of each group but for those of one implementation, and its parameters' steps."""
    record = json.loads((folder / "global_step3" / "training_state.json").read_text())
    shared = ("lr", "betas", "eps", "weight_decay")
    return [
        (
            {name: group["options"][name] for name in shared},
            [number_in(record["forms"][number]["small"]["step"]) for number in group["forms"]],
            sorted(group["parameters"]),
        )
        for group in record["groups"]
    ]


def resume_in_all_ways(folder: Path, source: Path, universal: Path) -> dict[str, list[float]]:
    """The losses after a resume by load_state, by the engine inside streaming(), and by DeepSpeed's universal one."""
    config = state_config(3)
    found = {"load_state": resume(folder, source, config, all_in_one_group)}
    engine = engine_of(folder, config, all_in_one_group)
    with hf_zero_stream.streaming():
        path, client_state = engine.load_checkpoint(str(source))
    assert (path, client_state) == (str(source / "global_step3"), {})
    found["engine"] = train(engine, (3, 4))
    engine = engine_of(folder, {**config, "checkpoint": {"load_universal": True}}, all_in_one_group)
    engine.load_checkpoint(str(universal.parent), tag=universal.name)
    found["universal"] = train(engine, (3, 4))
    return found


@pytest.mark.slow
def test_losses_at_another_size_are_those_of_deepspeeds_universal_resume(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    universal = tmp_path / "global_step3_universal"
    arguments = ["--input_folder", str(trained.stock("one group") / "global_step3"), "--output_folder", str(universal)]
    monkeypatch.setattr("sys.argv", ["ds_to_universal", *arguments, "--num_extract_workers", "1"])
    ds_to_universal.main(ds_to_universal.parse_arguments())
    folders = (trained.models["one group"], trained.stock("one group"), universal)
    found = run_ranks(3, resume_in_all_ways, *folders, timeout=300)[0]
    assert found["load_state"] == found["engine"] == found["universal"]


@pytest.mark.slow
def test_into_fsdp2(trained: Trained, tmp_path: Path) -> None:
    """As from a state of ours."""
    folder, sizes = trained.models["two groups"], {"fsdp_size": 2}
    sources = (trained.ours("two groups"), trained.stock("two groups"))
    losses = [run_ranks(2, resume_plain, folder, it, sizes, tmp_path / it.name, False)[0] for it in sources]
    assert losses[0] == losses[1]
    assert different_states(tmp_path / sources[0].name, tmp_path / sources[1].name) == []


def resume_or_not(folder: Path, source: Path) -> None:
    hf_zero_stream.load_state(engine_of(folder, state_config(3), all_in_one_group), source)


def test_all_ranks_raise(trained: Trained, tmp_path: Path) -> None:
    """Before anything is read: other groups, a file that is missing."""
    broken = tmp_path / "broken"
    shutil.copytree(trained.stock("one group"), broken)
    (broken / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    for source, error, text in (
        (trained.stock("two groups"), ConfigError, "had 2 groups, and has 1 now"),
        (broken, CheckpointError, "rank_1_mp_rank_00_optim_states.pt"),
    ):
        for outcome in run_ranks_expecting_errors(3, resume_or_not, trained.models["one group"], source):
            assert outcome.error_type == error.__name__ and text in str(outcome.error_message)


# ---------------------------------------------------------------------------------------------------------- converting


def test_what_modules_keep_beside(trained: Trained, tmp_path: Path) -> None:
    """Entries that are no tensors have no place in the files, and are not left out in silence."""
    folder = tmp_path / "global_step3"
    shutil.copytree(trained.stock("two groups") / "global_step3", folder)
    edited(lambda it: it["module"].update({"lm_head._extra_state": {"scale": 2.0}}), MODEL)(folder)
    with pytest.raises(UnsupportedError, match=r"1 entries of modules are neither .*lm_head\._extra_state"):
        convert(folder, tmp_path / "out", config=trained.models["two groups"], progress=False)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(("name", "dtype"), [("stage 3", torch.bfloat16), ("stage 1, fp32", None), ("frozen", None)])
def test_convert(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype | None
) -> None:
    """The values of zero_to_fp32, and in the hub's layout what transformers saves of a model with these values."""
    monkeypatch.setattr(converting, "CHUNK_BYTES", 4096)  # so that tensors are cut
    source = tmp_path / "checkpoint-3"
    shutil.copytree(trained.stock(name), source)
    shutil.copy(trained.models[name] / "config.json", source)
    wanted = dtype or torch.float32
    values = get_fp32_state_dict_from_zero_checkpoint(str(source))
    values = {key: value.to(wanted) if value.is_floating_point() else value for key, value in values.items()}

    convert(source, tmp_path / "same", dtype=dtype, max_shard_size="40KB")
    found = tensors_of(tmp_path / "same")
    assert found.keys() == values.keys() and (tmp_path / "same" / "model.safetensors.index.json").exists()
    assert [key for key in values if not same(found[key], values[key])] == []
    assert not any((tmp_path / "same" / left).exists() for left in ("latest", "zero_to_fp32.py"))

    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "same")
    assert plain.dtype == wanted
    # transformers keeps a buffer of DeepSeek-V3 in fp32.
    loaded = {key: value.to(wanted) for key, value in plain.state_dict().items()}
    assert [key for key, value in loaded.items() if not same(value, values[key])] == []

    convert(source / "global_step3", tmp_path / "hub", dtype=dtype, layout="hub", max_shard_size="40KB")
    plain = transformers.AutoModelForCausalLM.from_pretrained(trained.models[name], dtype=wanted)  # which is the hub's
    plain.load_state_dict(values)
    plain.save_pretrained(tmp_path / "stock", max_shard_size="40KB")
    ours, theirs = tensors_of(tmp_path / "hub"), tensors_of(tmp_path / "stock")
    assert ours.keys() == theirs.keys() and all(same(ours[key], theirs[key].to(wanted)) for key in ours)
    assert json.loads((tmp_path / "hub" / "config.json").read_text())["dtype"] == str(wanted).removeprefix("torch.")


def test_command(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, config = trained.stock("one group"), str(trained.models["one group"])
    app(
        ["convert", str(folder), str(tmp_path / "out"), "--dtype", "bf16", "--layout", "model", "--config", config],
        standalone_mode=False,
    )
    assert "21 tensors in 1 shard" in capsys.readouterr().out
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="config=FOLDER"):
        convert(folder, tmp_path / "none", layout="hub")


@pytest.mark.plugin("tools", "forecast")
def test_inspect_verify_and_plan(trained: Trained, tmp_path: Path) -> None:
    folder = trained.stock("one group")
    found, expected = run_json("inspect", str(folder)), run_json("inspect", str(trained.models["one group"]))
    assert found["format"] == "ZeRO" and found["count"] == expected["count"] and list(found["dtypes"]) == ["F32"]
    verified = run_json("verify", str(folder))
    assert verified["sound"] and verified["shards"] == len(found["shards"]) and verified["tensors"] == found["count"]
    assert "convert" in run("plan", str(folder), "--world-size", "2", code=1).stderr
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    lost = sorted(copied.rglob("*_optim_states.pt"))[-1]
    lost.unlink()
    (fault,) = run_json("verify", str(copied), code=1)["faults"]
    assert fault["kind"] == "map" and lost.name in fault["message"]


# -------------------------------------------------------------------------------------------------------------- faults


def edited(
    change: Callable[[dict[str, Any]], object], pattern: str = "*rank_1_*optim_states.pt"
) -> Callable[[Path], object]:
    """Changes a file, which is loaded and saved again."""

    def edit(folder: Path) -> None:
        (path,) = folder.glob(pattern)
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)

    return edit


def add(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(b"")


def swap(key: str) -> Callable[[Path], object]:
    """All ranks have a tensor in swap files, which are not there, and its moments, among them one named `key`."""

    def change(content: dict[str, Any]) -> None:
        optimizer = content[OPTIMIZER]
        flat = torch.zeros(0)
        flat.ds_id = "3_7"  # type: ignore[attr-defined]
        optimizer["fp32_flat_groups"][1] = flat
        optimizer[OPTIMIZER]["state"][1] = {"exp_avg_sq": flat, key: flat}

    edits = [edited(change, f"*rank_{rank}_*optim_states.pt") for rank in range(2)]
    return lambda folder: [edit(folder) for edit in edits]


def copy_rank(folder: Path) -> None:
    name = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    shutil.copy(folder / name.format(1), folder / name.format(2))


OPTIMIZER = "optimizer_state_dict"
MODEL = "zero_pp_rank_0_*model_states.pt"
FAULTS: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "a rank's file": (lambda folder: next(folder.glob("*rank_0_*optim*")).unlink(), CheckpointError, "is not there"),
    "a model file": (lambda folder: next(folder.glob("*rank_1_*model*")).unlink(), CheckpointError, "is not there"),
    "an older rank": (copy_rank, CheckpointError, "partition_count: expected 3, .* found 2"),
    "a rank twice": (add("zero_pp_rank_1_mp_rank_00_optim_states.pt"), CheckpointError, "rank 1 has another file"),
    "model parallel": (add("zero_pp_rank_0_mp_rank_01_optim_states.pt"), UnsupportedError, "tensor parallelism"),
    "a pipeline": (add("layer_00-model_00-model_states.pt"), UnsupportedError, "stages of a pipeline"),
    "a swap file": (swap("exp_avg"), CheckpointError, r"rank00/3_7.tensor.swp: the swap file is not there"),
    "a path": (swap("../../x"), CheckpointError, "expected names of states of the optimizer; found '../../x'"),
    "not a zip": (lambda folder: next(folder.glob(MODEL)).write_bytes(b"no"), CheckpointError, "model_states.pt"),
    "stage 0": (edited(lambda it: it[OPTIMIZER].pop("zero_stage")), UnsupportedError, "found that of stage 0"),
    "another stage": (edited(lambda it: it[OPTIMIZER].update(zero_stage=7)), CheckpointError, "found 7"),
    "another size": (edited(lambda it: it[OPTIMIZER].update(partition_count=3)), CheckpointError, "expected 2, .* 3"),
    "experts": (edited(lambda it: it[OPTIMIZER].update(partition_count=[2, 1])), UnsupportedError, "as experts are"),
    "AutoEP": (edited(lambda it: it.update(ds_autoep_layers=[1]), MODEL), UnsupportedError, "different experts"),
    "tensor parallel": (edited(lambda it: it.update(mp_world_size=2), MODEL), UnsupportedError, "mp_world_size"),
    "a flat": (
        edited(lambda it: it[OPTIMIZER]["fp32_flat_groups"].__setitem__(1, torch.zeros(3))),
        UnsupportedError,
        "'exp_avg', .* numbers, for fp32_flat_groups.1., which has 3 elements",
    ),
    "a block of a moment": (
        edited(lambda it: it[OPTIMIZER][OPTIMIZER]["state"][0].update(errors=torch.zeros(7))),
        UnsupportedError,
        "'errors', 7 numbers",
    ),
    "a step": (
        edited(lambda it: it[OPTIMIZER][OPTIMIZER]["state"][0].update(step=torch.tensor(9.0))),
        CheckpointError,
        "the same entries and steps .* .step.*go on with 2 ranks",
    ),
    "an entry of its own": (
        edited(lambda it: it[OPTIMIZER][OPTIMIZER]["state"].update(everywhere={"count": 3})),
        UnsupportedError,
        "keeps 'everywhere', which belongs to none of its tensors. Go on with as many ranks",
    ),
    "beside groups and states": (
        edited(lambda it: it[OPTIMIZER][OPTIMIZER].update(scales=[1.0])),
        UnsupportedError,
        "keeps 'scales', which belongs to none",
    ),
    "None on one rank": (
        edited(lambda it: it[OPTIMIZER][OPTIMIZER]["state"][0].update(compensation=None)),
        CheckpointError,
        "expected the same entries .*compensation",
    ),
    "Muon": (
        edited(lambda it: it[OPTIMIZER][OPTIMIZER]["param_groups"][0].update(use_muon=True)),
        UnsupportedError,
        "Muon",
    ),
    "groups": (
        edited(lambda it: it[OPTIMIZER][OPTIMIZER]["param_groups"][0].update(params=[0, 0])),
        CheckpointError,
        "once in all groups",
    ),
    "shapes": (
        edited(lambda it: it["param_shapes"][1].update({"more": torch.Size([9])}), MODEL),
        CheckpointError,
        "expected .* elements, which the parameters in it need",
    ),
    "huge shapes": (
        edited(lambda it: it["param_shapes"][1].update({"more": torch.Size([2**40, 2**40])}), MODEL),
        CheckpointError,
        "overflow",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(trained: Trained, tmp_path: Path, name: str) -> None:
    damage, error, text = FAULTS[name]
    folder = tmp_path / "global_step3"
    shutil.copytree(trained.stock("two groups") / "global_step3", folder)
    damage(folder)
    with pytest.raises(error, match=text) as raised:
        read_zero_folder(LocalFiles(), folder)
    assert str(folder) in str(raised.value)
