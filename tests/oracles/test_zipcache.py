"""ZipCache against its oracle, and the properties of any second tier of precision."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.codecs.chunk_quant import Channelwise, SeparableTokenwise
from kvjax.cache.codecs.plain import Host
from kvjax.cache.eviction.scorers import AccumulatedAttention
from kvjax.cache.method import Method
from kvjax.cache.side_store.mixed_precision import ScoredTiers
from kvjax.core.attention_mass import Observation
from kvjax.core.random import draw
from kvjax.core.types import KVBlock
from kvjax.errors import KvjaxError
from kvjax.methods.zipcache import ProbeAttention
from kvjax.testing import dense_attention
from tests.contract import layer
from tests.oracles import zipcache as oracle
from tests.oracles.eviction import attention_weights


def oracle_low_tier(
    batch: layer.SequenceBatch, b: int, share: float, probes: float, normalise: str, window=None
) -> list[list[int]]:
    """The oracle's low tier of each head of sequence b."""
    n = int(batch.lengths[b])
    q, k = np.asarray(batch.q[b, :, :, :n]), np.asarray(batch.k[b, :, :n])
    probe_pos = oracle.probe_queries(n, probes, np.asarray(draw(0, jnp.arange(n, dtype=jnp.int32)) >> 8).tolist())
    return [
        oracle.low_tier_tokens(s, share)
        for s in oracle.saliency(attention_weights(q, k, window), probe_pos, normalise, window)
    ]


@pytest.mark.parametrize("normalise", ["queries", "probes"])
@pytest.mark.parametrize("window", [None, 5])
def test_it_is_its_oracle_over_chunks_of_three_decoded_tokens(normalise, window):
    batch = layer.random_batch()
    out = layer.decode(f"zipcache:every=3,probes=0.3,normalise={normalise}", batch, window)
    for b, n in enumerate(layer.LENGTHS):
        low = oracle_low_tier(batch, b, 0.4, 0.3, normalise, window)
        for t in range(layer.STEPS):
            k, v = np.asarray(batch.k[b, :, : n + t + 1]), np.asarray(batch.v[b, :, : n + t + 1])
            for h in range(layer.K):
                q = np.asarray(batch.q[b, h, :, n + t : n + t + 1])
                keys, values = oracle.reconstruct(k[h], v[h], n, low[h], chunk_tokens=3)
                expected = dense_attention(q, keys[None], values[None], np.array([n + t]), window)
                np.testing.assert_allclose(out[b, h, :, t], expected[:, 0], atol=1e-5)


def test_the_low_tier_holds_the_least_salient_tokens_of_each_head():
    batch = layer.random_batch(padding=np.inf)
    bound = layer.bind("zipcache:probes=0.3")
    state = layer.prefill(bound, batch, padding=np.inf)
    for b in range(layer.B):
        for h, expected in enumerate(oracle_low_tier(batch, b, 0.4, 0.3, "queries")):
            actual = np.asarray(state.side_store.pos[b, h])
            assert actual[actual >= 0].tolist() == expected
    positions = np.asarray(bound.positions(state))
    for b, n in enumerate(layer.LENGTHS):
        for head in positions[b]:
            assert sorted(head[head >= 0].tolist()) == list(range(n))


def test_saliency_by_hand():
    """Column sums 1.7, .8, .5 over 3, 2, 1 queries: the token in the middle is the least salient, not the last."""
    a = np.array([[1, 0, 0], [0.5, 0.5, 0], [0.2, 0.3, 0.5]])
    np.testing.assert_allclose(oracle.saliency(a[None, None], [0, 1, 2])[0], [1.7 / 3, 0.4, 0.5])
    # Queries and keys of three channels whose softmax is this matrix: keys are unit vectors.
    q = np.log(np.maximum(a, 1e-9)) * np.sqrt(3)
    pos = jnp.arange(3, dtype=jnp.int32)[None]
    block = KVBlock(jnp.eye(3)[None, None], jnp.zeros((1, 1, 3, 3)), pos[:, None])
    observation = Observation(jnp.asarray(q, jnp.float32)[None, None, None], pos)
    scores = ProbeAttention(share=1.0).scores(block, observation, layer.spec(head_dim=3)).per_kv_head
    np.testing.assert_allclose(scores[0, 0], [0.5667, 0.4, 0.5], atol=1e-4)


