"""Double Sparsity: a few channels of each key say which tokens count, and only these are read in all channels."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.calibration.table_file import TableFile
from kvjax.cache.codecs.base import Codec, Plain
from kvjax.cache.codecs.per_token import PerTokenCodec
from kvjax.cache.codecs.quantizers import MinMax
from kvjax.cache.eviction.channel_order import Channels
from kvjax.cache.eviction.decode_policy import check_minimum, require_observation
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerSpec
from kvjax.cache.readers.retrieval import Index, Retrieve
from kvjax.core.attention import scores
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import over_heads
from kvjax.core.types import Array, KVBlock, pytree
from kvjax.errors import KvjaxError
from kvjax.methods.registry import register_method


@pytree
class Labels:
    """What tokens are found by: r channels of their keys."""

    channels: Array  # i32[B K r], which ones
    k: Any  # [B K S r], stored by the index's codec


@dataclasses.dataclass(frozen=True)
class LabelChannels(Index):
    """Single tokens, by 1 / factor of the channels of their keys (Yang et al. 2024, arXiv 2408.07092, section 3).

    Those channels of a key/value head count in which |q k| is largest in the mean over the prompt's tokens that are
    held, each with its own query, and over query heads. bits: of a label, each token's scaled by itself; 16: as it is.
    """

    factor: int
    bits: int = 16

    size: ClassVar[int] = 1
    num_queries: ClassVar[int | None] = None

    def __post_init__(self):
        check_minimum("Double Sparsity", factor=(self.factor, 1))
        if self.bits != 16:
            MinMax(self.bits)  # knows which bits there are

    @property
    def codec(self) -> Codec:
        """How labels are held."""
        return Plain() if self.bits == 16 else PerTokenCodec(MinMax(self.bits))

    def fit(self, block: KVBlock, observation: Observation | None) -> Labels:
        products = _products(block, require_observation(observation, "Double Sparsity", "all queries"))
        return self.labels(lax.top_k(products, self._count(block))[1], block)

    def in_order(self, order: Array, block: KVBlock) -> Labels:
        """Labels of the first channels of an order i32[K H] that is the same for all rows."""
        first = order[None, :, : self._count(block)]
        return self.labels(jnp.broadcast_to(first, (block.k.shape[0], *first.shape[1:])), block)

    def _count(self, block: KVBlock) -> int:
        """Channels of a label."""
        size = block.k.shape[3]
        count = size // self.factor
        if size % self.factor or (self.bits < 16 and count * self.bits % 32):
            raise KvjaxError(
                f"factor={self.factor} of Double Sparsity leaves {size} / {self.factor} channels, which must be a "
                f"whole number and in {self.bits} bits fill 32-bit words; use another factor, or bits=16"
            )
        return count

    def rebuild(self, reader_state: Labels, block: KVBlock) -> Labels:
        return self.labels(reader_state.channels, block)

    def labels(self, channels: Array, block: KVBlock) -> Labels:
        """The labels of a block in channels i32[B K r]."""
        return Labels(channels, self.codec.encode(_take(block.k, channels), block.pos))

    def append(self, reader_state: Labels, new: KVBlock, at: Array) -> Labels:
        if not new.pos.shape[2]:
            return reader_state
        return dataclasses.replace(
            reader_state, k=self.codec.append(reader_state.k, _take(new.k, reader_state.channels), at)
        )

    def load(self, reader_state: Labels) -> Labels:
        return dataclasses.replace(reader_state, k=self.codec.decode(reader_state.k))

    def score(self, summary: Labels, q: Array) -> Array:
        return scores(jnp.take_along_axis(q, summary.channels[:, :, None, None], 4), summary.k)


@dataclasses.dataclass(frozen=True)
class Calibrated(Retrieve):
    """Labels in the channels of a table, which were found on other texts."""

    table: TableFile | None = None

    num_queries: ClassVar[int | None] = 0

    def init_state(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Labels:
        assert self.table is not None and isinstance(self.index, LabelChannels)
        order = self.table.layer_arrays(spec, order=(spec.num_kv_heads, spec.head_dim))["order"]
        return self.index.in_order(
            over_heads.local_part(jnp.asarray(order), block.k.shape[1]), jax.tree.map(lax.stop_gradient, block)
        )


def _take(k: Array, channels: Array) -> Array:
    """Some channels i32[B K r] of keys [B K S H]."""
    return jnp.take_along_axis(k, channels[:, :, None], 3)


def _products(block: KVBlock, observation: Observation) -> Array:
    """f32[B K H]: the sum of |q k| over the tokens of a block, and the mean over query heads."""
    B, K, S, _ = block.k.shape
    at = jnp.broadcast_to(jnp.maximum(block.pos, 0), (B, K, S))  # a query lies at its position
    q = jnp.take_along_axis(observation.q, at[:, :, None, :, None], 3).astype(jnp.float32)
    product = jnp.abs(q * block.k.astype(jnp.float32)[:, :, None])
    return jnp.where((block.pos >= 0)[:, :, None, :, None], product, 0.0).sum(3).mean(2)


@register_method(example="double_sparsity:heavy=256,factor=4,device_layers=1", family="sparse reading")
def double_sparsity(
    heavy: int = 256, factor: int = 8, bits: int = 16, device_layers: int = 2, table: str = ""
) -> Method:
    """Reads only the tokens whose keys match the query best in a few channels; no token is lost.

    Attention in the prompt is exact.

    Formula:
      score_s = sum over channels c of q_c k_sc, c the H / factor channels of the largest mean of |q_c k_c|

    Differs:
      Channels are selected for each key/value head, and without a table from the prompt's own queries and keys, where
      the authors calibrate those of each query head on 256 texts; a query's own token is always read.

    Args:
      heavy: tokens that a query head reads, its own included (the authors: 256).
      factor: one in this many channels belongs to a token's label (the authors: 8).
      bits: bits of a label's numbers, with a scale per token; 16 stores them as they are (the authors: 4 or 16).
      device_layers: first layers that are read in full (the authors: 2).
      table: the file of `kvjax calibrate channels`, or "shipped", with the channels of the labels; without one each
        prompt selects its own.

    Reference:
      Double Sparsity, Yang et al. 2024, arXiv 2408.07092, section 3
    """
    check_minimum("Double Sparsity", heavy=(heavy, 2))
    labels = LabelChannels(factor, bits)
    read = Calibrated(labels, heavy - 1, table=Channels.table_file(table)) if table else Retrieve(labels, heavy - 1)
    return Method(read=read, device_layers=device_layers)
