"""ShadowKV: a prompt's keys in low rank and its values on the host, fetched by the landmarks of their chunks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.codecs.base import Host
from kvjax.cache.codecs.low_rank import PromptLowRank
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerState
from kvjax.cache.readers.base import map_query_blocks
from kvjax.cache.readers.retrieval import attend_slots
from kvjax.cache.side_store.base import SideStore
from kvjax.core import memory
from kvjax.core.attention import MASKED_LOGIT, scores, visible, weights
from kvjax.core.attention_mass import Observation
from kvjax.core.top_k import mask_to_slots, top_k_mask
from kvjax.core.types import Array, KVBlock, Partial, gather_tokens, pytree
from kvjax.errors import KvjaxError
from kvjax.methods.registry import register_method


@pytree
class Chunked:
    """The prompt's chunks, in slots of their own."""

    tokens: LayerState  # keys in low rank, values on the host; position -1 for what stays exact
    landmarks: memory.Buffer  # [B K C H], the mean key of each chunk


@dataclasses.dataclass(frozen=True)
class Shadow(SideStore):
    """A prompt in chunks of `chunk` tokens, but for its last `local` chunks and what is left over (Sun et al. 2024).

    Chunks whose tokens are least like their mean, `outliers` of each head, are exact too: these and the last tokens
    stay in the slots, with all that is decoded. Of the others a query reads those with the highest softmax weight of
    its key/value head's query heads, `budget` tokens together.
    """

    budget: int = 2048
    chunk: int = 8
    rank: int = 160
    outliers: int = 48
    local: int = 4

    uses_host_memory = True

    def __post_init__(self):
        if min(self.chunk, self.rank) < 1 or min(self.outliers, self.local) < 0 or self.budget < self.chunk:
            raise KvjaxError(
                "ShadowKV needs a chunk and a rank of at least 1, a budget of at least a chunk, and 0 or more outlier "
                f"and local chunks, got {self}; its authors use chunk=8, rank=160, budget=2048, outliers=48, local=4"
            )

    def num_main_slots(self, kept: int) -> int:
        """The outliers, the local chunks and what is left over."""
        return min(kept, (self.outliers + self.local + 1) * self.chunk - 1)

    def split(
        self, layer: MethodLayer, block: KVBlock, observation: Observation | None, slots: int
    ) -> tuple[KVBlock, Chunked]:
        width = block.pos.shape[2]
        most = width if self.num_main_slots(width) <= slots else slots
        if layer.method.select is not None:
            block = layer.selected(block, observation, most)
        block = block.clean()
        chunks = max(most // self.chunk - self.local, 1)
        slot = jnp.arange(chunks * self.chunk, dtype=jnp.int32)[None, None]
        front = gather_tokens(block, jnp.where(slot < block.pos.shape[2], slot, -1))
        landmarks, likeness = self._landmarks(front.k)
        away = self._away(block, likeness)
        here = self._here(block, away, min(self.num_main_slots(most), slots))
        return here, Chunked(self._store(layer, block, front, away), memory.pack(landmarks.astype(block.k.dtype)))

    def _away(self, block: KVBlock, likeness: Array) -> Array:
        """bool[B K C*chunk]: the tokens of the chunks that leave the slots; the least alike stay."""
        length = (block.pos[:, :1] >= 0).sum(-1, dtype=jnp.int32)
        chunk = jnp.arange(likeness.shape[2], dtype=jnp.int32)[None, None]
        whole = chunk < (length // self.chunk - self.local)[..., None]
        outliers = top_k_mask(-likeness, whole, jnp.full_like(length, self.outliers))
        return jnp.repeat(whole & ~outliers, self.chunk, -1)

    def _here(self, block: KVBlock, away: Array, slots: int) -> KVBlock:
        """What stays in the slots."""
        after = jnp.zeros((*away.shape[:2], block.pos.shape[2]), bool)
        away = jnp.concatenate([away, after], 2)[:, :, : block.pos.shape[2]]
        return gather_tokens(block, mask_to_slots((block.pos >= 0) & ~away, slots))

    def _store(self, layer: MethodLayer, block: KVBlock, front: KVBlock, away: Array) -> LayerState:
        """The chunks, with directions that are fitted to all tokens of the prompt."""
        inner, pos = self._inner(layer), jnp.where(away, front.pos, -1)
        k = inner.k.encode(inner.as_held(block), block.pos)
        k = dataclasses.replace(k, rows=jax.tree.map(lambda rows: rows[:, :, : pos.shape[2]], k.rows))
        return LayerState(k, inner.v.encode(front.v, pos), pos, bias=front.bias)

    def _landmarks(self, keys: Array) -> tuple[Array, Array]:
        """Keys [B K C*chunk H] -> (the mean of each chunk f32[B K C H], the least cosine to it f32[B K C])."""
        B, K, S, H = keys.shape
        keys = lax.stop_gradient(keys)  # landmarks, and likeness to them, only say what is read, and from where
        keys = keys.astype(jnp.float32).reshape(B, K, -1, self.chunk, H)
        mean = keys.mean(3, keepdims=True)
        lengths = jnp.sqrt(jnp.square(keys).sum(-1) * jnp.square(mean).sum(-1))
        cosine = (keys * mean).sum(-1) / jnp.maximum(lengths, 1e-8)
        return mean[:, :, :, 0], cosine.min(-1)

    def _inner(self, layer: MethodLayer) -> MethodLayer:
        """The layer as the chunks see it."""
        fitted = PromptLowRank(0, rank=self.rank, pre_rope=True).at(layer.spec)
        return dataclasses.replace(layer, method=Method(k=fitted, v=Host()))

    def read(self, layer: MethodLayer, state: LayerState, q: Array, q_pos: Array) -> Partial:
        store: Chunked = state.side_store
        landmarks, inner = memory.unpack(store.landmarks), self._inner(layer)
        newest = store.tokens.pos[:, :, self.chunk - 1 :: self.chunk]

        def attend(q: Array, q_pos: Array) -> Partial:
            seen = visible(newest, q_pos, layer.spec.window)
            p, _, l = weights(jnp.where(seen, scores(q, landmarks), MASKED_LOGIT))
            share = (p / jnp.maximum(l, 1e-30)[..., None]).max(2, keepdims=True)
            best, chunk = lax.top_k(jnp.where(seen, share, -1.0), min(self.budget // self.chunk, share.shape[4]))
            within = jnp.arange(self.chunk, dtype=jnp.int32).reshape(1, 1, 1, 1, 1, -1)
            slots = jnp.where(best[..., None] >= 0, chunk[..., None] * self.chunk + within, -1)
            return attend_slots(inner, store.tokens, q, q_pos, slots.reshape(*slots.shape[:4], -1))

        return map_query_blocks(attend, q, q_pos, 16)

    def positions(self, store: Chunked) -> Array:
        return store.tokens.pos

    def visible_block(self, layer: MethodLayer, store: Chunked) -> KVBlock:
        inner, held = self._inner(layer), store.tokens
        return KVBlock(inner.keys(held.k, held.pos), inner.v.decode(held.v), held.pos)


@register_method(example="shadowkv:budget=512,rank=16", family="host memory")
def shadowkv(budget: int = 2048, chunk: int = 8, rank: int = 160, outliers: int = 48, local: int = 4) -> Method:
    """Stores a prompt's keys in low rank and its values on the host, and reads the chunks that landmarks select.

    Decoded tokens and the prompt's own attention are exact. The defaults are the authors'.

    Formula:
      K = U_r S_r V_r^T of a prompt's keys before RoPE, all heads together; score(chunk) = max over a head's queries of
      softmax(q mean(chunk) / sqrt(d)); k' = RoPE((U_r S_r V_r^T)[chunk])

    Differs:
      The right singular vectors come from the keys' outer products, which gives the same factors; each query selects
      its chunks, where the code adds up those of one call; a prompt shorter than the budget is no error.

    Args:
      budget: tokens that a query reads in chunks.
      chunk: tokens of a chunk.
      rank: numbers stored per token for all heads together, at most all of their channels.
      outliers: chunks of each head that are exact because one of their tokens is unlike their mean.
      local: last chunks of the prompt that are exact.

    Reference:
      ShadowKV, Sun et al. 2024, arXiv 2410.21465, section 4; constants of its authors' code
    """
    return Method(side_store=Shadow(budget, chunk, rank, outliers, local))
