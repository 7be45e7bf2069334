"""XAttention and MInference against their oracles and their authors' choices; what the hook for such patterns does.

Both in NumPy, float64, from the papers (arXiv 2503.16428, section 2; 2407.02490, section 3): one head, tile by tile.
tests/fixtures/patterns.npz has what the authors' own functions choose.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kvjax
from kvjax.core.attention import TileChoosing, attend_dense, causal_attention, causal_attention_with_lse
from kvjax.core.types import KVBlock
from kvjax.engine import prefill
from kvjax.errors import KvjaxError
from kvjax.methods.minference import HeadPattern, LinesAndBlocks, read_head_patterns
from kvjax.methods.xattention import AntidiagonalTiles
from kvjax.models.sharding import param_shardings
from kvjax.testing import toy_model
from tests.contract import layer

FIXTURE = np.load(Path(__file__).parents[1] / "fixtures" / "patterns.npz")


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max())
    return p / p.sum()


def antidiagonal_weights(q: np.ndarray, k: np.ndarray, stride: int, window: float = np.inf) -> np.ndarray:
    """The estimated weights [n n] of groups of keys for groups of queries; q, k [T H].

    A group has none if its last key is outside of the first query's window.
    """
    T, H = q.shape
    n = -(-T // stride)
    weights = np.zeros((n, n))
    for a in range(n):
        sums = np.zeros(a + 1)
        for b, i in np.ndindex(a + 1, stride):
            t, s = a * stride + stride - 1 - i, b * stride + i
            sums[b] += q[t] @ k[s] if t < T and s < T else 0.0
        is_hidden = a * stride - (np.arange(a + 1) * stride + stride - 1) >= window
        weights[a, : a + 1] = softmax(np.where(is_hidden, -np.inf, sums / stride / np.sqrt(H)))
    return weights


def antidiagonal_tiles(
    q: np.ndarray, k: np.ndarray, threshold: float, stride: int, tile: int, window: float = np.inf
) -> np.ndarray:
    """XAttention's tiles, bool [n n]: first and own one, then the heaviest until a fraction of all weight is read."""
    weights, per_tile, n = antidiagonal_weights(q, k, stride, window), tile // stride, -(-len(q) // tile)
    chosen = np.zeros((n, n), bool)
    for i in range(n):
        rows = weights[i * per_tile : (i + 1) * per_tile]
        mass = [rows[:, j * per_tile : (j + 1) * per_tile].sum() for j in range(n)]
        order = [0, i, *sorted(range(1, i), key=lambda j: -mass[j])]
        for rank, j in enumerate(order):
            if rank < 2 or sum(mass[other] for other in set(order[:rank])) < threshold * sum(mass):
                chosen[i, j] = True
    return chosen


def lines(q: np.ndarray, k: np.ndarray, given: LinesAndBlocks, pattern: HeadPattern) -> tuple[set[int], set[int]]:
    """Vertical and slash lines of a head by the last of its queries, which stand at the end of the keys."""
    S, last = len(k), min(given.queries, len(q))
    vertical, slash = np.zeros(S), np.zeros(S)
    for i in range(1, last + 1):
        t = S - i
        p = softmax(k[: t + 1] @ q[-i] / np.sqrt(q.shape[1]))
        vertical[: t + 1] += p
        slash[: t + 1] += p[::-1]
    vertical[: given.sinks] = slash[: given.recent] = np.inf
    best = (np.argsort(-x, kind="stable")[:n] for x, n in ((vertical, pattern.vertical), (slash, pattern.slash)))
    return tuple(set(x.tolist()) for x in best)


