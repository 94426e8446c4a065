"""Each Streaming class is its Auto class, with `from_pretrained` inside `streaming()`."""

import contextlib
import inspect
import io
import json
import pickle
import pydoc
import shutil
import subprocess
import sys
import types

import pytest
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig
from transformers.models.auto import modeling_auto

from hf_zero_stream import auto
from hf_zero_stream.auto import STREAMING_CLASSES, StreamingAutoModel, StreamingAutoModelForCausalLM


ENTERED = []


@contextlib.contextmanager
def stand_in_streaming(config=None):
    ENTERED.append("in")
    try:
        yield
    finally:
        ENTERED.append("out")


@pytest.fixture(autouse=True)
def context(monkeypatch):
    """Replaces the module that patches transformers: what it does is not the matter here."""
    stand_in = types.ModuleType("hf_zero_stream.bindings.streaming")
    stand_in.streaming = stand_in_streaming
    monkeypatch.setitem(sys.modules, "hf_zero_stream.bindings.streaming", stand_in)
    ENTERED.clear()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def remote_checkpoint(checkpoint, tmp_path_factory):
    """A checkpoint that brings its model's code along."""
    folder = tmp_path_factory.mktemp("remote")
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n"
        "    model_type = 'hzs_own'\n"
        "class OwnModel(LlamaForCausalLM):\n"
        "    config_class = OwnConfig\n"
    )
    config = json.loads((checkpoint / "config.json").read_text())
    config.update(
        model_type="hzs_own",
        architectures=["OwnModel"],
        auto_map={"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"},
    )
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(checkpoint / "model.safetensors", folder)
    return folder


def test_there_is_one_for_each_auto_model_class():
    expected = {
        name
        for name in dir(transformers)
        if name.startswith(("AutoModel", "AutoBackbone")) and not name.startswith("AutoModelWith")
    }
    assert {"AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoBackbone"} <= expected
    assert set(STREAMING_CLASSES) == {f"Streaming{name}" for name in expected}
    assert set(STREAMING_CLASSES) < set(auto.__all__)
    assert set(STREAMING_CLASSES) < set(dir(auto))


@pytest.mark.parametrize("name", STREAMING_CLASSES)
def test_class_looks_like_a_written_one(name):
    cls, parent = STREAMING_CLASSES[name], getattr(transformers, name.removeprefix("Streaming"))
    assert getattr(auto, name) is cls
    assert cls.__bases__ == (parent,)
    assert (cls.__module__, cls.__qualname__, cls.__name__) == ("hf_zero_stream.auto", name, name)
    assert pickle.loads(pickle.dumps(cls)) is cls
    assert cls._model_mapping is parent._model_mapping
    assert cls.__doc__.endswith(f"everything else is as in [`{parent.__name__}`].")
    for method in ("from_pretrained", "from_config"):
        mine, theirs = getattr(cls, method), getattr(parent, method)
        assert method == "from_pretrained" or inspect.signature(mine) == inspect.signature(theirs)
        assert mine.__func__.__qualname__ == f"{name}.{method}"
        assert mine.__func__.__module__ == "hf_zero_stream.auto"
    own_doc = inspect.getdoc(parent.from_pretrained) or ""
    assert cls.from_pretrained.__doc__.startswith(own_doc)
    assert "each rank reads" in cls.from_pretrained.__doc__.removeprefix(own_doc)
    assert f"class {name}" in pydoc.plain(pydoc.render_doc(cls))


def test_help_works():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        help(StreamingAutoModelForCausalLM.from_pretrained)
    assert "trust_remote_code" in out.getvalue()


def test_instantiation_error_names_the_class():
    with pytest.raises(OSError, match=r"StreamingAutoModel is designed .* `StreamingAutoModel.from_pretrained"):
        StreamingAutoModel()


def test_from_pretrained_runs_inside_streaming(checkpoint):
    model, info = StreamingAutoModelForCausalLM.from_pretrained(
        pretrained_model_name_or_path=checkpoint, output_loading_info=True
    )
    assert type(model) is LlamaForCausalLM
    assert not info["missing_keys"]
    assert ENTERED == ["in", "out"]
    AutoModelForCausalLM.from_pretrained(checkpoint)
    assert ENTERED == ["in", "out"]


def test_streaming_ends_after_an_error(tmp_path):
    with pytest.raises(ValueError, match="Unrecognized model"):
        StreamingAutoModel.from_pretrained(tmp_path)
    assert ENTERED == ["in", "out"]


def test_from_config_does_not_stream(checkpoint):
    config = AutoConfig.from_pretrained(checkpoint)
    assert type(StreamingAutoModelForCausalLM.from_config(config)) is LlamaForCausalLM
    assert ENTERED == []


def test_checkpoint_with_its_own_code(remote_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    model = StreamingAutoModelForCausalLM.from_pretrained(remote_checkpoint, trust_remote_code=True)
    assert "OwnModel" in type(model).__name__
    # This is what save_pretrained writes into `auto_map`.
    assert type(model)._auto_class == "AutoModelForCausalLM"
    assert "OwnModel" in type(StreamingAutoModelForCausalLM.from_config(model.config, trust_remote_code=True)).__name__


@pytest.mark.parametrize(
    ("registering", "reading"), [(StreamingAutoModel, AutoModel), (AutoModel, StreamingAutoModel)]
)
def test_register_is_shared_with_the_parent(registering, reading):
    class OwnConfig(PreTrainedConfig):
        model_type = "hzs_registered"

    class OwnModel(LlamaForCausalLM):
        config_class = OwnConfig

    extra = AutoModel._model_mapping._extra_content
    try:
        registering.register(OwnConfig, OwnModel)
        assert reading._model_mapping[OwnConfig] is OwnModel
    finally:
        extra.pop(OwnConfig, None)


def test_subclass_keeps_its_own_mapping(checkpoint):
    class Other(StreamingAutoModel):
        _model_mapping = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING

    assert type(Other.from_pretrained(checkpoint)) is LlamaForCausalLM
    assert ENTERED == ["in", "out"]
    with pytest.raises(OSError, match="Other is designed"):
        Other()


def test_importing_loads_no_model_code_and_patches_nothing():
    code = (
        "import sys, hf_zero_stream.auto\n"
        "models = [m for m in sys.modules if m.startswith('transformers.models.') and '.modeling_' in m]\n"
        "assert models == ['transformers.models.auto.modeling_auto'], models\n"
        "assert 'hf_zero_stream.bindings.streaming' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
