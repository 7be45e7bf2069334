"""The functional core: pure functions of arrays and pytrees that every JAX transformation enters.

A method is bound to the layers of a model once; the result is hashable and static. Everything else is arrays: the
parameters, tokens, and a `Cache`, which is an ordinary pytree.

    config, params = model.config, model.params
    plan = functional.bind("snapkv:budget=256", config)
    logits, cache = functional.prefill(params, tokens, lengths, plan, config, capacity=2048)
    new_tokens, cache = functional.decode(params, cache, logits.argmax(-1), num_tokens=64)

Nothing here donates buffers, checks tokens or measures time: `kvjax.generate` and `kvjax.read` do, and are built on
these functions. Values decide no shape, except where a method divides a budget over layers and is called eagerly. Only
methods that hold arrays in host memory place any. Called eagerly, a pass compiles one program for each distinct layer;
under `jax.jit` it is one program, in which layers that are alike are compiled once on a CPU.

Nothing here is given a model, so that a cache of these functions names no weights, and the caller runs it with the
parameters that filled it. `kvjax.extend`, `kvjax.generate` and `kvjax.Context` refuse such a cache until the caller
says whose it is, `dataclasses.replace(cache, weights=model.fingerprint)`.

Under `jax_enable_x64` everything is computed in 32 bits as without it: arrays of 64 bits are narrowed.

Arguments called static are Python values, which decide shapes: close over them, or name them in `jax.jit`'s
`static_argnames`. A program that takes or returns a cache can be written by `jax.export`; a process that reads it calls
`bind` before `jax.export.deserialize`, since JAX finds the classes of a method's state only once they are imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import PartitionSpec

from kvjax.cache.protocol import Cache, KVMethod, LayerSpec
from kvjax.cache.shared_prefix import SharedPrefixState
from kvjax.core import memory
from kvjax.core.explicit_axes import accepts_explicit_axes, layer_specs, spec_of, specs_as_before
from kvjax.core.precision import computes_in_32_bits
from kvjax.core.quantized_kernel import is_quantized
from kvjax.core.random import key_from_seed
from kvjax.core.rope import Rope
from kvjax.core.types import Array
from kvjax.custom_decoder.layer_cache import map_layer_caches
from kvjax.engine import decode as _decode
from kvjax.engine import plan as _plan
from kvjax.engine import prefill as _prefill
from kvjax.engine.forward import BoundLayers, Target, exact_logits
from kvjax.engine.sampling import SamplingParams
from kvjax.errors import KvjaxError
from kvjax.models.config import Config
from kvjax.utils import arguments
from kvjax.utils.keywords import checks_keywords

__all__ = ["bind", "decode", "empty", "extend", "logits", "prefill", "take"]


@checks_keywords
def bind(method: str | KVMethod, config: Config, differentiable: bool = False) -> BoundLayers:
    """Binds a method to every layer of a model.

    Args:
      method: a method or its string, as in "snapkv:budget=256 + int8".
      config: of the model, as `model.config`.
      differentiable: gradients pass through what the cache stores. Codes, 16-bit caches and host memory hold bits, at
        which a gradient ends; each codec then keeps the exact vectors too, and returns its own values with the gradient
        of the exact ones (the straight-through estimator). The numbers of the forward pass stay, the bytes saved do
        not, and nothing lies in host memory.

    Returns:
      One bound layer for each layer of the model: hashable, to be a static argument. Equal layers are equal values.

    Raises:
      KvjaxError: a method that cannot serve the model.
    """
    return _plan.bind(method, config, differentiable)


def _kernel_spec(linear: Any) -> PartitionSpec:
    """Returns how the kernel of a linear map's parameters is divided; its codes are divided alike."""
    kernel = linear["kernel"]
    return spec_of(kernel["codes"] if is_quantized(kernel) else kernel)


def _logits_spec(result: Array, params: Any, tokens: Array, *_: Any, **__: Any) -> PartitionSpec:
    """Logits lie as the tokens do, and along the vocabulary as the parameters that make them."""
    vocabulary = _kernel_spec(params["head"])[1] if "head" in params else spec_of(params["embedding"])[0]
    return PartitionSpec(*spec_of(tokens)[: result.ndim - 1], vocabulary)


def _prefill_specs(
    result: tuple[Array, Cache], params: Any, tokens: Array, lengths: Array, *_: Any, **__: Any
) -> tuple[PartitionSpec, Cache]:
    """States lie as the tokens do, and along the heads as the layer's projection of keys."""
    last, cache = result
    sequences, states = spec_of(tokens)[0], []
    for i, state in enumerate(cache.layers):
        params_of_layer = params[f"layer_{i}"]
        keys = params_of_layer.get("attention", params_of_layer.get("recurrence")).get("k")
        kv_heads = cache.config.kind(i).attention.kv_heads
        heads = None if keys is None else _kernel_spec(keys)[1]
        states.append(layer_specs(state, len(tokens), kv_heads, sequences, heads))
    specs = dataclasses.replace(cache, layers=tuple(states), length=PartitionSpec(sequences))
    return _logits_spec(last, params, tokens), specs


