"""ThinK against its oracle, and the properties of keys with few channels.

ThinK in NumPy, float64, from its paper (arXiv 2407.21018, section 3) and authors' code: one head of one sequence.
"""

from __future__ import annotations

from math import floor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.codecs.plain import Host
from kvjax.core import attention, memory
from kvjax.core.attention_mass import Observation
from kvjax.core.types import KVBlock
from kvjax.errors import KvjaxError
from kvjax.methods.think import ChannelPruner, OlderTokens
from kvjax.testing import dense_attention
from tests.contract import layer


def oracle_select_channels(q: np.ndarray, k: np.ndarray, fraction: float, num_queries: int) -> list[int]:
    """Selects the key channels that stay, ascending, by q [G n H] and k [S H] of a prompt; ties go to the lower."""
    scores = np.square(q[:, -num_queries:]).mean((0, 1)) * np.square(k).mean(0)
    order = sorted(range(len(scores)), key=lambda c: (-scores[c], c))
    return sorted(order[: len(scores) - floor(fraction * len(scores) + 1e-9)])


def reconstruct(k: np.ndarray, num_pruned: int, channels: list[int]) -> np.ndarray:
    """The stored keys [n H] when the first `num_pruned` have only these channels."""
    out = k.astype(float).copy()
    dropped = [c for c in range(k.shape[1]) if c not in set(channels)]
    out[:num_pruned, dropped] = 0.0
    return out


def oracle_channels(batch: layer.SequenceBatch, b: int, h: int, queries: int = 4) -> list[int]:
    """The channels that the oracle keeps of a head."""
    n = int(batch.lengths[b])
    q, k = np.asarray(batch.q[b, h, :, :n], np.float64), np.asarray(batch.k[b, h, :n], np.float64)
    return oracle_select_channels(q, k, 0.4, queries)


def test_it_is_its_oracle_where_padding_holds_infinity():
    batch, noisy = layer.random_batch(), layer.random_batch(padding=np.inf)
    bound = layer.bind("think:recent=3,queries=4")
    out = layer.decode("think:recent=3,queries=4", batch, state=layer.prefill(bound, noisy, padding=np.inf))
    for b, n in enumerate(map(int, layer.LENGTHS)):
        for h in range(layer.K):
            channels = oracle_channels(batch, b, h)
            for t in range(layer.STEPS):
                k, v = (np.asarray(x[b, h, : n + t + 1], np.float64) for x in (batch.k, batch.v))
                keys, q = (
                    reconstruct(k, max(n - 3, 0), channels),
                    np.asarray(batch.q[b, h, :, n + t : n + t + 1]),
                )
                expected = dense_attention(q, keys[None], v[None], np.array([n + t]))[:, 0]
                np.testing.assert_allclose(out[b, h, :, t], expected, atol=1e-5)


def select_channels(q, k, **parameters) -> list[int]:
    """The channels that the pruner keeps of a head with queries q [n H] and keys k [n H]."""
    q, k = (jnp.asarray(x, jnp.float32)[None, None] for x in (q, k))
    pos = jnp.arange(q.shape[2], dtype=jnp.int32)[None]
    run = jax.jit(ChannelPruner(**parameters).fit_prompt)
    return np.asarray(run(k, pos[:, None], Observation(q[:, :, None], pos)))[0, 0, 0].tolist()


def test_by_hand_a_channel_goes_although_its_queries_are_larger():
    """Mean squares 4 and 1 of queries, 1 and 9 of keys: 4 against 9."""
    assert select_channels([[2, 1], [-2, 1]], [[1, 3], [1, -3]], share=0.5) == [1]
    assert select_channels([[0, 9], [2, 0], [-2, 1]], [[1, 1], [1, 1], [1, 1]], share=0.5, num_queries=2) == [0]
    assert select_channels([[0, 0]], [[0, 0]], share=0.5) == [0]


