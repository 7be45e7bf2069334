"""Packed prompts are the prompts."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from kvjax import KvjaxError
from kvjax.generation.reuse.prepacking import pack_exactly, pack_rows, read_packed
from kvjax.testing import toy_model

MODEL = toy_model(layers=2, windows=(None, 9))
RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(0, 97, n).tolist() for n in (60, 23, 1, 30, 8, 64, 5)]


def test_an_example_by_hand():
    """5, 4, 3, 3 and 1 in rows of 8: 5 with 3, 4 with 3 and 1."""
    assert pack_rows([3, 5, 1, 3, 4], 8) == [(0, 5), (0, 0), (1, 7), (1, 4), (1, 0)]


def test_rows_hold_each_prompt_once():
    lengths = RNG.integers(1, 65, 40).tolist()
    used = np.zeros((40, 64), int)
    for n, (row, start) in zip(lengths, pack_rows(lengths, 64), strict=True):
        used[row, start : start + n] += 1
    assert used.max() == 1 and used.sum() == sum(lengths) and used.any(1).sum() <= 1.3 * sum(lengths) / 64 + 1


def test_keys_values_queries_and_logits_are_those_of_the_prompts():
    one, other = pack_exactly(MODEL, DOCUMENTS), kvjax.reuse.read_exactly(MODEL, DOCUMENTS)
    np.testing.assert_allclose(one.last, other.last, atol=1e-5)
    for mine, exact in zip(one.prompts, other.prompts, strict=True):
        for row, n in enumerate(map(len, DOCUMENTS)):
            for name in ("k", "v", "q"):
                a, b = (np.asarray(getattr(x, name))[row][..., :n, :] for x in (mine, exact))
                np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("method", ["snapkv:budget=12,window=4 + int8 + offload"])
def test_any_method_reads_packed_documents(method):
    one, other = (f(MODEL, DOCUMENTS, method, room=40) for f in (read_packed, kvjax.read))
    for a, b in zip(one.kept_positions(), other.kept_positions(), strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(np.stack(x), np.stack(y))
    more = [[i + 1, 5] for i in range(7)]
    np.testing.assert_allclose(one.feed(more).last, other.feed(more).last, atol=1e-4)
    assert one.bytes == other.bytes and one.cache.capacity == other.cache.capacity


def test_bad_input_is_named():
    with pytest.raises(KvjaxError, match="longest document has 64 tokens and width is 32; use width=64 or more"):
        pack_exactly(MODEL, DOCUMENTS, 32)
