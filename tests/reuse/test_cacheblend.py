"""CacheBlend against reading the whole text, and its choice of tokens against the formula in NumPy."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import kvjax
from kvjax import KvjaxError
from kvjax.reuse.cacheblend import blend
from kvjax.reuse.chunk_layout import Span, layout_chunks, recompute
from kvjax.testing import toy_model

RNG = np.random.default_rng(0)
CHUNKS = [RNG.integers(0, 97, n).tolist() for n in (12, 20, 7)]
QUESTIONS = [RNG.integers(0, 97, n).tolist() for n in (4, 2)]
ORDER = [[0, 2, 1], [1]]
WHOLE = [[t for c in row for t in CHUNKS[c]] + q for row, q in zip(ORDER, QUESTIONS, strict=True)]


@functools.cache
def make_model() -> kvjax.Model:
    return toy_model(windows=(None, None, 9))


@pytest.fixture(scope="module")
def chunks():
    return kvjax.reuse.read_exactly(make_model(), CHUNKS)


@pytest.fixture(scope="module")
def whole_text():
    return kvjax.reuse.read_exactly(make_model(), WHOLE)


def keys_and_values(exact, layer: int, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [K T H] of a sequence, without padding."""
    n = int(exact.lengths[sequence])
    return tuple(np.asarray(x)[sequence, :, :n] for x in (exact.prompts[layer].k, exact.prompts[layer].v))


def test_all_tokens_again_are_the_whole_text(chunks, whole_text):
    blended = blend(chunks, ORDER, QUESTIONS, ratio=1.0)
    np.testing.assert_allclose(blended.last_logits, whole_text.last_logits, atol=1e-5)
    tokens, expected = (
        exact.compress("full", 64).generate(max_new_tokens=4, eos_ids=()).tokens for exact in (blended, whole_text)
    )
    assert tokens == expected


def test_a_first_chunk_is_exact_however_little_is_run(chunks, whole_text):
    blended = blend(chunks, ORDER, QUESTIONS, ratio=0.0)
    np.testing.assert_allclose(
        blended.last_logits[1], whole_text.last_logits[1], atol=1e-5
    )  # its only chunk is its first
    assert np.abs(np.asarray(blended.last_logits[0] - whole_text.last_logits[0])).max() > 1e-3
    for layer in range(3):
        pairs = zip(keys_and_values(blended, layer, 0), keys_and_values(whole_text, layer, 0), strict=True)
        for vectors, exact in pairs:
            np.testing.assert_allclose(vectors[:, :12], exact[:, :12], atol=1e-5)


def test_the_recomputed_tokens_deviate_most(chunks, whole_text):
    """The values of layer 1 are exact; int(39 * 0.2) = 7 of the 39 chunk tokens are run, and replaced in layer 2."""
    layout = layout_chunks(chunks, [Span(i, 0, len(c)) for i, c in enumerate(CHUNKS)], ORDER, QUESTIONS)
    blended, positions = recompute(chunks, layout, np.array([7, 4]), None, 1)
    exact_values = keys_and_values(whole_text, 1, 0)[1]
    chunk_values = np.concatenate([keys_and_values(chunks, 1, c)[1] for c in ORDER[0]], 1)
    deviation = ((exact_values[:, :39].astype(np.float64) - chunk_values) ** 2).sum((0, 2))
    expected = sorted(np.argsort(-deviation)[:7]) + [39, 40, 41, 42]
    recomputed = np.asarray(positions[0])
    np.testing.assert_array_equal(recomputed[recomputed >= 0], expected)
    others = np.setdiff1d(np.arange(39), expected)
    chunk_values = np.concatenate([keys_and_values(chunks, 2, c)[1] for c in ORDER[0]], 1)
    np.testing.assert_array_equal(keys_and_values(blended, 2, 0)[1][:, others], chunk_values[:, others])
    np.testing.assert_allclose(keys_and_values(blended, 1, 0)[0], keys_and_values(whole_text, 1, 0)[0], atol=1e-5)
    by_ratio = blend(chunks, ORDER, QUESTIONS, ratio=0.2)
    np.testing.assert_array_equal(by_ratio.last_logits, blended.last_logits)


def test_no_token_sees_a_later_one(chunks):
    """The question changes nothing in the chunks' keys and values (in the public code it does)."""
    one = blend(chunks, ORDER[:1], [[1, 2, 3]], ratio=0.3)
    other = blend(chunks, ORDER[:1], [[50, 60, 70]], ratio=0.3)
    for layer in range(3):
        for a, b in zip(keys_and_values(one, layer, 0), keys_and_values(other, layer, 0), strict=True):
            np.testing.assert_array_equal(a[:, :39], b[:, :39])


def test_a_row_depends_on_no_other(chunks):
    together, alone = blend(chunks, ORDER, QUESTIONS), blend(chunks, ORDER[:1], QUESTIONS[:1])
    np.testing.assert_allclose(together.last_logits[0], alone.last_logits[0], atol=1e-5)


def test_a_blended_text_goes_under_any_method_without_queries(chunks):
    context = blend(chunks, ORDER, QUESTIONS).compress("keydiff:budget=8 + int4", 64)
    assert context.generate(max_new_tokens=2).num_sequences == 2
    with pytest.raises(KvjaxError, match="read the prompts' tokens with it"):
        blend(chunks, ORDER, QUESTIONS).compress("snapkv:budget=8,window=4", 64)


@pytest.mark.parametrize(
    ("arguments", "more", "says"),
    [
        ((ORDER, QUESTIONS), {"ratio": 1.5}, "ratio must be a number from 0 to 1, got 1.5; the public code uses 0.16"),
        ((ORDER, QUESTIONS), {"layer": 3}, "layer must be an integer from 0 to 2, got 3"),
        ((ORDER, QUESTIONS[:1]), {}, "2 orders of chunks but 1 questions"),
        (([[3], [0]], QUESTIONS), {}, "there are chunks 0..2, got 3"),
    ],
)
def test_bad_input_is_named(chunks, arguments, more, says):
    with pytest.raises(KvjaxError, match=says):
        blend(chunks, *arguments, **more)


def test_a_method_that_would_read_the_text_again_says_so(chunks):
    with pytest.raises(KvjaxError, match="read the prompts' tokens with it"):
        blend(chunks, ORDER, QUESTIONS).compress("a_shape", 64)