def random_prompt(S: int = 6, H: int = 10, dtype=jnp.float32) -> tuple[jax.Array, jax.Array, Observation]:
    """Prompts of six and of two tokens: keys padded with infinity, positions, and queries."""
    rng = np.random.default_rng(0)
    pos = np.where(np.arange(S)[None] < np.array([[S], [2]]), np.arange(S)[None], -1)
    x = np.where(pos[:, None, :, None] < 0, np.inf, rng.normal(size=(2, 2, S, H)))
    q = jnp.asarray(rng.normal(size=(2, 2, 3, S, H)), dtype)
    pos = jnp.asarray(pos, jnp.int32)
    return jnp.asarray(x, dtype), pos[:, None], Observation(q, pos)


@pytest.mark.parametrize("codec", [ChannelPruner(0.4), Host(ChannelPruner(0.4))])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_channels_that_stay_are_bit_equal_and_a_query_reads_no_others(codec, dtype):
    x, pos, observation = random_prompt(dtype=dtype)

    @jax.jit
    def run(x, pos, observation, at, idx):
        stored = codec.encode(x, pos, observation)
        restored, loaded, q = codec.decode(stored), memory.load(stored), observation.q[:, :, :, :1]
        decoded = codec.append(stored, x[:, :, :1], at)
        scores = codec.scores(q, loaded), attention.scores(q, restored)
        return stored, restored, scores, codec.gather(decoded, idx), codec.decode(decoded)

    at, idx = jnp.asarray([[5], [2]], jnp.int32), jnp.asarray([[[0, 1, 5], [1, 1, 2]]] * 2, jnp.int32)
    stored, restored, scores, gathered, decoded = run(x, pos, observation, at, idx)
    is_kept = np.zeros((2, 2, 1, 10), bool)
    np.put_along_axis(is_kept, np.asarray(stored.channels), True, 3)
    assert memory.unpack(stored.kept).shape == (2, 2, 6, 6) and restored.dtype == dtype and is_kept.sum() == 4 * 6
    expected_keys = np.where(np.asarray(pos)[..., None] >= 0, np.asarray(x, np.float32), 0)
    np.testing.assert_array_equal(np.asarray(restored, np.float32), np.where(is_kept, expected_keys, 0))
    np.testing.assert_allclose(*scores, atol=1e-5 if dtype == jnp.float32 else 0.1)
    np.testing.assert_array_equal(gathered, jnp.take_along_axis(decoded, idx[..., None], 2))
    np.testing.assert_array_equal(decoded[1, :, 2], restored[1, :, 0])


def test_over_a_selection_older_tokens_are_those_that_it_leaves():
    """Four of the six tokens that stay in each head lose channels, which are chosen by all six."""
    batch, text = layer.random_batch(), "snapkv:budget=6,window=2,kernel=3"
    state, single = (layer.prefill(layer.bind(t), batch) for t in (f"{text} + think:recent=2,queries=4", text))
    pos = np.asarray(single.pos[0, :, :6])
    np.testing.assert_array_equal(np.asarray(state.side_store.pos[0])[:, :4], pos[:, :4])
    np.testing.assert_array_equal(np.asarray(state.pos[0])[:, :2], pos[:, 4:])
    for h in range(layer.K):
        q, k = np.asarray(batch.q[0, h, :, :9], np.float64), np.asarray(batch.k[0, h], np.float64)[pos[h]]
        assert state.side_store.k.channels[0, h, 0].tolist() == oracle_select_channels(q, k, 0.4, 4)


def test_what_has_no_meaning_is_refused():
    x, pos, _ = random_prompt()
    with pytest.raises(KvjaxError, match="has seen none"):
        ChannelPruner().encode(x, pos, None)
    with pytest.raises(KvjaxError, match="observe 32 of them"):
        OlderTokens(ChannelPruner()).encode_low_tier(KVBlock(x, x, pos), KVBlock(x, x, pos), None)
