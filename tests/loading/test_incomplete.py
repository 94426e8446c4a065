"""Checkpoints that do not fit their model exactly come out as in plain loading."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from hf_zero_stream.errors import LoadError
from tests.support.checkpoint_files import Tensors, rewritten
from tests.support.cluster import run_ranks
from tests.support.messages import listen
from tests.support.parity import assert_same, compare, ds_config
from tests.support.zoo import Checkpoint, build_model


FP32 = {"dtype": torch.float32}


def load_both(world_size: int, auto_class: str, folder: Path, **kwargs: Any) -> list[dict[str, Any]]:
    """Plain and streamed; no rank sees a difference: what is initialised has the same values from the same seed."""
    results = run_ranks(world_size, compare, auto_class, folder, FP32 | kwargs)
    assert_same(results)
    return results


def drop_some(tensors: Tensors) -> None:
    del tensors["model.layers.1.self_attn.q_proj.weight"], tensors["model.norm.weight"], tensors["lm_head.weight"]


def drop_a_fused_expert(tensors: Tensors) -> None:
    for name in [name for name in tensors if "layers.0.mlp.experts" in name]:
        del tensors[name]


def drop_embeddings(tensors: Tensors) -> None:
    del tensors["model.embed_tokens.weight"]


def add_some(tensors: Tensors) -> None:
    tensors["model.layers.0.nowhere.weight"] = torch.ones(3)
    tensors["extra"] = torch.ones(())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("change", [drop_some, drop_a_fused_expert, drop_embeddings, add_some])
def test_missing_and_unexpected_keys(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, change: Callable[[Tensors], None], world_size: int
) -> None:
    folder = rewritten(zoo_checkpoint("qwen3_moe"), tmp_path / "changed", change)
    for result in load_both(world_size, "AutoModelForCausalLM", folder):
        assert result["info"]["missing_keys"] or result["info"]["unexpected_keys"]


def untie(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def duplicate(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def swap(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("change", [untie, duplicate, swap])
def test_ties(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, change: Callable[[Tensors], None], world_size: int
) -> None:
    """Both ends in the file with different or equal values, and only the end that is usually left out."""
    load_both(world_size, "AutoModelForCausalLM", rewritten(zoo_checkpoint("qwen3"), tmp_path / "changed", change))


@pytest.mark.parametrize(
    ("name", "auto_class"),
    [("bert", "AutoModelForSequenceClassification"), ("bert", "AutoModel"), ("qwen3_moe", "AutoModel")],
)
def test_another_head(cluster: None, zoo_checkpoint: Checkpoint, name: str, auto_class: str) -> None:
    """A task model's checkpoint into a base model, and into a model with a new head."""
    load_both(2, auto_class, zoo_checkpoint(name))


def load_where_gathers_end_late(auto_class: str, folder: Path) -> dict[str, Any]:
    """What is gathered is written when somebody waits for it, or else at the next collective: gloo may do that."""
    real_gather, real_broadcast = deepspeed.comm.all_gather_into_tensor, dist.broadcast
    unfinished: list[Any] = []
    gathers = [0]

    class Late:
        def __init__(self, output: torch.Tensor, values: torch.Tensor) -> None:
            self.output, self.values = output, values
            unfinished.append(self)

        def is_completed(self) -> bool:
            return True

        def wait(self) -> None:
            if self in unfinished:
                unfinished.remove(self)
                self.output.copy_(self.values)

    def gather(output: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        gathers[0] += 1
        if not async_op:
            return real_gather(output, *args, async_op=False, **kwargs)
        values = torch.empty_like(output)
        real_gather(values, *args, async_op=False, **kwargs)
        return Late(output, values)

    def broadcast(*args: Any, **kwargs: Any) -> Any:
        for late in [*unfinished]:
            late.wait()
        return real_broadcast(*args, **kwargs)

    deepspeed.comm.all_gather_into_tensor, dist.broadcast = gather, broadcast
    result = compare(auto_class, folder, FP32)
    return {**result, "gathers": gathers[0]}


def test_gathers_that_end_late(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """DeepSpeed 0.18 waits for the last of several gathers: an earlier one could still write over a new weight."""
    folder = zoo_checkpoint("bert")
    for result in run_ranks(2, load_where_gathers_end_late, "AutoModelForSequenceClassification", folder):
        assert result["differences"] == []
        assert result["gathers"] > len(result["info"]["missing_keys"]) > 2


@pytest.mark.plugin("pickled")
def test_pickled_checkpoint(cluster: None, tmp_path: Path) -> None:
    """A `.bin` checkpoint streams out of torch.load's memory map."""
    model = build_model("bert")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert_same(run_ranks(2, compare, "AutoModelForMaskedLM", tmp_path, FP32))


def save_tiny(model: transformers.PreTrainedModel, folder: Path) -> Path:
    torch.manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_()
    model.save_pretrained(folder)
    return folder


def clip() -> transformers.PreTrainedModel:
    text = {"hidden_size": 12, "intermediate_size": 13, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**text, "image_size": 8, "patch_size": 4}
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config={**text, "vocab_size": 31}, vision_config=vision, projection_dim=7)
    )


