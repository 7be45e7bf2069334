"""Double Sparsity: a few channels of each key tell which tokens count, and only these are read in all channels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import method_api as kv


@kv.register_table_kind("channels")
class ChannelOrder(kv.TableKind):
    """The mean of |q_c k_c| by channel c of each layer and key/value head, each token's key with its own query.

    Arrays: `order` i32[K H], channels by falling mean, ties the lower first, and `means` f32[K H]. Queries and keys are
    after RoPE; all query heads of a key/value head count together (Double Sparsity, Yang et al. 2024, arXiv 2408.07092,
    section 3.1).
    """

    num_queries = None

    def count(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> dict[str, kv.Array]:
        assert observation is not None
        B, K, _, _ = block.k.shape
        real = (block.pos >= 0)[:, :, None, :, None]
        product = jnp.abs(observation.q.astype(jnp.float32) * block.k.astype(jnp.float32)[:, :, None])
        tokens = jnp.broadcast_to(real.sum((2, 3, 4), dtype=jnp.float32)[..., None], (B, K, 1))
        return {"products": jnp.where(real, product, 0.0).mean(2).sum(2), "tokens": tokens}

    def arrays(self, counted: dict[str, np.ndarray], spec: kv.LayerSpec) -> Mapping[str, np.ndarray]:
        means = counted["products"] / np.maximum(counted["tokens"], 1)
        order = np.argsort(-means, -1, kind="stable")
        return {"order": order.astype(np.int32), "means": means.astype(np.float32)}


@kv.pytree
class Labels:
    """The labels that tokens are found by: r channels of their keys."""

    channels: kv.Array  # i32[B K r], which ones
    k: Any  # [B K S r], stored by the index's codec


@dataclasses.dataclass(frozen=True)
class LabelChannels(kv.Index):
    """Scores single tokens by 1 / factor of the channels of their keys (Yang et al. 2024, arXiv 2408.07092, section 3).

    A key/value head takes the channels in which |q k| is largest in the mean over the prompt's tokens that are kept,
    each with its own query, and over query heads.

    Args:
      factor: channels of a head per channel of a label.
      bits: bits of a label's numbers, with a scale per token; 16 leaves them as they are.
    """

    factor: kv.PositiveInt
    bits: int = 16

    size: ClassVar[int] = 1
    num_queries: ClassVar[int | None] = None

    def __post_init__(self):
        kv.check_fields(self)
        if self.bits != 16:
            kv.MinMax(self.bits)  # which raises for bits that it does not know

    @property
    def codec(self) -> kv.Codec:
        """The codec of labels."""
        return kv.Plain() if self.bits == 16 else kv.PerTokenCodec(kv.MinMax(self.bits))

    def fit(self, block: kv.KVBlock, observation: kv.Observation | None) -> Labels:
        observation = kv.require_observation(observation, "Double Sparsity", "all queries")
        B, K, S, _ = block.k.shape
        at = jnp.broadcast_to(jnp.maximum(block.pos, 0), (B, K, S))  # the query at position i is the i-th
        q = jnp.take_along_axis(observation.q, at[:, :, None, :, None], 3).astype(jnp.float32)
        product = jnp.abs(q * block.k.astype(jnp.float32)[:, :, None])
        product = jnp.where((block.pos >= 0)[:, :, None, :, None], product, 0.0).sum(3).mean(2)
        return self.make_labels(kv.top_k(product, self.num_channels(block))[1], block)

    def num_channels(self, block: kv.KVBlock) -> int:
        """Channels of a label; raises KvjaxError where `factor` gives no number that can be stored."""
        size = block.k.shape[3]
        count = size // self.factor
        if size % self.factor or (self.bits < 16 and count * self.bits % 32):
            raise kv.KvjaxError(
                f"factor={self.factor} of Double Sparsity leaves {size} / {self.factor} channels, which must be a "
                f"whole number and in {self.bits} bits fill 32-bit words; use another factor, or bits=16"
            )
        return count

    def rebuild(self, reader_state: Labels, block: kv.KVBlock) -> Labels:
        return self.make_labels(reader_state.channels, block)

    def make_labels(self, channels: kv.Array, block: kv.KVBlock) -> Labels:
        """Makes the labels of a block in channels i32[B K r]."""
        return Labels(channels, self.codec.encode(jnp.take_along_axis(block.k, channels[:, :, None], 3), block.pos))

    def append(self, reader_state: Labels, new: kv.KVBlock, at: kv.Array) -> Labels:
        if not new.pos.shape[2]:
            return reader_state
        labels = jnp.take_along_axis(new.k, reader_state.channels[:, :, None], 3)
        return dataclasses.replace(reader_state, k=self.codec.append(reader_state.k, labels, at))

    def load(self, reader_state: Labels) -> Labels:
        return dataclasses.replace(reader_state, k=self.codec.decode(reader_state.k))

    def score(self, summary: Labels, q: kv.Array) -> kv.Array:
        return kv.attention.scores(jnp.take_along_axis(q, summary.channels[:, :, None, None], 4), summary.k)


@dataclasses.dataclass(frozen=True)
class CalibratedLabels(kv.Retrieve):
    """Retrieval by labels in the channels of a file of `ChannelOrder`, which were found on other texts."""

    table: kv.TableFile | None = None

    num_queries: ClassVar[int | None] = 0  # the table stands for the prompt's own queries

    def init_state(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> Labels:
        assert self.table is not None and isinstance(self.index, LabelChannels)
        order = self.table.layer_arrays(spec, order=(spec.num_kv_heads, spec.head_dim))["order"]
        own_order = kv.over_heads.local_part(jnp.asarray(order), block.k.shape[1])
        channels = own_order[None, :, : self.index.num_channels(block)]
        channels = jnp.broadcast_to(channels, (block.k.shape[0], *channels.shape[1:]))
        # Labels only choose which tokens are read, so no gradient passes through them.
        return self.index.make_labels(channels, jax.tree.map(lax.stop_gradient, block))


@kv.register_method(example="double_sparsity:heavy=256,factor=4,device_layers=1", family="sparse reading")
def double_sparsity(
    heavy: Annotated[int, kv.Within("[2, inf)")] = 256,
    factor: int = 8,
    bits: int = 16,
    device_layers: int = 2,
    table: str = "",
) -> kv.Method:
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
    labels = LabelChannels(factor, bits)
    read = (
        CalibratedLabels(labels, heavy - 1, table=ChannelOrder.table_file(table))
        if table
        else kv.Retrieve(labels, heavy - 1)
    )
    return kv.Method(read=read, device_layers=device_layers)
