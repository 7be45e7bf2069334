"""Locret against its oracle: scores, kept tokens, and the calibrated heads.

Locret in NumPy, float64 (arXiv 2410.01805, section 3.3; code huangyuxiang03/Locret): one sequence at a time.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.table_file import TableFile
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.rope import Rope
from kvjax.core.types import KVBlock
from kvjax.errors import KvjaxError
from kvjax.methods.locret import RetainingHeads, RetainingScorer, group_by_head, ungroup_heads
from tests.contract import layer
from tests.oracles import eviction
from tests.oracles.expected_attention import rotation_matrix


def apply_network(x, fc1, fc2) -> np.ndarray:
    """Applies the two layers to one token's input [C] -> [K]."""
    hidden = fc1 @ x
    return fc2 @ (hidden / (1 + np.exp(-hidden)))


def network_inputs(q, k, v, frequencies) -> np.ndarray:
    """The network's inputs [T C], all heads' q, k, v before RoPE, from q [K G T H], k and v [K T H] after RoPE."""
    K, G, T, _ = q.shape
    out = []
    for t in range(T):
        inverse_rotation = rotation_matrix(t, frequencies).T
        queries = [inverse_rotation @ q[h, g, t] for h in range(K) for g in range(G)]
        out.append(
            np.concatenate([*queries, *(inverse_rotation @ k[h, t] for h in range(K)), *(v[h, t] for h in range(K))])
        )
    return np.array(out)


def scores(q, k, v, fc1, fc2, frequencies) -> np.ndarray:
    """The scores [K T] of all tokens."""
    return np.array([apply_network(x, fc1, fc2) for x in network_inputs(q, k, v, frequencies)]).T


def targets(q, k, window=None) -> np.ndarray:
    """The greatest logit [K n] of each token of the earlier half from the later half's queries; -inf without one."""
    K, G, T, H = q.shape
    first = T - T // 2
    out = np.full((K, first), -np.inf)
    for h in range(K):
        for s in range(first):
            for t in range(first, T):
                if window is None or t - s < window:
                    out[h, s] = max(out[h, s], *(q[h, g, t] @ k[h, s] / np.sqrt(H) for g in range(G)))
    return out


def fit_regression(x, y, ridge: float) -> np.ndarray:
    """Fits linear functions to inputs [n C] and targets [K n] -> their weights [K C] without the offsets."""
    x, y = x - x.mean(0), y - y.mean(1, keepdims=True)
    covariance = x.T @ x / len(x)
    regularizer = np.trace(covariance) / x.shape[1] / ridge
    return (np.linalg.inv(covariance + regularizer * np.eye(x.shape[1])) @ x.T @ y.T / len(x)).T


