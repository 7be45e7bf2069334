"""Attention-Gate against its oracle: gates, free numbers of tokens under a budget, and calibrated gates.

Attention-Gate in NumPy, float64, one sequence at a time (arXiv 2410.12876); weights are shaped as in the table.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.table_file import TableFile
from kvjax.core.attention_mass import Observation
from kvjax.core.types import KVBlock
from kvjax.errors import KvjaxError
from kvjax.methods.attention_gate import AttentionGateTable, Gate, gate_attention
from tests.contract import layer
from tests.oracles import eviction


def gate_logits(x, query, key, value, output, bias) -> np.ndarray:
    """The logits of the heads' gates [K T] for hidden states [T D]."""
    A, _, C = query.shape
    out = np.tile(np.asarray(bias, np.float64)[:, None], (1, len(x)))
    for a in range(A):
        for t in range(len(x)):
            weights = np.array([(x[t] @ query[a]) @ (x[s] @ key[a]) / np.sqrt(C) for s in range(len(x))])
            weights = np.exp(weights - weights.max())
            mixed = sum(p * (x[s] @ value[a]) for s, p in enumerate(weights / weights.sum()))
            out[:, t] += mixed @ output[a]
    return out


def select_tokens(scores, threshold, budget, sinks, recent) -> list[list[int]]:
    """Selects by logits [K T] the sinks and recent tokens of each head, and the best flagged tokens of all heads."""
    K, n = scores.shape
    if n <= sinks + recent:
        return [list(range(n))] * K
    free = range(sinks, n - recent)
    num_flagged = K * (min(budget, n) - sinks - recent)
    flagged = [(-scores[h, t], t, h) for h in range(K) for t in free if 1 / (1 + np.exp(-scores[h, t])) > threshold]
    best = sorted(flagged)[:num_flagged]
    ends = [*range(sinks), *range(n - recent, n)]
    return [sorted(ends + [t for _, t, head in best if head == h]) for h in range(K)]


def fit_discriminant(x, is_kept, ridge: float) -> tuple[np.ndarray, float]:
    """Fits vectors [n D] with a mask of the first class -> direction and offset of that class's logit."""
    kept_mean, evicted_mean = x[is_kept].mean(0), x[~is_kept].mean(0)
    centered = np.concatenate([x[is_kept] - kept_mean, x[~is_kept] - evicted_mean])
    covariance = centered.T @ centered / len(x)
    covariance += np.eye(len(kept_mean)) * np.trace(covariance) / len(kept_mean) / ridge
    direction = np.linalg.inv(covariance) @ (kept_mean - evicted_mean)
    return direction, np.log(is_kept.sum() / (~is_kept).sum()) - direction @ (kept_mean + evicted_mean) / 2


SPEC = layer.spec()
TABLE = AttentionGateTable().example(SPEC, np.random.default_rng(3))


def write_table(path, **changed: np.ndarray) -> str:
    return str(table_file.write(path / "table", "attention_gate", SPEC, [TABLE | changed]))


def observe_prompts(batch: layer.SequenceBatch, padding: float = 0.0) -> tuple[KVBlock, Observation]:
    """The prompts with the battery's observation of them."""
    q, block = layer.prompt(batch, padding)
    hidden = np.where(np.isfinite(block.v[:, :1, :, : layer.D]), np.tanh(block.v[:, :1, :, : layer.D]), np.inf)
    return block, Observation(q, block.pos[:, 0], hidden_states=hidden.astype(np.float32))


def oracle_logits(batch: layer.SequenceBatch, b: int) -> np.ndarray:
    x = observe_prompts(batch)[1].hidden_states[b, 0, : batch.lengths[b]].astype(np.float64)
    return gate_logits(x, *(TABLE[name] for name in ("query", "key", "value", "output", "bias")))


def test_the_example_by_hand():
    """Hidden states 1 and 0, logits of the first ln 3 and 0: it mixes 3 parts to 1, the other token 1 to 1."""
    w = np.full((1, 1, 1), np.sqrt(np.log(3)))
    actual = gate_logits(np.array([[1.0], [0.0]]), w, w, np.full((1, 1, 1), 4.0), np.ones((1, 1, 1)), np.array([-2.0]))
    np.testing.assert_allclose(actual, [[1.0, 0.0]])  # 3 / 4 of 4, and 1 / 2 of 4, less 2
    assert select_tokens(actual, 0.5, 2, 0, 0) == [[0]]
    hidden, pos = np.array([1.0, 0.0], np.float32).reshape(1, 1, 2, 1), np.arange(2, dtype=np.int32)[None]
    w = w.astype(np.float32)
    np.testing.assert_allclose(gate_attention(hidden, pos, w, w, np.full((1, 1, 1), 4, np.float32))[0, 0, :, 0], [3, 2])


