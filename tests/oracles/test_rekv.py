"""ReKV against its paper, its lookup by hand, and the state of a question."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import IncompatibleMethod
from kvjax.methods.rekv import MeanKeys
from tests.contract import layer
from tests.oracles import rekv as oracle
from tests.oracles.online import rope

SMALL = "rekv:topk=1,block=2,sinks=1,recent=2"


def test_it_equals_the_paper_whatever_lies_in_empty_slots():
    layer.assert_decodes_as(SMALL, lambda *sequence: oracle.rekv(*sequence, 1, 2, 1, 2))


def test_the_cosine_is_over_all_heads_as_one_vector():
    """By hand: both heads' keys (3, 4) and (0, 0) against (1, 0) and (0, 1): 3 / 5, whatever the length of a block."""
    sums = jnp.array([[[3.0, 4.0], [30.0, 40.0]], [[0.0, 0.0], [0.0, 0.0]]])[None]
    q = jnp.array([[1.0, 0.0], [0.0, 1.0]]).reshape(1, 2, 1, 1, 2)
    np.testing.assert_allclose(MeanKeys(2).score(sums, q).ravel() * np.sqrt(2), [0.6, 0.6], rtol=1e-6)
    assert np.isfinite(MeanKeys(2).score(0 * sums, q)).all()


def test_only_kept_tokens_go_on_asking():
    batch, bound = layer.random_batch(), layer.bind(SMALL)
    state = layer.prefill(bound, batch)
    chunk, new = batch.tokens(0, 2), None
    for commit, count in ((0, 0), (1, 1)):
        out, next_state = layer.compile_extend(bound, commit)(state, chunk)
        for b, n in enumerate(batch.lengths):
            question = rope(np.asarray(batch.q[b, :, :, n : n + 2], np.float64), -np.arange(n, n + 2))[
                :, :, :count
            ].sum(2)
            np.testing.assert_allclose(next_state.reader_state.question[b], question, atol=1e-5)
        new = out if new is None else new
        np.testing.assert_allclose(out, new, atol=2e-6)  # the question's outputs do not depend on the stored tokens


def test_tokens_that_asked_cannot_be_taken_back():
    bound = layer.bind(SMALL)
    with pytest.raises(IncompatibleMethod, match="component `read`, QuestionRetrieval, keeps something of all tokens"):
        bound.method.read.crop(bound.storage, layer.prefill(bound, layer.random_batch()))
