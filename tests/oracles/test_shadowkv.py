"""ShadowKV against its oracle: exact tokens, fetched chunks, and keys reconstructed from few numbers.

ShadowKV in NumPy, float64, from its paper (arXiv 2410.21465, section 4) and the authors' constants: one sequence.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.cache.codecs.low_rank import PromptLowRank
from kvjax.core import memory
from kvjax.methods.shadowkv import ShadowStore
from kvjax.testing import dense_attention
from tests.contract import layer
from tests.oracles.lowrank import concat_heads, rotate, split_heads


def reconstruct_keys(k: np.ndarray, rank: int) -> np.ndarray:
    """Reconstructs a prompt's keys after RoPE [K n H] from the truncated SVD of all heads' keys before RoPE."""
    pos = np.arange(k.shape[1])
    u, s, vh = np.linalg.svd(concat_heads(rotate(k, pos, -1)), full_matrices=False)
    return rotate(split_heads(u[:, :rank] * s[:rank] @ vh[:rank], len(k)), pos)


def split_prompt(k: np.ndarray, chunk: int, outliers: int, local: int) -> tuple[list[int], list[int]]:
    """Splits one head's prompt [n H] -> (chunks in low rank, positions of the tokens that stay exact)."""
    num_chunks = max(len(k) // chunk - local, 0)
    similarities = []
    for c in range(num_chunks):
        tokens = k[c * chunk : (c + 1) * chunk]
        mean = tokens.mean(0)
        similarities.append(min(mean @ x / np.linalg.norm(mean) / np.linalg.norm(x) for x in tokens))
    exact = sorted(range(num_chunks), key=lambda c: similarities[c])[:outliers]
    low_rank = [c for c in range(num_chunks) if c not in exact]
    return low_rank, [t for t in range(len(k)) if t // chunk not in low_rank]


def best_landmarks(q: np.ndarray, landmarks: np.ndarray, num_best: int) -> list[int]:
    """The landmarks [C H] with the highest softmax weight of any of one head's queries [G H]."""
    logits = q @ landmarks.T / np.sqrt(q.shape[1])
    weights = np.exp(logits - logits.max(1, keepdims=True))
    weight = (weights / weights.sum(1, keepdims=True)).max(0)
    return np.argsort(-weight, kind="stable")[:num_best].tolist()


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, n: int, budget: int, chunk: int, rank: int, outliers: int, local: int
) -> np.ndarray:
    """Runs the step of the last token: q [K G H], k and v [K S H], a prompt of n tokens -> [K G H]."""
    low_rank_keys, out = reconstruct_keys(k[:, :n], rank), np.zeros(q.shape)
    for h in range(len(q)):
        low_rank, exact = split_prompt(k[h, :n], chunk, outliers, local)
        keys, values = [k[h, exact], k[h, n:]], [v[h, exact], v[h, n:]]
        if low_rank:
            landmarks = np.stack([k[h, c * chunk : (c + 1) * chunk].mean(0) for c in low_rank])
            for i in best_landmarks(q[h], landmarks, budget // chunk):
                tokens = slice(low_rank[i] * chunk, (low_rank[i] + 1) * chunk)
                keys, values = [*keys, low_rank_keys[h, tokens]], [*values, v[h, tokens]]
        keys, values = np.concatenate(keys), np.concatenate(values)
        out[h] = dense_attention(q[h][:, None], keys[None], values[None], np.array([len(keys) - 1]))[:, 0]
    return out


SIZES = {"budget": 2, "chunk": 2, "rank": 8, "outliers": 1, "local": 1}
METHOD = "shadowkv:" + ",".join(f"{name}={n}" for name, n in SIZES.items())


def test_by_hand():
    """(1, 2), (2, 4) and (0, 0) are of rank 1, with the singular value 5: one number a token rebuilds them."""
    spec = layer.LayerSpec(0, 1, 1, 1, 2, layer.Rope(2))
    codec, x = PromptLowRank(0, rank=1).at(spec), jnp.array([[1.0, 2.0], [2.0, 4.0], [0.0, 0.0]])[None, None]
    stored = codec.encode(x, jnp.arange(3, dtype=jnp.int32)[None, None])
    assert stored.coordinates.data.shape == (1, 1, 3, 1)
    np.testing.assert_allclose(jnp.linalg.norm(stored.coordinates.data), 5, rtol=1e-6)
    np.testing.assert_allclose(codec.decode(stored), x, atol=1e-6)


def test_it_is_the_oracle_on_ragged_rows():
    """The prompts are padded with infinity; one of them has no chunk at all."""
    batch = layer.random_batch()
    actual = layer.decode(METHOD, batch, state=layer.prefill(layer.bind(METHOD), batch, padding=np.inf))
    for b, n in enumerate(map(int, batch.lengths)):
        for t in range(layer.STEPS):
            q = np.asarray(batch.q[b, :, :, n + t], np.float64)
            k, v = (np.asarray(x[b, :, : n + t + 1], np.float64) for x in (batch.k, batch.v))
            np.testing.assert_allclose(actual[b, :, :, t], attend(q, k, v, n, **SIZES), atol=1e-5)


def test_every_token_is_in_the_slots_or_in_a_chunk_and_values_of_chunks_are_on_the_host():
    bound, batch = layer.bind(METHOD), layer.random_batch()
    state = layer.prefill(bound, batch)
    store = state.side_store.tokens
    assert (
        memory.memory_kind(store.v.data) == "pinned_host" and memory.memory_kind(store.k.coordinates.data) == "device"
    )
    for b, n in enumerate(map(int, batch.lengths)):
        for h in range(layer.K):
            low_rank, exact = split_prompt(np.asarray(batch.k[b, h, :n], np.float64), 2, 1, 1)
            here, positions = (np.asarray(x.pos)[b, h] for x in (state, store))
            assert here[here >= 0].tolist() == exact
            assert positions[positions >= 0].tolist() == [t for c in low_rank for t in (2 * c, 2 * c + 1)]
    assert np.asarray(state.n).tolist() == [5, 1, 4]


def test_a_chunk_with_a_token_unlike_its_mean_stays_exact():
    keys = jnp.array([[1.0, 0.0], [1.0, 0.1], [1.0, 0.0], [-0.5, 1.0], [0.0, 0.0], [0.0, 0.0]])[None, None]
    landmarks, likeness = ShadowStore(chunk=2)._landmarks(keys)
    np.testing.assert_allclose(landmarks[0, 0], [[1, 0.05], [0.25, 0.5], [0, 0]], rtol=1e-6)
    assert likeness[0, 0, 1] < likeness[0, 0, 0] and likeness[0, 0, 2] == 0


def test_it_divides_what_a_selection_leaves():
    """The state holds each token that the selection keeps, and no other."""
    selection, batch = "snapkv:budget=6,window=2,kernel=3", layer.random_batch()

    def kept_positions(method: str) -> list[list[int]]:
        bound = layer.bind(method)
        positions = np.asarray(bound.positions(layer.prefill(bound, batch)))
        return [sorted(row[row >= 0].tolist()) for row in positions.reshape(-1, positions.shape[2])]

    assert kept_positions(f"{selection} + {METHOD}") == kept_positions(selection)


def test_it_says_that_it_needs_host_memory():
    assert kvjax.parse("shadowkv").traits.host
