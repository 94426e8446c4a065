"""What the engine's side imports."""

import sys

from tests.core.test_imports import imports_of


def test_an_engine_needs_torch_alone() -> None:
    """What runs in vLLM's process, where the package is installed without what it depends on."""
    of_engine = {
        f"hf_zero_stream.plugins.stream.{name}" for name in ("wire", "receiver", "reads", "vllm_plugin", "vllm_engine")
    }
    for module in of_engine:
        sources = {source for source, _ in imports_of(module)}
        own = {source for source in sources if source.startswith("hf_zero_stream")}
        assert own <= of_engine
        others = {source.partition(".")[0] for source in sources - own} - sys.stdlib_module_names
        assert others <= {"torch", "vllm"}, module
