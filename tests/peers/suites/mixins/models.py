"""Drives transformers' FSDP, TP and EP mixins with tiny models, as its own test of each model would."""

import os
import unittest
from typing import Any

import transformers

from .test_expert_parallel_mixin import ExpertParallelTesterMixin
from .test_fsdp_mixin import FSDPTesterMixin
from .test_tensor_parallel_mixin import TensorParallelTesterMixin


os.cpu_count = lambda: 8  # by which the mixins skip tests of 4 and 8 ranks

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


class Tester:
    """What the mixins ask of a model's tester."""

    def __init__(self, model: str, config: dict[str, Any]) -> None:
        self.causal_lm_class = getattr(transformers, f"{model}ForCausalLM")
        self._config_class, self._config = getattr(transformers, f"{model}Config"), {**SIZES, **config}

    def get_config(self) -> Any:
        return self._config_class(**self._config)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        return self.get_config(), {}


class Case(FSDPTesterMixin, TensorParallelTesterMixin, ExpertParallelTesterMixin):
    model_tester: Any = None
    all_model_classes: Any = ()
    model, config = "", dict[str, Any]()

    def setUp(self) -> None:
        self.model_tester = Tester(self.model, self.config)
        self.all_model_classes = (self.model_tester.causal_lm_class,)


class LlamaTest(Case, unittest.TestCase):
    model = "Llama"


class Qwen3Test(Case, unittest.TestCase):
    model, config = "Qwen3", {"head_dim": 16}


class MixtralTest(Case, unittest.TestCase):
    model, config = "Mixtral", {"num_local_experts": 4}


class Qwen2MoeTest(Case, unittest.TestCase):
    model, config = "Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 32}


class Qwen3MoeTest(Case, unittest.TestCase):
    model, config = "Qwen3Moe", {**EXPERTS, "head_dim": 16}
