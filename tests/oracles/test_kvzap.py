"""KVzap and DMS against their oracles: scores, tokens above a threshold, and the calibrated map.

In NumPy, float64, one sequence at a time (arXiv 2601.07891, 2506.05345; code NVIDIA/kvpress).
"""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import pytest

from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.table_file import TableFile
from kvjax.core.attention_mass import Observation
from kvjax.core.types import KVBlock
from kvjax.errors import KvjaxError
from kvjax.methods.kvzap import KVzapTable, PredictedScores
from tests.contract import layer
from tests.oracles import eviction
from tests.oracles.online import softmax
from tests.oracles.test_locret import fit_regression

SPEC = layer.spec()
RNG = np.random.default_rng(3)
SHAPES = {"hidden": (5, layer.D), "hidden_bias": (5,), "output": (layer.K, 5), "output_bias": (layer.K,)}
NETWORK = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def apply_network(x, hidden, hidden_bias, output, output_bias) -> np.ndarray:
    """The scores [K] of a hidden state [D]."""
    units = [u * (1 + math.erf(u / math.sqrt(2))) / 2 for u in hidden @ x + hidden_bias]
    return output @ units + output_bias


def select_above(scores, threshold, budget, window) -> list[list[int]]:
    """Selects by scores [K T] the window of each head, and the best tokens of all heads that reach the threshold."""
    K, n = scores.shape
    first = max(n - window, 0)
    reached = sorted((-scores[h, t], t, h) for h in range(K) for t in range(first) if scores[h, t] >= threshold)
    best = reached[: K * max(min(budget, n) - (n - first), 0)]
    return [sorted([*range(first, n), *(t for _, t, head in best if head == h)]) for h in range(K)]


def evict_delayed(q, k, v, n: int, threshold: float, budget: int, window: int) -> np.ndarray:
    """Decodes q [K G S H], k, v [K S H], a prompt of n tokens, by minus the norms of keys -> outputs [K G S-n H]."""
    K, G, S, H = q.shape
    out, scores = np.empty((K, G, S - n, H)), -np.linalg.norm(k, axis=-1)
    for h in range(K):
        # The selection keeps the best of the budget; those below the threshold leave.
        recent = range(max(n - window, 0), n)
        others = sorted(range(recent[0]), key=lambda s: -scores[h, s])[: max(budget - len(recent), 0)]
        cached = [*recent, *(s for s in others if scores[h, s] >= threshold)]
        for t in range(n, S):
            cached.append(t)
            out[h, :, t - n] = softmax(q[h, :, t] @ k[h, cached].T / np.sqrt(H)) @ v[h, cached]
            cached = [s for s in cached if s > t - window or scores[h, s] >= threshold]
            if len(cached) > budget:
                cached.remove(min((s for s in cached if s <= t - window), key=lambda s: scores[h, s]))
    return out


def plus_scores(q, k, v, hidden, projection) -> np.ndarray:
    """KVzip+'s scores [K n] of the earlier half by the later half, from one text's q, k, v and hidden states [T D]."""
    K, G, T, _ = q.shape
    first, weights = T - T // 2, eviction.attention_weights(q, k)
    out = np.zeros((K, first))
    for h in range(K):
        for s in range(first):
            for g in range(G):
                added = np.linalg.norm(v[h, s] @ projection[h, g])
                out[h, s] = max(
                    out[h, s], *(weights[h, g, t, s] * added / np.linalg.norm(hidden[t]) for t in range(first, T))
                )
    return out


def observe_prompts(batch: layer.SequenceBatch, padding: float = 0.0) -> tuple[KVBlock, Observation]:
    """The prompts with the battery's observation of them."""
    q, block = layer.prompt(batch, padding)
    hidden = np.where(np.isfinite(block.v[:, :1, :, : layer.D]), np.tanh(block.v[:, :1, :, : layer.D]), np.inf)
    projection = np.random.default_rng(5).normal(size=(1, layer.K, layer.G, layer.H, layer.D))
    return block, Observation(
        q, block.pos[:, 0], hidden_states=hidden.astype(np.float32), output_projection=projection.astype(np.float32)
    )


def oracle_scores(batch: layer.SequenceBatch, b: int, network=NETWORK) -> np.ndarray:
    x = observe_prompts(batch)[1].hidden_states[b, 0, : batch.lengths[b]].astype(np.float64)
    return np.array([apply_network(token, *network.values()) for token in x]).T


def write_table(path, **changed: np.ndarray) -> str:
    return str(table_file.write(path / "table", "kvzap", SPEC, [NETWORK | changed]))


def test_scores_are_the_oracles_whatever_padding_holds(tmp_path):
    batch, scorer = layer.random_batch(2), PredictedScores(TableFile(write_table(tmp_path), "kvzap"))
    score = jax.jit(lambda block, observation: scorer.scores(block, observation, SPEC).per_kv_head)
    for padding in (0.0, np.inf):
        actual = np.asarray(score(*observe_prompts(batch, padding)))
        for b, n in enumerate(batch.lengths):
            np.testing.assert_allclose(actual[b, :, :n], oracle_scores(batch, b), atol=1e-4)
            assert (actual[b, :, n:] == -np.inf).all()


