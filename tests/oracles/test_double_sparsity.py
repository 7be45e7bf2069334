"""Double Sparsity against its paper, its channels, and its labels in few bits.

Double Sparsity in NumPy, float64, from paper and public code (arXiv 2408.07092): one sequence, query by query.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from kvjax.cache.calibration import table_file
from kvjax.core import memory
from kvjax.core.attention_mass import Observation
from kvjax.core.types import KVBlock
from kvjax.methods.double_sparsity import LabelChannels
from tests.contract import layer
from tests.oracles.online import softmax


def label_channels(q: np.ndarray, k: np.ndarray, num_channels: int) -> np.ndarray:
    """The most important channels of a head by its prompt q [G n H], k [n H]: each query times its own token's key."""
    return np.argsort(-np.abs(q * k[None]).mean((0, 1)), kind="stable")[:num_channels]


def double_sparsity(q, k, v, n: int, heavy: int, factor: int) -> np.ndarray:
    """Decodes q [K G S H], k, v [K S H] of one sequence, a prompt of n tokens -> outputs [K G S-n H] of the rest.

    A query head reads its own token and the heavy - 1 earlier ones whose labels give the largest product.
    """
    K, G, S, H = q.shape
    out = np.empty((K, G, S - n, H))
    for h in range(K):
        channels = label_channels(q[h, :, :n], k[h, :n], H // factor)
        for g in range(G):
            for t in range(n, S):
                products = k[h, :t][:, channels] @ q[h, g, t, channels]
                visible = [*np.argsort(-products, kind="stable")[: heavy - 1], t]
                out[h, g, t - n] = softmax(k[h, visible] @ q[h, g, t] / np.sqrt(H)) @ v[h, visible]
    return out


SMALL = "double_sparsity:heavy=3,factor=4,device_layers=0"


def test_it_equals_the_paper_whatever_lies_in_empty_slots():
    layer.assert_decodes_as(SMALL, functools.partial(double_sparsity, heavy=3, factor=4))


def test_channels_are_those_of_each_rows_and_heads_own_prompt():
    batch = layer.random_batch()
    channels = layer.prefill(layer.bind(SMALL), batch).reader_state.channels
    for b, n in enumerate(batch.lengths.tolist()):
        q, k, _ = batch.exact(b)
        for h in range(layer.K):
            np.testing.assert_array_equal(channels[b, h], label_channels(q[h, :, :n], k[h, :n], 8))


def test_a_table_says_which_channels_labels_have(tmp_path):
    order = np.stack([np.random.default_rng(h).permutation(layer.H) for h in range(layer.K)]).astype(np.int32)
    table = table_file.write(tmp_path / "order", "channels", layer.spec(), [{"order": order}])
    state = layer.prefill(layer.bind(f"{SMALL},table={table}"), layer.random_batch())
    np.testing.assert_array_equal(state.reader_state.channels, np.broadcast_to(order[:, :8], (layer.B, layer.K, 8)))
    np.testing.assert_array_equal(
        memory.unpack(state.reader_state.k),
        jnp.take_along_axis(
            memory.unpack(state.k), jnp.broadcast_to(order[None, :, None, :8], (layer.B, layer.K, 1, 8)), 3
        ),
    )


def test_behind_a_selection_the_tokens_that_are_left_choose_the_channels():
    k = jnp.array([[9.0, 1], [1, 2], [1, 2]])[None, None]
    q = jnp.ones((1, 1, 1, 3, 2))
    observation = Observation(q, jnp.arange(3, dtype=jnp.int32)[None])
    for tokens, channel in ([0, 1, 2], 0), ([1, 2, -1], 1):
        pos = jnp.array(tokens, jnp.int32)[None, None]
        keys = jnp.where((pos >= 0)[..., None], k[:, :, np.array(tokens)], jnp.inf)
        assert LabelChannels(2).fit(KVBlock(keys, keys, pos), observation).channels.item() == channel


def test_by_hand_two_channels_of_four_find_the_token():
    """|q k| is largest in channels 1 and 3, by which token 1 is best; by all channels it would be token 0."""
    k = jnp.array([[9.0, 1, 0, 1], [0, 2, 0, 2]])[None, None]
    q = jnp.array([[0.1, 3.0, 0.1, 3.0], [0.1, 3.0, 0.1, 3.0]])[None, None, None]
    index = LabelChannels(2)
    labels = index.fit(KVBlock(k, k, jnp.arange(2, dtype=jnp.int32)[None, None]), Observation(q, jnp.arange(2)[None]))
    assert sorted(labels.channels.ravel().tolist()) == [1, 3]
    query = jnp.array([1.0, 1, 1, 1]).reshape(1, 1, 1, 1, 4)
    np.testing.assert_allclose(index.score(index.load(labels), query).ravel() * np.sqrt(2), [2, 4], rtol=1e-6)


def test_labels_in_eight_bits_score_nearly_alike():
    batch = layer.random_batch()
    states = [layer.prefill(layer.bind(f"{SMALL},bits={bits}"), batch) for bits in (16, 8)]
    q = batch.q[:, :, :, :1]
    exact, quantized = (
        LabelChannels(4, bits).score(LabelChannels(4, bits).load(state.reader_state), q)
        for bits, state in zip((16, 8), states, strict=True)
    )
    np.testing.assert_allclose(quantized[..., :1], exact[..., :1], atol=0.1)
    assert not np.array_equal(quantized[..., :1], exact[..., :1])
