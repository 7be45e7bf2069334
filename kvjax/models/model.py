"""A model: configuration, parameters and tokenizer, ready for use."""

from __future__ import annotations

import dataclasses
import pathlib
from importlib import resources
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kvjax.core.types import KvjaxError
from kvjax.models import checkpoint
from kvjax.models.config import Config
from kvjax.models.decoder import init
from kvjax.models.sharding import param_shardings
from kvjax.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Model:
    """params is the Flax parameter tree of `kvjax.models.Decoder`; mesh, when given, is where they live."""

    config: Config
    params: Any
    tokenizer: Tokenizer | None = None
    mesh: Mesh | None = None
    name: str = ""

    @property
    def dtype(self) -> jnp.dtype:
        """Of the parameters, the activations and the cache."""
        return self.params["embedding"].dtype

    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises when the checkpoint came without one."""
        if self.tokenizer is None:
            raise KvjaxError("this model has no tokenizer.json: pass prompts as lists of token ids")
        return self.tokenizer


def load(path: str | pathlib.Path, *, dtype: Any = None, mesh: Mesh | None = None) -> Model:
    """Opens "testbed" (the model in the box) or a directory that checkpoints_convert wrote.

    dtype: of parameters and cache, default as stored. mesh: parameters are restored straight to their shards.
    Raises KvjaxError for a directory that is missing, foreign, incomplete or damaged.
    """
    name = str(path)
    where = resources.files("kvjax") / "testbed" if name == "testbed" else pathlib.Path(path)
    config = checkpoint.manifest(where).config
    shardings = None if mesh is None else param_shardings(config, mesh)
    config, params = checkpoint.restore(where, dtype=dtype, shardings=shardings)
    tokenizer = Tokenizer.from_directory(where) if (where / "tokenizer.json").is_file() else None
    return Model(config, params, tokenizer, mesh, name)


def random_model(config: Config, seed: int = 0, dtype: Any = jnp.float32) -> Model:
    """A model with random parameters: for tests and benchmarks, where only shapes and speed matter."""
    params = jax.jit(lambda key: nn.unbox(init(config, key, dtype)))(jax.random.key(seed))
    return Model(config, params, name="random")
