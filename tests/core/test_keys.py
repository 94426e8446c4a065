"""Renaming a checkpoint's keys by their kind gives what transformers gives for each of them."""

import copy
import random
import re

import pytest
from transformers import core_model_loading
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_zero_stream.seams.keys import RenamingChain


NUMBERS = ("0", "1", "2", "7", "9", "10", "11", "12", "19", "21", "71", "100", "101", "117", "250")


def with_numbers(key: str, randomness: random.Random) -> str:
    """`key` with other numbers in place of its own."""
    return re.sub(r"\d+", lambda _: randomness.choice(NUMBERS), key)


def assert_same(transforms: list, keys: list[str]) -> None:
    chain = RenamingChain(copy.deepcopy(transforms))  # some remember which keys they met
    for key in keys:
        assert chain.apply_all(key) == core_model_loading.apply_renamings(key, transforms), key
        assert chain.apply_first(key) == core_model_loading.apply_converters(key, transforms), key


def example(pattern: str) -> str:
    """A key that is like what `pattern` matches."""
    text = re.sub(r"\\d\+|\(\\d\+\)|\.\*|\*", "3", pattern)
    return "model.layers.4." + re.sub(r"[\\^$()?:|\[\]!<>=+]", "", text)


def test_every_mapping_of_transformers() -> None:
    randomness = random.Random(0)
    tried = matched = 0
    for model_type in CONFIG_MAPPING_NAMES:
        transforms = get_checkpoint_conversion_mapping(model_type) or []
        examples = [example(pattern) for transform in transforms for pattern in transform.source_patterns]
        examples += [key.removeprefix("model.") for key in examples] + ["model.layers.5.self_attn.q_proj.weight"]
        keys = [with_numbers(key, randomness) for key in examples for _ in range(8)]
        assert_same(transforms, keys)
        tried += len(keys)
        matched += sum(core_model_loading.apply_converters(key, transforms)[1] is not None for key in keys)
    assert matched > tried / 4, "the examples should be like real keys"


@pytest.mark.parametrize(
    "patterns",
    [
        [(r"conv1\.", "first."), (r"conv(\d+)\.", r"other.\1.")],
        [(r"layers\.\d\.", "one_digit."), (r"layers\.\d\d\.", "two_digits.")],
        [(r"layers\.[0-3]\.", "early."), (r"layers\.", "late.")],
        [(r"(?P<n>\d+)\.x\.(?P=n)\.", "twice."), (r"layers", "blocks")],
        [(r"layers\.1", "second"), (r"x\.2", "y"), (r"layers.(\d+).x", r"l\1")],
        [(r"a.b", "dot"), (r"layers\.(\d+)", r"h.\1")],
        [(r"(?<=x)a\d", "b")],  # the same text may come earlier, where it does not match
    ],
)
def test_patterns_that_tell_digits_apart(patterns: list[tuple[str, str]]) -> None:
    transforms = [WeightRenaming(source, target) for source, target in patterns]
    templates = ("layers.{0}.x.{1}.w", "conv{0}.weight", "conv{0}.{1}", "a{0}b.{1}", "größe.layers.{0}.{1}")
    keys = [
        template.format(first, second)
        for template in (*templates, "a{0}.xa{1}")
        for first in NUMBERS
        for second in NUMBERS
    ]
    assert_same(transforms, keys)


@pytest.mark.parametrize("scope", ["model", "layers.1", "text2"])
def test_scopes(scope: str) -> None:
    transform = WeightRenaming("weight", "w")
    transform.scope_prefix, transform.base_model_prefix = scope, "model3"
    keys = [f"{prefix}{scope}{number}.weight" for prefix in ("", "model3.", "model4.") for number in ("", ".1", "2")]
    assert_same([transform, WeightRenaming(r"w$", "v")], [*keys, "layers.2.weight", "model2.weight", "text1.weight"])