def wav2vec2() -> transformers.PreTrainedModel:
    return transformers.Wav2Vec2Model(
        transformers.Wav2Vec2Config(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=17,
            conv_dim=(8, 8),
            conv_stride=(2, 2),
            conv_kernel=(3, 3),
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
        )
    )


def marian() -> transformers.PreTrainedModel:
    return transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=31,
            d_model=12,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=13,
            decoder_ffn_dim=13,
            max_position_embeddings=16,
            pad_token_id=0,
            decoder_start_token_id=0,
        )
    )


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("build", [clip, wav2vec2, marian])
def test_models_that_stock_cannot_load(
    cluster: None, tmp_path: Path, build: Callable[[], transformers.PreTrainedModel], world_size: int
) -> None:
    """0-dimensional parameters, weight norm, and positions computed by initialisation code."""
    folder = save_tiny(build(), tmp_path)
    assert_same(run_ranks(world_size, compare, "AutoModel", folder, FP32))


def load_strictly(folder: Path, how: str, kwargs: dict[str, Any]) -> str:
    """The error that strict loading raises, or "" if it loads; then the same without ZeRO-3."""
    section = {"strict": True} if how == "section" else {}
    strict = {"strict": True} if how == "argument" else {}
    config = {**ds_config(), "hf_zero_stream": section}
    try:
        hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=config, **strict, **kwargs)
    except LoadError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["argument", "section"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [(drop_some, "missing lm_head.weight"), (add_some, "unexpected extra"), (lambda tensors: None, "")],
    ids=["missing", "unexpected", "exact"],
)
def test_strict(
    cluster: None,
    zoo_checkpoint: Checkpoint,
    tmp_path: Path,
    change: Callable[[Tensors], None],
    expected: str,
    how: str,
) -> None:
    folder = rewritten(zoo_checkpoint("qwen3_moe"), tmp_path / "changed", change)
    for message in run_ranks(2, load_strictly, folder, how, {}):
        assert expected in message if expected else message == ""


def test_strict_allows_ties(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    for change in (lambda tensors: None, swap):
        folder = rewritten(zoo_checkpoint("qwen3"), tmp_path / getattr(change, "__name__", ""), change)
        assert run_ranks(2, load_strictly, folder, "argument", {}) == ["", ""]


def test_strict_refuses_mismatches(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    kwargs = {"vocab_size": 9, "ignore_mismatched_sizes": True}
    for message in run_ranks(2, load_strictly, zoo_checkpoint("qwen3_moe"), "argument", kwargs):
        assert "mismatched lm_head.weight" in message


def test_strict_without_zero3(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    streaming_class = hf_zero_stream.StreamingAutoModelForCausalLM
    assert streaming_class.from_pretrained(zoo_checkpoint("qwen3_moe"), strict=True)
    folder = rewritten(zoo_checkpoint("qwen3_moe"), tmp_path / "changed", drop_some)
    with pytest.raises(LoadError, match="missing lm_head.weight"):
        streaming_class.from_pretrained(folder, strict=True)


class OfOwn(transformers.LlamaForCausalLM):
    """Has buffers whose values only its ``__init__`` knows, where a load has none, and one that is initialised."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("scale", torch.full((8,), 3.0))
        self.register_buffer("table", torch.full((8,), 3.0), persistent=False)
        self.register_buffer("counted", torch.ones(8))

    def _init_weights(self, module: Any) -> None:
        super()._init_weights(module)
        if module is self:
            self.counted.zero_()


def load_of_own(folder: Path, config: dict[str, Any] | None) -> Any:
    """What is said, and the buffers; in memory that others have written to before."""
    said = listen()
    spoilt = [torch.full((8,), -1e34) for _ in range(10_000)]
    del spoilt
    kwargs = {} if config is None else {"ds_config": config}
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(share_reads=True)):
        model = OfOwn.from_pretrained(folder, dtype=torch.float32, **kwargs)
    return [it for it in said if "are zeros" in it], {name: getattr(model, name).tolist() for name in OF_OWN}


OF_OWN = ("scale", "table", "counted")


@pytest.mark.parametrize("stage", [None, 2, 3])
def test_buffers_that_nothing_initialises(cluster: None, zoo_checkpoint: Checkpoint, stage: int | None) -> None:
    """They are zeros, and are named."""
    config = None if stage is None else {**ds_config(), "zero_optimization": {"stage": stage}}
    for rank, (said, found) in enumerate(run_ranks(2, load_of_own, zoo_checkpoint("llama"), config)):
        assert found == dict.fromkeys(OF_OWN, [0.0] * 8)
        assert len(said) == (rank == 0)
        assert all("OfOwn: 2 buffer(s) are zeros: scale, table" in it for it in said), said
