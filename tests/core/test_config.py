"""Settings come from one of four places, and a mistake in any of them names itself."""

import dataclasses
import inspect

import pytest
import torch

from hf_zero_stream.bindings.streaming import streaming
from hf_zero_stream.errors import ConfigError, HfZeroStreamError
from hf_zero_stream.settings.config import StreamingConfig, unknown_variables, without_own_section
from hf_zero_stream.settings.values import floating_dtype


MIB = 2**20


def test_defaults():
    assert StreamingConfig.resolve(environ={}) == StreamingConfig(staging_bytes=0, reader_threads=0, progress=True)


def test_settings_beside_a_config():
    """``streaming(verify="full")``, by which the other settings are the defaults, or those of the config."""
    assert streaming(verify="full").config == StreamingConfig(verify="full")
    both = streaming(StreamingConfig(progress=False), staging_bytes="1MiB").config
    assert both == StreamingConfig(progress=False, staging_bytes=MIB)
    with pytest.raises(ConfigError, match="unknown setting: 'verfy'; did you mean verify?"):
        streaming(verfy="full")
    with pytest.raises(ConfigError, match="^verify: expected one of"):
        streaming(verify="ful")
    fields = [field.name for field in dataclasses.fields(StreamingConfig)]
    assert [*inspect.signature(streaming).parameters] == ["config", *fields]


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_names_of_a_dtype(name):
    assert floating_dtype(name) is torch.bfloat16


@pytest.mark.parametrize("name", ["bf17", "int8", "nn", torch.int8, 3])
def test_what_is_no_dtype_of_weights(name):
    with pytest.raises(ConfigError, match=r'^dtype: expected .*"bfloat16", "float16" or "float32"; got ' + repr(name)):
        floating_dtype(name)


def test_is_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        StreamingConfig().progress = False
    with pytest.raises(TypeError):
        StreamingConfig(MIB)


def test_every_field_is_documented():
    lines = [line.strip() for line in inspect.getsource(StreamingConfig).splitlines()]
    for field in dataclasses.fields(StreamingConfig):
        (declaration,) = (i for i, line in enumerate(lines) if line.startswith(f"{field.name}: "))
        assert lines[declaration + 1].startswith('"""')


@pytest.mark.parametrize(
    ("values", "field", "found"),
    [
        ({"staging_bytes": "64 XB"}, "staging_bytes", "'64 XB'"),
        ({"snapshot_bytes": "some"}, "snapshot_bytes", "'some'"),
        ({"staging_bytes": True}, "staging_bytes", "True"),
        ({"staging_bytes": 1.0}, "staging_bytes", "1.0"),
        ({"staging_bytes": -1}, "staging_bytes", "-1"),
        ({"reader_threads": -1}, "reader_threads", "-1"),
        ({"reader_threads": None}, "reader_threads", "None"),
        ({"progress": 1}, "progress", "1"),
        ({"verify": "all"}, "verify", "'all'"),
        ({"write_from": "rank1"}, "write_from", "'rank1'"),
        ({"strict": "no"}, "strict", "'no'"),
    ],
)
def test_invalid_value_names_field_and_value(values, field, found):
    with pytest.raises(ConfigError, match=f"^{field}: expected .* got {found}") as error:
        StreamingConfig(**values)
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, HfZeroStreamError)


def test_smallest_values_are_accepted():
    StreamingConfig(staging_bytes=1, reader_threads=0)


def test_sources_in_order():
    section = {"hf_zero_stream": {"staging_bytes": 1, "reader_threads": 2, "progress": False}, "train_batch_size": 8}
    environ = {"HF_ZERO_STREAM_READER_THREADS": "3", "HF_ZERO_STREAM_STRICT": "1", "HOME": "/"}

    assert StreamingConfig.resolve(None, section, environ) == StreamingConfig(
        staging_bytes=1, reader_threads=3, progress=False, strict=True
    )
    explicit = StreamingConfig(staging_bytes=7)
    assert StreamingConfig.resolve(explicit, section, environ) is explicit
    assert StreamingConfig.resolve(None, {"zero_optimization": {"stage": 3}}, {}) == StreamingConfig()


