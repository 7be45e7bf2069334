"""Packed prompts have the keys, values, queries and logits of separate ones."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import kvjax
from kvjax import KvjaxError
from kvjax.reuse.prepacking import pack_exactly, pack_rows, read_packed
from kvjax.testing import toy_model

RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(0, 97, n).tolist() for n in (60, 23, 1, 30, 8, 64, 5)]


@functools.cache
def make_model() -> kvjax.Model:
    return toy_model(layers=2, windows=(None, 9))


def test_an_example_by_hand():
    """Texts of 5, 4, 3, 3 and 1 tokens fill two rows of 8: 5 with 3, and 4 with 3 and 1."""
    assert pack_rows([3, 5, 1, 3, 4], 8) == [(0, 5), (0, 0), (1, 7), (1, 4), (1, 0)]


def test_rows_hold_each_prompt_once():
    lengths = RNG.integers(1, 65, 40).tolist()
    used = np.zeros((40, 64), int)
    for n, (row, start) in zip(lengths, pack_rows(lengths, 64), strict=True):
        used[row, start : start + n] += 1
    assert used.max() == 1 and used.sum() == sum(lengths) and used.any(1).sum() <= 1.3 * sum(lengths) / 64 + 1


def test_keys_values_queries_and_logits_are_those_of_the_prompts():
    packed, exact = pack_exactly(make_model(), DOCUMENTS), kvjax.reuse.read_exactly(make_model(), DOCUMENTS)
    np.testing.assert_allclose(packed.last_logits, exact.last_logits, atol=1e-5)
    for packed_layer, exact_layer in zip(packed.prompts, exact.prompts, strict=True):
        for b, n in enumerate(map(len, DOCUMENTS)):
            for name in ("k", "v", "q"):
                vectors, expected = (np.asarray(getattr(x, name))[b][..., :n, :] for x in (packed_layer, exact_layer))
                np.testing.assert_allclose(vectors, expected, atol=1e-5)


@pytest.mark.parametrize("method", ["snapkv:budget=12,window=4 + int8 + offload"])
def test_any_method_reads_packed_documents(method):
    packed, separate = (read(make_model(), DOCUMENTS, method, headroom=40) for read in (read_packed, kvjax.read))
    for packed_layer, separate_layer in zip(packed.kept_positions(), separate.kept_positions(), strict=True):
        for heads, expected_heads in zip(packed_layer, separate_layer, strict=True):
            np.testing.assert_array_equal(np.stack(heads), np.stack(expected_heads))
    more = [[i + 1, 5] for i in range(7)]
    np.testing.assert_allclose(packed.feed(more).last_logits, separate.feed(more).last_logits, atol=1e-4)
    assert packed.bytes == separate.bytes and packed.cache.capacity == separate.cache.capacity


def test_bad_input_is_named():
    with pytest.raises(KvjaxError, match="width must be an integer from 64 .* the longest document has 64 tokens"):
        pack_exactly(make_model(), DOCUMENTS, 32)
