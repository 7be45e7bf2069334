"""KCache equals its NumPy oracle, step by step, on ragged sequences (C7)."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax import methods
from tests.contract import layer
from tests.oracles.kcache import kcache


@pytest.mark.parametrize("n", [1, 3, 8, 50])
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("granularity", ["query", "kv"])
def test_kcache_equals_the_paper(n, renormalise, granularity):
    batch = layer.random_batch(seed=n)
    out = layer.decode(methods.kcache(n, device_layers=0, renormalise=renormalise, granularity=granularity), batch)
    for b, length in enumerate(batch.lengths):
        for t in range(layer.STEPS):
            at = length + t
            q = np.asarray(batch.q[b])[:, :, at].reshape(-1, layer.H)
            k, v = (np.asarray(x[b])[:, : at + 1] for x in (batch.k, batch.v))
            expected = kcache(q, k, v, n, renormalise, granularity == "kv")
            np.testing.assert_allclose(out[b, :, :, t].reshape(-1, layer.H), expected, atol=2e-6)


def test_a_small_n_without_renormalising_shrinks_the_output():
    batch = layer.random_batch()
    plain, scaled = (layer.decode(methods.kcache(1, 0, r), batch) for r in (False, True))
    assert np.linalg.norm(plain) < 0.9 * np.linalg.norm(scaled)
