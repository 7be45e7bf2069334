"""Fast KVzip against its oracle: gates, the tokens that always stay, and calibrated gates.

Fast KVzip in NumPy, float64, one token and head at a time (arXiv 2601.17668; code NVIDIA/kvpress).
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.table_file import TableFile
from kvjax.errors import KvjaxError
from kvjax.method_api import fit_linear_map
from kvjax.methods.fastkvzip import FastKVzipGates, GateScores
from tests.contract import layer
from tests.oracles.test_kvzap import SPEC, observe_prompts

GATES = FastKVzipGates().example(SPEC, np.random.default_rng(3))


def gate_score(x, head, query, query_bias, key, query_norm, key_norm, sink_keys, bias) -> float:
    """The score of a hidden state [D] in a head."""

    def normalize(vector, weight):
        return vector / np.sqrt(np.mean(vector**2) + 1e-6) * weight

    G, C = query.shape[1:3]
    own, gates = normalize(key[head] @ x, key_norm), []
    for g in range(G):
        q = normalize(query[head, g] @ x + query_bias[head, g], query_norm)
        logit = q @ own / np.sqrt(C) + bias[head, g]
        gates.append(1 / (1 + sum(np.exp(q @ sink / np.sqrt(C) - logit) for sink in sink_keys[head])))
    return float(np.mean(gates))


def test_scores_are_the_oracles_and_ends_score_1_whatever_padding_holds(tmp_path):
    table = TableFile(str(table_file.write(tmp_path / "table", "fastkvzip", SPEC, [GATES])), "fastkvzip")
    batch, scorer = layer.random_batch(2), GateScores(table, sinks=2, window_share=0.25)
    score = jax.jit(lambda block, observation: scorer.scores(block, observation, SPEC).per_kv_head)
    for padding in (0.0, np.inf):
        block, observation = observe_prompts(batch, padding)
        actual = np.asarray(score(block, observation))
        for b, n in enumerate(batch.lengths.tolist()):
            x = np.asarray(observation.hidden_states[b, 0, :n], np.float64)
            expected = np.array([[gate_score(token, h, **GATES) for token in x] for h in range(layer.K)])
            expected[:, :2] = expected[:, -{9: 2, 1: 1, 6: 1}[n] :] = 1  # a quarter of the tokens, and at least one
            np.testing.assert_allclose(actual[b, :, :n], expected, rtol=1e-4)
            assert (actual[b, :, n:] == -np.inf).all()


def test_a_calibrated_gate_is_the_sigmoid_of_the_map_that_was_fitted():
    batch, kind = layer.random_batch(4), FastKVzipGates(ridge=50)
    block, observation = observe_prompts(batch)
    counts = jax.jit(lambda block, observation: kind.count(block, observation, SPEC))(block, observation)
    counts = jax.tree.map(lambda x: np.asarray(x, np.float64).sum(0), counts)
    weight, offsets = fit_linear_map(counts, kind.ridge)
    arrays = {name: x.astype(np.float64) for name, x in kind.arrays(counts, SPEC).items()}
    for x in np.asarray(observation.hidden_states[0, 0, :9], np.float64):
        expected = 1 / (1 + np.exp(-(weight @ x + offsets)))
        np.testing.assert_allclose([gate_score(x, h, **arrays) for h in range(layer.K)], expected, rtol=1e-4)


def test_gates_of_another_model_are_refused(tmp_path):
    narrow = {name: GATES[name][..., :6] for name in ("query", "key")}
    table = TableFile(str(table_file.write(tmp_path / "table", "fastkvzip", SPEC, [GATES | narrow])), "fastkvzip")
    with pytest.raises(
        KvjaxError, match="read hidden states of 6 channels, and the model has 8; make a table for this"
    ):
        GateScores(table).scores(*observe_prompts(layer.random_batch()), SPEC)
