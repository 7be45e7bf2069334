"""gemma (google-deepmind): its models and its samplers under any method.

    from kvjax.adapters.gemma import ChatSampler

    sampler = ChatSampler(model=model, params=params, multi_turn=True, method="streaming_llm:sinks=4,recent=1020")
    sampler.chat("Hello!")

`Sampler` and `ChatSampler` take the arguments of `gm.text.Sampler` and `gm.text.ChatSampler`, and `method`. Their loop
is kvjax's: the package's own runs the last token of a prompt twice, which only a cache that can be overwritten allows.
Under a method whose size is constant, a conversation may become longer than `cache_length`; under others the end of
the cache is an error, and no answer stops in silence.

`init_cache` and `apply` are the model alone, for loops of your own. Nothing of the package is replaced: Flax's
interceptors hand queries, keys and values to `custom_decoder.attend`, while `apply` runs.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from kvjax import custom_decoder
from kvjax.adapters.common import GIVES, CacheHandle, ForwardPass, check_layer, make_rope
from kvjax.cache.protocol import LayerSpec
from kvjax.core.mesh import to_numpy
from kvjax.core.types import Array
from kvjax.errors import KvjaxError, KvjaxWarning

try:
    import kauldron.checkpoints as checkpoints
except ImportError as e:
    raise KvjaxError(f'kvjax.adapters.gemma needs gemma ({e}): pip install "kvjax[gemma]"') from e

TESTED = "3.3.0"
TURN_CHUNK_TOKENS = 256
"""Tokens of a later turn that are run at a time, at most: more than the smallest window would not fit a ring."""


@contextlib.contextmanager
def _renamed_base_class() -> Iterator[None]:
    # gemma 3.3.0 derives from a class of kauldron that 1.4 calls otherwise, and older kauldrons do not know this JAX.
    is_missing = not hasattr(checkpoints, "AbstractPartialLoader") and hasattr(checkpoints, "InitTransform")
    if is_missing:
        checkpoints.AbstractPartialLoader = checkpoints.InitTransform
    try:
        yield
    finally:
        if is_missing:
            del checkpoints.AbstractPartialLoader


with _renamed_base_class():
    from gemma import gm
    from gemma.gm.math import _positional_embeddings
    from gemma.gm.nn import _gemma, _modules, _transformer  # noqa: F401  `_gemma` has the renamed class in its imports
    from gemma.gm.text import _sampler

_ATTENTION = inspect.signature(_modules.Attention.__call__)


def layer_specs(model: Any) -> tuple[LayerSpec, ...]:
    """Describes the layers of a `gm.nn` model: heads, rotation, window and soft cap, from its configuration."""
    if not isinstance(model, _transformer.Transformer):
        raise KvjaxError(
            f"{type(model).__name__} is no gm.nn.Transformer (Gemma 2 and 3), which is what this adapter knows. Give "
            "the model without its wrapper (LoRA, quantization); docs/your_model.md shows the two lines for any other "
            "decoder"
        )
    c = model.config
    local_rope = make_rope(c.head_dim, c.local_base_frequency, c.local_scale_factor)
    global_rope = make_rope(c.head_dim, c.global_base_frequency, c.global_scale_factor)
    is_local = [kind == _modules.AttentionType.LOCAL_SLIDING for kind in c.attention_types]
    return custom_decoder.specs_of(
        c.num_layers,
        c.num_heads,
        c.num_kv_heads,
        c.head_dim,
        rope=[local_rope if local else global_rope for local in is_local],
        window=[c.sliding_window_size if local else None for local in is_local],
        soft_cap=c.attn_logits_soft_cap,
    )


def init_cache(model: Any, method: Any, cache_length: int) -> dict[int, Any]:
    """Makes the caches of a `gm.nn` model's layers under a method, for `apply`.

    Args:
      model: of Gemma 2 or 3, text only.
      method: a method string, as "snapkv:budget=512", or a method.
      cache_length: tokens that a sequence may grow to; methods of constant size go on beyond it.

    Returns:
      {layer: LayerCache}, see `custom_decoder.attach`. The first `apply` is the prompt.
    """
    return custom_decoder.attach(method, layer_specs(model), capacity=cache_length, gives=GIVES)


def apply(
    model: Any, params: Any, tokens: Array, positions: Array, cache: dict[int, Any], last_only: bool = False
) -> tuple[Array, dict[int, Any]]:
    """Runs a `gm.nn` model on a prompt or on further tokens, for `jax.jit`.

    Args:
      model: of Gemma 2 or 3.
      params: its parameters.
      tokens: i32[B T].
      positions: i32[B T], 0, 1, 2, .. in each sequence over all calls, -1 for padding.
      cache: from `init_cache`, or from the last call.
      last_only: whether only the logits of each sequence's last token are computed.

    Returns:
      Logits [B T V], or [B V] with `last_only`, and the cache.
    """
    is_prompt = cache[0].length is None

    def run(cache: dict[int, Any], tokens: Array, positions: Array) -> tuple[Array, dict[int, Any]]:
        forward_pass = ForwardPass(cache, positions)
        with nn.intercept_methods(_attend_in_attention):
            logits = model.apply({"params": params}, tokens, forward_pass, last_only, method=_forward)
        return logits, forward_pass.layers

    logits, cache = run(cache, tokens, positions)
    if is_prompt:
        cache = custom_decoder.finish(cache, tokens=tokens, repeat=lambda *arguments: run(*arguments)[1])
    return logits, cache


def _forward(model: Any, tokens: Array, forward_pass: ForwardPass, last_only: bool) -> Array:
    """The package's `Transformer.__call__` for text, which would flatten the batch of every array of a cache."""
    x = model.embedder.encode(tokens)
    positions = jnp.maximum(forward_pass.positions, 0)
    for i, block in enumerate(model.blocks):
        _, x = block(x, positions, CacheHandle(forward_pass, i), None)
    x = model.final_norm(x)
    if last_only:
        last = jnp.argmax(jnp.where(forward_pass.positions >= 0, forward_pass.positions, -1), axis=1)
        x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
    logits = model.embedder.decode(x)
    cap = model.config.final_logit_softcap
    return logits if cap is None else jnp.tanh(logits / cap) * cap


