"""Small GGUF metadata of tokenizers, and the tokenizer that kvjax reads from the files made of them."""

from __future__ import annotations

from pathlib import Path

from checkpoints_convert.gguf import tokenizer_files
from kvjax.models.tokenizer import Tokenizer


def tokenizer_keys(**values) -> dict:
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def tiny_keys(**changes) -> dict:
    """Metadata of three letters that a word may join to "abc", though no merge does."""
    tokens = ["<s>", "</s>", "a", "b", "c", "ab", "abc"]
    known = dict(model="gpt2", pre="gpt-2", tokens=tokens, merges=["a b"], token_type=[3, 3, *[1] * 5])
    return tokenizer_keys(**known | changes)


def load_tokenizer(metadata: dict, directory: Path) -> Tokenizer:
    for name, content in tokenizer_files.make_files(metadata).items():
        (directory / name).write_bytes(content)
    return Tokenizer.from_directory(directory)
