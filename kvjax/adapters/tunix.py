"""google-tunix: its models and its `Sampler` under any method.

    from kvjax.adapters import tunix
    tunix.use(model, "snapkv:budget=512")

Two lines, before `Sampler(model, tokenizer, cache_config)` is made. The model's weights, checkpoints and sharding stay
as they are; only this one model object changes, and `with tunix.use(..):` or `remove()` changes it back. The sampler
asks the model for its cache and gets kvjax's states; its `cache_size` is the capacity. It pads prompts on the left,
compiles, and donates the states as it does its own.

The classes of this object's model and attention layers are replaced by subclasses. The model's `__call__` reads
positions and padding once for all layers, and compresses after the prompt where a method does. An attention's `block`
hands its rotated queries, keys and values to `custom_decoder.attend`. Calls without a cache (training, scoring) run the
package's code.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import custom_decoder
from kvjax.adapters.common import GIVES, PROBE_CAPACITY, CacheHandle, ForwardPass, check_layer, make_rope
from kvjax.cache.protocol import LayerSpec
from kvjax.core.types import Array
from kvjax.errors import KvjaxError

TESTED = "0.1.7"


@dataclasses.dataclass(frozen=True)
class _Family:
    """The attention of one of the package's model files.

    Attributes:
      project: (module, attention, x, call) -> queries [B T N H], scaled by 1 / sqrt(H), keys and values [B T K H],
        after RoPE.
      output: name of the module that projects the output.
      rope: (module, attention) -> (theta, divisor of the positions).
      rotate: (module, attention, x [B T N H], positions [B T]) -> x rotated, by the package's function.
    """

    project: Callable[[ModuleType, Any, Array, Any], tuple[Array, Array, Array]]
    output: str
    rope: Callable[[ModuleType, Any], tuple[float, float]]
    rotate: Callable[[ModuleType, Any, Array, Array], Array]


def _default_theta(module: ModuleType, name: str) -> float:
    # Llama 3, Qwen 3 and Gemma call `apply_rope` with its default theta, whatever their configuration says.
    return float(inspect.signature(module.apply_rope).parameters[name].default)


def _rotate(module: ModuleType, attention: Any, x: Array, positions: Array) -> Array:
    return module.apply_rope(x, positions, head_dim=attention.head_dim)


def _rotate_qwen2(module: ModuleType, attention: Any, x: Array, positions: Array) -> Array:
    angles = module._generate_pos_embeddings(positions, attention.config.head_dim, attention.config.rope_theta)
    return module.apply_rotary_embedding(x, *angles)


def _rotate_gemma3(module: ModuleType, attention: Any, x: Array, positions: Array) -> Array:
    theta, divisor = attention.rope_base_frequency, attention.rope_scale_factor
    return module.apply_rope(x, positions, head_dim=attention.head_dim, base_frequency=theta, scale_factor=divisor)


def _project_llama(module: ModuleType, attention: Any, x: Array, call: Any) -> tuple[Array, Array, Array]:
    q, k, v = attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
    q, k = (_rotate(module, attention, y, call["segment_pos"]) for y in (q, k))
    return q, k, v


def _project_qwen2(module: ModuleType, attention: Any, x: Array, call: Any) -> tuple[Array, Array, Array]:
    q, k, v = (
        projection(x) + bias[...].astype(attention.config.dtype).reshape(projection.shape[1:])[None, None]
        for projection, bias in (
            (attention.q_proj, attention.q_bias),
            (attention.k_proj, attention.k_bias),
            (attention.v_proj, attention.v_bias),
        )
    )
    q, k = (module.apply_rotary_embedding(y, call["sin"], call["cos"]) for y in (q, k))
    return q, k, v


def _project_qwen3(module: ModuleType, attention: Any, x: Array, call: Any) -> tuple[Array, Array, Array]:
    q, k, v = attention.q_norm(attention.q_proj(x)), attention.k_norm(attention.k_proj(x)), attention.v_proj(x)
    q, k = (_rotate(module, attention, y, call["segment_pos"]) for y in (q, k))
    return q, k, v


def _split_gemma(attention: Any, x: Array) -> tuple[Array, Array, Array]:
    if attention.use_qkv_einsum:
        q, k, v = attention.qkv_einsum(x)
        return q, k, v
    k, v = attention.kv_einsum(x)
    return attention.q_einsum(x), k, v


def _project_gemma(module: ModuleType, attention: Any, x: Array, call: Any) -> tuple[Array, Array, Array]:
    q, k, v = _split_gemma(attention, x)
    q, k = (_rotate(module, attention, y, call["segment_pos"]) for y in (q, k))
    return q, k, v


def _project_gemma3(module: ModuleType, attention: Any, x: Array, call: Any) -> tuple[Array, Array, Array]:
    q, k, v = _split_gemma(attention, x)
    q, k = attention._query_norm(q), attention._key_norm(k)
    q, k = (_rotate_gemma3(module, attention, y, call["segment_pos"]) for y in (q, k))
    scale = attention.query_pre_attn_scalar * attention.head_dim**0.5
    return q if scale == 1 else q * scale, k, v


def _read_theta_gemma3(module: ModuleType, attention: Any) -> tuple[float, float]:
    return float(attention.rope_base_frequency), float(attention.rope_scale_factor)


FAMILIES = {
    "tunix.models.llama3.model": _Family(
        _project_llama, "o_proj", lambda module, attention: (_default_theta(module, "rope_theta"), 1.0), _rotate
    ),
    "tunix.models.qwen2.model": _Family(
        _project_qwen2, "o_proj", lambda module, attention: (float(attention.config.rope_theta), 1.0), _rotate_qwen2
    ),
    "tunix.models.qwen3.model": _Family(
        _project_qwen3, "o_proj", lambda module, attention: (_default_theta(module, "rope_theta"), 1.0), _rotate
    ),
    "tunix.models.gemma.model": _Family(
        _project_gemma,
        "attn_vec_einsum",
        lambda module, attention: (_default_theta(module, "max_wavelength"), 1.0),
        _rotate,
    ),
    "tunix.models.gemma3.model": _Family(_project_gemma3, "attn_vec_einsum", _read_theta_gemma3, _rotate_gemma3),
}
"""By the module that defines a model's class."""


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class TunixCache:
    """The states of all layers, as tunix' loops carry them.

    Beam search repeats and gathers every array of a cache by its first axis, which would be wrong for arrays that all
    sequences share. The number of sequences is therefore static: the model sees by it that beam search was at work.
    """

    leaves: list[Array]
    num_tokens: Array  # i32[B], padding included: the column of the attention mask that a token has
    structure: Any
    batch_size: int
    is_prompt: bool

    def tree_flatten(self):
        return (self.leaves, self.num_tokens), (self.structure, self.batch_size, self.is_prompt)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(*children, *static)

    @classmethod
    def pack(cls, layers, num_tokens, is_prompt=False):
        leaves, structure = jax.tree.flatten(layers)
        # `jnp.repeat` of beam search refuses scalars before the model could say what is wrong.
        static = (structure, tuple(x.ndim == 0 for x in leaves))
        return cls([x[None] if x.ndim == 0 else x for x in leaves], num_tokens, static, len(num_tokens), is_prompt)

    def unpack(self):
        structure, is_scalar = self.structure
        leaves = [x[0] if s else x for x, s in zip(self.leaves, is_scalar, strict=True)]
        return jax.tree.unflatten(structure, leaves)