def _attend_in_attention(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Runs the attention of a layer whose cache is kvjax's, and everything else as it is."""
    module = context.module
    if not isinstance(module, _modules.Attention) or context.method_name != "__call__":
        return run(*args, **kwargs)
    call = _ATTENTION.bind(module, *args, **kwargs).arguments
    handle, x = call["cache"], call["x"]
    if not isinstance(handle, CacheHandle):
        return run(*args, **kwargs)
    if module.use_qkv_einsum:
        q, k, v = module.qkv_einsum("BTD,SNDH->SBTNH", x)
    else:
        q, (k, v) = module.q_einsum("BTD,NDH->BTNH", x), module.kv_einsum("BSD,CKDH->CBSKH", x)
    if module.use_qk_norm:
        q, k = module._query_norm(q), module._key_norm(k)
    rope = {"base_frequency": module.rope_base_frequency, "scale_factor": module.rope_scale_factor}
    q, k = (_positional_embeddings.apply_rope(y, call["segment_pos"], **rope) for y in (q, k))
    scale = module.query_pre_attn_scalar * module.head_dim**0.5
    projection = module.attn_vec_einsum
    weight = projection.get_variable("params", projection.weight_name)
    out = handle.attend(q if scale == 1 else q * scale, k, v, x, weight)
    return handle, projection("BTNH,NHD->BTD", out.astype(x.dtype))


def check_model(model: Any, params: Any) -> None:
    """Compares an attention layer of each kind with this adapter's reading of it; raises KvjaxError if they differ."""
    dtype = jax.tree.leaves(params)[0].dtype
    checked = set()
    for i, spec in enumerate(layer_specs(model)):
        if spec.without_index in checked:  # layers of one kind differ in their weights alone
            continue
        checked.add(spec.without_index)

        def run(cache: Any, x: Array, positions: Array, mask: Array, i: int = i) -> Array:
            with nn.intercept_methods(_attend_in_attention):
                return model.apply({"params": params}, method=lambda m: m.blocks[i].attn(x, positions, cache, mask)[1])

        check_layer(spec, run, package="gemma", tested=TESTED, width=model.config.embed_dim, dtype=dtype)


@struct.dataclass(kw_only=True)
class SamplingState:
    """The state of a sampler between two steps, and between two turns.

    Attributes:
      step: tokens predicted in this turn.
      done: [B], whether a sequence has predicted an end token.
      last_token: [B], predicted last; the cache does not hold it yet.
      predicted_tokens: [B, max_out_length] of this turn, 0 after the end token.
      rng: for the sampling method.
      cache: {layer: LayerCache}.
    """

    step: Array
    done: Array
    last_token: Array
    predicted_tokens: Array
    rng: Array
    cache: Any


@functools.partial(jax.jit, static_argnames=("model",))
def _run_tokens(model: Any, params: Any, tokens: Array, positions: Array, cache: Any) -> tuple[Array, Any]:
    return apply(model, params, tokens, positions, cache, last_only=True)


@functools.partial(jax.jit, static_argnames=("loop",))
def _choose(loop: _Loop, state: SamplingState, logits: Array) -> SamplingState:
    return loop.choose(state, logits)


@functools.partial(jax.jit, static_argnames=("loop",))
def _run_step(loop: _Loop, params: Any, state: SamplingState) -> SamplingState:
    return loop.run_step(params, state)


@functools.partial(jax.jit, static_argnames=("loop",))
def _run_steps(loop: _Loop, params: Any, state: SamplingState, max_new_tokens: Array) -> SamplingState:
    def goes_on(state: SamplingState) -> Array:
        return (state.step < max_new_tokens) & ~state.done.all()

    return jax.lax.while_loop(goes_on, functools.partial(loop.run_step, params), state)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The static part of a sampling loop."""

    model: Any
    end_tokens: tuple[int, ...]
    forbidden_tokens: tuple[int, ...]
    sampling: Any

    def choose(self, state: SamplingState, logits: Array) -> SamplingState:
        if self.forbidden_tokens:
            logits = logits.at[:, jnp.asarray(self.forbidden_tokens)].set(-jnp.inf)
        rng, key = jax.random.split(state.rng)
        token = self.sampling.get_next_tokens(logits, rng=key).astype(jnp.int32)
        predicted = state.predicted_tokens.at[:, state.step].set(jnp.where(state.done, 0, token))
        return SamplingState(
            step=state.step + 1,
            done=state.done | jnp.isin(token, jnp.asarray(self.end_tokens)),
            last_token=jnp.where(state.done, state.last_token, token),
            predicted_tokens=predicted,
            rng=rng,
            cache=state.cache,
        )

    def run_step(self, params: Any, state: SamplingState) -> SamplingState:
        positions = jnp.where(state.done, -1, state.cache[0].length)[:, None]
        logits, cache = apply(self.model, params, state.last_token[:, None], positions, state.cache)
        return self.choose(dataclasses.replace(state, cache=cache), logits[:, 0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler(gm.text.Sampler):
    """`gm.text.Sampler` under a method.

    Under "full" it predicts what the package's own sampler predicts, for a first turn. In later turns the end token of
    the answer before is part of the conversation, which the package's sampler leaves out.

    Attributes:
      method: a method string, as "snapkv:budget=512", or a method.
      The others are those of `gm.text.Sampler`. `cache_length` is the capacity: only methods of constant size go beyond
      it.
    """

    method: Any = "full"

    def __post_init__(self):
        super().__post_init__()
        init_cache(self.model, self.method, self.cache_length)  # refuses here what it would refuse at the first prompt
        check_model(self.model, self.params)

    def sample(
        self,
        prompt: Any,
        *,
        images: Any = None,
        max_new_tokens: int | None = None,
        stream: bool = False,
        sampling: Any = None,
        rng: Any = None,
        return_state: bool = False,
        last_state: SamplingState | None = None,
        sharding: Any = None,
    ) -> Any:
        """Samples texts; arguments and result are those of `gm.text.Sampler.sample`.

        Raises:
          KvjaxError: images; a conversation that no longer fits the cache; what the method refuses.
        """
        if images is not None:
            raise KvjaxError(
                "images see each other in both directions, and a cache under a method holds text: images=None"
            )
        has_batch_dim = _sampler._get_has_batch_dim(prompt)
        if stream and has_batch_dim:
            raise KvjaxError(
                "stream=True takes one prompt, and a list was given; sample them one by one, or stream=False"
            )
        max_new_tokens = max_new_tokens or self.max_out_length
        if max_new_tokens > self.max_out_length:
            raise KvjaxError(
                f"max_new_tokens={max_new_tokens} exceeds max_out_length={self.max_out_length}, a field of the sampler"
            )
        # The beginning of the text, and the padding, which is id 0, are the package's.
        tokens = self._tokenize_prompts(prompt, add_bos=last_state is None)
        if sharding is not None:
            tokens = jax.device_put(tokens, sharding)
        lengths = (tokens != self.tokenizer.special_tokens.PAD).sum(axis=1)
        longest = int(to_numpy(lengths).max())
        B, num_before = tokens.shape[0], 0
        if last_state is None:
            cache = init_cache(self.model, self.method, self.cache_length)
            width = next((n for n in self._buckets if n >= tokens.shape[1]), tokens.shape[1])
            width = max(min(width, self.cache_length), tokens.shape[1])
            starts, chunk_tokens = [0], width
        else:
            cache = last_state.cache
            if len(last_state.last_token) != B:
                raise KvjaxError(
                    f"last_state has {len(last_state.last_token)} conversations and {B} prompts were given"
                )
            tokens = jnp.concatenate([last_state.last_token[:, None], tokens], axis=1)
            lengths, longest, num_before = lengths + 1, longest + 1, int(to_numpy(cache[0].length).max())
            windows = [x.layer.spec.rule.window for x in cache.values()]
            chunk_tokens = min(TURN_CHUNK_TOKENS, *(window or TURN_CHUNK_TOKENS for window in windows))
            width = -(-tokens.shape[1] // chunk_tokens) * chunk_tokens
            starts = list(range(0, width, chunk_tokens))
        # The last token of an answer is not run, so that it needs no slot.
        headroom_tokens = self.cache_length - num_before - longest + 1
        # A prompt is compressed after it has been read, so that it has to fit even where the state is of constant size.
        if all(x.layer.has_constant_size for x in cache.values()) and (headroom_tokens > 0 or last_state is not None):
            headroom_tokens = max_new_tokens
        if headroom_tokens < 1:
            raise KvjaxError(
                f"the conversation has {num_before + longest} tokens and the cache room for {self.cache_length}; "
                "take a larger cache_length, or a method of constant size, such as streaming_llm, h2o or tova"
            )
        tokens = jnp.pad(tokens, ((0, 0), (0, width - tokens.shape[1])))
        offsets = jnp.arange(width, dtype=jnp.int32)[None]
        first_position = jnp.zeros((B, 1), jnp.int32) if last_state is None else cache[0].length[:, None]
        positions = jnp.where(offsets < lengths[:, None], first_position + offsets, -1)
        logits = None
        for start in starts:
            chunk = slice(start, start + chunk_tokens)
            chunk_logits, cache = _run_tokens(self.model, self.params, tokens[:, chunk], positions[:, chunk], cache)
            # Each sequence's logits come from the chunk that has its last token.
            has_token = (positions[:, chunk] >= 0).any(axis=1)[:, None]
            logits = chunk_logits if logits is None else jnp.where(has_token, chunk_logits, logits)
        end_tokens = (self.tokenizer.special_tokens.EOS, self.tokenizer.special_tokens.END_OF_TURN)
        loop = _Loop(
            self.model,
            (*(int(x) for x in end_tokens), *self._normalized_stop_tokens),
            tuple(int(x) for x in self._normalized_forbidden_tokens or ()),
            sampling or self.sampling,
        )
        state = SamplingState(
            step=jnp.zeros((), jnp.int32),
            done=jnp.zeros(B, bool),
            last_token=jnp.zeros(B, jnp.int32),
            predicted_tokens=jnp.zeros((B, self.max_out_length), jnp.int32),
            rng=_sampler._normalize_rng(rng),
            cache=cache,
        )
        state = _choose(loop, state, logits)
        limit = min(max_new_tokens, headroom_tokens)
        if stream:
            states = self._stream(loop, state, limit, max_new_tokens)
            return self._stream_decode_state(states, return_state=return_state)
        state = _run_steps(loop, self.params, state, jnp.int32(limit))
        self._warn_if_cut(state, limit, max_new_tokens)
        return self._decode_state(
            state, predicted_tokens=state.predicted_tokens, has_batch_dim=has_batch_dim, return_state=return_state
        )

    @property
    def _buckets(self) -> tuple[int, ...]:
        return (self.pad_length,) if isinstance(self.pad_length, int) else self.pad_length or ()

    def _stream(self, loop: _Loop, state: SamplingState, limit: int, max_new_tokens: int) -> Iterator[SamplingState]:
        yield state
        for _ in range(1, limit):
            if to_numpy(state.done)[0]:
                return
            state = _run_step(loop, self.params, state)
            yield state
        self._warn_if_cut(state, limit, max_new_tokens)

    def _warn_if_cut(self, state: SamplingState, limit: int, max_new_tokens: int) -> None:
        if limit < max_new_tokens and not to_numpy(state.done).all():
            warnings.warn(
                f"the cache of {self.cache_length} tokens is full, and the answer ends there; take a larger "
                "cache_length, or a method of constant size, such as streaming_llm, h2o or tova",
                KvjaxWarning,
                stacklevel=3,
            )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ChatSampler(gm.text.ChatSampler):
    """`gm.text.ChatSampler` under a method; see `Sampler`.

    Attributes:
      method: a method string, as "streaming_llm:sinks=4,recent=1020", or a method.
    """

    method: Any = "full"

    @functools.cached_property
    def sampler(self) -> Sampler:
        """The sampler of the turns."""
        return Sampler(
            model=self.model,
            params=self.params,
            tokenizer=self.tokenizer,
            sampling=self.sampling,
            forbidden_tokens=self.forbidden_tokens,
            stop_tokens=self.stop_tokens,
            cache_length=self.cache_length or 4096,
            max_out_length=self.max_out_length,
            method=self.method,
        )
