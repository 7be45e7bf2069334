"""KVarN against the numbers of its authors' own check, and a batch against an oracle in NumPy, head by head.

The authors' own code computed the codes and scales of tests/fixtures/kvarn.npz: `make_kvarn.py` beside it runs
`_reference` of their api_test.py on four random tiles. vLLM's functions in PyTorch, which that file names too, return
the same codes for these tiles, and the same scales in float16, both as keys and as values.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.core import memory
from kvjax.methods.kvarn import NormalizedTiles
from tests import fixtures
from tests.contract import layer
from tests.oracles.codec_attention import attend_decoded

AUTHORS = dict(np.load(Path(fixtures.__file__).with_name("kvarn.npz")))


def sylvester(n: int) -> np.ndarray:
    """Hadamard's matrix over its root: its sign is -1 to the bits of i & j."""
    return np.array([[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)]) / np.sqrt(n)


def fake_quantize_rows(tile: np.ndarray, bits: int, iterations: int) -> np.ndarray:
    """Balances a tile [R C], rounds each row between its least and greatest number, and restores it."""
    rows, columns = np.zeros((len(tile), 1)), np.zeros((1, tile.shape[1]))

    def balanced():
        return tile / np.exp(rows) / np.exp(columns)

    def spread() -> float:
        by_column, by_row = (balanced().std(axis, ddof=1) for axis in (0, 1))
        return by_column.max() / max(by_column.min(), 1e-8) + by_row.max() / max(by_row.min(), 1e-8)

    least_spread, best = spread(), (rows, columns)
    for _ in range(iterations):
        columns = np.clip(columns + np.log(np.clip(balanced().std(0, ddof=1, keepdims=True), 1e-3, 1e3)), -0.3, 10)
        rows = np.clip(rows + np.log(np.clip(balanced().std(1, ddof=1, keepdims=True), 1e-3, 1e3)), -0.3, 10)
        if spread() <= least_spread:
            least_spread, best = spread(), (rows, columns)
    rows, columns = best
    low, high = balanced().min(1, keepdims=True), balanced().max(1, keepdims=True)
    step = np.maximum((high - low) / (2**bits - 1), 1e-10)
    codes = np.clip(np.round((balanced() - low) / step), 0, 2**bits - 1)
    return (codes * np.float16(np.exp(rows) * step) + np.float16(np.exp(rows) * low)) * np.float16(np.exp(columns))


def authors_tiles(bits: int, iterations: int) -> np.ndarray:
    """The tiles that the authors' codes stand for, [tiles R C], by their scales in 16 bits."""
    found = {
        name: AUTHORS[f"{name}_{bits}_{iterations}"].astype(np.float64)
        for name in ("codes", "step", "least", "columns")
    }
    packed, per_byte = found["codes"].astype(int), 8 // bits
    codes = np.stack([packed >> i * bits & 2**bits - 1 for i in range(per_byte)], -1).reshape(AUTHORS["tiles"].shape)
    step, least, columns = (np.float64(np.float16(found[name])) for name in ("step", "least", "columns"))
    return (codes * step[..., None] + least[..., None]) * columns[:, None]


def restore(codec: NormalizedTiles, tokens: jax.Array) -> jax.Array:
    """Codes the tokens of each tile [tiles n H], one for each sequence, and restores them."""
    stored = codec.encode(
        tokens[:, None] @ sylvester(tokens.shape[2]).astype(np.float32),
        jnp.broadcast_to(jnp.arange(tokens.shape[1]), (4, 1, tokens.shape[1])),
    )
    return codec.decode(stored)[:, 0] @ sylvester(tokens.shape[2]).astype(np.float32)


@pytest.mark.parametrize(("bits", "iterations"), [(4, 16), (2, 16), (2, 1)])
def test_tiles_are_those_of_the_authors(bits, iterations):
    """Their tiles have channels as rows, which is a key's orientation; as tokens, they are values'."""
    expected, tiles = authors_tiles(bits, iterations), AUTHORS["tiles"]
    oracle = np.stack([fake_quantize_rows(tile.astype(np.float64), bits, iterations) for tile in tiles])

    @jax.jit
    def round_trip(tokens):
        keys = restore(NormalizedTiles(bits, "channel", 16, iterations), tokens.swapaxes(1, 2))
        return keys.swapaxes(1, 2), restore(NormalizedTiles(bits, "token", 32, iterations), tokens)

    for found in (oracle, *round_trip(jnp.asarray(tiles))):
        # A number at a tie may take the neighboring code, which is at most one step away.
        difference = np.abs(np.asarray(found) - expected)
        scale = np.abs(expected).max(2, keepdims=True)
        assert np.mean(difference < 2e-3 * scale) > 0.995 and (difference < 0.5 * scale).all()


