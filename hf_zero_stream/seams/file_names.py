"""The names of the files that transformers asks for when it loads something by name; most are in no checkpoint."""

from __future__ import annotations


_SINGLE = "model.safetensors"
"""If it is not there, an index names the shards: of this file only the beginning is asked for."""

MODEL_FILES = ("config.json", "adapter_config.json", "generation_config.json", _SINGLE, f"{_SINGLE}.index.json")
TOKENIZER_FILES = (
    *("config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model"),
)
PROCESSOR_FILES = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *TOKENIZER_FILES,
)
