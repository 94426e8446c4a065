"""The DeepSpeed configs in examples/deepspeed run; each destination in docs/support.md has tests."""

import re
from pathlib import Path

import pytest

from tests.support.cluster import ROOT
from tests.support.commands import losses, run_command
from tests.support.shown_by import assert_tests_exist


PAGE = ROOT / "docs" / "support.md"
MAKE = "python -m benchmarks.moe_checkpoint tiny-moe --gigabytes 0.01 --layers 2 --experts 8"
TRAIN = "torchrun --nproc_per_node 2 examples/finetune_trainer.py --model tiny-moe --steps 3"
SHOWN_BY = {
    "device": "test_equals_plain_loading test_losses_equal_stock test_losses_equal_stock_at_other_world_sizes",
    "CPU offload": "test_offload_to_pinned_memory test_pinned_memory_is_filled_in_place test_missing_keys",
    "NVMe": "test_losses_equal_stock test_values_equal_plain_loading test_host_memory_is_bounded_by_the_buffers",
    "ZeRO++ hpZ": "test_hpz test_missing_keys",
    "ZeRO++ qwZ": "test_no_quantizer_on_a_cpu test_quantised_on_the_wire test_quantised_weights_need_a_gpu",
    "frozen weights in int8": (
        "test_no_quantizer_on_a_cpu test_quantising_frozen_weights test_partitioning_what_is_frozen"
    ),
    "frozen parameters, LoRA": "test_frozen test_frozen_partitions_stay test_training_a_new_adapter",
    "mixed dtypes": "test_torch_autocast test_frozen test_teacher_and_student",
    "several models, one after another": "test_teacher_and_student test_teacher_and_student_with_hpz",
    "a streamed model inside the user's own": "test_own_model_around_a_streamed_one",
    "a streamed part, built under `with zero.Init(...)`": "test_own_model_built_under_init",
    "sequence parallelism (Ulysses)": "test_sequence_parallel",
    "other ranks for single parameters": "test_group_of_a_parameter",
    "expert parallelism (AutoEP)": (
        "test_losses_equal_those_without_expert_parallelism test_each_rank_reads_its_own_experts_only "
        "test_no_fused_expert_tensor_is_allocated test_checkpoints_of_the_engine_are_saved_and_loaded "
        "test_with_offload test_saved_as_the_model_that_it_was"
    ),
    "tensor parallelism of DeepSpeed (AutoTP), all stages": "test_trains_as_stock",
    "an `mpu`, stages of a pipeline, AutoTP with experts": "test_parts_are_saved_by_deepspeed",
    "frozen weights in files": "test_losses_and_adapters_are_those_in_memory test_packed_weights_stay_in_files",
    "[no checkpoint](use.md#without-a-checkpoint): `from_config`, `zero.Init(module=...)`": (
        "test_zero3_is_stocks test_fsdp2_is_a_plain_model test_fsdp2_is_on_no_rank_whole test_prebuilt"
    ),
    "`offload_optimizer` with `ratio` below 1, `super_offload`; ZenFlow": (
        "test_beside_stock test_moments_that_nothing_reaches"
    ),
    "transformers' own expert parallelism": "test_transformers_own_means_nothing_under_zero3",
    "stages 0 to 2, data parallelism": "test_losses_equal_stock test_values_equal_plain_loading",
    "a model that exists: `load_into`": (
        "test_partitions_hold_the_new_values test_in_every_home test_a_training_engine_gets_masters_and_weights"
    ),
}
"""Destination -> the tests that show what the page says of it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples run, with their checkpoint."""
    folder = tmp_path_factory.mktemp("homes")
    run_command(MAKE, folder)
    return folder


@pytest.fixture(scope="module")
def stock_losses(folder: Path) -> list[str]:
    """What stock's loading gives with plain ZeRO-3; where partitions live changes no value."""
    found = losses(run_command(TRAIN, folder, extra=["--loader", "stock"]))
    assert len(found) == 3
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("async_io")
@pytest.mark.parametrize("config", ["zero3_offload_cpu.json", "zero3_hpz.json", "zero3_nvme.json"])
def test_trains_as_stock(folder: Path, stock_losses: list[str], config: str) -> None:
    output = run_command(TRAIN, folder, extra=["--deepspeed", f"examples/deepspeed/{config}"])
    assert output.count("STREAMING LOAD REPORT (2 ranks") == 1
    assert losses(output) == stock_losses


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_stage_2_trains_as_stock(folder: Path) -> None:
    extra = ["--deepspeed", "examples/deepspeed/zero2.json"]
    output = run_command(TRAIN, folder, extra=extra)
    assert output.count("STREAMING LOAD REPORT (2 ranks") == 1
    stock = losses(run_command(TRAIN, folder, extra=[*extra, "--loader", "stock"]))
    assert losses(output) == stock and len(stock) == 3


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_quantised_weights_need_a_gpu(folder: Path) -> None:
    """`run_command` fails with what the command printed."""
    with pytest.raises(AssertionError, match="UnsupportedError: zero_quantized_weights: DeepSpeed's quantizer"):
        run_command(TRAIN, folder, extra=["--deepspeed", "examples/deepspeed/zero3_quantized_weights.json"])


def rows() -> list[list[str]]:
    _, _, page = PAGE.read_text().partition("\n## Destinations under DeepSpeed\n")
    lines = [line for line in page.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1:]]


def test_each_destination_has_tests() -> None:
    assert {len(row) for row in rows()} == {4}
    assert {row[0] for row in rows() if not row[2].startswith("*refused*")} == set(SHOWN_BY)
    assert_tests_exist(SHOWN_BY)


def test_each_config_has_a_row() -> None:
    configs = {path.name for path in (ROOT / "examples" / "deepspeed").glob("*.json")}
    assert configs == set(re.findall(r"`([\w.]+\.json)`", "\n".join(row[3] for row in rows())))
