"""A model: configuration, parameters, tokenizer and chat template, ready for use."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import pathlib
from importlib import resources
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax.core.compile_cache import use_compilation_cache
from kvjax.core.random import key_from_seed
from kvjax.errors import KvjaxError
from kvjax.models import checkpoint, conversations
from kvjax.models.chat import ChatTemplate
from kvjax.models.config import Config
from kvjax.models.conversations import Messages
from kvjax.models.decoder import init
from kvjax.models.sharding import param_shardings
from kvjax.models.tokenizer import Tokenizer
from kvjax.utils.arguments import float_type


@dataclasses.dataclass(frozen=True, repr=False)
class Model:
    """params is the Flax parameter tree of `kvjax.models.Decoder`; mesh, when given, is where they live."""

    config: Config
    params: Any
    tokenizer: Tokenizer | None = None
    mesh: Mesh | None = None
    name: str = ""
    chat_template: ChatTemplate | None = None

    def __repr__(self) -> str:
        c, count = self.config, sum(x.size for x in jax.tree.leaves(self.params))
        shape = f"{c.layers} layers, width {c.width}, {c.heads} heads on {c.kv_heads} of {c.head_dim}"
        return f"Model({self.name or 'no name'}: {count:,} parameters in {self.dtype}, {shape})"

    @property
    def dtype(self) -> jnp.dtype:
        """Of the parameters, the activations and the cache."""
        return self.params["embedding"].dtype

    @functools.cached_property
    def fingerprint(self) -> str:
        """What tells models of one configuration apart: a digest of the first few numbers of every parameter."""
        found = hashlib.sha256()
        for x in jax.tree.leaves(self.params):
            on_cpu = all(device.platform == "cpu" for device in x.devices())
            first = (np.asarray(x) if on_cpu else x)[tuple(slice(4) for _ in x.shape)]  # on CPUs nothing is compiled
            found.update(np.asarray(first).tobytes())
        return found.hexdigest()

    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises when the checkpoint came without one."""
        if self.tokenizer is None:
            raise KvjaxError("this model has no tokenizer.json: pass prompts as lists of token ids")
        return self.tokenizer

    def chat_ids(self, messages: Messages) -> list[list[int]]:
        """The ids that the model reads for one conversation, or for each of a batch, up to where its answer begins.

        They are prompts for `kvjax.generate` and `kvjax.read`. The template writes all special tokens, and none is
        added; a special token that is spelled out in a message is read as that token, as in transformers. Raises
        KvjaxError for messages without a known role or a text, and for a model without tokenizer or chat template.
        """
        tokenizer = self.text_tokenizer()
        return [tokenizer.encode(text, special_tokens=False) for text in self.chat_texts(messages)]

    def chat_texts(self, messages: Messages) -> list[str]:
        """The text of which `chat_ids` gives the ids, for each conversation."""
        return conversations.texts(self.chat_template, messages)


def load(path: str | pathlib.Path, *, dtype: Any = None, mesh: Mesh | None = None) -> Model:
    """Opens a directory that checkpoints_convert wrote, or a model by its name, as `kvjax models` lists them.

    A text is a name only where nothing lies at that path.
    dtype: of parameters and cache, "bfloat16" or "bf16" for example, default as stored. mesh: parameters are restored
    straight to their shards.
    Programs that are compiled from now on are kept on disk (see `use_compilation_cache`). Raises KvjaxError for a
    directory that is missing, foreign, incomplete or damaged.
    """
    use_compilation_cache()
    dtype = None if dtype is None else float_type(dtype)
    name = str(path)
    where = path if isinstance(path, pathlib.Path) else located(name)
    if isinstance(path, str) and isinstance(where, pathlib.Path) and not where.exists():
        raise _unknown(name)
    config = checkpoint.read_manifest(where).config
    shardings = None if mesh is None else param_shardings(config, mesh)
    config, params = checkpoint.restore(where, dtype=dtype, shardings=shardings)
    tokenizer = Tokenizer.from_directory(where) if (where / "tokenizer.json").is_file() else None
    return Model(config, params, tokenizer, mesh, name, ChatTemplate.from_directory(where))


def located(name: str) -> Any:
    """The directory of a model: one that holds a checkpoint, "testbed", or that of a package, converted first.

    Any other path stays as it is.
    """
    path = pathlib.Path(name)
    if (path / checkpoint.MANIFEST).exists():
        return path
    if name == "testbed":
        return resources.files("kvjax") / "testbed"
    from checkpoints_convert import package_models  # the converters stand on this file

    return package_models.directory(name) if name in package_models.MODELS else path


def _unknown(name: str) -> KvjaxError:
    """What to say where neither a directory nor a model has that name."""
    from checkpoints_convert import package_models

    names = ["testbed", *package_models.MODELS]
    close = difflib.get_close_matches(name.lower().rpartition("/")[2], names, 1)
    mean = f"did you mean {close[0]!r}? Models" if close else "models"
    return KvjaxError(
        f"there is no checkpoint directory {name}, and no model of that name; {mean} that go by a name: "
        f"{', '.join(names)} (`kvjax models` says where each comes from). Any other is a checkpoint of Hugging Face or "
        "a GGUF file that is converted first, python -m checkpoints_convert convert SRC DST, and opened as DST"
    )


def random_model(config: Config, seed: int = 0, dtype: Any = jnp.float32) -> Model:
    """A model with random parameters: for tests and benchmarks, where only shapes and speed matter."""
    params = jax.jit(lambda key: nn.unbox(init(config, key, float_type(dtype))))(key_from_seed(seed))
    return Model(config, params, name="random")
