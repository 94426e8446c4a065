"""Some situations beside stock, and the generator itself: what it draws, finds, and makes simpler."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.situations.axes import AXES, Situation, contradiction, draw, simpler
from tests.situations.models import make
from tests.situations.script import write_script
from tests.situations.trial import Finding, Trial, _of_losses, _of_weights, shrunk, trial


FOUND_BEFORE = [
    "home=autotp1,model=even",
    "optimizer=none_entry",
    "change=lora_resized,wrapper=accelerate",
    "optimizer=own_state_dict,home=zero3_offload",
    "home=zero2,wrapper=accelerate,weights=state_dict_rank0",
    "change=extra_state",
    "optimizer=global_entry,follows=resume_1",
    pytest.param("change=extra_state,follows=resume_1", marks=pytest.mark.plugin("pickled")),  # DeepSpeed has saved it
    "change=lora_prompt,home=fsdp2,wrapper=accelerate",
]
"""One of each kind in which something was lost."""

DRAWN = [str(draw(random.Random(seed))) for seed in range(100, 112)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    make(folder)
    return folder


def _try(text: str, folder: Path, checkpoints: Path) -> None:
    result = trial(Situation.parse(text), folder, checkpoints)
    assert result.findings == (), "\n".join(f"{each.kind}: {each.text}" for each in result.findings)


@pytest.mark.sample(6)
@pytest.mark.parametrize("text", FOUND_BEFORE)
def test_found_before(cluster: None, tmp_path: Path, checkpoints: Path, text: str) -> None:
    """Trains, saves and resumes as stock does."""
    _try(text, tmp_path, checkpoints)


@pytest.mark.sample(2)
@pytest.mark.parametrize("text", DRAWN)
def test_drawn(cluster: None, tmp_path: Path, checkpoints: Path, text: str) -> None:
    """Trains, saves and resumes as stock does."""
    _try(text, tmp_path, checkpoints)


@pytest.mark.usefixtures("async_io")
@pytest.mark.parametrize("wrapper", ["engine", "accelerate"])
def test_what_deepspeed_would_not_bring_back_is_not_left_to_it(
    cluster: None, tmp_path: Path, checkpoints: Path, wrapper: str
) -> None:
    """With swap files, DeepSpeed's own load restores nothing, without a word; so its save is no way out."""
    situation = Situation.parse(f"home=zero3_nvme,optimizer=global_entry,wrapper={wrapper}")
    result = trial(situation, tmp_path, checkpoints)
    assert result.findings == ()
    assert "everywhere" in result.refused and "on NVMe" in result.refused and result.stock_failed.startswith("resume")
    assert not list((tmp_path / "ours").rglob("*.*"))


def test_a_seed_draws_the_same() -> None:
    """A situation can be written down and read again, and none contradicts itself."""
    drawn = [draw(source) for source in (random.Random(3), random.Random(3)) for _ in range(200)]
    assert drawn[:200] == drawn[200:]
    assert all(contradiction(each) is None and Situation.parse(str(each)) == each for each in drawn)


def test_each_value_is_drawn() -> None:
    source = random.Random(1)
    drawn = [draw(source) for _ in range(3000)]
    for name, values in AXES.items():
        assert {getattr(each, name) for each in drawn} == set(values), name


def test_an_unknown_value() -> None:
    with pytest.raises(ValueError, match="home is one of .*'zero4'"):
        Situation.parse("home=zero4")


def _fails_if(fails: Callable[[Situation], bool]) -> Callable[[Situation], Trial]:
    return lambda each: Trial(findings=(Finding("losses", "other"),) if fails(each) else ())


def test_a_failure_is_made_simpler() -> None:
    """What is left is what it depends on, and another failure is not taken for it."""
    given = Situation.parse("model=moe,change=lora_buffer,home=zero2,optimizer=amsgrad,wrapper=accelerate,groups=two")
    found = shrunk(given, {"losses"}, _fails_if(lambda each: each.adapts and each.home == "zero2"))
    assert found == Situation.parse("change=lora,home=zero2")
    assert shrunk(given, {"an error"}, _fails_if(lambda each: each != given)) == given
    assert not list(simpler(Situation()))


def test_comparisons() -> None:
    """Losses must be equal, bit for bit; weights of a tied tensor may have one of its names."""
    assert not _of_losses("losses", [{"losses": [1.0, 2.0]}], [[1.0, 2.0]])
    (finding,) = _of_losses("losses", [{"losses": [1.0, 2.0]}, {"losses": [1.0, 2.0000001]}], [[1.0, 2.0]] * 2)
    assert finding.text.startswith("rank 1")
    theirs = {"a": ((2,), "fp32", "x"), "b": ((2,), "fp32", "x"), "c": ((2,), "fp32", "y")}
    assert not _of_weights({name: theirs[name] for name in "ac"}, theirs)
    (lacks,) = _of_weights({"a": theirs["a"]}, theirs)
    assert lacks.text == "c is left out"
    (halved,) = _of_weights({**theirs, "c": ((1,), "fp32", "z")}, theirs)
    assert halved.text == "c: ((1,), 'fp32'), stock: ((2,), 'fp32')"


def test_a_script(tmp_path: Path) -> None:
    situation = Situation.parse("home=zero2,optimizer=none_entry")
    text = write_script(tmp_path, 3, situation, ["losses"]).read_text()
    compile(text, "finding.py", "exec")
    assert f'Situation.parse("{situation}")' in text and text.startswith('"""losses')