class Use:
    """A model under a method, until `remove()` or the end of a `with`."""

    def __init__(self, model: Any, classes: list[tuple[Any, type]]):
        self.model = model
        self._classes = classes

    def remove(self) -> None:
        """Gives the model its own classes back; a second call does nothing."""
        for module, own in self._classes:
            module.__class__ = own
        self._classes = []

    def __enter__(self) -> Any:
        return self.model

    def __exit__(self, *exception) -> None:
        self.remove()


def use(model: Any, method: Any) -> Use:
    """Puts a method into a model of google-tunix: its `Sampler` then generates under it.

    Make the `Sampler` afterwards: it keeps what the model was when the sampler was made. Another call replaces the
    method. A method's `capacity` is the sampler's `cache_size`.

    Args:
      model: a `Llama3`, `Qwen2`, `Qwen3`, `Gemma` (1 and 2) or `Gemma3` of the package; it is changed in place.
      method: a method string, as "snapkv:budget=512", or a method.

    Returns:
      A `Use`, whose `remove()`, or the end of a `with`, undoes it.

    Raises:
      KvjaxError: another model; a version of the package whose attention differs from the tested one; a method that
        needs what the model does not give.
    """
    if hasattr(model, "model_def_and_state"):
        raise KvjaxError(
            "tunix.use takes the model and not a Sampler: a sampler keeps what its model was when it was made. "
            "Call tunix.use(model, method) first, and Sampler(model, ..) then"
        )
    family, module = _family_of(model)
    installed = getattr(type(model), "_kvjax_use", None)
    if installed is not None:
        installed.remove()
    specs = layer_specs(model)
    # Refuses here what it would refuse at the prompt.
    custom_decoder.attach(method, specs, capacity=PROBE_CAPACITY, gives=GIVES)
    classes: list[tuple[Any, type]] = []
    undo = Use(model, classes)
    checked = set()
    for layer, spec in zip(model.layers, specs, strict=True):
        if spec.without_index not in checked:  # layers of one kind differ in their weights alone
            custom_decoder.check_rope(spec, functools.partial(family.rotate, module, layer.attn))
            _check_attention(family, module, layer.attn, spec)
            checked.add(spec.without_index)
        for part, make in ((layer.attn, _attention_class), (layer, _without_remat)):
            classes.append((part, type(part)))
            part.__class__ = make(type(part), family, module)
    classes.append((model, type(model)))
    model.__class__ = _model_class(type(model), method, specs, undo)
    return undo