def reconstruct(x: np.ndarray, prompt: int, bits: int, tile: int, sinks: int, axis: str) -> np.ndarray:
    """The stored tokens [n H] after the last was written; the first `prompt` were the prompt."""
    rotation, out = sylvester(x.shape[1]), x.copy()
    num_coded = max(prompt // tile, (len(x) - 1) // tile) * tile
    for start in range(0, num_coded, tile):
        tokens = x[start : start + tile] @ rotation
        restored = (
            fake_quantize_rows(tokens.T, bits, 16).T if axis == "channel" else fake_quantize_rows(tokens, bits, 16)
        )
        out[start : start + tile] = restored @ rotation
    out[:sinks] = x[:sinks]
    return out


def test_a_batch_is_its_oracle_and_padding_may_hold_infinity():
    batch, method = layer.random_batch(), kvjax.parse("kvarn:tile=4,sinks=2")
    out = layer.decode(method, batch, state=layer.prefill(layer.bind(method), batch, padding=np.inf))

    def keys(x: np.ndarray, prompt: int) -> np.ndarray:
        return reconstruct(x, prompt, 4, 4, 2, "channel")

    def values(x: np.ndarray, prompt: int) -> np.ndarray:
        return reconstruct(x, prompt, 2, 4, 2, "token")

    expected = attend_decoded(batch, keys, values)
    # Float32 rounds some numbers at a tie to the other code, and here one code is a third of a token's range.
    assert np.quantile(np.abs(out - expected), 0.97) < 1e-4
    assert np.abs(attend_decoded(batch, lambda x, _: x, lambda x, _: x) - expected).mean() > 0.01


def test_a_host_buffer_and_a_gather_hold_the_same_tokens():
    """Prompts of 9, 3 and 0 tokens get eight more each, and a cache of 17 slots ends within a tile."""
    codec, lengths, S = kvjax.method_api.Host(NormalizedTiles(4, "channel", 4)), np.array([9, 3, 0]), 17
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, S, 8)), jnp.float32)
    pos = jnp.where(jnp.arange(S)[None] < lengths[:, None], jnp.arange(S)[None], -1)[:, None].astype(jnp.int32)

    is_token = np.arange(S)[None] < lengths[:, None] + 8
    weights = jnp.asarray(np.where(is_token, np.random.default_rng(1).random((3, S)), 0.0), jnp.float32)
    weights = jnp.broadcast_to(weights[:, None, None, None], (3, 2, 1, 1, S))

    @jax.jit
    def run(x):
        def step(stored, t):
            at = jnp.asarray(lengths, jnp.int32)[:, None] + t
            return codec.append(stored, jnp.take_along_axis(x, at[:, None, :, None], 2), at), None

        first = codec.encode(x, pos)
        last = jax.lax.scan(step, first, jnp.arange(8, dtype=jnp.int32))[0]
        q = jnp.ones((3, 2, 1, 1, 8))
        loaded = memory.load(last)
        idx = jnp.broadcast_to(jnp.asarray([0, 5, 7], jnp.int32), (3, 2, 3))
        return (
            codec.decode(last),
            codec.gather(last, idx),
            codec.scores(q, loaded),
            codec.mix(weights, loaded),
        )

    decoded, gathered, scores, mixed = (np.asarray(a, np.float64) for a in run(x))
    np.testing.assert_allclose(gathered, decoded[:, :, [0, 5, 7]], atol=1e-6)
    np.testing.assert_allclose(scores[:, :, 0, 0], decoded.sum(3) / np.sqrt(8), atol=1e-5)
    np.testing.assert_allclose(mixed[:, :, 0, 0], np.einsum("bks,bksh->bkh", weights[:, :, 0, 0], decoded), atol=1e-4)
    for b, n in enumerate(lengths + 8):
        for h in range(2):
            expected = reconstruct(np.asarray(x[b, h, :n], np.float64), int(lengths[b]), 4, 4, 0, "channel")
            assert np.mean(np.abs(decoded[b, h, :n] - expected) < 1e-3) > 0.97
