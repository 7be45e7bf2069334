"""HeadKV against its oracle: the number of tokens of each head and layer, and the tokens themselves.

HeadKV's budgets (arXiv 2410.19258, section 3), from the formula in its public code (`ReasonSnapKVCluster`).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.table_file import TableFile
from kvjax.engine.plan import specs
from kvjax.errors import KvjaxError
from kvjax.methods.headkv import HeadWeightBudgets
from kvjax.testing import toy_model
from tests.contract import layer
from tests.oracles import adakv, eviction


def oracle_capacities(weights, budget: int, window: int, beta: float) -> list[list[int]]:
    """The tokens that each head keeps, its window included, by weights [L][K]."""
    base = budget - window
    heads = sum(len(layer_weights) for layer_weights in weights)
    total = sum(sum(layer_weights) for layer_weights in weights)
    pool, floor = (base // beta) * heads, base - base // beta
    return [[window + round(w / total * pool + floor) for w in layer_weights] for layer_weights in weights]


SPEC = dataclasses.replace(layer.spec(), num_layers=3, method_layers=None, num_kv_heads=4)


def write_table(path, weights, spec=None) -> str:
    """Writes a table of weights [L K] and returns its path."""
    tables = [{"weights": np.asarray(heads, np.float32)} for heads in weights]
    return str(table_file.write(path / "heads.safetensors", "heads", spec or layer.spec(), tables))


def test_the_example_by_hand(tmp_path):
    assert oracle_capacities([[0.75, 0.25]], 128, 0, 1.01) == [[191, 65]]
    rule = HeadWeightBudgets(TableFile(write_table(tmp_path, [[0.75, 0.25]]), "heads"), 160, 32, 1.01)
    assert rule.at(layer.spec()).tokens == (32 + 191, 32 + 65)


@pytest.mark.parametrize(("budget", "window", "beta"), [(128, 32, 1.01), (40, 8, 2), (9, 0, 5), (300, 1, 1)])
def test_numbers_are_the_oracles(tmp_path, budget, window, beta):
    weights = np.random.default_rng(budget).uniform(size=(3, 4)).astype(np.float32)
    rule = HeadWeightBudgets(TableFile(write_table(tmp_path, weights, SPEC), "heads"), budget, window, beta)
    tokens = [list(rule.at(dataclasses.replace(SPEC, index=i)).tokens) for i in range(3)]
    assert tokens == oracle_capacities(weights.astype(np.float64).tolist(), budget, window, beta)


def test_heads_keep_their_best_and_read_them_as_under_a_mask(tmp_path):
    batch, table = layer.random_batch(5), write_table(tmp_path, [[0.2, 0.8]])
    bound = layer.bind(f"headkv:budget=5,window=2,kernel=3,beta=1.5,page=4,table={table}")
    state = layer.prefill(bound, batch, padding=np.inf)
    positions, out = np.asarray(bound.positions(state)), layer.decode(bound.method, batch, state=state)
    capacities = oracle_capacities([[0.2, 0.8]], 5, 2, 1.5)[0]
    assert capacities == [4, 6]
    for b, n in enumerate(batch.lengths.tolist()):
        q, k, v = (np.asarray(x[b]) for x in (batch.q, batch.k, batch.v))
        scores = eviction.snapkv_scores(eviction.attention_weights(q[..., :n, :], k[:, :n]), 2, 3, "max")[1]
        for head, keep in enumerate(capacities):
            tokens = eviction.select_tokens(scores[head : head + 1], keep, 0, 2)[0]
            assert sorted(p for p in positions[b, head].tolist() if p >= 0) == tokens
            for t in range(layer.STEPS):
                expected = adakv.attend(q[head, :, n + t], k[head], v[head], tokens, n + t, n)
                np.testing.assert_allclose(out[b, head, :, t], expected, atol=5e-6)


def test_tokens_move_between_layers(tmp_path):
    model, prompts = toy_model(kv_heads=2), [list(range(30)), [5]]
    weights = [[1, 3], [0, 0], [6, 2]]
    text = f"headkv:budget=12,window=4,kernel=3,page=4,table={write_table(tmp_path, weights, specs(model.config)[0])}"
    capacities = oracle_capacities(weights, 12, 4, 1.01)
    assert sum(map(sum, capacities)) == 3 * 2 * 12
    for layers, numbers in zip(kvjax.read(model, prompts, text).kept_positions(), capacities, strict=True):
        for heads, prompt in zip(layers, prompts, strict=True):
            assert [len(head) for head in heads] == [min(len(prompt), number) for number in numbers]


def test_wrong_values_say_so(tmp_path):
    for weights in ([[-1, 2]], [[0, 0]]):
        with pytest.raises(KvjaxError, match="weights of heads must be 0 or more and not all 0, got"):
            layer.bind(f"headkv:table={write_table(tmp_path, weights)}")
