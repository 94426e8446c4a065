"""Scripts that accelerate and TRL install, as their own tests launch them: ZeRO-2, ZeRO-3 and FSDP2, two ranks."""

import hashlib
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file


Record = Callable[[str, Any], None]

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "a", "small", "model", "learns", "words", "user", "assistant"]
CHAT = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"

ZERO = "--use_deepspeed --gradient_accumulation_steps 1"
KINDS = {
    "zero2": f"{ZERO} --zero_stage 2",
    "zero3": f"{ZERO} --zero_stage 3 --zero3_init_flag true --zero3_save_16bit_model true",
    "fsdp2": "--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP "
    "--fsdp_state_dict_type FULL_STATE_DICT --fsdp_reshard_after_forward true",
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models under names of the Hub, from which scripts load by those names."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=CHAT, **special)
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64}
    llama = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "pad_token_id": 0}
    configs = {
        "sshleifer/tiny-gpt2": transformers.GPT2Config(**gpt2),
        "bert": transformers.BertConfig(**SIZES, intermediate_size=64),
        "llama": transformers.LlamaConfig(**llama),
        "reward": transformers.LlamaConfig(**llama, num_labels=1),
    }
    classes = {
        "sshleifer/tiny-gpt2": transformers.GPT2LMHeadModel,
        "bert": transformers.BertForSequenceClassification,
        "llama": transformers.LlamaForCausalLM,
        "reward": transformers.LlamaForSequenceClassification,
    }
    folder = tmp_path_factory.mktemp("models")
    for name, config in configs.items():
        torch.manual_seed(0)
        classes[name](config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def launch(kind: str, script: str, arguments: list[str], cwd: Path) -> str:
    """What the ranks print; raises if one fails."""
    options = KINDS[kind].split()
    if kind == "fsdp2":
        layer = {"bert": "BertLayer"}.get(Path(arguments[1]).name, "LlamaDecoderLayer")
        options += ["--fsdp_transformer_layer_cls_to_wrap", layer]
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    common = ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *common, "--main_process_port", str(port)]
    done = subprocess.run(
        [*command, *options, script, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    errors = done.stderr.partition("torch.distributed.elastic")[0]  # the launcher's own come last
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-1000:]}{errors[-3000:]}"
    return done.stdout + done.stderr


def script_of(module: str) -> str:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        pytest.skip(f"{module} is not installed")
    return spec.origin


def of_accelerate(name: str) -> str:
    return script_of(f"accelerate.test_utils.scripts.external_deps.{name}")


def digest(folder: Path) -> str:
    """Of the names and values of the weights in a folder, however they are sharded."""
    found = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert found, f"{folder}: no weights were saved"
    parts = (name.encode() + found[name].contiguous().view(torch.uint8).numpy().tobytes() for name in sorted(found))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def test_accelerate_zero3_integration(models: Path) -> None:
    launch("zero3", of_accelerate("test_zero3_integration"), [], models)


@pytest.mark.parametrize("kind", KINDS)
def test_accelerate_checkpointing(models: Path, tmp_path: Path, kind: str, record_property: Record) -> None:
    """Trains, and resumes: the script compares accuracies and rates itself."""
    script = of_accelerate("test_checkpointing")
    arguments = ["--model_name_or_path", str(models / "bert"), "--output_dir", str(tmp_path)]
    output = launch(kind, script, [*arguments, "--num_epochs", "2", "--partial_train_epoch", "1"], tmp_path)
    record_property("trained", re.findall(r"epoch \d+: (\{.*\})", output))
    output = launch(kind, script, [*arguments, "--resume_from_checkpoint", str(tmp_path / "epoch_0")], tmp_path)
    record_property("resumed", re.findall(r"resumed \w+'?s? .*: .*", output))
    assert "resumed checkpoint performance" in output


@pytest.mark.parametrize("kind", KINDS)
def test_accelerate_performance(models: Path, tmp_path: Path, kind: str, record_property: Record) -> None:
    script = of_accelerate("test_performance")
    arguments = ["--model_name_or_path", str(models / "bert"), "--output_dir", str(tmp_path), "--num_epochs", "2"]
    output = launch(kind, script, [*arguments, "--performance_lower_bound", "0"], tmp_path)
    record_property("trained", re.findall(r"epoch \d+: \{.*\}", output))


CHATS = {
    "sft": '{"messages": [{"role": "user", "content": "a small"}, {"role": "assistant", "content": "model learns"}]}',
    "dpo": '{"prompt": "a small", "chosen": " model learns", "rejected": " words words"}',
    "reward": '{"chosen": "a small model learns", "rejected": "a small words words"}',
    "kto": '{"prompt": "a small", "completion": " model learns", "label": true}',
}


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
@pytest.mark.parametrize("trainer", CHATS)
def test_trl(models: Path, tmp_path: Path, trainer: str, kind: str, record_property: Record) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text(f"{CHATS[trainer]}\n" * 16)
    model = models / ("reward" if trainer == "reward" else "llama")
    options = f"--dataset_name {data} --output_dir {tmp_path / 'out'} --max_steps 3 --logging_steps 1 --save_steps 2"
    options += " --per_device_train_batch_size 2 --learning_rate 1e-3 --report_to none --bf16 false --use_cpu true"
    options += " --gradient_checkpointing false --disable_tqdm true --eval_strategy no"
    arguments = ["--model_name_or_path", str(model), "--dtype", "float32", *options.split()]
    output = launch(kind, script_of(f"trl.scripts.{trainer}"), arguments, tmp_path)
    losses = re.findall(r"'loss': '?([-\d.e]+)", output)
    assert len(losses) == 3, output[-3000:]
    record_property("losses", losses)
    record_property("weights", digest(tmp_path / "out"))