def test_a_draw_depends_on_the_position_alone():
    """Four of 40 queries are probes, two of them random; another seed draws others, and padding draws none."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(1, 1, 1, 64, 4)), jnp.float32)

    def positions(probes: ProbeAttention, width: int) -> list[int]:
        pos = np.where(np.arange(width) < 40, np.arange(width), -1)
        query_pos = probes._take_probes(Observation(q[:, :, :, :width], jnp.asarray(pos, jnp.int32)[None])).pos[0]
        return [int(p) for p in query_pos if p >= 0]

    single = positions(ProbeAttention(), 40)
    assert len(single) == 4 and single[2:] == [38, 39]
    assert positions(ProbeAttention(), 64) == single != positions(ProbeAttention(seed=1), 40)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("reader", ["full", "kcache:n=100,device_layers=0"])
def test_two_exact_tiers_are_the_full_cache(reader, window):
    batch = layer.random_batch()
    exact = dataclasses.replace(kvjax.parse(reader), side_store=ScoredTiers(AccumulatedAttention(), 0.4))
    np.testing.assert_allclose(layer.decode(exact, batch, window), layer.decode("full", batch, window), atol=5e-6)


def test_without_a_low_tier_it_is_the_high_codec_alone():
    batch = layer.random_batch()
    single = Method(k=Channelwise(4, 3), v=SeparableTokenwise(4, 3))
    actual = layer.decode(
        dataclasses.replace(
            single, side_store=ScoredTiers(ProbeAttention(), 0.0, Channelwise(2), SeparableTokenwise(2))
        ),
        batch,
    )
    np.testing.assert_allclose(actual, layer.decode(single, batch), atol=1e-6)


@pytest.mark.parametrize("codec", [Channelwise, SeparableTokenwise])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_zero_channels_and_constant_tokens_come_back(codec, dtype):
    x = np.random.default_rng(0).normal(size=(2, 1, 6, 5)).astype(np.float32)
    x[:, :, :, 2] = 0.0
    x[1] = 3.0 if codec is Channelwise else 0.0
    x, pos = jnp.asarray(x, dtype), jnp.asarray([[[0, 1, 2, 3, -1, -1]], [[0, 1, -1, -1, -1, -1]]], jnp.int32)
    noisy = jnp.where(pos[..., None] >= 0, x, jnp.inf)
    codec = codec(8)
    decoded = jax.jit(lambda x: codec.decode(codec.encode(x, pos)))(noisy)
    assert decoded.dtype == dtype and np.isfinite(np.asarray(decoded, np.float32)).all()
    np.testing.assert_array_equal(decoded[1, :, :2], x[1, :, :2])
    np.testing.assert_array_equal(decoded[0, :, :4, 2], jnp.zeros((1, 4), dtype))
    np.testing.assert_allclose(
        np.asarray(decoded[0, :, :4], np.float32), np.asarray(x[0, :, :4], np.float32), atol=0.05
    )


@pytest.mark.parametrize(
    "codec", [Channelwise(2, 3), SeparableTokenwise(4, 3), Host(Channelwise(4, 3)), Host(SeparableTokenwise(2, 3))]
)
def test_rows_are_those_of_all_that_is_decoded_and_only_whole_chunks_become_codes(codec):
    """Prompts of 5 and of 2 tokens get seven more each; their channels do not fill a word."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 12, 5)), jnp.float32)
    lengths = jnp.asarray([5, 2], jnp.int32)
    slot = jnp.arange(12, dtype=jnp.int32)[None]
    pos = jnp.where(slot < lengths[:, None], slot, -1)[:, None]
    write, decode = (jax.jit(f) for f in (codec.append, codec.decode))

    stored = codec.encode(x, pos)
    for t in range(7):
        at = lengths[:, None] + t
        new = jnp.take_along_axis(x, at[:, None, :, None], 2)
        stored = write(stored, new, at)
    decoded = decode(stored)
    idx = jnp.asarray([[[11, 0, 4], [7, 7, 2]], [[8, 1, 0], [3, 5, 6]]], jnp.int32)
    np.testing.assert_array_equal(codec.gather(stored, idx), jnp.take_along_axis(decoded, idx[..., None], 2))
    inner = codec.on_device()
    rule = oracle.quantize_channels if isinstance(inner, Channelwise) else oracle.quantize_separable
    for b, n in enumerate((5, 2)):
        for h in range(2):
            expected = np.asarray(x[b, h, : n + 7], np.float64)
            for part in (slice(0, n), slice(n, n + 3), slice(n + 3, n + 6)):
                expected[part] = rule(expected[part], inner.bits)
            np.testing.assert_allclose(decoded[b, h, : n + 7], expected, atol=2e-6)


def test_what_has_no_meaning_is_refused():
    with pytest.raises(KvjaxError, match="holds a prompt and nothing after it"):
        codec = Channelwise(4)
        x, at = jnp.ones((1, 1, 4, 8)), jnp.zeros((1, 1), jnp.int32)
        codec.append(codec.encode(x, jnp.arange(4, dtype=jnp.int32)[None, None]), x[:, :, :1], at)