@pytest.mark.parametrize(("budget", "threshold"), [("100%", 0.2), ("4", -1.0)])
def test_under_dms_heads_keep_what_reaches_the_threshold_up_to_the_budget(tmp_path, budget, threshold):
    batch = layer.random_batch(2)
    text = f"kvzap:budget={budget},recent=2,table={write_table(tmp_path)} + dms:threshold={threshold},page=4"
    bound = layer.bind(text)
    positions, numbers = np.asarray(bound.positions(layer.prefill(bound, batch))), set()
    for b in range(layer.B):
        actual = [sorted(p for p in head.tolist() if p >= 0) for head in positions[b]]
        tokens = 4 if budget == "4" else int(batch.lengths[b])
        assert actual == select_above(oracle_scores(batch, b), threshold, tokens, 2)
        numbers |= {len(head) for head in actual}
    assert len(numbers) > 2


def test_a_score_that_is_the_threshold_stays(tmp_path):
    """All scores are 0.3, which no binary fraction is."""
    flat = write_table(
        tmp_path, output=np.zeros((layer.K, 5), np.float32), output_bias=np.full(layer.K, 0.3, np.float32)
    )
    bound = layer.bind(f"kvzap:budget=100%,recent=1,table={flat} + dms:threshold=0.3,page=4")
    assert (np.asarray(bound.positions(layer.prefill(bound, layer.random_batch())))[0] >= 0).sum(-1).tolist() == [9, 9]


def test_a_calibrated_map_is_the_regression_of_the_logarithm_of_what_later_queries_attend_to():
    batch = dataclasses.replace(layer.random_batch(4), lengths=np.array([9, 1, 9], np.int32))
    kind, (block, observation) = KVzapTable(ridge=50), observe_prompts(batch)
    counts = jax.jit(lambda block, observation: kind.count(block, observation, SPEC))(block, observation)
    arrays = kind.arrays(jax.tree.map(lambda x: np.asarray(x, np.float64).sum(0), counts), SPEC)
    x, y = [], []
    for b in (0, 2):
        q, k, v = (np.asarray(a[b, ..., :9, :], np.float64) for a in (batch.q, batch.k, batch.v))
        hidden = np.asarray(observation.hidden_states[b, 0, :9], np.float64)
        y.append(np.log(plus_scores(q, k, v, hidden, np.asarray(observation.output_projection[0], np.float64))))
        x.append(hidden[:5])
    x, y = np.concatenate(x), np.concatenate(y, 1)
    weight = fit_regression(x, y, 50)
    offsets = y.mean(1) - weight @ x.mean(0)
    for token in x:
        np.testing.assert_allclose(apply_network(token, *arrays.values()), weight @ token + offsets, atol=1e-3)


def test_what_cannot_be_says_so(tmp_path):
    scorer = PredictedScores(TableFile(write_table(tmp_path, hidden=NETWORK["hidden"][:, :6]), "kvzap"))
    with pytest.raises(
        KvjaxError, match="read hidden states of 6 channels, and the model has 8; make a table for this"
    ):
        scorer.scores(*observe_prompts(layer.random_batch()), SPEC)
    with pytest.raises(KvjaxError, match="no token of these texts is asked by a later one; give texts of at least 2"):
        KVzapTable().arrays({"tokens": np.zeros((1, 1))}, SPEC)


@pytest.mark.parametrize("budget", [4, 6, 100])
def test_decoded_tokens_leave_when_they_leave_the_window(budget):
    """Half of the keys are longer than 5.6; a budget of 4 is also full of better ones, and 100 never is."""
    method = f"keynorm:budget={budget},recent=2 + dms:threshold=-5.6,decode=true"
    layer.assert_decodes_as(method, lambda q, k, v, n: evict_delayed(q, k, v, n, -5.6, budget, 2))


def test_a_step_without_hidden_states_is_refused_by_name():
    bound, batch = layer.bind("kvzap:budget=6,recent=2 + dms:threshold=0,decode=true"), layer.random_batch()
    with pytest.raises(KvjaxError, match="scores decoded tokens by their hidden states.*give them with every token"):
        layer.decode("kvzap:budget=6,recent=2 + dms:threshold=0,decode=true", batch)
    assert bound.needs.decoded_hidden_states


def test_tokens_of_unlike_heads_are_scored_by_their_own_hidden_states():
    """The selection keeps other tokens in each head; every score that the policy holds is the network's."""
    bound, batch = layer.bind("kvzap:budget=6,recent=2 + dms:threshold=-1e9,decode=true"), layer.random_batch()
    state = layer.prefill(bound, batch)
    whole = layer.prefill(layer.bind("kvzap:budget=100,recent=2 + dms:threshold=-1e9,decode=true"), batch)
    pos, scores = np.asarray(state.pos[0]), np.asarray(state.policy_state[0])
    all_pos, all_scores = np.asarray(whole.pos[0]), np.asarray(whole.policy_state[0])
    assert pos[0].tolist() != pos[1].tolist()
    for head in range(layer.K):
        known = dict(zip(all_pos[head].tolist(), all_scores[head].tolist(), strict=True))
        kept = pos[head] >= 0
        np.testing.assert_allclose(scores[head][kept], [known[p] for p in pos[head][kept].tolist()], rtol=1e-5)
