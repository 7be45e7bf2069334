"""A model that the scripts open, small enough for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvjax
from kvjax import Config
from kvjax.models import checkpoint
from kvjax.testbed import vocab


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A random model of the shipped model's vocabulary."""
    config = Config.llama(vocab.SIZE, 16, 1, heads=2, kv_heads=1, head_dim=32, mlp_width=16, tie_embeddings=True)
    folder = tmp_path_factory.mktemp("tiny")
    params = kvjax.random_model(config, 3).params
    checkpoint.save(folder / "model", config, params, extra_files=vocab.tokenizer_files())
    return folder / "model"
