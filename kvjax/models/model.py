"""A model that is ready for use: configuration, parameters, tokenizer and chat template."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import operator
import os
import pathlib
from collections.abc import Callable
from importlib import resources
from typing import Any, Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from kvjax.core.compile_cache import use_compilation_cache
from kvjax.core.explicit_axes import leave_explicit_mesh
from kvjax.core.mesh import auto_mesh, check_divides, is_shared
from kvjax.core.quantized_kernel import check_weights
from kvjax.core.random import key_from_seed
from kvjax.errors import KvjaxError
from kvjax.models import checkpoint
from kvjax.models.chat_messages import Messages, TemplateOptions, render_conversations
from kvjax.models.chat_template import ChatTemplate
from kvjax.models.config import Config
from kvjax.models.decoder import init
from kvjax.models.fingerprint import fingerprint
from kvjax.models.quantized_params import count_parameters, quantize_params, weights_of
from kvjax.models.sharding import param_shardings
from kvjax.models.tokenizer import Tokenizer
from kvjax.processes import require_agreement
from kvjax.utils.arguments import float_type
from kvjax.utils.files import expand_user
from kvjax.utils.keywords import checks_keywords
from kvjax.utils.mesh_context import leaves_callers_mesh

MODEL_RESOLVERS = ["checkpoints_convert.package_models"]
"""Modules that find models by name. They stand above this one, so they are imported when a name is looked up.