def layer_specs(model: Any) -> tuple[LayerSpec, ...]:
    """Describes the layers of a model of google-tunix: heads, rotation, window and soft cap, read off its modules."""
    family, module = _family_of(model)
    by_layer: dict[str, list[Any]] = collections.defaultdict(list)
    for layer in model.layers:
        attention = layer.attn
        heads, head_dim, _ = getattr(attention, family.output).shape
        theta, divisor = family.rope(module, attention)
        is_local = getattr(getattr(attention, "attn_type", None), "name", "GLOBAL") == "LOCAL_SLIDING"
        by_layer["heads"].append(heads)
        by_layer["kv_heads"].append(
            attention.k_proj.shape[1] if hasattr(attention, "k_proj") else attention.num_kv_heads
        )
        by_layer["head_dim"].append(head_dim)
        by_layer["rope"].append(make_rope(head_dim, theta, divisor))
        by_layer["window"].append(attention.sliding_window_size if is_local else None)
        by_layer["soft_cap"].append(getattr(attention, "attn_logits_soft_cap", None))
    return custom_decoder.specs_of(len(model.layers), **by_layer)


def _family_of(model: Any) -> tuple[_Family, ModuleType]:
    for cls in type(model).__mro__:
        if cls.__module__ in FAMILIES and hasattr(model, "layers"):
            return FAMILIES[cls.__module__], sys.modules[cls.__module__]
    names = ", ".join(name.split(".")[2] for name in FAMILIES)
    raise KvjaxError(
        f"{type(model).__module__}.{type(model).__name__} is no model that this adapter knows; it knows google-tunix' "
        f"{names}. docs/your_model.md shows the two lines that put kvjax.custom_decoder.attend into any other decoder"
    )


def _check_attention(family: _Family, module: ModuleType, attention: Any, spec: LayerSpec) -> None:
    weight = getattr(attention, family.output).w
    if isinstance(weight[...], jax.ShapeDtypeStruct):  # a model whose weights come later
        return
    block = _attention_class(type(attention), family, module).block
    names = inspect.signature(type(attention).block).parameters

    def run(cache: CacheHandle | None, x: Array, positions: Array, mask: Array) -> Array:
        call = {"x": x, "segment_pos": positions, "cache": cache, "attn_mask": mask}
        if "sin" in names:
            angles = module._generate_pos_embeddings(positions, attention.head_dim, attention.config.rope_theta)
            call["sin"], call["cos"] = (angle.astype(x.dtype) for angle in angles)
        return block(attention, **{name: call[name] for name in names if name in call})[1]

    check_layer(spec, run, package="google-tunix", tested=TESTED, width=weight.shape[-1], dtype=weight.dtype)