def test_gates_are_the_oracles_whatever_padding_holds(tmp_path):
    batch, gate = layer.random_batch(2), Gate(TableFile(write_table(tmp_path), "attention_gate"))
    score = jax.jit(lambda block, observation: gate.scores(block, observation, SPEC).per_kv_head)
    for padding in (0.0, np.inf):
        actual = np.asarray(score(*observe_prompts(batch, padding)))
        for b, n in enumerate(batch.lengths):
            np.testing.assert_allclose(actual[b, :, :n], oracle_logits(batch, b), atol=1e-4)
            assert (actual[b, :, n:] == -np.inf).all()


@pytest.mark.parametrize(("budget", "threshold"), [(9, 0.5), (4, 0.2)])
def test_heads_keep_what_is_flagged_up_to_the_budget_of_all(tmp_path, budget, threshold):
    batch = layer.random_batch(2)
    text = f"attention_gate:budget={budget},threshold={threshold},sinks=1,recent=1,page=4,table={write_table(tmp_path)}"
    bound = layer.bind(text)
    positions = np.asarray(bound.positions(layer.prefill(bound, batch)))
    numbers = set()
    for b in range(layer.B):
        actual = [sorted(p for p in head.tolist() if p >= 0) for head in positions[b]]
        assert actual == select_tokens(oracle_logits(batch, b), threshold, budget, 1, 1)
        numbers |= {len(head) for head in actual}
    assert len(numbers) > 2


def test_a_calibrated_gate_is_the_discriminant_of_what_later_queries_attend_to():
    """In two texts of nine tokens the last four attend to the first five, and two of these stay."""
    batch = dataclasses.replace(layer.random_batch(4), lengths=np.array([9, 1, 9], np.int32))
    kind, (block, observation) = AttentionGateTable(keep=40, channels=4, ridge=20), observe_prompts(batch)
    count = jax.jit(lambda block, observation: kind.count(block, observation, SPEC))
    counts = jax.tree.map(lambda x: np.asarray(x, np.float64)[[0, 2]].sum(0), count(block, observation))
    arrays = kind.arrays(counts, SPEC)
    x, is_kept, scales = [], [[] for _ in range(layer.K)], []
    for b in (0, 2):
        q, k = (np.asarray(y[b, ..., :9, :], np.float64) for y in (batch.q, batch.k))
        hidden = np.asarray(observation.hidden_states[b, 0, :9], np.float64)
        scales.append((32 * np.sqrt(4) / np.square(hidden).sum(1).mean()) ** 0.5)
        projected = hidden @ kind._projection(layer.D, SPEC) * scales[-1]
        weights = np.exp(projected @ projected.T / np.sqrt(4))
        x.append((weights / weights.sum(1, keepdims=True) @ hidden)[:5])
        attention = eviction.attention_weights(q, k)[:, :, 5:, :5].sum((1, 2))
        for head in range(layer.K):
            best = eviction.top_indices(attention[head].tolist(), 2)
            is_kept[head] += [t in best for t in range(5)]
    np.testing.assert_allclose(arrays["key"][0], kind._projection(layer.D, SPEC) * np.mean(scales), rtol=1e-4)
    for head in range(layer.K):
        direction, offset = fit_discriminant(np.concatenate(x), np.array(is_kept[head]), 20)
        np.testing.assert_allclose(arrays["value"][0] @ arrays["output"][0][:, head], direction, rtol=2e-3, atol=1e-3)
        np.testing.assert_allclose(arrays["bias"][head], offset, rtol=2e-3, atol=1e-3)


def test_what_cannot_be_says_so(tmp_path):
    narrow = {name: TABLE[name][:, :5] for name in ("query", "key", "value")}
    gate = Gate(TableFile(write_table(tmp_path, **narrow), "attention_gate"))
    with pytest.raises(
        KvjaxError, match="read hidden states of 5 channels, and the model has 8; make a table for this"
    ):
        gate.scores(*observe_prompts(layer.random_batch()), SPEC)
    for wrong, says in (
        ({"keep": 100}, "keep must lie in"),
        ({"channels": 0}, "must be at least 1, got 0"),
    ):
        with pytest.raises(KvjaxError, match=says):
            AttentionGateTable(**wrong)
    with pytest.raises(KvjaxError, match=r"each head would keep \[0, 1\] of 3 tokens that are asked, none or all"):
        AttentionGateTable().arrays({"kept": np.array([0.0, 1]), "tokens": np.array([3.0])}, SPEC)
