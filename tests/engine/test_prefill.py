"""Prompts that are read in chunks: layer by layer, so that one layer's exact keys and values exist at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Config, functional
from kvjax.engine import prefill as engine_prefill
from kvjax.engine.forward import Target

TOKENS, VOCAB = 300, 40
LENGTHS = np.array([TOKENS, 211], np.int32)


@functools.cache
def make_model(layers: int) -> kvjax.Model:
    sizes = dict(width=16, heads=4, kv_heads=4, head_dim=32, mlp_width=32)
    return kvjax.random_model(Config.llama(vocab_size=VOCAB, layers=layers, max_positions=2048, **sizes))


def reading(method: str, layers: int, chunk: int | None) -> Any:
    config = make_model(layers).config
    return functools.partial(
        functional.prefill, plan=functional.bind(method, config), config=config, capacity=TOKENS + 16, chunk=chunk
    )


@pytest.mark.parametrize(
    "method",
    [
        "streaming_llm:recent=40",
        "kivi:bits=4,group=8,residual=16",
        "snapkv:budget=64,window=8",
        "accumulated:budget=64,recent=2,sinks=2",  # observes all queries
        "cur:budget=64,window=8",
        "think:share=0.5,recent=8,queries=8",
        "infllm:block=4,sinks=2,local=8,topk=2,representatives=2,chunk=8",  # each layer is fed the chunks
    ],
)
def test_chunks_and_the_whole_prompt_make_one_cache(method):
    params = make_model(2).params
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, TOKENS), np.int32)
    chunk = None if "infllm" in method else 96  # three chunks, and 12 tokens that are left
    read = reading(method, 2, chunk)
    last, cache = read(params, tokens, LENGTHS)
    expected, whole = jax.jit(reading(method, 2, None))(params, tokens, LENGTHS)
    np.testing.assert_allclose(last, expected, atol=2e-5)
    compiled_last, compiled = jax.jit(read)(params, tokens, LENGTHS)
    np.testing.assert_allclose(compiled_last, last, atol=2e-5)
    step = jax.jit(functional.extend)
    new = np.array([[3], [5]], np.int32)
    expected = step(params, new, whole)[0]
    for other in (cache, compiled):
        assert jax.tree.map(jax.typeof, other) == jax.tree.map(jax.typeof, whole)
        np.testing.assert_allclose(step(params, new, other)[0], expected, atol=2e-3)


def test_one_layers_exact_keys_and_values_exist_at_a_time():
    params, tokens = make_model(5).params, np.zeros((1, TOKENS), np.int32)
    live_bytes = []

    def record(layers: Iterable[int]) -> Iterator[int]:
        for i in layers:
            live_bytes.append(sum(x.nbytes for x in jax.live_arrays()))
            yield i

    config = make_model(5).config
    plan, lengths = functional.bind("streaming_llm:recent=40", config), jnp.array([TOKENS])
    engine_prefill.prefill(params, tokens, lengths, plan, Target(config), TOKENS, chunk=60, progress=record)
    exact_layer = 2 * TOKENS * 4 * 32 * 4
    assert len(live_bytes) == 5
    assert max(live_bytes) - live_bytes[0] < exact_layer