def _attention_class(base: type, family: _Family, module: ModuleType) -> type:
    signature = inspect.signature(base.block)

    def block(self, *args, **kwargs):
        call = signature.bind(self, *args, **kwargs).arguments
        handle = call["cache"]
        if not isinstance(handle, CacheHandle):
            return base.block(self, *args, **kwargs)
        if call.get("segment_ids") is not None:
            raise KvjaxError("packed sequences (segment_ids) have no cache: give one sequence per row, or no cache")
        x = call["x"]
        q, k, v = family.project(module, self, x, call)
        projection = getattr(self, family.output)
        out = handle.attend(q, k, v, x, projection.w[...])
        return handle, projection(out.astype(x.dtype))

    def __call__(self, *args, **kwargs):
        # Rematerialization is for gradients, and it would copy the handles, through which layers share values.
        call = signature.bind(self, *args, **kwargs).arguments
        return (block if isinstance(call["cache"], CacheHandle) else base.__call__)(self, *args, **kwargs)

    return type(base.__name__, (base,), {"block": block, "__call__": __call__, "__module__": base.__module__})


def _without_remat(base: type, family: _Family, module: ModuleType) -> type:
    signature = inspect.signature(base.block)

    def __call__(self, *args, **kwargs):
        call = signature.bind(self, *args, **kwargs).arguments
        run = base.block if isinstance(call["cache"], CacheHandle) else base.__call__
        return run(self, *args, **kwargs)

    return type(base.__name__, (base,), {"__call__": __call__, "__module__": base.__module__})


def _mark_padding(positions: Array, mask: Array | None, num_tokens: Array) -> Array:
    """Returns positions with -1 for padding: a token is padding where it may not see its own column of the mask."""
    T = positions.shape[1]
    if mask is None or T == 1:  # the sampler's steps bring a true token for every sequence
        return positions
    columns = num_tokens[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
    if mask.shape[1] == T:
        is_real = jnp.take_along_axis(mask, columns[:, :, None], axis=2, mode="clip")[:, :, 0]
    else:  # one row for all queries
        is_real = jnp.take_along_axis(mask[:, 0], columns, axis=1, mode="clip")
    return jnp.where(is_real, positions, -1)


def _model_class(base: type, method: Any, specs: tuple[LayerSpec, ...], undo: Use) -> type:
    signature = inspect.signature(base.__call__)
    self_name, tokens_name, *_ = signature.parameters

    def init_cache(self, batch_size, cache_size, dtype=None):
        layers = custom_decoder.attach(method, specs, capacity=cache_size, gives=GIVES)
        return TunixCache.pack(layers, jnp.zeros(batch_size, jnp.int32), is_prompt=True)

    def __call__(self, *args, **kwargs):
        call = dict(signature.bind(self, *args, **kwargs).arguments)
        call.pop(self_name)
        cache = call.get("cache")
        if not isinstance(cache, TunixCache):
            return base.__call__(self, *args, **kwargs)
        if call.get("images") is not None:
            raise KvjaxError(
                "images see each other in both directions, and a cache under a method holds text: images=None"
            )
        tokens, positions, mask = call[tokens_name], call["positions"], call.get("attention_mask")
        if tokens.shape[0] != cache.batch_size:
            raise KvjaxError(
                f"the cache holds {cache.batch_size} sequences and {tokens.shape[0]} came: beam search copies caches "
                "array by array, which states do not allow. Sample with beam_size=None (greedy, top_p)"
            )
        positions = _mark_padding(positions, mask, cache.num_tokens)

        def run(tokens: Array, positions: Array, layers: dict[int, Any]) -> tuple[Array, dict[int, Any]]:
            forward_pass = ForwardPass(layers, positions)
            given = {
                tokens_name: tokens,
                "positions": jnp.maximum(positions, 0),
                "cache": {f"layer_{i}": CacheHandle(forward_pass, i) for i in range(len(specs))},
            }
            logits, _ = base.__call__(self, **{**call, **given})
            return logits, forward_pass.layers

        logits, layers = run(tokens, positions, cache.unpack())
        if cache.is_prompt:
            layers = custom_decoder.finish(
                layers, tokens=tokens, repeat=lambda layers, tokens, positions: run(tokens, positions, layers)[1]
            )
        return logits, TunixCache.pack(layers, cache.num_tokens + tokens.shape[1])

    members = {"init_cache": init_cache, "__call__": __call__, "_kvjax_use": undo, "__module__": base.__module__}
    return type(base.__name__, (base,), members)
