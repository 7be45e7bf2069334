"""The gated delta rule (Yang et al., 2024, arXiv 2412.06464), a recurrence in place of attention, and its convolution.

Each value head has a state S [H Hv], which maps keys to values. A token with key k, value v, decay a and write strength
b replaces what the state holds at its key, and a query reads the state (equation 10 there, with S transposed):

    S <- a S + k (b (v - k' a S))'        o = q' S

Keys and queries have unit length. The G value heads of a key head share its keys and queries.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Float, Float32, Int32

from kvjax.core.matmul import map_matrices
from kvjax.core.types import Array
from kvjax.utils.parameter_types import Size, check_fields

CHUNK_TOKENS = 64
"""Tokens that pass the rule at once, as in the authors' kernels: longer chunks do more work for each token."""
NORM_EPS = 1e-6
"""Added to the squared length of keys and queries before they are divided by it (the authors' `l2norm`)."""


@dataclasses.dataclass(frozen=True)
class GatedDelta:
    """A gated delta rule in place of attention (Gated DeltaNet, arXiv 2412.06464; Qwen3-Next, Qwen3.5).

    Such a layer has no keys and values but a state of constant size. Of its `kvjax.models.kinds.AttentionKind`, `heads`
    are those of values, `kv_heads` those of keys and queries, and both widths have their meaning; all other fields are
    the defaults.

    Attributes:
      kernel_tokens: W, tokens that the convolution of each channel reads, the new one among them.
    """

    kernel_tokens: Size = 4

    __post_init__ = check_fields


class RecurrentInputs(NamedTuple):
    """What a layer with a recurrence makes of the tokens of a pass, in place of queries, keys and values."""

    mixed: Float[Array, "B K T C"]  # queries, keys and the values of G heads, one after the other, not yet convolved
    log_decay: Float32[Array, "B K G T"]
    write_strength: Float32[Array, "B K G T"]
    kernel: Float[Array, "1 K C W"]  # of the convolution, oldest token first


def convolve(
    x: Float[Array, "B K T C"], before: Float[Array, "B K W1 C"], kernel: Float[Array, "1 K C W"]
) -> Float32[Array, "B K T C"]:
    """Convolves each channel over a token and the W - 1 tokens before it, and applies SiLU.

    Args:
      x: tokens.
      before: the W - 1 tokens before the first one.
      kernel: one for each channel.
    """
    T = x.shape[2]
    padded, kernel = jnp.concatenate([before, x], 2).astype(jnp.float32), kernel.astype(jnp.float32)
    return jax.nn.silu(sum(padded[:, :, w : w + T] * kernel[:, :, None, :, w] for w in range(kernel.shape[3])))


def last_inputs(
    x: Float[Array, "B K T C"], before: Float[Array, "B K W1 C"], count: Int32[Array, " B"]
) -> Float[Array, "B K W1 C"]:
    """Returns the W - 1 tokens that end with token count - 1 of x, which may begin among those before x."""
    index = count[:, None] + jnp.arange(before.shape[2], dtype=jnp.int32)[None]
    return jnp.take_along_axis(jnp.concatenate([before, x], 2), index[:, None, :, None], 2)


def apply_gated_delta_rule(
    q: Float32[Array, "B K T H"],
    k: Float32[Array, "B K T H"],
    v: Float32[Array, "B K G T Hv"],
    log_decay: Float32[Array, "B K G T"],
    write_strength: Float32[Array, "B K G T"],
    state: Float32[Array, "B K G H Hv"],
) -> tuple[Float32[Array, "B K G T Hv"], Float32[Array, "B K G H Hv"]]:
    """Runs tokens through the rule, `CHUNK_TOKENS` at a time; a decode step is a chunk of one token.

    A token with log_decay 0 and write_strength 0, as callers give padding, leaves the state as it is.

    Args:
      q: queries, of any length; the rule takes them at length H ** -0.5.
      k: keys, of any length; the rule takes them at length 1.
      v: values.
      log_decay: logarithm of a, at most 0.
      write_strength: b, from 0 to 1.
      state: S before the first token.

    Returns:
      What each query reads of the state after its own token, and the state after the last token.
    """
    T, H = q.shape[2:]
    C = min(CHUNK_TOKENS, T)
    q, k = _normalize(q) * H**-0.5, _normalize(k)
    num_chunks = -(-T // C)

    def split(x: Array, axis: int) -> Array:
        """Cuts the tokens into chunks, a new first axis."""
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, num_chunks * C - T)
        shape = (*x.shape[:axis], num_chunks, C, *x.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(x, padding).reshape(shape), axis, 0)

    chunks = split(q, 2), split(k, 2), split(v, 3), split(log_decay, 3), split(write_strength, 3)
    if num_chunks == 1:  # a decode step needs no loop
        state, out = _run_chunk(state, tuple(x[0] for x in chunks))
        return out, state
    state, out = lax.scan(_run_chunk, state, chunks)
    out = jnp.moveaxis(out, 0, 3)
    return out.reshape(*out.shape[:3], num_chunks * C, -1)[:, :, :, :T], state


def _run_chunk(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
    """Runs C tokens at once, by the WY representation of their products of updates (section 3.3 of the paper).

    Token i writes k_i w_i'. By the recurrence w_i = b_i (v_i - A_i k_i' S - sum over j < i of (A_i / A_j) (k_i' k_j)
    w_j), where A_i is the product of the decays up to i: a triangular system for all w of the chunk.
    """
    q, k, v, log_decay, write_strength = chunk
    C = k.shape[2]
    decay = jnp.exp(jnp.cumsum(log_decay, 3))[..., None]  # A_i [B K G C 1]
    is_past = jnp.tril(jnp.ones((C, C), bool))
    # Sums from j + 1 to i, each by itself: where a token forgets much, differences of sums from the first token on
    # would lose the small decays behind it to rounding.
    sums = jnp.cumsum(jnp.where(jnp.tril(is_past, -1), log_decay[..., :, None], 0), -2)
    ratio = jnp.where(is_past, jnp.exp(sums), 0)  # A_i / A_j for j <= i [B K G C C]
    wanted = write_strength[..., None] * (v - decay * jnp.einsum("bkch,bkghv->bkgcv", k, state))
    overlap = jnp.einsum("bkch,bkdh->bkcd", k, k)[:, :, None] * ratio * write_strength[..., None]
    written = wanted
    if C > 1:
        # It reads below the diagonal alone.
        solve = functools.partial(solve_triangular, lower=True, unit_diagonal=True)
        written = map_matrices(solve, overlap, wanted)
    read = jnp.einsum("bkch,bkdh->bkcd", q, k)[:, :, None] * ratio
    out = decay * jnp.einsum("bkch,bkghv->bkgcv", q, state) + jnp.einsum("bkgcd,bkgdv->bkgcv", read, written)
    left = ratio[..., -1, :, None]  # what is left of each write at the end of the chunk
    state = decay[..., -1:, :] * state + jnp.einsum("bkch,bkgcv->bkghv", k, left * written)
    return state, out


def _normalize(x: Array) -> Array:
    return x * lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + NORM_EPS)
