"""A cache shorter than the exact window of a codec stays exact."""

from __future__ import annotations

import functools

import pytest

import kvjax
from kvjax.testing import toy_model

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]


@functools.cache
def make_model() -> kvjax.Model:
    return toy_model(layers=1)


@pytest.mark.parametrize("rest", ["", " + offload"])
@pytest.mark.parametrize("first", ["", "snapkv:budget=4,window=2,kernel=3 + "])
def test_a_cache_shorter_than_the_window_is_exact(first, rest):
    """A flush quantizes 128 tokens; host buffers were once smaller than a flush, and the program did not compile."""
    method = f"{first}kivi:bits=4,group=8,residual=128{rest}"
    exact = kvjax.generate(make_model(), PROMPTS, (first + "full") if first else "full", max_new_tokens=5)
    assert kvjax.generate(make_model(), PROMPTS, method, max_new_tokens=5).tokens == exact.tokens
