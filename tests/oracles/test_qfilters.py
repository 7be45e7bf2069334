"""Q-Filters against its oracle: scores, and filters calibrated on texts.

Q-Filters in NumPy, float64 (arXiv 2503.02812; code NathanGodey/qfilters): one head at a time.
"""

from __future__ import annotations

import jax
import numpy as np

from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.table_file import TableFile
from kvjax.core.attention_mass import Observation
from kvjax.methods.qfilters import QFilters, QueryFilter
from tests.contract import layer
from tests.oracles import eviction


def query_filter(q) -> np.ndarray:
    """The filter [H] of a key/value head from the queries [G T H] of its query heads."""
    opposite = []
    for queries in q:
        direction = np.linalg.svd(queries, full_matrices=False)[2][0]
        opposite.append(-direction if (queries @ direction).mean() > 0 else direction)
    return np.mean(opposite, 0)


def test_scores_are_minus_the_product_of_key_and_filter_whatever_padding_holds(tmp_path):
    batch, filters = layer.random_batch(2), np.random.default_rng(0).normal(size=(layer.K, layer.H)).astype(np.float32)
    table = str(table_file.write(tmp_path / "table", "qfilters", layer.spec(), [{"filter": filters}]))
    score = jax.jit(
        lambda block: QueryFilter(TableFile(table, "qfilters")).scores(block, None, layer.spec()).per_kv_head
    )
    bound = layer.bind(f"qfilters:budget=4,recent=1,table={table}")
    for padding in (0.0, np.inf):
        actual, state = np.asarray(score(layer.prompt(batch, padding)[1])), layer.prefill(bound, batch, padding)
        for b, n in enumerate(batch.lengths):
            expected = np.array([[-k @ f for k in np.asarray(batch.k[b, h, :n], float)] for h, f in enumerate(filters)])
            np.testing.assert_allclose(actual[b, :, :n], expected, atol=1e-4)
            assert (actual[b, :, n:] == -np.inf).all()
            kept = [sorted(p for p in head.tolist() if p >= 0) for head in np.asarray(state.pos[b])]
            assert kept == eviction.select_tokens(expected, 4, 0, 1)


def test_a_calibrated_filter_is_the_first_right_singular_vector_of_all_queries():
    """Of 18 queries of each head in two texts; those of one head lie on the other side of their direction."""
    batch, kind, offset = layer.random_batch(4), QFilters(), np.random.default_rng(1).normal(size=layer.H)
    sides = np.array([1, -1], np.float32)[:, None, None, None] * np.asarray(offset, np.float32)
    q, block = layer.prompt(batch, np.inf)
    observation = Observation(q + sides[None], block.pos[:, 0])
    counts = jax.jit(lambda block, observation: kind.count(block, observation, layer.spec()))(block, observation)
    counts = jax.tree.map(lambda x: np.asarray(x, np.float64)[[0, 2]].sum(0), counts)
    actual = kind.arrays(counts, layer.spec())["filter"]
    texts = [np.asarray(observation.q[b, ..., : batch.lengths[b], :], np.float64) for b in (0, 2)]
    expected = [query_filter(head) for head in np.concatenate(texts, -2)]
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert (np.array(expected) @ offset * [1, -1] < 0).all()  # against the queries
