"""From logits to the next token."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.core import arguments
from kvjax.core.attention import NEG
from kvjax.core.types import Array, KvjaxError, pytree

LEAST = 1e-30  # of a temperature and of top_p: logits over a smaller one would overflow, a smaller share be none


@pytree
class Sampler:
    """How a token is drawn; the numbers are arrays, so that a sweep over them does not recompile.

    temperature None: greedy. top_k: the k likeliest. top_p: the likeliest that together reach p (Holtzman et al.,
    2020). min_p: at least min_p times the likeliest (Nguyen et al., 2024). Filters apply in this order, after the
    temperature; each keeps the likeliest token, and equal logits are kept or dropped lower index first.
    """

    temperature: Array | None = None
    top_k: Array | None = None
    top_p: Array | None = None
    min_p: Array | None = None


def sampler(
    temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> Sampler:
    """A checked Sampler; temperature 0 is greedy, and then no filter may be given."""
    greedy = not isinstance(temperature, bool) and temperature == 0
    if not greedy:
        arguments.number("temperature", temperature, LEAST, 1 / LEAST, "; 0 is greedy")
    if top_k is not None:
        arguments.integer("top_k", top_k)
    if top_p is not None:
        arguments.number("top_p", top_p, LEAST, 1)
    if min_p is not None:
        arguments.number("min_p", min_p, 0, 1)
    if greedy:
        if (top_k, top_p, min_p) != (None, None, None):
            raise KvjaxError("top_k, top_p and min_p need temperature > 0; temperature 0 is greedy")
        return Sampler()

    def array(x, dtype):
        return None if x is None else jnp.asarray(x, dtype)

    return Sampler(
        jnp.float32(temperature), array(top_k, jnp.int32), array(top_p, jnp.float32), array(min_p, jnp.float32)
    )


def sample(s: Sampler, logits: Array, key: Array) -> Array:
    """logits f32[B V] -> tokens i32[B]; a row's token depends only on its own logits and its own key [B]."""
    if s.temperature is None:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(key, filtered(s, logits / s.temperature)).astype(jnp.int32)


def filtered(s: Sampler, logits: Array) -> Array:
    """logits f32[B V], after the temperature, with the tokens that the filters drop at NEG."""
    if (s.top_k, s.top_p, s.min_p) == (None, None, None):
        return logits
    order = jnp.argsort(-logits, axis=-1, stable=True)
    x = jnp.take_along_axis(logits, order, -1)  # likeliest first
    keep = jnp.ones(x.shape, bool)
    if s.top_k is not None:
        keep &= (jnp.arange(x.shape[-1]) < s.top_k)[None]
    if s.top_p is not None:
        p = jax.nn.softmax(jnp.where(keep, x, NEG), -1)
        keep &= jnp.cumsum(p, -1) - p < s.top_p  # the mass before this token has not reached p yet
    if s.min_p is not None:
        keep &= x >= x[:, :1] + jnp.log(s.min_p)
    keep = jnp.put_along_axis(jnp.zeros_like(keep), order, keep, -1, inplace=False)
    return jnp.where(keep, logits, NEG)


def row_keys(key: Array, batch: int, first: Array | int = 0) -> Array:
    """One key per row, numbered from `first` on, so that a row draws the same tokens alone and in company."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, first + jnp.arange(batch))