Each has `MODELS`, whose keys are the names, and `directory(name)`, which returns a checkpoint directory, converted if
need be.
"""


@dataclasses.dataclass(frozen=True, repr=False)
class Model:
    """A decoder with its parameters, and the tokenizer and chat template of its checkpoint, if it has any."""

    config: Config
    params: Any  # parameter tree of `kvjax.models.Decoder`
    tokenizer: Tokenizer | None = None
    mesh: Mesh | None = None  # where the parameters live
    name: str = ""
    chat_template: ChatTemplate | None = None

    def __post_init__(self):
        if self.mesh is not None:
            auto_mesh(self.mesh)  # raises for one that divides nothing
            for kind in self.config.kinds:
                check_divides("K", kind.attention.kv_heads, self.mesh, "use a mesh axis that divides kv_heads")

    def __repr__(self) -> str:
        flat: dict[str, Any] = flatten_dict(self.params, sep="/")
        c, num_parameters = self.config, count_parameters({path: x.shape for path, x in flat.items()})
        numbers = f"{self.dtype}" if self.weights is None else f"{self.dtype}, kernels in {self.weights}"
        shape = f"{c.layers} layers, width {c.width}, {c.describe_heads()}"
        return f"Model({self.name or 'no name'}: {num_parameters:,} parameters in {numbers}, {shape})"

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the parameters, the activations and the cache."""
        return self.params["embedding"].dtype

    @property
    def weights(self) -> str | None:
        """The kind of codes that kernels are held in, "int8" or "int4"; None where they are numbers of `dtype`."""
        flat: dict[str, Any] = flatten_dict(self.params, sep="/")
        return weights_of({path: x.dtype for path, x in flat.items()})

    @property
    @leaves_callers_mesh
    def fingerprint(self) -> str:
        """A digest of every number of every parameter, which tells models of one configuration apart.

        It is computed once, and again when an array of `params` has been replaced by another.
        """
        return self._of_params("_fingerprint", lambda _: fingerprint(self.auto_params))

    @property
    def auto_mesh(self) -> Mesh | None:
        """The mesh as kvjax computes on it; `mesh` may have `Explicit` axes."""
        return None if self.mesh is None else auto_mesh(self.mesh)

    @property
    def auto_params(self) -> Any:
        """The parameters on `auto_mesh`: the same buffers, without shardings as types."""
        return self._of_params("_auto_params", _computable)

    def _of_params(self, name: str, compute: Callable[[Any], Any]) -> Any:
        """Computes something of the parameters once, and again when an array of `params` has been replaced."""
        leaves = jax.tree.leaves(self.params)
        # Not a field, so that `dataclasses.replace` does not copy it. The arrays are remembered, as `params` is a dict
        # that may get others; those of JAX never change, and those of NumPy may.
        computed = self._computed()
        known_leaves, known = computed.get(name, ([], None))
        is_known = len(leaves) == len(known_leaves) and all(map(operator.is_, leaves, known_leaves))
        if not is_known or not all(isinstance(x, jax.Array) for x in leaves):
            known = compute(self.params)
            computed[name] = leaves, known
        return known

    def _computed(self) -> dict[str, Any]:
        return vars(self).setdefault("_computed_of_params", {})

    def with_config(self, config: Config) -> Model:
        """Returns the same model under another config of `Config.variants`, which shares what is known of `params`."""
        if config == self.config:
            return self
        other = dataclasses.replace(self, config=config)
        vars(other)["_computed_of_params"] = self._computed()
        return other

    @leaves_callers_mesh
    def with_weights(self, weights: str) -> Model:
        """Returns the model with its kernels in codes of 8 bits or 4; this model does not change.

        Embeddings, norms, biases, sinks and routers stay as they are, and so does `dtype`. A gradient passes through
        the maps to their inputs, and JAX refuses one with respect to codes: train the exact model, and quantize then.

        Args:
          weights: "int8" has a scale for each output channel, "int4" one for each 32 inputs of an output channel.

        Raises:
          KvjaxError: for any other kind, and where the model has the other kind of codes already.
        """
        if weights is None:
            raise KvjaxError("weights=None names no kind of codes; take 'int8' or 'int4', or use the model as it is")
        check_weights(weights)
        if self.weights == weights:
            return self
        if self.weights is not None:
            raise KvjaxError(
                f"this model holds {self.weights} weights, and {weights} cannot be made of them; load it anew, "
                f"kvjax.load(.., weights={weights!r})"
            )
        params = quantize_params(self.params, weights)
        if self.mesh is not None:
            params = jax.device_put(params, param_shardings(self.config, self.mesh, weights))
        return dataclasses.replace(self, params=params)

    def text_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer; raises KvjaxError if the checkpoint has none."""
        if self.tokenizer is None:
            raise KvjaxError("this model has no tokenizer.json: pass prompts as lists of token ids")
        return self.tokenizer

    @checks_keywords
    def chat_ids(self, messages: Messages, **options: Unpack[TemplateOptions]) -> list[list[int]]:
        """Returns the token ids of one conversation, or of each of a batch, up to where the model's answer begins.

        They are prompts for `kvjax.generate` and `kvjax.read`. The template writes all special tokens, and none is
        added. A special token spelled out in a message is read as that token, as in transformers.

        Args:
          messages: [{"role": "user", "content": "Hello"}], or a list of such lists. A content is a text, or a list of
            parts [{"type": "text", "text": "Hello"}]; a template that reads texts alone gets the parts joined by
            newlines, as in vLLM. The assistant's message may have `tool_calls`, and no content then.
          **options: tools, documents, chat_template_kwargs, continue_final_message and chat_template, as in
            `kvjax.chat`.

        Raises:
          KvjaxError: for messages without a known role or a text, for what the template does not read, and for a model
            without tokenizer or chat template.
        """
        tokenizer = self.text_tokenizer()
        return [tokenizer.encode(text, special_tokens=False) for text in self.chat_texts(messages, **options)]

    @checks_keywords
    def chat_texts(self, messages: Messages, **options: Unpack[TemplateOptions]) -> list[str]:
        """Returns the text that `chat_ids` encodes, for each conversation."""
        template = self.chat_template
        if template is None and options.get("chat_template") is not None:
            template = ChatTemplate(None, tuple(self.text_tokenizer().special_tokens.names.items()))
        return render_conversations(template, messages, options)


def _computable(params: Any) -> Any:
    """Returns parameters on `Model.auto_mesh`; raises KvjaxError for numbers of 64 bits."""
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if x.dtype.itemsize > 4:
            raise KvjaxError(
                f"the parameter {jax.tree_util.keystr(path)} is {x.dtype}, and kvjax computes in 32 bits at most: "
                "params=jax.tree.map(lambda x: np.asarray(x, np.float32), params)"
            )
    return leave_explicit_mesh(params)


@checks_keywords
def load(
    path: str | pathlib.Path,
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    max_positions: int | None = None,
    weights: str | None = None,
) -> Model:
    """Loads a checkpoint directory of `checkpoints_convert`, or a model by name, as `kvjax models` lists them.

    Programs that are compiled from now on are cached on disk (`use_compilation_cache`).

    Args:
      path: a directory; a string that is no existing path is a name.
      dtype: of parameters and cache, as "bfloat16" or "bf16"; None as stored.
      mesh: devices along "data", which divides sequences, and "model", which divides key/value heads, MLP width and
        vocabulary; its axes may be `Auto` or `Explicit`. Parameters are restored straight to their shards, by each of
        several processes those of its own devices.
      max_positions: positions of the longest text, at most the model's; None for the model's. A model with LongRoPE has
        one list of factors for texts within its original context and one for longer texts. This number chooses one for
        all calls; with None each call chooses, by the longest text that it asks for.
      weights: "int8" or "int4" holds kernels in codes, see `Model.with_weights`; None as stored.

    Raises:
      KvjaxError: for an unknown name, for a directory that is missing, foreign, incomplete or damaged, for weights of
        another kind than it holds, and for processes that share the mesh and load something else.
    """
    use_compilation_cache()
    check_weights(weights)
    dtype = None if dtype is None else float_type(dtype)
    directory = find_checkpoint(path) if isinstance(path, str) else expand_user(path)
    name = os.fspath(path)
    if isinstance(path, str) and isinstance(directory, pathlib.Path) and not os.path.exists(directory):
        names = ["testbed", *(model for resolver in _resolvers() for model in resolver.MODELS)]
        close = difflib.get_close_matches(name.lower().rstrip("/").rpartition("/")[2], names, 1)
        mean = f"did you mean {close[0]!r}? Models" if close else "models"
        raise KvjaxError(
            f"there is no checkpoint directory {name}, and no model of that name; {mean} that go by a name: "
            f"{', '.join(names)} (`kvjax models` says where each comes from). Any other is a checkpoint of Hugging "
            "Face or a GGUF file that is converted first, python -m checkpoints_convert convert SRC DST, and opened "
            "as DST"
        )
    record = checkpoint.read_manifest(directory)
    if mesh is not None:
        auto_mesh(mesh)  # raises for one that divides nothing
    if mesh is not None and is_shared(mesh):
        # Before any computation between processes, in which those with other shapes would wait for good.
        require_agreement(
            checkpoint=(record.config, record.digests),
            dtype=dtype,
            mesh=dict(mesh.shape),
            positions=max_positions,
            weights=weights,
        )
    shardings = None if mesh is None else param_shardings(record.config, mesh, record.weights)
    config, params = checkpoint.restore(directory, dtype=dtype, shardings=shardings, weights=weights)
    if mesh is not None and weights is not None:
        params = jax.device_put(params, param_shardings(config, mesh, weights))
    if max_positions is not None:
        config = config.with_max_positions(max_positions)
    tokenizer = Tokenizer.from_directory(directory) if (directory / "tokenizer.json").is_file() else None
    # The tokenizer's own end, which config.json and generation_config.json may lack, ends an answer too, as in vLLM.
    if tokenizer is not None and (eos := tokenizer.eos_id) is not None and eos < config.vocab_size:
        config = dataclasses.replace(config, eos_ids=tuple(dict.fromkeys((*config.eos_ids, eos))))
    return Model(config, params, tokenizer, mesh, name, ChatTemplate.from_directory(directory))


def find_checkpoint(name: str) -> Any:
    """Returns the directory of a model: a checkpoint at that path first, then a model of that name.

    Without either, returns the path itself.
    """
    path = expand_user(name)
    if checkpoint.is_checkpoint(path):
        return path
    if name == "testbed":
        return resources.files("kvjax") / "testbed"
    resolver = next((resolver for resolver in _resolvers() if name in resolver.MODELS), None)
    return path if resolver is None else resolver.directory(name)


def _resolvers() -> list[Any]:
    return [importlib.import_module(module) for module in MODEL_RESOLVERS]


@checks_keywords
def random_model(config: Config, seed: int = 0, dtype: Any = jnp.float32) -> Model:
    """Makes a model with random parameters, for tests and benchmarks where only shapes and speed matter."""
    return Model(config, _init_params(key_from_seed(seed), config, float_type(dtype)), name="random")


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def _init_params(key: jax.Array, config: Config, dtype: jnp.dtype) -> Any:
    return nn.unbox(init(config, key, dtype))
