"""Block floating point and sorted channels against their oracle.

Block floating point in NumPy, float64, with key channels in the order of their size (arXiv 2403.20137).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.codecs.per_token import PerTokenCodec
from kvjax.cache.codecs.plain import Host, Plain
from kvjax.cache.codecs.quantizers import BlockFloat
from kvjax.core import memory
from kvjax.core.memory import array_bytes
from kvjax.methods.bfp import SortedChannels
from tests.contract import layer
from tests.oracles.codec_attention import attend_decoded


def exponent(largest: float, bits: int) -> int:
    """The least exponent with which the largest mantissa reaches a positive number."""
    e = -126
    while (2 ** (bits - 1) - 1) * 2.0**e < largest:
        e += 1
    return e


def fake_quantize(x: np.ndarray, bits: int, block: int) -> np.ndarray:
    """Rounds a vector [H] to mantissas and back."""
    out = []
    for numbers in x.reshape(-1, block):
        scale = 2.0 ** exponent(np.abs(numbers).max(), bits)
        out += [round(y / scale) * scale for y in numbers.tolist()]
    return np.array(out)


def channel_order(k: np.ndarray) -> list[int]:
    """The channels of keys k [n H], the largest first; ties go to the lower channel."""
    size = (k**2).sum(0)
    return sorted(range(k.shape[1]), key=lambda c: (-size[c], c))


def fake_quantize_keys(k: np.ndarray, prompt: int, bits: int, block: int) -> np.ndarray:
    """Rounds keys [n H] in the channel order of their first `prompt` tokens, and restores the order."""
    channels = channel_order(k[:prompt])
    out = np.empty_like(k)
    out[:, channels] = np.stack([fake_quantize(x, bits, block) for x in k[:, channels]])
    return out


POS = jnp.arange(6, dtype=jnp.int32)[None, None]


def round_trip(quantizer: BlockFloat, x: np.ndarray) -> np.ndarray:
    run = jax.jit(lambda x: quantizer.decode(quantizer.encode(x)))
    return np.asarray(run(jnp.asarray(x, jnp.float32)))


def test_the_example_by_hand():
    """7 steps of 1 do not reach 8, so a step is 2, and 1 lies half-way between 0 and 2; the zeros share no exponent."""
    x = np.array([8.0, 1.0, -2.0, 0.4, 0.0, 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(round_trip(BlockFloat(4, 4), x), [8.0, 0.0, -2.0, 0.0, 0, 0, 0, 0])
    np.testing.assert_array_equal(round_trip(BlockFloat(4, 4), np.array([7.0, 1.0, -2.5, 0.4] * 2)), [7, 1, -2, 0] * 2)


@pytest.mark.parametrize(("bits", "block"), [(2, 8), (3, 32), (4, 8), (8, 16)])
def test_rows_are_their_oracles_and_largest_numbers_are_never_cut(bits, block):
    x = np.random.default_rng(bits).normal(size=(30, 32)).astype(np.float32)
    x *= np.exp(np.random.default_rng(0).uniform(-9, 9, size=(30, 1)))
    x[:5, 0] = (2 ** (bits - 1) - 1) * 2.0 ** np.arange(-2, 3)  # exactly what the largest mantissa reaches
    actual = round_trip(BlockFloat(bits, block), x)
    x = x.astype(np.float64)
    np.testing.assert_array_equal(actual, [fake_quantize(vector, bits, block) for vector in x])
    power = np.array([[2.0 ** exponent(np.abs(b).max(), bits) for b in vector.reshape(-1, block)] for vector in x])
    assert (np.abs(actual - x).reshape(30, -1, block) <= power[..., None] / 2).all()


def test_numbers_at_the_edges_of_float32_stay_finite():
    x = np.array([3e38, -3e38, 1.0, 0.0, 1e-38, 0.0, -1e-38, 0.0])
    np.testing.assert_allclose(round_trip(BlockFloat(8, 4), x), x, rtol=0.02, atol=2e36)


@pytest.mark.parametrize("sort", [True, False])
def test_a_batch_is_its_oracle_and_padding_may_hold_infinity(sort):
    batch, method = layer.random_batch(), kvjax.methods.bfp(4, 8, sort)
    out = layer.decode(method, batch, state=layer.prefill(layer.bind(method), batch, padding=np.inf))

    def values(x: np.ndarray, prompt: int) -> np.ndarray:
        return np.stack([fake_quantize(vector, 4, 8) for vector in x])

    def keys(x: np.ndarray, prompt: int) -> np.ndarray:
        return fake_quantize_keys(x, prompt, 4, 8) if sort else values(x, prompt)

    np.testing.assert_allclose(out, attend_decoded(batch, keys, values), atol=1e-5)


def test_sorted_outliers_share_blocks_and_no_longer_coarsen_the_others():
    """Every fourth channel is a hundred times as large as the others: unsorted, all blocks of 8 are coarse."""
    x = np.random.default_rng(0).normal(size=(1, 1, 6, 32))
    x[..., ::4] *= 100
    others = [c for c in range(32) if c % 4]

    def error(codec) -> np.ndarray:
        run = jax.jit(lambda x: codec.decode(codec.encode(x, POS)))
        return np.abs(np.asarray(run(jnp.asarray(x, jnp.float32))) - x)[..., others].mean()

    values = PerTokenCodec(BlockFloat(4, 8))
    assert error(SortedChannels(values)) < 0.2 * error(values)


@pytest.mark.parametrize("place", [lambda c: c, Host])
def test_an_order_alone_changes_nothing(place):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 6, 8)), jnp.float32)
    q = jnp.asarray(np.random.default_rng(1).normal(size=(1, 2, 2, 1, 8)), jnp.float32)
    ordered, plain = place(SortedChannels(Plain())), Plain()
    a, b = (c.append(c.encode(x, POS), 2 * x[:, :, :1], jnp.array([[5]])) for c in (ordered, plain))
    assert array_bytes(a)["device"] == 2 * 8 * 4 + (0 if place is Host else array_bytes(b)["device"])
    p = plain.scores(q, b)
    a = memory.load(a)
    np.testing.assert_array_equal(ordered.decode(a), plain.decode(b))
    np.testing.assert_array_equal(
        ordered.gather(a, jnp.array([[[5, 0]] * 2])), plain.gather(b, jnp.array([[[5, 0]] * 2]))
    )
    np.testing.assert_allclose(ordered.scores(q, a), p, atol=1e-5)
    np.testing.assert_allclose(ordered.mix(p, a), plain.mix(p, b), atol=1e-5)


def test_without_a_prompt_channels_stay_as_they_are():
    stored = SortedChannels(Plain()).encode(jnp.full((1, 1, 2, 8), jnp.inf), jnp.full((1, 1, 2), -1))
    assert stored.order.tolist() == [[list(range(8))]]
