"""docs/settings.md names each argument that the installed transformers knows, and each has tests."""

import ast
import inspect
import re

import transformers
from transformers.models.auto import auto_factory

from tests.support.cluster import ROOT
from tests.support.shown_by import assert_tests_exist


OURS = {"ds_config", "strict"}
SHOWN_BY = {
    "pretrained_model_name_or_path": (
        "test_repository_in_the_cache test_pieces_of_ranks_are_left_to_stock test_distributed_checkpoint "
        "test_no_weights"
    ),
    "model_args": "test_model_args",
    "config": "test_config_object test_config_path",
    "cache_dir": "test_repository_in_the_cache",
    "ignore_mismatched_sizes": "test_ignore_mismatched_sizes",
    "force_download": "test_changes_nothing test_repository_not_in_the_cache",
    **dict.fromkeys(
        (
            "local_files_only token proxies tqdm_class max_memory offload_folder offload_buffers "
            "allow_all_kernels _from_pipeline _from_auto _commit_hash mirror _fast_init low_cpu_mem_usage "
            "from_tf from_flax offload_state_dict"
        ).split(),
        "test_changes_nothing",
    ),
    "revision": "test_repository_in_the_cache test_revision_of_a_folder",
    "use_safetensors": "test_use_safetensors test_use_safetensors_where_there_are_none",
    "weights_only": "test_weights_only",
    "fusion_config": "test_fusion_config",
    "disable_mmap": "test_disable_mmap",
    "state_dict": "test_state_dict",
    "output_loading_info": "test_output_loading_info",
    "dtype": "test_dtype test_dtype_of_each_part test_wrong_dtype",
    "torch_dtype": "test_dtype test_dtype_and_torch_dtype",
    "device_map": "test_device_map",
    "quantization_config": (
        "test_dequantised_as_plain test_compressed_tensors test_losses test_bytes_are_those_of_stock "
        "test_unknown_format_is_refused_by_name test_quantization_config_that_stays"
    ),
    "subfolder": "test_subfolder",
    "variant": "test_variant",
    "adapter_kwargs": "test_adapter_kwargs test_adapter_folder_as_model_path",
    "adapter_name": "test_adapter_name",
    "generation_config": "test_generation_config",
    "gguf_file": "test_dequantised_as_plain test_without_dequantize_it_is_left_to_stock",
    "distributed_config": ("test_tensor_parallelism test_distributed_arguments_that_ask_for_nothing"),
    "device_mesh": "test_distributed_arguments_that_ask_for_nothing",
    "tp_plan tp_size": "test_tensor_parallelism",
    "trust_remote_code": "test_trusted test_missing_tensors test_not_trusted",
    "use_kernels kernel_config": "test_kernels_without_their_package",
    "key_mapping": "test_key_mapping test_key_mapping_is_remembered",
    "attn_implementation": "test_attn_implementation",
    "experts_implementation": "test_experts_implementation",
    "kwargs": "test_other_kwargs_update_the_config test_unknown_kwargs",
    "code_revision": "test_in_bf16 test_changes_nothing",
    "use_timm_backbone": "test_backbones",
    "ds_config": "test_ds_config test_the_newest_that_is_alive_counts test_two_models",
    "strict": "test_strict",
}
"""Arguments -> the tests that show what the page says of them."""


def rows() -> list[str]:
    """The arguments that the page's table names."""
    _, _, page = (ROOT / "docs" / "settings.md").read_text().partition("\n## Arguments of ")
    return [
        name
        for line in page.partition("\n## ")[0].splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    ]


def arguments_of(function: object) -> set[str]:
    """Parameters, what is popped from `kwargs` by name, and what is popped in loops over lists of names."""
    function = inspect.unwrap(getattr(function, "__func__", function))  # type: ignore[arg-type]
    source = inspect.getsource(function)
    found = {name for name in inspect.signature(function).parameters if name not in ("cls", "self")}
    found |= set(re.findall(r"\bkwargs\.(?:pop|get)\(\s*\"(\w+)\"", source))
    found |= set(re.findall(r"\"(\w+)\" in kwargs", source))
    for names in re.findall(r"(?:for name in|hub_kwargs_names =) (\[[^\]]*\])", source):
        found |= set(ast.literal_eval(names))
    return found


def known() -> set[str]:
    return (
        arguments_of(transformers.PreTrainedModel.from_pretrained)
        | arguments_of(auto_factory._BaseAutoModelClass.from_pretrained)
        | arguments_of(auto_factory._BaseAutoBackboneClass.from_pretrained)
    )


def test_arguments_are_found() -> None:
    """The reading of the source works: some of each kind."""
    assert {"config", "model_args", "dtype", "mirror", "attn_implementation", "code_revision"} <= known()


def test_each_argument_has_a_row() -> None:
    assert sorted(rows()) == sorted(known() | OURS)


def test_each_argument_has_a_test() -> None:
    arguments = [argument for names in SHOWN_BY for argument in names.split()]
    assert sorted(arguments) == sorted(known() | OURS)
    assert_tests_exist(SHOWN_BY)
