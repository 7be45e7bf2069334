"""DuoAttention against its oracle: streaming heads, the tokens that they hold and read, and bytes.

DuoAttention in NumPy (arXiv 2410.10819, section 3): full and streaming heads as its public code chooses them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.head_tables import HeadWeights
from kvjax.cache.calibration.table_file import TableFile
from kvjax.cache.eviction.head_budgets import ALL_TOKENS
from kvjax.core.attention_mass import Observation
from kvjax.core.rope import Rope
from kvjax.core.types import KVBlock
from kvjax.errors import KvjaxError
from kvjax.methods.duo_attention import StreamingBudgets
from tests.contract import layer
from tests.oracles import adakv


def select_full_heads(alpha, sparsity: float) -> np.ndarray:
    """The heads that keep all tokens, bool[L K], by distinct weights [L K] (`sparsify_attention_heads`)."""
    threshold = np.quantile(alpha, sparsity)
    if sparsity >= 1:
        threshold = np.inf
    if sparsity <= 0:
        threshold = -np.inf
    return np.asarray(alpha) >= threshold


def select_tokens(n: int, is_full: bool, sinks: int, recent: int) -> list[int]:
    """The tokens that a head keeps of n."""
    return [s for s in range(n) if is_full or s < sinks or s >= n - recent]


def untrained_head_score(q, k, rotate, num_positions: int = 500) -> float:
    """The score of kvpress for untrained models, from queries [G T H] and keys [T H] before RoPE of one head and text.

    `rotate` takes (vector, position) and returns the vector rotated to the position.
    """
    keys = np.stack([rotate(k.mean(0), s) for s in range(num_positions)])
    areas = []
    for group in q:
        s = keys @ rotate(group.mean(0), num_positions - 1) / np.sqrt(k.shape[1])
        p = np.exp(s - s.max())
        areas.append(np.cumsum(p / p.sum()).mean())
    return float(np.mean(areas))


SPEC = dataclasses.replace(layer.spec(), num_layers=3, method_layers=None, num_kv_heads=4)


def write_table(path, weights, spec=None) -> str:
    """Writes a table of weights [L K] and returns its path."""
    weights = np.asarray(weights, np.float32)
    tables = [{"weights": layer_weights} for layer_weights in weights]
    return str(table_file.write(path / "heads.safetensors", "heads", spec or layer.spec(), tables))


def cached_positions(bound: layer.BoundLayer, state) -> list[list[list[int]]]:
    """The positions in a state, ascending, by sequence and head."""
    return [
        [sorted(p for p in head.tolist() if p >= 0) for head in heads] for heads in np.asarray(bound.positions(state))
    ]


def test_the_example_by_hand(tmp_path):
    assert select_full_heads([[0.9, 0.1]], 0.5).tolist() == [[True, False]]
    assert select_tokens(10, True, 1, 2) == list(range(10)) and select_tokens(10, False, 1, 2) == [
        0,
        8,
        9,
    ]
    bound = layer.bind(f"duo_attention:sinks=1,recent=2,page=4,table={write_table(tmp_path, [[0.9, 0.1]])}")
    batch = dataclasses.replace(layer.random_batch(), lengths=np.array([10, 1, 6], np.int32))
    prefill = jax.jit(lambda block: bound.prefill(block, None, 16))
    state = prefill(layer.prompt(batch, padding=np.inf, width=10)[1])
    expected = [[list(range(10)), [0, 8, 9]], [[0], [0]], [list(range(6)), [0, 4, 5]]]
    assert cached_positions(bound, state) == expected


def test_heads_stream_as_in_the_authors_code(tmp_path):
    weights = np.random.default_rng(0).permutation(12).reshape(3, 4) / 12
    table = TableFile(write_table(tmp_path, weights, SPEC), "heads")
    for sparsity in (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1):
        rule = StreamingBudgets(table, sparsity, 5)
        tokens = [rule.at(dataclasses.replace(SPEC, index=i)).tokens for i in range(3)]
        np.testing.assert_array_equal(np.array(tokens) == ALL_TOKENS, select_full_heads(weights, sparsity))
    equal = StreamingBudgets(TableFile(write_table(tmp_path, np.ones((3, 4)), SPEC), "heads"), 0.5, 5)
    assert [equal.at(dataclasses.replace(SPEC, index=i)).tokens.count(ALL_TOKENS) for i in range(3)] == [0, 2, 4]


def test_unequal_heads_are_read_as_under_a_mask(tmp_path):
    batch, table = layer.random_batch(3), write_table(tmp_path, [[0.2, 0.7]])
    bound = layer.bind(f"duo_attention:sinks=2,recent=1,page=4,table={table}")
    state = layer.prefill(bound, batch, padding=np.inf)
    out = layer.decode(bound.method, batch, state=state)
    for b, n in enumerate(batch.lengths.tolist()):
        for head in range(layer.K):
            tokens = select_tokens(n, head == 1, 2, 1)
            assert cached_positions(bound, state)[b][head] == tokens
            q, k, v = (np.asarray(x[b, head]) for x in (batch.q, batch.k, batch.v))
            for t in range(layer.STEPS):
                expected = adakv.attend(q[:, n + t], k, v, tokens, n + t, n)
                np.testing.assert_allclose(out[b, head, :, t], expected, atol=5e-6)


def test_where_all_heads_stream_they_hold_sinks_and_recent():
    batch = layer.random_batch(1)
    streaming = layer.bind("duo_attention:sparsity=1,sinks=2,recent=3,page=1")
    both = layer.bind("sinks_and_recent:budget=5,sinks=2")
    batch_positions, positions = (cached_positions(m, layer.prefill(m, batch)) for m in (streaming, both))
    assert batch_positions == [[row[0]] * layer.K for row in positions]
    np.testing.assert_allclose(layer.decode(streaming.method, batch), layer.decode(both.method, batch), atol=2e-6)


def test_weights_without_training_are_the_oracles_for_rows_of_any_length():
    rng, rope, n = np.random.default_rng(0), Rope(8), [20, 7]
    q, k = rng.normal(size=(2, 2, 2, 20, 8)), rng.normal(size=(2, 2, 20, 8))
    pos = np.where(np.arange(20)[None] < np.array(n)[:, None], np.arange(20)[None], -1).astype(np.int32)
    is_token = (pos >= 0)[:, None, :, None]
    spec = dataclasses.replace(layer.spec(), head_dim=8, rope=rope)

    def count(q, k, pos):
        rotated = rope.rotate_queries(q, pos), rope.rotate(k, pos[:, None])
        q, k = (jnp.where(x, y, 1e4) for x, y in zip((is_token[:, :, None], is_token), rotated, strict=True))
        return HeadWeights().count(KVBlock(k, k, pos[:, None]).clean(), Observation(q, pos), spec)

    counts = jax.jit(count)(*(jnp.asarray(x, jnp.float32) for x in (q, k)), jnp.asarray(pos))

    def rotate(x: np.ndarray, at: int) -> np.ndarray:
        cos, sin = (np.asarray(a, np.float64) for a in rope.angles(jnp.asarray(at)))
        return np.concatenate([x[:4] * cos - x[4:] * sin, x[4:] * cos + x[:4] * sin])

    for b, length in enumerate(n):
        for h in range(2):
            expected = untrained_head_score(q[b, h, :, :length], k[b, h, :length], rotate)
            np.testing.assert_allclose(counts["weights"][b, h], expected, rtol=2e-4)


def test_wrong_values_say_so(tmp_path):
    table = write_table(tmp_path, np.zeros((3, 4)), SPEC)
    with pytest.raises(KvjaxError, match="layers=3, and this one has layers=1; make a table"):
        layer.bind(f"duo_attention:table={table}")
