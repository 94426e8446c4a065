"""Some situations beside stock, and the generator itself: what it draws, finds, and makes simpler."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.situations import hosts, places
from tests.situations.axes import Situation
from tests.situations.drawn import Drawn
from tests.situations.models import make
from tests.situations.script import module_of, write_script
from tests.situations.trial import Finding, Trial, _of_losses, _of_weights, shrunk, trial
from tests.support.hosts import can_mount


FOUND_BEFORE = [
    pytest.param("home=autotp1,model=even", marks=pytest.mark.plugin("autotp")),
    "optimizer=none_entry",
    "change=lora_resized,wrapper=accelerate",
    "optimizer=own_state_dict,home=zero3_offload",
    "home=zero2,wrapper=accelerate,weights=state_dict_rank0",
    "change=extra_state",
    pytest.param(
        "optimizer=global_entry,follows=resume_1", marks=pytest.mark.plugin("pickled")
    ),  # DeepSpeed has saved it
    pytest.param("change=extra_state,follows=resume_1", marks=pytest.mark.plugin("pickled")),  # DeepSpeed has saved it
    "change=lora_prompt,home=fsdp2,wrapper=accelerate",
]
"""One of each kind in which something was lost."""

OURS = {"error": "SaveError: lost", "kinds": ["SaveError", "HfZeroStreamError"], "frames": []}

DRAWN = [str(Situation.draw(random.Random(seed))) for seed in range(100, 112)]


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


@pytest.mark.parametrize("kind", [Situation, places.Place, hosts.Hosts])
def test_situations_are_drawn_and_written_down(kind: type[Drawn], tmp_path: Path) -> None:
    """Each value of each axis, none that contradicts itself; what is simpler differs, and comes to an end."""
    source, again = random.Random(5), random.Random(5)
    drawn = [kind.draw(source) for _ in range(3000)]
    assert drawn[:50] == [kind.draw(again) for _ in range(50)]
    for name, values in kind.AXES.items():
        assert {getattr(each, name) for each in drawn} == set(values), name
    assert all(each.contradiction() is None and kind.parse(str(each)) == each for each in drawn)
    assert all(each not in each.simpler() for each in drawn[:50])
    simplest = shrunk(drawn[0], {"x"}, lambda each: Trial(findings=(Finding("x", ""),)))
    assert not list(simplest.simpler())
    text = write_script(tmp_path, 4, drawn[0], ["lost"]).read_text()
    compile(text, "finding.py", "exec")
    assert f"from {module_of(drawn[0]).__name__} import" in text


@pytest.mark.parametrize(
    ("found", "outcomes", "kinds"),
    [
        ({"values": [2.0]}, {"first": {"saved": True}}, []),
        ({"values": [1.0]}, {"first": {"saved": True}}, ["another's values"]),
        ({"values": [1.0]}, {"first": OURS}, []),
        ({"values": [2.0]}, {"first": OURS}, ["another's values"]),
        ({"values": [2.0]}, {"first": {**OURS, "error": "SaveError: This save is complete"}}, []),
        ({"values": [2.0]}, {"first": {"killed": True}}, []),
        ({"values": [2.0, 3.0]}, {"first": {"saved": True}, "second": {"saved": True}}, ["a mixture"]),
        ({"values": [3.0]}, {"first": OURS, "second": {"saved": True}}, []),
        ({**OURS}, {"first": OURS}, ["lost"]),
        ({"values": [1.0]}, {"first": {**OURS, "kinds": ["OSError"]}}, ["an error of somebody else"]),
    ],
)
def test_the_rule_of_places(found: dict[str, Any], outcomes: dict[str, Any], kinds: list[str]) -> None:
    assert [each.kind for each in places._against_the_rule(places.Place(), outcomes, found)] == kinds


OF_PLACES = [
    "place=folder,what=state,fault=killed,at=rename,number=3,second=none",
    "place=folder,fault=io_error,at=list,number=3",
    "place=folder,what=state,fault=no_space,at=make,number=7",
    pytest.param("place=bucket,fault=cut,at=put,number=2,shape=fewer", marks=pytest.mark.plugin("remote")),
    pytest.param(
        "place=hosts,away=none,fault=killed,at=rename,number=2",
        marks=[
            pytest.mark.plugin("hosts"),
            pytest.mark.skipif(not can_mount(), reason="mounting in a namespace of its own is not allowed here"),
        ],
    ),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("text", OF_PLACES)
def test_places(cluster: None, tmp_path: Path, text: str) -> None:
    """A load afterwards gives one writer's values, and whoever has lost has an error of ours."""
    kind = hosts if text.startswith("place=hosts") else places
    situation = (hosts.Hosts if kind is hosts else places.Place).parse(text)
    assert kind.trial(situation, tmp_path / "trial").findings == ()


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
    assert not list(Situation().simpler())


def test_comparisons() -> None:
    """Losses must be equal, bit for bit; weights of a tied tensor may have one of its names."""
    nan = float("nan")
    assert not _of_losses("losses", [{"losses": [1.0, nan]}], [[1.0, nan]])
    assert _of_losses("losses", [{"losses": [1.0, 2.0]}], [[1.0, nan]])
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
