"""What becomes of what is read beside a training if a release renames a function that we replace, or calls another.

Models, code, tokenizers and processors from URLs; a process that ``hf-zero-stream run`` has reached. Either there is
an error, or all is as it would be otherwise; never anything else.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

import hf_zero_stream
from hf_zero_stream.prefix import environment
from tests.support.commands import command_environment
from tests.support.http_files import http_files
from tests.support.messages import outcome_of
from tests.support.mutations import Mutation, mutated, mutations
from tests.support.remote_code import make_remote_checkpoint
from tests.support.zoo import Checkpoint, make_checkpoint


Loads = dict[str, Callable[[str], Any]]

OF_FILES = tuple(
    f"transformers.{module}:"
    for module in (
        *("models.auto.modeling_auto", "models.auto.tokenization_auto", "models.auto.processing_auto"),
        *("tokenization_utils_base", "processing_utils", "modeling_utils", "utils.hub", "dynamic_module_utils"),
    )
)


def values(model: Any) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def of_tokenizer(tokenizer: Any) -> Any:
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    return tokenizer.chat_template, tokenizer("b a").input_ids, tokenizer.model_max_length


LOADS: Loads = {
    "model": lambda path: values(transformers.AutoModelForCausalLM.from_pretrained(path)),
    "code": lambda path: values(transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)),
    "tokenizer": lambda path: of_tokenizer(transformers.AutoTokenizer.from_pretrained(path)),
    "own tokenizer": lambda path: of_tokenizer(transformers.PreTrainedTokenizerFast.from_pretrained(path)),
    "processor": lambda path: of_tokenizer(transformers.AutoProcessor.from_pretrained(path)),
    "processor of two": lambda path: transformers.AutoProcessor.from_pretrained(path).to_dict(),
}
"""Each loads the folder of its name, and says what of it would not be the same if a file were not read."""


@pytest.fixture(scope="module", autouse=True)
def own_module_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Code of checkpoints goes neither into the user's cache nor into other tests of this process."""
    cache = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
        patch.syspath_prepend(cache)
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    make_checkpoint("llama", root / "model")
    make_remote_checkpoint(root / "code")
    words = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]")
    template = "{{ messages[0].content }} a"
    for name in LOADS:
        if "tokenizer" in name or "processor" in name:
            made = tokenizers.Tokenizer(words)
            made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
            tokenizer = transformers.PreTrainedTokenizerFast(
                tokenizer_object=made, unk_token="[UNK]", pad_token="[UNK]", model_max_length=7
            )
            tokenizer.chat_template = template
            tokenizer.save_pretrained(root / name)
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 9})
    both = transformers.CLIPProcessor(images, tokenizer)
    both.chat_template = template
    both.save_pretrained(root / "processor of two")
    return root


@pytest.fixture(scope="module")
def expected(root: Path) -> dict[str, Any]:
    return {name: load(str(root / name)) for name, load in LOADS.items()}


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    with http_files(root) as web:
        yield web.address


def load_all(address: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
        for name, load in LOADS.items():
            url = f"{address}/{name.replace(' ', '%20')}"
            found[name] = outcome_of(lambda load=load, url=url: load(url))
    return found


@pytest.mark.plugin("remote")
def test_all_is_read_from_urls(address: str, expected: dict[str, Any]) -> None:
    assert load_all(address) == expected


@pytest.mark.plugin("remote")
@pytest.mark.parametrize("mutation", mutations(OF_FILES, "BLOCK"))
def test_from_urls(address: str, expected: dict[str, Any], mutation: Mutation) -> None:
    found = mutated(mutation, load_all, address)
    for name, what in dict.fromkeys(expected, found).items() if isinstance(found, str) else found.items():
        assert what == expected[name] or (isinstance(what, str) and "Error: " in what), (name, what)


# -------------------------------------------------------------------------------------- a process that was reached

SCRIPT = """
import os, sys
from hf_zero_stream.bindings.table import REACHED, TABLE
import torch.distributed as dist
from torch.distributed import distributed_c10d

folder, file, mutation = sys.argv[1:]
(row, _), scope = TABLE[REACHED], REACHED
if mutation:
    TABLE[scope] = [row._replace(of=row.of + "_")]
if mutation == "uncalled":
    distributed_c10d._update_default_pg_ = distributed_c10d._update_default_pg
import transformers

os.environ["LOCAL_RANK"] = "0"  # for DeepSpeed
dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
kept = transformers.integrations.HfDeepSpeedConfig(
    {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
)
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
import deepspeed

with deepspeed.zero.GatheredParameters(list(model.parameters())):
    print("sum", sum(param.double().sum().item() for param in model.parameters()))
print("streamed", getattr(getattr(model, "streaming_report", None), "streamed", False))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mutation", ["", "renamed", "uncalled"])
def test_a_process_that_was_reached(compiler: None, zoo_checkpoint: Checkpoint, tmp_path: Path, mutation: str) -> None:
    """It makes a process group that no launcher has announced. Where that is not noticed, its loads are stock's."""
    folder = zoo_checkpoint("llama")
    command = [sys.executable, "-c", SCRIPT, str(folder), str(tmp_path / "store"), mutation]
    done = subprocess.run(
        command, env=environment(command_environment()), capture_output=True, text=True, timeout=200, check=True
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    found = dict(line.split() for line in done.stdout.splitlines() if line.startswith(("sum ", "streamed ")))
    assert float(found["sum"]) == pytest.approx(sum(param.double().sum().item() for param in model.parameters()))
    assert found["streamed"] == str(not mutation)
    assert ("no distributed.distributed_c10d._update_default_pg_: ranks that no" in done.stderr) == (
        mutation == "renamed"
    )
