"""ZipVL against its oracle: the tiers are ZipCache's, and the count of important tokens is found from attention.

ZipVL's number of important tokens in NumPy, float64, from its paper (arXiv 2410.08584, version 1, section 3).
"""

from __future__ import annotations

import functools
from math import ceil, floor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.codecs.chunk_quant import Channelwise, SeparableTokenwise
from kvjax.cache.method import Method
from kvjax.core.attention_mass import Observation
from kvjax.core.random import draw
from kvjax.core.types import KVBlock
from kvjax.methods.zipcache import ProbeAttention
from kvjax.methods.zipvl import UnimportantTokens
from kvjax.testing import dense_attention
from tests.contract import layer
from tests.oracles import zipcache
from tests.oracles.eviction import attention_weights


def num_covering_tokens(received: np.ndarray, tau: float) -> int:
    """The fewest tokens that receive the fraction tau of the attention [n]."""
    total, count = 0.0, 0
    for x in sorted(received, reverse=True):
        if total >= tau * received.sum():
            break
        total, count = total + x, count + 1
    return count


def num_important(attention: np.ndarray, probes: list[int], tau: float, least: float = 0.0, most: float = 1.0) -> int:
    """The number of important tokens, by the probes' part of the attention [K G T T] of all prompt queries."""
    count, n = num_covering_tokens(attention[:, :, probes].sum(2).mean((0, 1)), tau), attention.shape[3]
    return min(max(count, floor(least * n + 1e-9)), ceil(most * n - 1e-9))


def oracle_low_tier(batch: layer.SequenceBatch, b: int, tau: float, least: float, most: float) -> list[list[int]]:
    """The oracle's low tier of each head of sequence b, with three tenths of the queries as probes."""
    n = int(batch.lengths[b])
    a = attention_weights(np.asarray(batch.q[b, :, :, :n]), np.asarray(batch.k[b, :, :n]))
    probes = zipcache.probe_queries(n, 0.3, np.asarray(draw(0, jnp.arange(n, dtype=jnp.int32)) >> 8).tolist())
    low_tier = n - num_important(a, probes, tau, least, most)
    return [sorted(np.argsort(s, kind="stable")[:low_tier].tolist()) for s in zipcache.saliency(a, probes)]


@pytest.mark.parametrize(("tau", "least", "most"), [(0.8, 0.0, 1.0), (0.8, 0.5, 0.6)])
def test_it_is_its_oracle_where_padding_holds_infinity(tau, least, most):
    text = f"zipvl:every=3,probes=0.3,tau={tau},least={least},most={most}"
    batch, noisy = layer.random_batch(), layer.random_batch(padding=np.inf)
    state, counts = layer.prefill(layer.bind(text), noisy, padding=np.inf), []
    out = layer.decode(text, batch, state=state)
    for b, n in enumerate(map(int, layer.LENGTHS)):
        low_tier = oracle_low_tier(batch, b, tau, least, most)
        counts.append(n - len(low_tier[0]))
        for h in range(layer.K):
            positions = np.asarray(state.side_store.pos[b, h])
            assert positions[positions >= 0].tolist() == low_tier[h]
            for t in range(layer.STEPS):
                k, v = (np.asarray(x[b, h, : n + t + 1]) for x in (batch.k, batch.v))
                keys, values = zipcache.reconstruct(k, v, n, low_tier[h], chunk_tokens=3)
                q = np.asarray(batch.q[b, h, :, n + t : n + t + 1])
                expected = dense_attention(q, keys[None], values[None], np.array([n + t]))[:, 0]
                np.testing.assert_allclose(out[b, h, :, t], expected, atol=1e-5)
    # The second bounds round to 4..6 of nine tokens, to 0..1 of one and to 3..4 of six.
    assert counts[1] == 1 and 1 < counts[0] < 9


def count_important(received: list[float], tau: float) -> int:
    """The number of important tokens when a single probe pays this attention to a sequence's tokens, in five slots."""
    n, H = len(received), 5
    pos = np.where(np.arange(5) < n, np.arange(5), -1)[None]
    k = np.where(pos[0, :, None] >= 0, np.eye(5), np.inf)[None, None]
    q = np.zeros((1, 1, 1, 1, H))
    q[..., :n] = np.log(received) * np.sqrt(H)
    block = KVBlock(*(jnp.asarray(k, jnp.float32),) * 2, jnp.asarray(pos, jnp.int32)[:, None])
    observation = Observation(jnp.asarray(q, jnp.float32), jnp.full((1, 1), n - 1, jnp.int32))
    return int(important(tau)(block.clean(), observation)[0])


@functools.cache
def important(tau: float):
    tier = UnimportantTokens(ProbeAttention(1.0), tau, Channelwise(2), SeparableTokenwise(2))
    return jax.jit(functools.partial(tier.num_important, spec=layer.spec(head_dim=5)))


def test_by_hand_of_six_three_and_one_tenth():
    shares = [0.1, 0.6, 0.3]
    for tau, expected in {0.5: 1, 0.85: 2, 0.95: 3}.items():
        assert count_important(shares, tau) == num_covering_tokens(np.array(shares), tau) == expected
    assert count_important([0.25] * 4, 0.85) == 4 and count_important([1.0], 0.95) == 1


def test_tokens_that_reach_the_fraction_exactly_suffice_and_one_takes_all():
    for tau, expected in {0.3: 1, 0.6: 2, 0.8: 3, 1.0: 5}.items():
        assert count_important([0.1, 0.3, 0.3, 0.2, 0.1], tau) == expected


def test_all_of_the_attention_is_that_of_all_tokens():
    batch = layer.random_batch()
    single = Method(k=Channelwise(4, 3), v=SeparableTokenwise(4, 3))
    np.testing.assert_allclose(layer.decode("zipvl:tau=1,every=3", batch), layer.decode(single, batch), atol=1e-6)