def test_reads_the_process_environment(monkeypatch):
    monkeypatch.setenv("HF_ZERO_STREAM_STAGING_BYTES", "12345")
    assert StreamingConfig.resolve().staging_bytes == 12345


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (100 * MIB, 100 * MIB),
        (5e8, 500_000_000),
        ("5e8", 500_000_000),
        ("104857600", 100 * MIB),
        ("64MiB", 64 * MIB),
        ("64 mib", 64 * MIB),
        ("64MB", 64_000_000),
        ("64M", 64_000_000),
        ("20000KB", 20_000_000),
        ("20000KiB", 20_480_000),
        ("1.5GiB", 1536 * MIB),
        ("2G", 2_000_000_000),
        ("1TiB", 2**40),
        ("123456789B", 123_456_789),
    ],
)
def test_sizes(written, expected):
    assert StreamingConfig.resolve(None, {"hf_zero_stream": {"staging_bytes": written}}, {}).staging_bytes == expected
    environ = {"HF_ZERO_STREAM_STAGING_BYTES": str(written)}
    assert StreamingConfig.resolve(None, None, environ).staging_bytes == expected
    assert StreamingConfig(staging_bytes=str(written)).staging_bytes == expected


@pytest.mark.parametrize(
    "written", ["", "MiB", "64 XB", "-1", "1.5", "0.3333KB", "64MiBs", "nan", 1.5, float("inf"), True, None, [1]]
)
def test_bad_sizes(written):
    with pytest.raises(ConfigError, match=r'"hf_zero_stream.staging_bytes" in the DeepSpeed config: expected .* got'):
        StreamingConfig.resolve(None, {"hf_zero_stream": {"staging_bytes": written}}, {})


@pytest.mark.parametrize("written", ["1", "true", "True", "YES", True, 1])
@pytest.mark.parametrize("negate", [False, True])
def test_booleans(written, negate):
    opposite = {"1": "0", "true": "false", "True": "False", "YES": "NO", True: False}
    value = opposite[written] if negate else written
    assert StreamingConfig.resolve(None, {"hf_zero_stream": {"progress": value}}, {}).progress is not negate
    assert StreamingConfig.resolve(None, None, {"HF_ZERO_STREAM_PROGRESS": str(value)}).progress is not negate


@pytest.mark.parametrize("written", ["on", "", "2"])
def test_bad_boolean(written):
    with pytest.raises(ConfigError, match=rf"environment variable HF_ZERO_STREAM_PROGRESS: .* got '{written}'"):
        StreamingConfig.resolve(None, None, {"HF_ZERO_STREAM_PROGRESS": written})


def test_threads_have_no_unit():
    with pytest.raises(ConfigError, match="HF_ZERO_STREAM_READER_THREADS.*'4K'"):
        StreamingConfig.resolve(None, None, {"HF_ZERO_STREAM_READER_THREADS": "4K"})


def test_unknown_key_suggests_the_nearest_and_lists_the_known():
    with pytest.raises(ConfigError, match="'staging_byte'; did you mean staging_bytes?") as error:
        StreamingConfig.resolve(None, {"hf_zero_stream": {"staging_byte": 1}}, {})
    for field in dataclasses.fields(StreamingConfig):
        assert field.name in str(error.value)


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("READ_FROM", "rank1", "one of all, rank0, local_rank0"),
        ("VERIFY", "all", "one of off, sizes, sample, full"),
        ("STAGING_BYTES", "many", 'a whole number of bytes, or a size such as "64MiB" or "64MB"'),
        ("KEEP_QUANTIZED", "maybe", 'a boolean .*, no. or "auto"'),
    ],
)
def test_a_wrong_variable_is_named_with_what_it_may_be(variable, value, allowed):
    variable = f"HF_ZERO_STREAM_{variable}"
    with pytest.raises(ConfigError, match=f"^environment variable {variable}: expected {allowed}; got '{value}'$"):
        StreamingConfig.resolve(None, None, {variable: value})


def test_unknown_variables_are_ignored_with_the_nearest_name():
    environ = {"HF_ZERO_STREAM_READ_THREADS": "4", "HF_ZERO_STREAM_XYZ": "", "HF_ZERO_STREAM_PROGRESS": "0"}
    assert StreamingConfig.resolve(None, None, environ) == StreamingConfig(progress=False)
    assert unknown_variables(environ) == {
        "HF_ZERO_STREAM_READ_THREADS": "HF_ZERO_STREAM_READER_THREADS",
        "HF_ZERO_STREAM_XYZ": "",
    }


@pytest.mark.parametrize("section", ["auto", [], None, 1])
def test_section_must_be_a_mapping(section):
    with pytest.raises(ConfigError, match="expected a mapping"):
        StreamingConfig.resolve(None, {"hf_zero_stream": section}, {})


def test_without_own_section():
    ds_config = {"train_batch_size": 8, "hf_zero_stream": {"progress": False}}
    assert without_own_section(ds_config) == {"train_batch_size": 8}
    assert "hf_zero_stream" in ds_config