def minference_mask(q: np.ndarray, k: np.ndarray, given: LinesAndBlocks, pattern: HeadPattern) -> np.ndarray:
    """What each query of a head reads, bool [T S]; the queries stand at the end of the keys."""
    (T, _), S, tile = q.shape, len(k), given.tile
    start, n = S - T, -(-S // tile)
    mask = np.zeros((T, S), bool)
    columns, distances = set(range(pattern.vertical)), set(range(pattern.slash))
    if pattern.name == "vertical_and_slash":
        columns, distances = lines(q, k, given, pattern)
    for first in range(start, S, tile):
        i = first // tile
        queries, tiles = range(first, min(first + tile, S)), set()
        if pattern.name == "block_sparse":
            means = [x.sum(0) for x in (k[j * tile : (j + 1) * tile] for j in range(n))]
            mean = q[first - start : first - start + tile].sum(0)
            tiles = set(sorted(range(i + 1), key=lambda j: -(means[j] @ mean))[: given.topk])
        else:
            for t in range(first, first + tile):
                tiles |= {(t - d) // tile for d in distances if t - d >= 0}
        for t in queries:
            read = {s for j in tiles for s in range(j * tile, (j + 1) * tile)}
            read |= columns if pattern.name != "block_sparse" else set()
            mask[t - start, [s for s in read if s <= t]] = True
    return mask


def attend_masked(q, k, v, masks):
    """Attention [B K G T H] under masks bool[B K G T S], in whatever package the arrays are of."""
    np_ = jnp if isinstance(q, jax.Array) else np
    logits = np_.where(masks, np_.einsum("bkgth,bksh->bkgts", q, k) / np.sqrt(q.shape[-1]), -1e30)
    p = np_.exp(logits - logits.max(-1, keepdims=True))
    return np_.einsum("bkgts,bksh->bkgth", p / p.sum(-1, keepdims=True), v)


B, K, G, H, T = 2, 2, 2, 4, 27
LENGTHS = (27, 14)


def random_qkv(T: int = T, groups: int = G):
    rng = np.random.default_rng(T)
    shapes = (B, K, groups, T, H), (B, K, T, H), (B, K, T, H)
    return tuple(jnp.asarray(rng.normal(size=s) * 1.5, jnp.float32) for s in shapes)


HEADS = (
    HeadPattern("vertical_and_slash", 3, 4),
    HeadPattern("stream_llm", 2, 5),
    HeadPattern("block_sparse", 1, 1),
    HeadPattern("vertical_and_slash", 6, 2),
)
LINES = LinesAndBlocks(HEADS[0], topk=2, queries=3, sinks=1, recent=1, tile=4, heads=HEADS)
TILES = AntidiagonalTiles(0.6, stride=2, tile=4)


def oracle_masks(pattern: TileChoosing, q, k, lengths=LENGTHS, start: int = 0) -> np.ndarray:
    """Masks bool[B K G T S] of all heads; queries after a prompt's end read their own key, and are not compared."""
    (B, K, G, T, _), S = q.shape, k.shape[2]
    masks = np.zeros((B, K, G, T, S), bool)
    masks[..., np.arange(T), start + np.arange(T)] = True
    for b, h, g in np.ndindex(B, K, G):
        n = min(lengths[b], start + T)
        x, y = (np.asarray(a, np.float64) for a in (q[b, h, g, : n - start], k[b, h, :n]))
        if isinstance(pattern, LinesAndBlocks):
            own = minference_mask(x, y, pattern, pattern.heads[h * G + g])
        else:
            x = np.concatenate([np.zeros((start, H)), x])  # a tile of queries chooses for itself
            tiles = antidiagonal_tiles(x, y, pattern.threshold, pattern.stride, pattern.tile)
            own = np.tril(tiles.repeat(pattern.tile, 0).repeat(pattern.tile, 1)[:n, :n])[start:]
        masks[b, h, g, : n - start, :n] = own
    return masks


def test_antidiagonals_by_hand():
    """Two groups of two tokens: the second one's queries 2 and 1 meet the keys 0 and 1, or 2 and 3, crosswise."""
    q, k = np.array([[0.0], [1.0], [2.0], [3.0]]), np.array([[1.0], [0.0], [0.0], [2.0]])
    expected = np.array([3 * 1 + 2 * 0, 3 * 0 + 2 * 2]) / 2
    np.testing.assert_allclose(antidiagonal_weights(q, k, 2), [[1, 0], softmax(expected)])


def chosen_by_all(pattern: TileChoosing, q, k, num_tiles: int):
    """What a pattern chooses for each tile of queries of a prompt: tiles [n K G tiles], columns [K G n]."""

    @jax.jit
    def choose(q, k):
        length = jnp.array([q.shape[3]], jnp.int32)
        choose = pattern.choose_keys(q, k, 0, length)
        padded = jnp.pad(q, [(0, 0)] * 3 + [(0, -q.shape[3] % pattern.tile), (0, 0)])
        tiles = jnp.split(padded, num_tiles, 3)
        return [choose(x, jnp.int32(i * pattern.tile)) for i, x in enumerate(tiles)]

    keys = choose(q, k)
    columns = keys[0].columns
    return np.stack([x.tiles[0] for x in keys]), None if columns is None else np.asarray(columns[0])


def fixture_qk(num_tokens: int | None = None):
    q, k = (jnp.asarray(FIXTURE[name][:, :num_tokens], jnp.float32)[None] for name in ("q", "k"))
    return q[:, :, None], k


@pytest.mark.parametrize("threshold", [0.5, 0.9])
def test_xattention_chooses_what_its_authors_code_does(threshold):
    q, k = fixture_qk()
    tiles, _ = chosen_by_all(AntidiagonalTiles(threshold, 4, 16), q, k, 10)
    expected = FIXTURE[f"xattention_{threshold}"]
    np.testing.assert_array_equal(tiles[:, :, 0].swapaxes(0, 1), expected)
    oracle = antidiagonal_tiles(*(np.asarray(x, np.float64).reshape(2, 150, 8)[0] for x in (q, k)), threshold, 4, 16)
    np.testing.assert_array_equal(oracle, expected[0])


def test_minference_chooses_what_its_authors_code_does():
    q, k = fixture_qk()
    pattern = HeadPattern("vertical_and_slash", 40, 110)
    given = LinesAndBlocks(pattern, 3, 64, 30, 100, 16, heads=(pattern,) * 2)
    found = jax.jit(lambda q, k: given.choose_lines(q, k, 0, jnp.array([150], jnp.int32)))(q, k)
    for mask, name in zip(found, ("vertical", "slash"), strict=True):
        np.testing.assert_array_equal([np.flatnonzero(head) for head in np.asarray(mask[0, :, 0])], FIXTURE[name])
    q64, k64 = (np.asarray(x, np.float64).reshape(2, 150, 8)[0] for x in (q, k))
    assert lines(q64, k64, given, pattern) == (set(FIXTURE["vertical"][0]), set(FIXTURE["slash"][0]))


def test_block_sparse_heads_choose_what_the_authors_code_does():
    blocks = HeadPattern("block_sparse", 1, 1)
    tiles, _ = chosen_by_all(LinesAndBlocks(blocks, 3, 64, 30, 100, 16, heads=(blocks,) * 2), *fixture_qk(144), 9)
    for head, i in np.ndindex(2, 9):
        # Where fewer blocks than three lie before a query, the authors' code also ranks later ones, and masks them.
        expected = {j for j in FIXTURE["blocks"][head, i].tolist() if j <= i}
        assert set(np.flatnonzero(tiles[i, head, 0]).tolist()) == expected


@pytest.mark.parametrize("pattern", [TILES, LINES], ids=["xattention", "minference"])
def test_attention_is_the_oracles_for_ragged_prompts(pattern):
    q, k, v = random_qkv()
    masks = oracle_masks(pattern, q, k)
    assert 0.2 < masks[0].mean() / 0.5 < 0.95
    expected = attend_masked(*(np.asarray(x, np.float64) for x in (q, k)), np.asarray(v, np.float64), masks)
    lengths = jnp.array(LENGTHS, jnp.int32)
    out, lse = jax.jit(lambda q, k, v: causal_attention_with_lse(q, k, v, block=8, pattern=pattern, lengths=lengths))(
        q, k, v
    )
    logits = np.where(masks, np.einsum("bkgth,bksh->bkgts", q, k) / 2, -np.inf)
    for b, n in enumerate(LENGTHS):
        np.testing.assert_allclose(out[b, :, :, :n], expected[b, :, :, :n], atol=1e-5)
        np.testing.assert_allclose(lse[b, :, :, :n], np.log(np.exp(logits).sum(-1))[b, :, :, :n], atol=1e-5)


@pytest.mark.parametrize("name", ["xattention", "block_sparse"])
def test_what_a_window_hides_is_not_chosen_for(name):
    """Else tiles that no query sees would take the place of those that some do, up to queries without any key."""
    window, tile, n, (q, k, v) = 6, 4, 24, random_qkv(24)
    spec = dataclasses.replace(layer.spec(window), num_kv_heads=K, num_groups=G)
    blocks = HeadPattern("block_sparse", 1, 1)
    pattern = TILES if name == "xattention" else dataclasses.replace(LINES, default=blocks, heads=())
    masks = np.zeros((B, K, G, n, n), bool)
    for b, h, g in np.ndindex(B, K, G):
        x, y = (np.asarray(a, np.float64) for a in (q[b, h, g], k[b, h]))
        tiles = (
            antidiagonal_tiles(x, y, 0.6, 2, tile, window) if name == "xattention" else np.eye(n // tile, dtype=bool)
        )
        for i in range(n // tile) if name == "block_sparse" else ():
            shown = [j for j in range(i) if i * tile - (j * tile + tile - 1) < window]
            means = [y[j * tile : (j + 1) * tile].mean(0) @ x[i * tile : (i + 1) * tile].mean(0) for j in shown]
            tiles[i, [shown[np.argmax(means)]] if shown else []] = True  # `topk` is 2, its own tile among them
        masks[b, h, g] = tiles.repeat(tile, 0).repeat(tile, 1)
    distance = np.arange(n)[:, None] - np.arange(n)
    masks &= (distance >= 0) & (distance < window)
    expected = attend_masked(*(np.asarray(x, np.float64) for x in (q, k, v)), masks)
    out = jax.jit(lambda q, k, v: causal_attention(q, k, v, rule=spec.rule, block=8, pattern=pattern.at(spec)))(q, k, v)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert masks.any(-1).all() and (masks.sum(-1) < np.minimum(np.arange(n) + 1, window)).any()


@pytest.mark.parametrize("pattern", [TILES, LINES], ids=["xattention", "minference"])
def test_a_chunk_chooses_by_its_own_queries_and_all_keys_so_far(pattern):
    q, k, v = (x[:, :, ..., :20, :] for x in random_qkv())
    masks = oracle_masks(pattern, q[:, :, :, 8:], k, (20, 14), 8)
    expected = attend_masked(*(np.asarray(x, np.float64) for x in (q[:, :, :, 8:], k, v)), masks)
    out, _ = jax.jit(
        lambda q, k, v, start, n: causal_attention_with_lse(q, k, v, start, block=4, pattern=pattern, lengths=n)
    )(q[:, :, :, 8:], k, v, jnp.int32(8), jnp.array([20, 14], jnp.int32))
    np.testing.assert_allclose(out[0], expected[0], atol=1e-5)
    np.testing.assert_allclose(out[1, :, :, :6], expected[1, :, :, :6], atol=1e-5)


def test_keys_that_no_head_chooses_are_not_read():
    """Their values are NaN, which a weight of zero would carry into the output."""
    q, k, v = random_qkv(24)
    unread = ~oracle_masks(TILES, q, k, (24, 24))[0, :, :, 20:].any((0, 1, 2))
    unread = np.flatnonzero(unread[:20])
    assert len(unread)
    out = jax.jit(lambda q, k, v: causal_attention(q, k, v, block=4, pattern=TILES))(
        q, k, v.at[0, :, unread].set(jnp.nan)
    )
    assert np.isfinite(out[0, :, :, 20:]).all() and np.isnan(out[0, :, :, :20]).any()


@pytest.mark.parametrize("pattern", [TILES, LINES], ids=["xattention", "minference"])
def test_gradients_are_those_of_attention_under_the_chosen_mask(pattern):
    q, k, v = random_qkv(11)
    masks = oracle_masks(pattern, q, k, (11, 11))

    def loss(attend, q, k, v):
        return jnp.sin(attend(q, k, v)).sum()

    def attend_one(q, k, v):  # a sequence, as `vmap` gives it
        return causal_attention(q[None], k[None], v[None], block=4, pattern=pattern)[0]

    one = functools.partial(loss, attend_one)
    actual = jax.jit(jax.vmap(jax.grad(one, (0, 1, 2))))(q, k, v)
    expected = jax.grad(functools.partial(loss, functools.partial(attend_masked, masks=jnp.asarray(masks))), (0, 1, 2))
    for x, y in zip(actual, jax.jit(expected)(q, k, v), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


SIZES = {"kv_heads": 4, "heads": 8, "vocab_size": 96, "layers": 2}
PROMPTS = [list(range(1, 22)), [7, 3, 90, 14, 2], [6], list(range(30, 43))]
METHODS = (
    "xattention:threshold=0.5,stride=2,tile=4",
    "minference:vertical=3,slash=4,queries=3,sinks=1,recent=1,tile=4",
    "minference:pattern=block_sparse,topk=2,tile=4",
)


@functools.cache
def make_model(shape: tuple[int, int] | None = None) -> kvjax.Model:
    model = toy_model(**SIZES)
    if shape is None:
        return model
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(shape), ("data", "model"))
    return dataclasses.replace(
        model, params=jax.device_put(model.params, param_shardings(model.config, mesh)), mesh=mesh
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_of_a_model_is_read_alike_alone_and_on_a_mesh(method):
    whole, _ = kvjax.prefill(make_model(), PROMPTS, method)
    on_mesh, _ = kvjax.prefill(make_model((2, 2)), PROMPTS, method)
    alone, _ = kvjax.prefill(make_model(), PROMPTS[3:], method)
    np.testing.assert_allclose(on_mesh, whole, atol=1e-5)
    np.testing.assert_allclose(alone[0], whole[3], atol=1e-5)
    exact, _ = kvjax.prefill(make_model(), PROMPTS, "full")
    assert np.abs(np.asarray(whole[0] - exact[0])).max() > 1e-3


@pytest.mark.parametrize("method", [METHODS[0], METHODS[2]])
def test_chunks_of_whole_tiles_choose_what_the_whole_prompt_does(method):
    whole, _ = kvjax.prefill(make_model(), PROMPTS, method)
    chunked, _ = kvjax.prefill(make_model(), PROMPTS, method, chunk=8)
    np.testing.assert_allclose(chunked, whole, atol=1e-5)


def test_the_last_layer_of_a_long_prompt_computes_all_queries(monkeypatch):
    """Elsewhere it computes the last one alone, by which no tile of queries could choose."""
    whole, _ = kvjax.prefill(make_model(), PROMPTS, METHODS[0])
    monkeypatch.setattr(prefill, "SHORT_PROMPT_TOKENS", 4)
    long, _ = kvjax.prefill(make_model(), PROMPTS, METHODS[0])
    np.testing.assert_array_equal(long, whole)


def test_chunks_that_cut_through_a_tile_and_single_queries_are_refused():
    with pytest.raises(KvjaxError, match="AntidiagonalTiles .* chooses keys for 4 queries at a time, and chunks of 6"):
        kvjax.prefill(make_model(), PROMPTS, METHODS[0], chunk=6)
    q, k, v = random_qkv(4)
    block = KVBlock(k, v, jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (B, 1, 4)))
    with pytest.raises(KvjaxError, match="chooses keys for whole tiles of 4 queries, and here single queries attend"):
        attend_dense(q[:, :, :, :1], block, jnp.full((B, 1), 3, jnp.int32), pattern=TILES)


def test_a_published_table_gives_each_head_its_pattern(tmp_path):
    file = tmp_path / "best_pattern.json"
    file.write_text(str(FIXTURE["published"]))
    published, layers = json.loads(file.read_text()), read_head_patterns(str(file))
    spec = dataclasses.replace(layer.spec(), num_layers=2, num_kv_heads=8, num_groups=4, index=1)
    given = dataclasses.replace(
        LINES, heads=(), layers=layers, sinks=30, recent=100, default=HeadPattern("block_sparse", 1, 1)
    )
    for i in range(2):
        heads = given.at(dataclasses.replace(spec, index=i)).heads
        assert [[p.name, p.vertical, p.slash] for p in heads] == [published[i][str(head)][:3] for head in range(32)]
    assert {p.name for p in heads} == {"stream_llm", "vertical_and_slash"}
    with pytest.raises(KvjaxError, match="patterns for 2 layers, and the model has 3"):
        given.at(dataclasses.replace(spec, num_layers=3))
    with pytest.raises(KvjaxError, match="a pattern for head 31 of layer 1, which has 16 query heads"):
        given.at(dataclasses.replace(spec, num_groups=2))
    one = dataclasses.replace(given, layers=(((3, HeadPattern("stream_llm", 1, 1)),),) * 2)
    assert [p.name for p in one.at(spec).heads[2:5]] == ["block_sparse", "stream_llm", "block_sparse"]


@pytest.mark.parametrize("text", ["{", "[1]", '[{"0": ["dense", 1, 2, 3]}]', '[{"0": ["stream_llm"]}]', '[{"x": []}]'])
def test_a_file_that_is_no_table_is_refused(tmp_path, text):
    file = tmp_path / "table.json"
    file.write_text(text)
    with pytest.raises(KvjaxError, match="is no table of head patterns .*; give a file of MInference's folder"):
        read_head_patterns(str(file))
