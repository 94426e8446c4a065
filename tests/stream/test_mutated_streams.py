"""What becomes of weights for engines if a release renames a function of a trainer that we replace, or calls another.

Either there is an error, or engines get the tensors that they get without us; never others.
"""

import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.vllm_on_cpu import stand_in
from hf_zero_stream.bindings import install
from hf_zero_stream.bindings.table import TABLE
from hf_zero_stream.registry import PatchScope, Row
from tests.stream import test_async_grpo, test_openrlhf, test_trl, test_verl
from tests.support.checkpoint_files import differing
from tests.support.cluster import run_ranks
from tests.support.engine_servers import VLLMServer
from tests.support.mutations import MUTATIONS, Mutation, mutated
from tests.support.rl_trainers import openrlhf, verl
from tests.support.trainers import make_tokenizer
from tests.support.zoo import Checkpoint


Tensors = dict[str, torch.Tensor]


def unasked(row: Row, patch: pytest.MonkeyPatch) -> Row:
    """It is there, and a trainer asks another function for what we would have it ask this one."""
    name = row.of.rpartition(".")[2]
    put = install.override_methods

    @contextmanager
    def override_methods(instance: Any, **methods: Any) -> Iterator[None]:
        with put(instance, **{each: method for each, method in methods.items() if each != name}):
            yield

    patch.setattr(importlib.import_module("hf_zero_stream.plugins.stream.trl"), "override_methods", override_methods)
    return row


def mutations(begin: str) -> list[Any]:
    return [
        pytest.param(
            (PatchScope.BLOCK.name, number, mutate), id=f"{mutate.__name__} {row.name}", marks=pytest.mark.slow
        )
        for number, row in enumerate(TABLE[PatchScope.BLOCK])
        if row.of.startswith(begin)
        for mutate in (
            MUTATIONS if row.leads_to else (MUTATIONS[0], unasked) if row.package == "trl" else MUTATIONS[:1]
        )
    ]


# ---------------------------------------------------------------------------------------------------------------- TRL


def of_trl(mutation: Mutation | None, train: Callable[..., Any], folder: Path, output: Path, *args: Any) -> Any:
    stand_in(output / f"rank {dist.get_rank()}")  # before TRL is imported
    return mutated(mutation, train, folder, output, *args)


def sent(
    mutation: Mutation | None, train: Callable[..., Any], folder: Path, output: Path, *args: Any
) -> tuple[list[Tensors], list[str]]:
    """What a server got, and the errors of the ranks."""
    folder = shutil.copytree(folder, output / "model")
    make_tokenizer(folder)
    server = VLLMServer(str(folder))
    try:
        found = run_ranks(
            2, of_trl, mutation, train, folder, output, *(server.url if each == "URL" else each for each in args)
        )
    finally:
        server.close()
    return server.updates, [what for what in found if isinstance(what, str)]


def passes(updates: list[Tensors]) -> Iterator[Tensors]:
    """Each pass over all parameters, of which TRL makes one update or many."""
    whole: Tensors = {}
    for update in updates:
        if whole.keys() & update.keys():
            yield whole
            whole = {}
        whole |= update
    yield whole


def assert_right(found: tuple[list[Tensors], list[str]], expected: tuple[list[Tensors], list[str]]) -> None:
    """TRL itself merges adapters into its model and takes them out again, with roundings."""
    assert expected[0] and expected[1] == []
    updates, errors = found
    mine = updates if errors else list(passes(updates))
    assert errors or len(mine) == len(expected[0])
    for ours, theirs in zip(mine, expected[0], strict=False):
        assert errors or ours.keys() == theirs.keys()
        torch.testing.assert_close(ours, {name: theirs[name] for name in ours}, rtol=0, atol=1e-6)


class Expected:
    """What a server gets without a mutation, by the arguments of the training."""

    def __init__(self, folder: Path, output: Path) -> None:
        self._folder, self._output, self._found = folder, output, {}

    def __call__(self, train: Callable[..., Any], *args: Any) -> tuple[list[Tensors], list[str]]:
        key = (train, args)
        if key not in self._found:
            self._found[key] = sent(None, train, self._folder, self._output / str(len(self._found)), *args)
        return self._found[key]


@pytest.fixture(scope="module")
def expected(cluster: None, zoo_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return Expected(zoo_checkpoint("llama"), tmp_path_factory.mktemp("expected"))


TRAININGS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "zero3": ("trl.generation.", (test_trl.train, "zero3", True, False, "URL")),
    "fsdp2 lora": ("trl.generation.", (test_trl.train, "fsdp2", True, True, "URL")),
    "online DPO": ("trl.experimental.online_dpo.", (test_trl.train, "zero3", True, False, "URL", None, "online DPO")),
    "async GRPO": ("trl.experimental.async_grpo.", (test_async_grpo.train, "URL")),
}
"""Where the functions are that are mutated, and what trains."""


@pytest.mark.parametrize(
    ("name", "mutation"),
    [
        pytest.param(name, *row.values, id=f"{name} {row.id}", marks=row.marks)
        for name, (begin, _) in TRAININGS.items()
        for row in mutations(begin)
    ],
)
def test_of_trl(expected: Expected, zoo_checkpoint: Checkpoint, tmp_path: Path, name: str, mutation: Mutation) -> None:
    train, *args = TRAININGS[name][1]
    assert_right(sent(mutation, train, zoo_checkpoint("llama"), tmp_path, *args), expected(train, *args))


# --------------------------------------------------------------------------------------------------- OpenRLHF and verl


def with_stand_in(
    module: Any, make: Callable[[], type], mutation: Mutation, work: Callable[..., Any], *args: Any
) -> Any:
    """`make` puts a stand-in of a framework among the modules, which `module` must not put there anew."""
    made = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[module], make.__name__, lambda *_: made)
        return mutated(mutation, work, *args)


@pytest.mark.parametrize("mutation", mutations("openrlhf."))
def test_of_openrlhf(cluster: None, zoo_checkpoint: Checkpoint, mutation: Mutation) -> None:
    folder, work = zoo_checkpoint("llama"), test_openrlhf.sync
    stock, _ = run_ranks(2, work, folder, False)
    outcome, _ = run_ranks(2, with_stand_in, work.__module__, openrlhf, mutation, work, folder, True)
    if not isinstance(outcome, str):
        assert [differing(*each) for each in zip(outcome["loaded"], stock["loaded"], strict=True)] == [[], []]


@pytest.mark.parametrize("mutation", mutations("verl."))
def test_of_verl(cluster: None, zoo_checkpoint: Checkpoint, mutation: Mutation) -> None:
    work = test_verl.both
    outcome, _ = run_ranks(2, with_stand_in, work.__module__, verl, mutation, work, zoo_checkpoint("qwen3_moe"))
    assert isinstance(outcome, str) or (outcome["differing"] == [] and outcome["order"] == [True, True])
