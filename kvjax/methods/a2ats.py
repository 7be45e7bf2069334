"""A2ATS: keys and values lie on the host, and a codebook of bare keys says by table look-up which tokens to fetch."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.codecs.base import Host, Plain
from kvjax.cache.eviction.decode_policy import check_minimum, require_observation
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerSpec, LayerState
from kvjax.cache.readers import codebook
from kvjax.cache.readers.base import ReadResult
from kvjax.cache.readers.retrieval import Index, Retrieve
from kvjax.core import memory
from kvjax.core.attention import scores
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock, Partial, pytree
from kvjax.errors import KvjaxError
from kvjax.methods.registry import register_method


@pytree
class Coded:
    """Each token by its codeword."""

    codes: Any  # a buffer of uint8 or uint16 [B K S 1]; as `score` takes it, the array
    words: Array  # [B K C H], bare keys
    moment: Array  # f32[B K H H], the mean of q q^T over the prompt's queries


@dataclasses.dataclass(frozen=True)
class Codewords(Index):
    """Single tokens, by the nearest of `words` bare keys (A2ATS, He et al. 2025, arXiv 2502.12665).

    Nearest by the square of the error that a prompt's queries would see: query-aware vector quantisation, the same as
    plain k-means of keys that were multiplied by Cholesky's factor of the queries' second moment. While there are fewer
    tokens than codewords, each is its own.
    """

    words: int
    rounds: int = 10

    size: ClassVar[int] = 1
    num_queries: ClassVar[int | None] = None

    def __post_init__(self):
        check_minimum("A2ATS", words=(self.words, 1), rounds=(self.rounds, 0))
        if self.words > 2**16:
            raise KvjaxError(f"a codeword's number has 16 bits, got words={self.words} of A2ATS; use 65536 or fewer")

    def fit(self, block: KVBlock, observation: Observation | None) -> Coded:
        block, observation = block.clean(), require_observation(observation, "A2ATS", "all queries")
        keys, count = block.k.astype(jnp.float32), min(self.words, block.pos.shape[2])
        moment = _moment(observation)
        real = jnp.broadcast_to(block.pos >= 0, keys.shape[:3])
        words = codebook.fitted(keys, real, moment, count, self.rounds).astype(block.k.dtype)
        slot = jnp.arange(keys.shape[2], dtype=jnp.int32)[None, None]
        few = real.sum(2, keepdims=True) <= count
        codes = jnp.where(few, jnp.minimum(slot, count - 1), codebook.nearest(keys, _f32(words), moment))
        return Coded(memory.pack(self._stored(codes)), words, moment)

    def rebuild(self, reader_state: Coded, block: KVBlock) -> Coded:
        return reader_state  # the tokens that are left keep their codewords

    def append(self, reader_state: Coded, new: KVBlock, at: Array) -> Coded:
        new, count = new.clean(), reader_state.words.shape[2]
        if not new.pos.shape[2]:
            return reader_state
        # what lies behind them is dropped
        words = memory.put(reader_state.words, new.k.astype(reader_state.words.dtype), at)
        slot = at[:, :, None] + jnp.arange(new.pos.shape[2], dtype=jnp.int32)[None, None]
        codes = jnp.where(slot < count, slot, codebook.nearest(_f32(new.k), _f32(words), reader_state.moment))
        return Coded(memory.append(reader_state.codes, self._stored(codes), at), words, reader_state.moment)

    def load(self, reader_state: Coded) -> Coded:
        return dataclasses.replace(
            reader_state, codes=memory.unpack(reader_state.codes), words=_f32(reader_state.words)
        )

    def score(self, summary: Coded, q: Array) -> Array:
        table = scores(q, summary.words)
        codes = summary.codes[..., 0].astype(jnp.int32)[:, :, None, None]
        return jnp.take_along_axis(table, jnp.broadcast_to(codes, (*table.shape[:4], codes.shape[4])), 4)

    def _stored(self, codes: Array) -> Array:
        return codes[..., None].astype(jnp.uint8 if self.words <= 2**8 else jnp.uint16)


@dataclasses.dataclass(frozen=True)
class WindowedRopeRetrieval(Retrieve):
    """Retrieval by bare keys and queries as if all tokens were `distance` before the query: windowed RoPE."""

    distance: int = 2048

    def init_state(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Any:
        observation = require_observation(observation, "A2ATS", "all queries")
        return self.index.fit(
            _bare(block, spec),
            observation._replace(
                q=self._far(lax.stop_gradient(observation.q), observation.pos, spec), softmax_lse=None
            ),
        )

    def append(self, reader_state: Any, new: KVBlock, at: Array, spec: LayerSpec) -> Any:
        return self.index.append(reader_state, _bare(new, spec), at)

    def read(
        self,
        layer: MethodLayer,
        state: LayerState,
        q: Array,
        q_pos: Array,
        other_partial: Partial | None = None,
        cross_layer: Any = None,
    ) -> ReadResult:
        asking = self._far(q, q_pos, layer.spec)
        return ReadResult(
            self.attend_retrieved(layer, state, q, q_pos, asking, state.reader_state),
            state.reader_state,
            cross_layer=cross_layer,
        )

    def _far(self, q: Array, q_pos: Array, spec: LayerSpec) -> Array:
        """Queries at q_pos i32[B T], turned to the position `distance`: f32."""
        return spec.rope.rotate_queries(spec.rope.unrotate_queries(q, q_pos), jnp.full_like(q_pos, self.distance))


def _moment(observation: Observation) -> Array:
    """f32[B K H H]: the mean of q q^T over all real queries of a key/value head."""
    real = (observation.pos >= 0)[:, None, None, :, None]
    q = jnp.where(real, observation.q.astype(jnp.float32), 0.0)
    number = jnp.maximum(real.sum(3, dtype=jnp.int32) * q.shape[2], 1).astype(jnp.float32)
    return jnp.einsum("bkgth,bkgti->bkhi", q, q, precision=lax.Precision.HIGHEST) / number


def _bare(block: KVBlock, spec: LayerSpec) -> KVBlock:
    """The block with keys without RoPE, in their dtype; constant, since codewords only say which tokens are read."""
    return dataclasses.replace(block, k=lax.stop_gradient(spec.rope.unrotate(block.k, block.pos).astype(block.k.dtype)))


def _f32(x: Array) -> Array:
    return x.astype(jnp.float32)


@register_method(example="a2ats:words=128", family="host memory", sized_by="topk")
def a2ats(
    topk: int = 256, words: int = 1024, sinks: int = 4, recent: int = 64, distance: int = 2048, rounds: int = 10
) -> Method:
    """Stores keys and values on the host; a query fetches the tokens whose codewords promise the largest logits.

    Attention in the prompt is exact. No default is from the paper; all are unverified.

    Formula:
      score_s = (R_b q) c(s), c(s) = the codeword c with the least E[(q (k_s - c))^2], keys and codewords before RoPE;
      read: sinks, the last `recent` tokens, and of the others the topk of the largest score

    Differs:
      The codebook is made from each prompt, where the authors calibrate it. Windowed RoPE only finds tokens; attention
      reads them at their true positions (unverified: the paper may read them at the fixed distance).

    Args:
      topk: tokens that a query head fetches.
      words: codewords of a key/value head, each a mean of keys. They lie on the device with the queries' second moment
        (H * H numbers) and a code of 1 byte per token, 2 bytes above 256 words.
      sinks: first tokens that are always read.
      recent: last tokens that are always read, the query's own included.
      distance: position offset at which windowed RoPE scores all but the last tokens.
      rounds: iterations of k-means over the prompt's keys.

    Reference:
      A2ATS, He et al. 2025, arXiv 2502.12665, by its abstract; there is no public code
    """
    check_minimum("A2ATS", topk=(topk, 1), sinks=(sinks, 0), recent=(recent, 0), distance=(distance, 0))
    read = WindowedRopeRetrieval(Codewords(words, rounds), topk, sinks, recent, distance=distance)
    return Method(k=Host(Plain()), v=Host(Plain()), read=read)
