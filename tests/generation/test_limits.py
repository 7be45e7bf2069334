"""Memory that runs out is an error with a remedy, and positions beyond the model's give a warning."""

from __future__ import annotations

import functools
import warnings

import jax
import numpy as np
import pytest

import kvjax
from kvjax import KvjaxError
from kvjax.engine import prefill as engine_prefill
from kvjax.errors import KvjaxWarning
from kvjax.generation import user_warnings
from kvjax.testing import toy_model

INFLLM = "infllm:local=32,sinks=4,block=8,chunk=8"


@functools.cache
def make_model() -> kvjax.Model:
    return toy_model(layers=1, max_positions=64)


def one_prompt(num_tokens):
    return [np.arange(num_tokens) % 97]


def test_a_cache_beyond_32_bits_is_refused():
    with pytest.raises(KvjaxError, match="positions are 32-bit integers; ask for fewer new tokens"):
        kvjax.generate(make_model(), one_prompt(4), "full", max_new_tokens=2**31 - 1)
    for new in (2**31, 10**12, 10**20):
        with pytest.raises(KvjaxError, match="max_new_tokens must be an integer from 1 to 2147483647, got"):
            kvjax.generate(make_model(), one_prompt(4), "full", max_new_tokens=new)


@pytest.mark.parametrize("begins", ["RESOURCE_EXHAUSTED: ", "INTERNAL: Error dispatching computation: "])
def test_running_out_of_memory_is_an_error_with_a_remedy(monkeypatch, begins):
    def prefill(*args, **kwargs):
        raise jax.errors.JaxRuntimeError(f"{begins}Out of memory allocating 9 bytes.")

    monkeypatch.setattr(engine_prefill, "prefill", prefill)
    with pytest.raises(KvjaxError, match="not enough memory .*9 bytes.*fewer or shorter prompts"):
        kvjax.read(make_model(), one_prompt(4), "full")


@pytest.mark.parametrize(
    ("method", "prompt", "fed"),
    [("full", True, True), ("streaming_llm:recent=20", True, False), (INFLLM, False, False)],
)
def test_positions_that_the_model_does_not_know(method, prompt, fed):
    """streaming_llm reads a prompt at its own positions; only decoded tokens have positions inside the cache."""

    def expect_warning(is_expected):
        if is_expected:
            return pytest.warns(KvjaxWarning, match="beyond the 64 positions")
        return warnings.catch_warnings()

    with expect_warning(False):
        context = kvjax.read(make_model(), one_prompt(60), method)
    with expect_warning(fed):
        context.feed(one_prompt(8))
    with expect_warning(fed):
        user_warnings.warn_of_positions(make_model(), context.cache.plan, int(context.cache.length.max()), 5)
    user_warnings.warn_of_positions(make_model(), context.cache.plan, int(context.cache.length.max()), 4)
    with expect_warning(prompt) as warned:
        kvjax.prefill(make_model(), one_prompt(65), method)
    assert not prompt or warned[0].filename == __file__  # the line that called kvjax


def test_a_share_of_a_short_prompt_keeps_what_is_protected():
    """A budget of fewer tokens than are protected is an error; a fraction of a short prompt is not."""
    context = kvjax.read(make_model(), one_prompt(11), "snapkv:budget=25%,window=8")
    assert {len(head) for layer in context.kept_positions() for sequence in layer for head in sequence} == {8}
    with pytest.raises(
        KvjaxError, match=r"budget=2 .* less than the 8 tokens that always stay, window=8; give budget>=8, or window<=2"
    ):
        kvjax.read(make_model(), one_prompt(11), "snapkv:budget=2,window=8")


@pytest.mark.parametrize("method", ["full", "snapkv:budget=48", "kivi:bits=2,group=8,residual=16", "kcache:n=8"])
def test_what_is_planned_for_a_capacity_is_what_is_held(method):
    for tokens, capacity in ((33, 70), (64, 64), (20, 203)):
        _, cache = kvjax.prefill(make_model(), one_prompt(tokens), method, capacity=capacity)
        assert cache.capacity == -(-capacity // 64) * 64  # the requested capacity, in multiples of 64
        planned = kvjax.planned_bytes(
            method, make_model().config, tokens, capacity=cache.capacity, dtype=make_model().dtype
        )
        assert planned == kvjax.state_bytes(cache)
