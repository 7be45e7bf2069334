"""A2ATS: keys and values lie on the host, and a codebook of pre-RoPE keys tells which tokens to fetch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, ClassVar

import jax.numpy as jnp
from jax import lax

from kvjax import method_api as kv


@kv.pytree
class CodewordState:
    """The codeword of each token, and the codebook."""

    codes: Any  # a buffer of uint8 or uint16 [B K S 1]; loaded, the array
    words: kv.Array  # [B K C H], pre-RoPE keys
    moment: kv.Array  # f32[B K H H], the mean of q q^T over the prompt's queries


@dataclasses.dataclass(frozen=True)
class Codewords(kv.Index):
    """Scores single tokens by the nearest of `words` pre-RoPE keys (A2ATS, He et al. 2025, arXiv 2502.12665).

    The distance is the mean square error that a prompt's queries would see: query-aware vector quantization, the same
    as plain k-means of keys multiplied by the Cholesky factor of the queries' second moment. While there are no more
    tokens than codewords, each token is its own.

    Args:
      words: codewords of a key/value head.
      rounds: iterations of k-means.
    """

    words: Annotated[int, kv.Within("[1, 65536]")]
    rounds: kv.NonNegativeInt = 10

    size: ClassVar[int] = 1
    num_queries: ClassVar[int | None] = None

    __post_init__ = kv.check_fields

    def fit(self, block: kv.KVBlock, observation: kv.Observation | None) -> CodewordState:
        block, observation = block.clean(), kv.require_observation(observation, "A2ATS", "all queries")
        keys, count = block.k.astype(jnp.float32), min(self.words, block.pos.shape[2])
        is_query = (observation.pos >= 0)[:, None, None, :, None]
        q = jnp.where(is_query, observation.q.astype(jnp.float32), 0.0)
        num_queries = jnp.maximum(is_query.sum(3, dtype=jnp.int32) * q.shape[2], 1).astype(jnp.float32)
        moment = jnp.einsum("bkgth,bkgti->bkhi", q, q, precision=lax.Precision.HIGHEST) / num_queries
        real = jnp.broadcast_to(block.pos >= 0, keys.shape[:3])
        words = fit_codebook(keys, real, moment, count, self.rounds).astype(block.k.dtype)
        slot = jnp.arange(keys.shape[2], dtype=jnp.int32)[None, None]
        is_short = real.sum(2, keepdims=True) <= count
        nearest = nearest_codeword(keys, words.astype(jnp.float32), moment)
        codes = jnp.where(is_short, jnp.minimum(slot, count - 1), nearest)
        return CodewordState(kv.memory.pack(self._narrow(codes)), words, moment)

    def rebuild(self, reader_state: CodewordState, block: kv.KVBlock) -> CodewordState:
        return reader_state  # the tokens that are left keep their codewords

    def append(self, reader_state: CodewordState, new: kv.KVBlock, at: kv.Array) -> CodewordState:
        new, count = new.clean(), reader_state.words.shape[2]
        if not new.pos.shape[2]:
            return reader_state
        # While there are unused codewords, a new token becomes one; a write beyond the last one is dropped.
        words = kv.memory.put(reader_state.words, new.k.astype(reader_state.words.dtype), at)
        slot = at[:, :, None] + jnp.arange(new.pos.shape[2], dtype=jnp.int32)[None, None]
        nearest = nearest_codeword(new.k.astype(jnp.float32), words.astype(jnp.float32), reader_state.moment)
        codes = self._narrow(jnp.where(slot < count, slot, nearest))
        return CodewordState(kv.memory.append(reader_state.codes, codes, at), words, reader_state.moment)

    def load(self, reader_state: CodewordState) -> CodewordState:
        words = reader_state.words.astype(jnp.float32)
        return dataclasses.replace(reader_state, codes=kv.memory.unpack(reader_state.codes), words=words)

    def score(self, summary: CodewordState, q: kv.Array) -> kv.Array:
        # One product per codeword; a token's score is looked up in this table.
        table = kv.attention.scores(q, summary.words)
        codes = summary.codes[..., 0].astype(jnp.int32)[:, :, None, None]
        return jnp.take_along_axis(table, jnp.broadcast_to(codes, (*table.shape[:4], codes.shape[4])), 4)

    def _narrow(self, codes: kv.Array) -> kv.Array:
        return codes[..., None].astype(jnp.uint8 if self.words <= 2**8 else jnp.uint16)


def fit_codebook(x: kv.Array, real: kv.Array, moment: kv.Array, count: int, num_iterations: int) -> kv.Array:
    """Fits codewords to vectors by Lloyd's k-means, for the errors that queries would see.

    Codewords start at vectors with equally many between them; one that is nearest to no vector stays where it is. If
    there are no more vectors than codewords, each starts as one, in the order of the vectors.

    Args:
      x: vectors f32[B K S H].
      real: bool[B K S], the vectors that count; they stand at the front.
      moment: f32[B K H H], the mean of q q^T over queries, by which the distance of x and c is the mean of
        (q (x - c))^2.
      count: codewords of each head.
      num_iterations: iterations of k-means.

    Returns:
      f32[B K count H], zeros for codewords that are not needed.
    """
    n, word = real.sum(2, dtype=jnp.int32)[..., None], jnp.arange(count, dtype=jnp.int32)[None, None]
    spread = word * (n // count) + word * (n % count) // count  # floor(word n / count) without a large product
    first = jnp.where(n > count, spread, word)
    is_used = word < n
    start = jnp.take_along_axis(x, jnp.minimum(first, x.shape[2] - 1)[..., None], 2)
    start = jnp.where(is_used[..., None], start, 0.0)
    sequence, head = (jnp.arange(size, dtype=jnp.int32) for size in x.shape[:2])

    def run_round(_: int, words: kv.Array) -> kv.Array:
        nearest = jnp.where(real, nearest_codeword(x, words, moment, is_used), count)  # index `count` is dropped
        at = (sequence[:, None, None], head[None, :, None], nearest)
        sums = jnp.zeros_like(words).at[at].add(jnp.where(real[..., None], x, 0.0), mode="drop")
        members = jnp.zeros(words.shape[:3]).at[at].add(1.0, mode="drop")[..., None]
        return jnp.where(members > 0, sums / jnp.maximum(members, 1.0), words)

    return lax.fori_loop(0, num_iterations, run_round, start)


def nearest_codeword(
    x: kv.Array, words: kv.Array, moment: kv.Array, is_used: kv.Array | None = None, vectors_at_once: int = 1024
) -> kv.Array:
    """Finds the nearest codeword of each vector; ties go to the first.

    Args:
      x: vectors f32[B K n H].
      words: codewords f32[B K C H].
      moment: f32[B K H H], as in `fit_codebook`.
      is_used: bool[B K C], the codewords that count; None for all.
      vectors_at_once: bounds memory, which grows with this times C, never with n times C.

    Returns:
      i32[B K n], indices of codewords.
    """
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    weighted = product(words, moment)
    square = (weighted * words).sum(-1)
    square = square if is_used is None else jnp.where(is_used, square, jnp.inf)

    def find(vectors: kv.Array) -> kv.Array:
        # The distance without the square of the vector itself, which is the same for all codewords.
        distance = square[:, :, None] - 2 * product(vectors, weighted.swapaxes(2, 3))
        return jnp.argmin(distance, -1).astype(jnp.int32)

    if x.shape[2] <= vectors_at_once:
        return find(x)
    index = lax.map(find, kv.attention.split_blocks(x, 2, vectors_at_once))
    return jnp.moveaxis(index, 0, 2).reshape(*x.shape[:2], -1)[:, :, : x.shape[2]]


@dataclasses.dataclass(frozen=True)
class WindowedRopeRetrieval(kv.Retrieve):
    """Retrieval by pre-RoPE keys, and queries as if all tokens were `distance` before them: windowed RoPE."""

    distance: int = 2048

    def init_state(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> Any:
        observation = kv.require_observation(observation, "A2ATS", "all queries")
        q = self._move_queries(lax.stop_gradient(observation.q), observation.pos, spec)
        return self.index.fit(_pre_rope(block, spec), observation._replace(q=q, softmax_lse=None))

    def append(self, reader_state: Any, new: kv.KVBlock, at: kv.Array, spec: kv.LayerSpec) -> Any:
        return self.index.append(reader_state, _pre_rope(new, spec), at)

    def read(
        self,
        storage: kv.KVStorage,
        state: kv.LayerState,
        q: kv.Array,
        q_pos: kv.Array,
        other_partial: kv.Partial | None = None,
        cross_layer: Any = None,
    ) -> kv.ReadResult:
        search_q = self._move_queries(q, q_pos, storage.spec)
        out = self.attend_retrieved(storage, state, q, q_pos, search_q, state.reader_state)
        return kv.ReadResult(out, state.reader_state, cross_layer=cross_layer)

    def _move_queries(self, q: kv.Array, q_pos: kv.Array, spec: kv.LayerSpec) -> kv.Array:
        """Rotates queries at q_pos i32[B T] to the position `distance`: f32."""
        return spec.rope.rotate_queries(spec.rope.unrotate_queries(q, q_pos), jnp.full_like(q_pos, self.distance))


def _pre_rope(block: kv.KVBlock, spec: kv.LayerSpec) -> kv.KVBlock:
    """Unrotates the keys, without a gradient: codewords only choose which tokens are read."""
    return dataclasses.replace(block, k=lax.stop_gradient(spec.rope.unrotate(block.k, block.pos).astype(block.k.dtype)))


@kv.register_method(example="a2ats:words=128", family="host memory", sized_by="topk")
def a2ats(
    topk: kv.PositiveInt = 256,
    words: int = 1024,
    sinks: kv.NonNegativeInt = 4,
    recent: kv.NonNegativeInt = 64,
    distance: kv.NonNegativeInt = 2048,
    rounds: int = 10,
) -> kv.Method:
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
    read = WindowedRopeRetrieval(Codewords(words, rounds), topk, sinks, recent, distance=distance)
    return kv.Method(k=kv.Host(kv.Plain()), v=kv.Host(kv.Plain()), read=read)
