"""Cache-Craft: its measures against NumPy, and reuse against reading the whole text."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import kvjax
from kvjax import KvjaxError
from kvjax.reuse.cachecraft import Chunk, cut, overlap
from kvjax.reuse.chunk_layout import Span
from kvjax.testing import toy_model
from tests.oracles import cachecraft as oracle

RNG = np.random.default_rng(0)
A, B, C, D = (tuple(RNG.integers(0, 97, n).tolist()) for n in (9, 14, 6, 11))
QUESTION = [5, 6, 7]


@functools.cache
def make_model() -> kvjax.Model:
    return toy_model(layers=2)


@pytest.fixture(scope="module")
def chunks():
    """The chunks of two prompts: A B C and a question, D A."""
    read = kvjax.reuse.read_exactly(make_model(), [[*A, *B, *C, *QUESTION], [*D, *A]])
    return cut(read, [[9, 14, 6], [11, 9]])


def test_impact_is_the_formula(chunks):
    read = chunks.read
    mean = np.mean(
        [
            oracle.attention_weights(np.asarray(p.q[0, :, :, :32]).reshape(4, 32, 8), np.asarray(p.k[0, :, :32]))
            for p in read.prompts
        ],
        0,
    )
    for i in range(3):
        assert chunks.chunks[i].impact == pytest.approx(oracle.context_impact(mean, [9, 14, 6], i), abs=1e-5)
        assert chunks.chunks[i].tokens == (A, B, C)[i] and chunks.chunks[i].preceding == (A, B, C)[:i]
    assert chunks.chunks[0].impact == 0.5  # nothing before it
    np.testing.assert_allclose(chunks.chunks[2].attention_to_context, mean[23:29, :23].sum(1), atol=1e-5)
    np.testing.assert_allclose(chunks.chunks[2].inter, [mean[23:29, :9].sum(), mean[23:29, 9:23].sum()], atol=1e-5)


def test_overlap_by_hand():
    """Attention to P, Q, R is 1, 2, 5: P and R have 6 / 8 of it; in reversed order their one pair is swapped, so 0."""
    p, q, r = (1,), (2,), (3,)
    chunk = Chunk(Span(0, 3, 4), (4,), (p, q, r), (1.0, 2.0, 5.0), 0.6, np.zeros(1))
    assert overlap(chunk, [p, q, r]) == 1.0
    assert overlap(chunk, [p, r]) == 6 / 8
    assert overlap(chunk, [r, p]) == 0.0
    assert overlap(chunk, [r, p, q]) == pytest.approx(1 - 2 / 3)
    assert overlap(chunk, [(9,)]) == overlap(chunk, []) == 0.0


def test_a_prompt_that_comes_again_is_reused_exactly(chunks):
    reused = chunks.reuse([[0, 1, 2]], [QUESTION])
    whole = kvjax.reuse.read_exactly(make_model(), [[*A, *B, *C, *QUESTION]])
    np.testing.assert_allclose(reused.last_logits, whole.last_logits, atol=1e-5)
    assert chunks._recompute_mask([0, 1, 2], 1.0).sum() == 0


def test_with_enough_tokens_it_is_the_whole_text(chunks):
    """Chunk 4 is A, read after D; at this alpha a chunk without its old context before it is recomputed whole."""
    order, texts = [[2, 1, 4], [3, 0]], [[*C, *B, *A, *QUESTION], [*D, *A, 1]]
    reused = chunks.reuse(order, [QUESTION, [1]], alpha=100.0)
    whole = kvjax.reuse.read_exactly(make_model(), texts)
    np.testing.assert_allclose(reused.last_logits, whole.last_logits, atol=1e-5)
    tokens, expected = (
        exact.compress("full", 64).generate(max_new_tokens=3, eos_ids=()).tokens for exact in (reused, whole)
    )
    assert tokens == expected


def test_more_tokens_come_nearer(chunks):
    """A chunk in a new place recomputes the tokens that attended most to its old context, and no others."""
    whole = np.asarray(kvjax.reuse.read_exactly(make_model(), [[*D, *B, *QUESTION]]).last_logits)

    def max_error(alpha: float) -> float:
        return np.abs(np.asarray(chunks.reuse([[3, 1]], [QUESTION], alpha=alpha).last_logits) - whole).max()

    assert max_error(alpha=100.0) < 1e-5 < max_error(alpha=0.0)
    mask = chunks._recompute_mask([3, 1], 1.0)
    chunk = chunks.chunks[1]
    count = int(np.ceil(chunk.impact * 14))
    np.testing.assert_array_equal(np.flatnonzero(mask[11:]), np.sort(np.argsort(-chunk.attention_to_context)[:count]))
    assert mask[:11].sum() == 0  # D was first, and is again


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: c.reuse([[5]], [[1]]), "there are chunks 0..4, got 5"),
        (
            lambda c: c.reuse([[0]], [[1]], alpha=-1.0),
            "alpha must be a number from 0 to inf, got -1.0",
        ),
        (lambda c: cut(c.read, [[1]]), "have no chunks of .* give a list of lengths for each prompt"),
        (lambda c: cut(c.read, [[40], [1]]), "prompts of .32, .* tokens have no chunks of"),
    ],
)
def test_bad_input_is_named(chunks, call, says):
    with pytest.raises(KvjaxError, match=says):
        call(chunks)