@checks_keywords
@computes_in_32_bits
@accepts_explicit_axes(_logits_spec)
def logits(params: Any, tokens: Array, config: Config) -> Array:
    """Runs the exact forward pass without a cache.

    Args:
      params: of the model, as `model.params`.
      tokens: i32[B T]; causal attention, so that padding on the right changes nothing before it.
      config: of the model. LongRoPE chooses its factors by T, see `models.Config.for_length`.

    Returns:
      Logits f32[B T V].
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    return exact_logits(params, tokens, config=config.for_length(tokens.shape[1]))


@checks_keywords
@computes_in_32_bits
@accepts_explicit_axes(_prefill_specs)
def prefill(
    params: Any,
    tokens: Array,
    lengths: Array,
    plan: BoundLayers,
    config: Config,
    capacity: int,
    *,
    chunk: int | None = None,
    replay_prompts: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> tuple[Array, Cache]:
    """Runs prompts and compresses them under a method.

    Args:
      params: of the model.
      tokens: i32[B T], left-aligned, padded on the right.
      lengths: i32[B], tokens of each prompt, at least 1.
      plan: from `bind`, with this config.
      config: of the model; with LongRoPE `config.for_length(capacity)`, which chooses its factors for this cache.
      capacity: static, tokens that a sequence may grow to, at least T: the headroom of each is capacity - T.
      chunk: static, tokens that are run at a time; None for all at once, or as the method asks.
      replay_prompts: static; a method that makes the model repeat the prompt (KVzip) puts these ids before the first
        and before every later chunk of it. None by default, as for a model without a tokenizer.

    Returns:
      Logits of each prompt's last token f32[B V], and the cache. Some methods choose the number of slots by values (of
      attention, for instance); under a transformation these are unknown, and the cache has enough for any prompts of T
      tokens.

    Raises:
      KvjaxError: capacity below T, or a static argument that is traced or of another type.
    """
    tokens, lengths = jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)
    capacity = _integer("capacity", capacity, tokens.shape[1])  # at least the tokens of the prompts
    _check_plan(plan, config, capacity)
    chunk = None if chunk is None else _integer("chunk", chunk)
    replay_prompts = tuple(replay_prompts[0]), tuple(replay_prompts[1])
    return _prefill.prefill(
        params, tokens, lengths, plan, Target(config), capacity, chunk=chunk, replay_prompts=replay_prompts
    )


@checks_keywords
@computes_in_32_bits
@accepts_explicit_axes(
    lambda result, params, tokens, cache, *_, **__: (
        _logits_spec(result[0], params, tokens),
        specs_as_before(result[1], cache),
    )
)
def extend(
    params: Any, tokens: Array, cache: Cache, lengths: Array | None = None, commit: int | None = None
) -> tuple[Array, Cache]:
    """Runs further tokens of every sequence.

    The caller keeps each sequence within the cache's capacity; nothing is checked, and results beyond mean nothing. A
    method that drafts (SpeCache) is fed one token at a time, each with the next one as its draft.

    Args:
      params: of the model.
      tokens: i32[B T], padded on the right.
      cache: of `prefill`, `extend`, `decode` or `empty`; it stays as it is.
      lengths: i32[B], how many tokens of each sequence are real; None for all.
      commit: static, how many of the tokens the cache keeps; None for all. Tokens beyond are drafts: they attend to the
        cache and to each other, and leave no trace.

    Returns:
      Logits f32[B T V], which mean nothing for padding, and the new cache.
    """
    tokens, target = jnp.asarray(tokens, jnp.int32), Target(cache.config)
    commit = None if commit is None else _integer("commit", commit, 0, tokens.shape[1])
    lengths = None if lengths is None else jnp.asarray(lengths, jnp.int32)
    if commit in (None, tokens.shape[1]):
        return _decode.extend(params, tokens, cache, target, lengths=lengths)
    return _decode.step(params, tokens, cache, commit, target, lengths)


@checks_keywords
@computes_in_32_bits
@accepts_explicit_axes(
    lambda result, params, cache, tokens, *_, **__: (PartitionSpec(*spec_of(tokens)), specs_as_before(result[1], cache))
)
def decode(
    params: Any,
    cache: Cache,
    tokens: Array,
    num_tokens: int,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 (it is immutable)
    key: Array | None = None,
) -> tuple[Array, Cache]:
    """Generates tokens in one `lax.scan`, without looking for an end of sequence.

    As in `extend`, the caller keeps each sequence within the cache's capacity.

    Args:
      params: of the model.
      cache: what the tokens follow.
      tokens: i32[B], the last token of each sequence, which the cache does not hold yet.
      num_tokens: static, how many to generate after it.
      sampling: static, settings of the sampler, without penalties; greedy by default.
      key: of the random numbers; None: made from `sampling.seed`, as in `kvjax.generate`.

    Returns:
      i32[B num_tokens], and the cache, which holds all of the tokens but the last.
    """
    tokens, num_tokens = jnp.asarray(tokens, jnp.int32), _integer("num_tokens", num_tokens)
    if not isinstance(sampling, SamplingParams):
        raise KvjaxError(f"sampling is static, a value such as SamplingParams(temperature=0.7), got {sampling!r:.80}")
    if sampling.has_penalties:
        raise KvjaxError(
            "penalties count the tokens before, which a cache does not know: use kvjax.generate, or a loop of your own "
            "over extend that subtracts them from its logits"
        )
    key = key_from_seed(sampling.seed) if key is None else key
    target, sampler = Target(cache.config), sampling.sampler()
    return _decode.decode(params, cache, tokens, num_tokens, target=target, sampler=sampler, key=key)


@checks_keywords
@computes_in_32_bits
@accepts_explicit_axes(lambda result, *_, **__: jax.tree.map(spec_of, result))
def empty(plan: BoundLayers, config: Config, batch: int, capacity: int, dtype: Any = jnp.float32) -> Cache:
    """Makes the cache of sequences that have no token yet.

    A method that compresses when the prompt ends has nothing to compress here: all tokens that follow count as decoded.

    Args:
      plan: from `bind`, with this config.
      config: of the model; with LongRoPE as in `prefill`.
      batch: sequences.
      capacity: tokens that a sequence may grow to.
      dtype: of keys and values, that of the parameters.

    Returns:
      A cache whose `length` is 0 in every sequence.
    """
    batch, capacity = _integer("batch", batch), _integer("capacity", capacity)
    _check_plan(plan, config, capacity)
    return _prefill.empty(plan, Target(config), batch, capacity, jnp.dtype(dtype))


@checks_keywords
@computes_in_32_bits
@accepts_explicit_axes(specs_as_before)
def take(cache: Any, sequences: Array) -> Any:
    """Takes sequences of a cache, as a beam search does in every step.

    It is `jax.tree.map(lambda x: x[sequences], cache)` where all arrays lie on the device and have one entry per
    sequence. Arrays in host memory are moved to the device and back, and what several sequences share, such as a
    calibrated basis, stays as it is.

    Args:
      cache: of B sequences; or what `custom_decoder.attach` returned, after the prompt, in the caller's own pytree.
      sequences: i32[n], which of them, in this order, each as often as it is named.

    Returns:
      The cache of n sequences.

    Raises:
      KvjaxError: a cache after a shared prefix; `kvjax.Context.take` takes its sequences.
    """
    sequences = jnp.asarray(sequences, jnp.int32)
    if not isinstance(cache, Cache):
        return map_layer_caches(lambda layer: _take_sequences(layer, sequences), cache)
    if any(isinstance(state, SharedPrefixState) for state in cache.layers):
        raise KvjaxError("these sequences share a prefix; take some of them with Context.take, or read them one by one")
    return _take_sequences(cache, sequences)


def _take_sequences(cache: Any, sequences: Array) -> Any:
    """`take` of a model's cache, or of a layer's."""
    if cache.length is None:
        raise KvjaxError("this cache holds no sequence yet: attend the prompt in every layer, then take sequences")
    batch = cache.length.shape[0]

    def take_from(x: Array) -> Array:
        if x.ndim == 0 or x.shape[0] != batch:
            return x  # shared by all sequences
        if not memory.is_host(x):
            return x[sequences]
        # A gather runs on the device alone.
        return jax.device_put(jax.device_put(x, memory.DEVICE)[sequences], memory.HOST)

    return jax.tree.map(take_from, cache)


def _check_plan(plan: Any, config: Any, capacity: int) -> None:
    if not isinstance(config, Config):
        raise KvjaxError(f"config is that of a model, as in model.config, got {type(config).__name__}")
    if not isinstance(plan, tuple) or len(plan) != config.layers:
        raise KvjaxError(
            f"plan is the tuple of {config.layers} bound layers that functional.bind(method, config) makes, got "
            f"{plan!r:.80}"
        )
    if config.for_length(capacity).ropes != config.for_length(config.max_positions).ropes:
        raise KvjaxError(
            f"a capacity of {capacity} tokens is within LongRoPE's original context, and this config takes the factors "
            "for longer texts where nobody chooses: config = config.for_length(capacity) before functional.bind"
        )
    for i, layer in enumerate(plan):
        spec = getattr(layer, "spec", None)
        if isinstance(spec, LayerSpec) and spec.rope != (config.kind(i).attention.rope or Rope(0)):
            raise KvjaxError(
                f"layer {i} of the plan has another rotary embedding than that of the config, {spec.rope}; make the "
                "plan of this config, functional.bind(method, config)"
            )


def _integer(name: str, value: Any, least: int = 1, most: int = 2**31 - 1) -> int:
    if isinstance(value, Tracer):
        raise KvjaxError(
            f"{name} decides the shapes of arrays and is traced here; make it static, as by "
            f"jax.jit(..., static_argnames={name!r}), or close over it"
        )
    return arguments.integer(name, value, least, most)
