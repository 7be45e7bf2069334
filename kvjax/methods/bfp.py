"""Accurate Block Quantization: keys and values in block floating point, the channels of keys sorted by their size."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.cache.codecs.quantizers import BlockFloat


@kv.pytree
class SortedState:
    """Token vectors with sorted channels, as the inner codec stores them."""

    inner: Any
    order: kv.Array  # i32[B K H], the channel at each place


@dataclasses.dataclass(frozen=True)
class SortedChannels(kv.CodecWrapper):
    """Sorts the channels of each head by size, largest first, before another codec stores them.

    The size is the root of the sum of squares over the tokens of a sequence's prompt; the order stays for decoded
    tokens. Ties go to the earlier channel, so that without a prompt nothing moves. Queries are sorted alike where they
    meet keys, and mixed values are sorted back: products are unchanged.
    """

    def encode(self, x: kv.Array, pos: kv.Array) -> SortedState:
        real = jnp.where((pos >= 0)[..., None], x, jnp.zeros((), x.dtype)).astype(jnp.float32)
        order = jnp.argsort(-jnp.square(real).sum(2), axis=-1, stable=True).astype(jnp.int32)
        return SortedState(self.inner.encode(_permute(x, order), pos), order)

    def append(self, stored: SortedState, x: kv.Array, at: kv.Array) -> SortedState:
        return SortedState(self.inner.append(stored.inner, _permute(x, stored.order), at), stored.order)

    def decode(self, stored: SortedState) -> kv.Array:
        return _permute_back(self.inner.decode(stored.inner), stored.order)

    def gather(self, stored: SortedState, idx: kv.Array) -> kv.Array:
        return _permute_back(self.inner.gather(stored.inner, idx), stored.order)

    def scores(self, q: kv.Array, stored: SortedState) -> kv.Array:
        return self.inner.scores(_permute(q, stored.order), stored.inner)

    def mix(self, p: kv.Array, stored: SortedState) -> kv.Array:
        return _permute_back(self.inner.mix(p, stored.inner), stored.order)


def _permute(x: kv.Array, order: kv.Array) -> kv.Array:
    """Puts the channels of x [B K ... H] in an order i32[B K H]."""
    B, K, H = order.shape
    return jnp.take_along_axis(x, order.reshape(B, K, *[1] * (x.ndim - 3), H), -1)


def _permute_back(x: kv.Array, order: kv.Array) -> kv.Array:
    return _permute(x, jnp.argsort(order, axis=-1).astype(jnp.int32))


@kv.register_method(example="bfp:block=8", family="quantization by token")
def bfp(bits: int = 4, block: int = 32, sort: bool = True) -> kv.Method:
    """Quantizes blocks of channels with a shared exponent; sorting the key channels puts outliers into common blocks.

    Attention in the prompt is exact. A token takes H bits / 8 + H / block bytes per head for a key and as many for a
    value, and the channel order 4 H bytes per head.

    Formula:
      channels of K in the order of |K_c| over the prompt; 2^e = the least power of two with max |x| <= (2^(bits - 1) -
      1) 2^e over a block, x' = round(x / 2^e) 2^e

    Differs:
      The order comes from the prompt's keys after RoPE, for each text and head; in the paper it comes once, from the
      norms of the rows of W_k. Unverified, as no public code is known: how the paper stores values (here in the same
      format, unsorted), and that mantissas round half to even.

    Args:
      bits: bits of each mantissa with its sign: 2, 3, 4 or 8 (the paper's BFP12: 4, with an exponent of 8).
      block: channels that share an exponent (in the paper 32 and 64 gain by sorting; 128, the whole head there, does
        not).
      sort: whether key channels are sorted.

    Reference:
      Accurate Block Quantization in LLMs with Outliers, Trukhanov & Soloveychik 2024, arXiv 2403.20137
    """
    codec = kv.PerTokenCodec(BlockFloat(bits, block))
    return kv.Method(k=SortedChannels(codec) if sort else codec, v=codec)