SPEC = layer.spec()
FREQUENCIES = 1 / 10_000 ** (np.arange(layer.H // 2) / (layer.H // 2))
COLUMNS = (layer.K * layer.G + 2 * layer.K) * layer.H


@functools.cache
def random_weights(hidden: int = 5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return tuple(rng.normal(size=s).astype(np.float32) / 4 for s in ((hidden, COLUMNS), (layer.K, hidden)))


def write_table(path, fc1, fc2, spec=SPEC) -> str:
    return str(table_file.write(path / "table", "locret", spec, [{"fc1": fc1, "fc2": fc2}]))


@functools.cache
def compile_scores(table: str, spec: LayerSpec = SPEC):
    """Compiles the scorer with a table."""
    scorer = RetainingScorer(TableFile(table, "locret"))
    return jax.jit(lambda block, observation: scorer.scores(block, observation, spec).per_kv_head)


def prompt_arrays(batch: layer.SequenceBatch, b: int) -> tuple[np.ndarray, ...]:
    """Queries, keys and values of one prompt."""
    n = int(batch.lengths[b])
    return tuple(np.asarray(x[b, ..., :n, :], np.float64) for x in (batch.q, batch.k, batch.v))


def test_the_example_by_hand(tmp_path):
    """One token at position 0: its query (1, 0), key (0, 2) and value (3, 0) give 1 + 2 and 3 to the hidden units."""
    fc1, fc2 = np.array([[1, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 0]], np.float32), np.array([[2, -1]], np.float32)
    expected = 2 * 3 / (1 + np.exp(-3)) - 3 / (1 + np.exp(-3))
    np.testing.assert_allclose(apply_network(np.array([1, 0, 0, 2, 3, 0]), fc1, fc2), [expected])
    spec = LayerSpec(index=0, num_layers=1, num_kv_heads=1, num_groups=1, head_dim=2, rope=Rope(2))
    q, k, v = (np.array(x, np.float32).reshape(1, 1, 1, 2) for x in ((1, 0), (0, 2), (3, 0)))
    pos = np.zeros((1, 1), np.int32)
    actual = compile_scores(write_table(tmp_path, fc1, fc2, spec), spec)(
        KVBlock(k, v, pos[:, None]), Observation(q[:, :, None], pos)
    )
    np.testing.assert_allclose(actual, [[[expected]]], rtol=1e-6)


def test_scores_are_the_oracles_and_each_head_keeps_its_best_and_the_local_tokens(tmp_path):
    batch, (fc1, fc2) = layer.random_batch(3), random_weights()
    table = write_table(tmp_path, fc1, fc2)
    for padding in (0.0, np.inf):
        q, block = layer.prompt(batch, padding)
        actual = np.asarray(compile_scores(table)(block, Observation(q, block.pos[:, 0])))
        for b, n in enumerate(batch.lengths):
            np.testing.assert_allclose(
                actual[b, :, :n], scores(*prompt_arrays(batch, b), fc1, fc2, FREQUENCIES), atol=2e-5
            )
            assert (actual[b, :, n:] == -np.inf).all()
    positions = layer.prefill(layer.bind(f"locret:budget=5,recent=2,table={table}"), batch, padding=np.inf).pos
    for b in range(layer.B):
        expected = eviction.select_tokens(scores(*prompt_arrays(batch, b), fc1, fc2, FREQUENCIES), 5, 0, 2)
        assert [sorted(p for p in head.tolist() if p >= 0) for head in positions[b]] == expected


def test_released_weights_come_back_as_they_were():
    fc1 = random_weights()[0]
    np.testing.assert_array_equal(ungroup_heads(group_by_head(fc1, SPEC), SPEC), fc1)


@pytest.mark.parametrize("window", [None, 5])
def test_calibrated_heads_are_the_regression_of_the_greatest_logits(window):
    batch, spec, kind = layer.random_batch(4), layer.spec(window), RetainingHeads(ridge=50)
    q, block = layer.prompt(batch)
    # As in `kvjax calibrate`, each sequence counts by itself, and sums add up; a text of one token has no targets.
    count = jax.jit(lambda block, observation: kind.count(block, observation, spec))
    counted = count(block, Observation(q, block.pos[:, 0]))
    arrays = kind.arrays(jax.tree.map(lambda x: np.asarray(x, np.float64).sum(0), counted), spec)
    x, y = [], []
    for b in range(layer.B):
        target = targets(*prompt_arrays(batch, b)[:2], window)
        asked = np.isfinite(target).all(0)
        x.append(network_inputs(*prompt_arrays(batch, b), FREQUENCIES)[: len(asked)][asked])
        y.append(target[:, asked])
    assert [len(part) for part in x] == [5 if window is None else 4, 0, 3]  # token 0 has left the window
    linear = fit_regression(np.concatenate(x), np.concatenate(y, 1), 50)
    for token in np.concatenate(x):
        actual = apply_network(token, arrays["fc1"].astype(np.float64), arrays["fc2"])
        np.testing.assert_allclose(actual, linear @ token, rtol=1e-3, atol=1e-3)


def test_what_cannot_be_says_so(tmp_path):
    fc1, fc2 = random_weights()
    block = layer.prompt(layer.random_batch())[1]
    with pytest.raises(KvjaxError, match="scores by queries, got none; observe all of each sequence"):
        RetainingScorer(TableFile(write_table(tmp_path, fc1, fc2), "locret")).scores(block, None, SPEC)
    wrong = RetainingScorer(TableFile(write_table(tmp_path, fc1[:, 1:], fc2), "locret"))
    with pytest.raises(KvjaxError, match=r"`0.fc1` of .* has shape \(5, 255\), expected \(any, 256\)"):
        wrong.scores(block, Observation(layer.random_batch().q, block.pos[:, 0]), SPEC)
    own = RetainingScorer(TableFile(write_table(tmp_path, fc1, fc2), "locret"))
    with pytest.raises(KvjaxError, match="each of 9 tokens by its own query, and there are 2; leave `recompress` out"):
        own.scores(block, Observation(layer.random_batch().q[..., :2, :], block.pos[:, 0, :2]), SPEC)
    with pytest.raises(KvjaxError, match="ridge must be at least 1, got 0"):
        RetainingHeads(ridge=0)
    with pytest.raises(KvjaxError, match="no token of these texts is asked by a later one; give texts of at least 2"):
        RetainingHeads().arrays({"tokens": np.zeros((1, 1))}, SPEC)
