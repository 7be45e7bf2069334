"""The staircase of bits against its oracle, over prompts and decoded tokens of all ages.

Staircase adaptive quantization in NumPy, from its listing (arXiv 2410.18441): the tokens of one head by blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kvjax
from kvjax.cache.codecs.plain import Host
from kvjax.core import memory
from kvjax.errors import KvjaxError
from kvjax.methods.saq import StaircaseQuantizer
from tests.contract import layer
from tests.oracles.codec_attention import attend_decoded
from tests.oracles.kivi import fake_quantize


def fake_quantize_block(block: np.ndarray, bits: int, group: int, axis: str) -> np.ndarray:
    """Quantizes and dequantizes a block of tokens [n H], in groups within a channel or within a token."""
    vectors = block.T if axis == "channel" else block
    quantized = np.stack(
        [np.concatenate([fake_quantize(x, bits) for x in vector.reshape(-1, group)]) for vector in vectors]
    )
    return quantized.T if axis == "channel" else quantized


def reconstruct(
    x: np.ndarray, prompt: int, bits: tuple[int, ...], group: int, block_tokens: int, axis: str
) -> np.ndarray:
    """The stored tokens [n H] after the last was written; the first `prompt` were the prompt."""
    out, last_level = x.copy(), len(bits) - 1
    blocks = prompt // block_tokens
    levels = {j: min(blocks - 1 - j, last_level) for j in range(blocks)}  # block -> the level that it is at
    for j, i in levels.items():
        out[j * block_tokens : (j + 1) * block_tokens] = fake_quantize_block(
            x[j * block_tokens : (j + 1) * block_tokens], bits[i], group, axis
        )
    for newest in range(blocks, max((len(x) - 1) // block_tokens, blocks)):
        for j in range(newest):
            if levels[j] < last_level:
                levels[j] += 1
                tokens = slice(j * block_tokens, (j + 1) * block_tokens)
                out[tokens] = fake_quantize_block(out[tokens], bits[levels[j]], group, axis)
        levels[newest] = 0
        tokens = slice(newest * block_tokens, (newest + 1) * block_tokens)
        out[tokens] = fake_quantize_block(out[tokens], bits[0], group, axis)
    return out


def test_the_oracle_by_hand():
    """Blocks of one token in groups of four channels, 2 bits and then 1, whose levels are the quarter points."""
    x = np.array([[0, 1, 2, 3.3], [0, 0, 0, 8], [1, 1, 1, 1], [5, 5, 5, 5]], np.float32)
    at = [reconstruct(x[:n], 1, (2, 1), 4, 1, "token") for n in (1, 2, 3, 4)]
    # A prompt's block is at its first level at once.
    np.testing.assert_allclose(at[0][0], [0, 1.1, 2.2, 3.3], rtol=1e-6)
    np.testing.assert_allclose(at[1], [[0, 1.1, 2.2, 3.3], [0, 0, 0, 8]], rtol=1e-6)
    np.testing.assert_allclose(at[2][:2], [[0.825, 0.825, 2.475, 2.475], [0, 0, 0, 8]], rtol=1e-6)
    np.testing.assert_allclose(at[3][:2], [[0.825, 0.825, 2.475, 2.475], [2, 2, 2, 6]], rtol=1e-6)


def test_a_batch_is_its_oracle_and_padding_may_hold_infinity():
    batch, method = layer.random_batch(), kvjax.parse("saq:group=4,every=4")
    out = layer.decode(method, batch, state=layer.prefill(layer.bind(method), batch, padding=np.inf))

    def keys(x: np.ndarray, prompt: int) -> np.ndarray:
        return reconstruct(x.astype(np.float32), prompt, (8, 4, 2), 4, 4, "channel")

    def values(x: np.ndarray, prompt: int) -> np.ndarray:
        return reconstruct(x.astype(np.float32), prompt, (8, 4, 2), 4, 4, "token")

    np.testing.assert_allclose(out, attend_decoded(batch, keys, values), atol=5e-6)


@pytest.mark.parametrize(
    ("place", "bits", "axis", "dtype"),
    [
        (Host, (8, 4, 2), "channel", np.float32),
        (lambda codec: codec, (4, 2), "token", ml_dtypes.bfloat16),
        (lambda codec: codec, (2,), "token", np.float32),
    ],
)
def test_what_is_held_is_the_oracles_bit_by_bit(place, bits, axis, dtype):
    """Prompts of 13, 3 and 0 tokens get fifteen more each, so every block reaches the lowest level."""
    codec, lengths, steps, S, H = place(StaircaseQuantizer(bits, 4, axis, 4)), np.array([13, 3, 0]), 15, 28, 16
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 2, S, H)).astype(dtype)
    slot = np.arange(S)[None]
    pos = jnp.asarray(np.where(slot < lengths[:, None], slot, -1), jnp.int32)[:, None]
    noisy = jnp.where(pos[..., None] >= 0, x, jnp.asarray(np.inf, dtype))

    def step(stored, t):
        at = jnp.asarray(lengths, jnp.int32)[:, None] + t
        return codec.append(stored, jnp.take_along_axis(jnp.asarray(x), at[:, None, :, None], 2), at), None

    def run(noisy):
        first = codec.encode(noisy, pos)
        last = jax.lax.scan(step, first, jnp.arange(steps, dtype=jnp.int32))[0]
        gathered = jnp.broadcast_to(jnp.asarray([0, 4, 9, 12, 14], jnp.int32), (3, 2, 5))
        return first, last, codec.decode(last), codec.gather(last, gathered)

    first, last, decoded, gathered = jax.jit(run)(noisy)
    assert jax.tree.map(memory.memory_kind, last) == jax.tree.map(memory.memory_kind, first)
    assert decoded.dtype == gathered.dtype == dtype
    for b, n in enumerate(lengths):
        for h in range(2):
            expected = reconstruct(x[b, h, : n + steps], int(n), bits, 4, 4, axis)
            np.testing.assert_array_equal(np.asarray(decoded[b, h, : n + steps]), expected)
            np.testing.assert_array_equal(np.asarray(gathered[b, h]), expected[[0, 4, 9, 12, 14]])


def test_what_has_no_meaning_is_refused():
    with pytest.raises(KvjaxError, match="does not divide the head size"):
        StaircaseQuantizer((8, 4), 4, "channel", 4).encode(jnp.ones((1, 1, 4, 6)), jnp.zeros((1, 1, 4), jnp.int32))
