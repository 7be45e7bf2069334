"""SimLayerKV in NumPy, one sequence and layer at a time, from arXiv 2410.13846 and kvpress' counts."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import kvjax
from kvjax.core.types import KVBlock
from kvjax.methods.simlayerkv import LazyLayers
from kvjax.testing import toy_model
from tests.contract import layer
from tests.oracles.eviction import attention_weights


def lazy_share(attention: np.ndarray, sinks: int, recent: int, last: int) -> float:
    """The mean attention [K G T T] that the last queries give the sinks, and the `recent` tokens before themselves."""
    T = attention.shape[2]
    before = max(T - last, 0)
    tokens = [s for s in range(before) if s < sinks or s >= before - recent]
    return attention[:, :, before:][..., tokens].sum(-1).mean()


@pytest.mark.parametrize(("sinks", "recent", "last"), [(1, 3, 1), (2, 2, 3)])
def test_a_layer_is_measured_by_what_its_last_queries_give(sinks, recent, last):
    batch, budgets = layer.random_batch(2), LazyLayers(last, 0.5, sinks, recent)
    method = kvjax.methods.simlayerkv(0.5, recent=max(recent, last + 1), sinks=sinks, last=last)
    bound = layer.bind(method)

    @jax.jit
    def measure(q: jax.Array, block: KVBlock) -> jax.Array:
        prompt, lengths = layer.observe_prompt(bound, q, block)
        return budgets.measure(bound.selection, *layer.observed_block(bound, prompt, lengths))

    for padding in (0.0, 1e4):
        actual = np.asarray(measure(*layer.prompt(batch, padding)))
        for b, n in enumerate(batch.lengths):
            q, k, _ = (x[..., :n, :] for x in batch.exact(b))
            expected = lazy_share(attention_weights(q, k), sinks, recent, last)
            np.testing.assert_allclose(actual[b], expected, atol=1e-6)


def test_lazy_layers_keep_few_tokens_and_free_their_slots():
    """Layers of a model, each sequence by itself; a short prompt stays whole, and slots are those of the longest."""
    model, prompts = toy_model(layers=2), [list(range(1, 90)), [9, 4] * 40, [5, 6, 7]]
    shares = []
    for threshold in (0.0, 1.0):
        method = kvjax.methods.simlayerkv(threshold, recent=11, sinks=2)
        _, cache = kvjax.prefill(model, prompts, method, capacity=128)
        counts = [[len(heads[0]) for heads in kept] for kept in kvjax.kept_positions(cache)]
        assert counts == ([[12, 12, 3]] * 2 if threshold == 0 else [[89, 80, 3]] * 2)
        first = kvjax.kept_positions(cache)[0][0][0].tolist()
        assert threshold == 1 or first == [0, 1, *range(79, 89)]
        shares.append([state.pos.shape[2] for state in cache.layers])
    assert max(shares[0]) < min(shares[1]) - 60


def test_a_threshold_divides_layers_by_their_measures():
    measures, lengths = np.array([[0.9, 0.2], [0.5, 1.0], [0.5001, 1.0000001]], np.float32), np.array([40, 9], np.int32)
    kept = LazyLayers(1, 0.5, 2, 6).allocate_tokens(layer.bind("simlayerkv").selection, measures, lengths)
    assert np.asarray(kept).tolist() == [[7, 9], [40, 9], [7, 9]]
    none = LazyLayers(1, 1.0, 2, 6).allocate_tokens(layer.bind("simlayerkv").selection, measures, lengths)
    assert np.asarray(none).tolist() == [[40, 9]] * 3
