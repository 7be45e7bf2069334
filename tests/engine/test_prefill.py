"""Prompts that are read in chunks: layer by layer, so that one layer's exact keys and values exist at a time."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Config, functional
from kvjax.core import memory
from kvjax.engine import prefill as engine_prefill
from kvjax.engine.forward import Target, layer_calls
from kvjax.engine.modes import FullPrefill
from kvjax.errors import KvjaxError
from kvjax.generation.programs import target_for

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


WAITING = (
    "kvzip:budget=96",
    "turned_queries:budget=96",
    "cake:budget=96,window=8",
    "snapkv:budget=96,window=8 + adakv:scope=model",
    "minicache",
)


@pytest.mark.parametrize("method", WAITING)
def test_prompts_that_wait_on_the_host_make_the_same_cache(method):
    model = make_model(4)
    ids = [list(range(VOCAB)) * 7, [5, 7, 11] * 60]
    for chunk in (None, 96):
        last, cache = kvjax.prefill(model, ids, method, chunk=chunk)
        through_host, other = kvjax.prefill(model, ids, method, chunk=chunk, prompt_memory="host")
        np.testing.assert_array_equal(last, through_host)
        for x, y in zip(jax.tree.leaves(cache.layers), jax.tree.leaves(other.layers), strict=True):
            assert jax.typeof(x) == jax.typeof(y)
            np.testing.assert_array_equal(x, y)


def test_prompts_that_wait_on_the_host_do_not_fill_the_device():
    params, tokens, on_device, on_host = make_model(5).params, np.zeros((1, TOKENS), np.int32), [], []

    def record(layers: Iterable[int]) -> Iterator[int]:
        for i in layers:
            kinds = [(memory.memory_kind(x), x.nbytes) for x in jax.live_arrays()]
            on_device.append(sum(size for kind, size in kinds if kind == "device"))
            on_host.append(sum(size for kind, size in kinds if kind == "pinned_host"))
            yield i

    config = make_model(5).config
    plan, lengths = functional.bind("kvzip:budget=96", config), jnp.array([TOKENS])
    options: dict[str, Any] = {"prompt_memory": "host", "progress": record}
    engine_prefill.prefill(params, tokens, lengths, plan, Target(config), TOKENS, **options)
    exact_layer = 2 * TOKENS * 4 * 32 * 4
    assert len(on_device) == 5
    assert max(on_device) - on_device[0] < exact_layer  # scores of all layers
    assert on_host[-1] - on_host[0] > 4 * exact_layer


def test_a_memory_for_prompts_is_refused_by_name():
    model = make_model(2)
    with pytest.raises(KvjaxError, match='prompt_memory must be "device" or "host"'):
        kvjax.prefill(model, [[1, 2]], "full", prompt_memory="disk")
    plan = functional.bind("cake:budget=96", model.config)

    def read(tokens: jax.Array) -> jax.Array:
        target, lengths = Target(model.config), jnp.array([8])
        return engine_prefill.prefill(model.params, tokens, lengths, plan, target, 8, prompt_memory="host")[0]

    with pytest.raises(KvjaxError, match="prompt_memory"):
        jax.jit(read)(jnp.zeros((1, 8), jnp.int32))


def test_hidden_vectors_are_given_up_from_layer_to_layer_without_warnings():
    """A last layer that computes one output only cannot put it in the place of its inputs, and is not asked to."""
    ids = [list(range(VOCAB)) * 15]
    assert len(ids[0]) > engine_prefill.SHORT_PROMPT_TOKENS
    with warnings.catch_warnings(action="error"):
        kvjax.prefill(make_model(2), ids, "full")
    target = target_for(make_model(2), 640, in_place=True)
    hidden = jnp.zeros((1, 640, 16))
    call = layer_calls(functional.bind("full", make_model(2).config), make_model(2).config, (640, 640))[0]
    angles = make_model(2).config.ropes[0].angles(jnp.arange(640)[None])
    mode = FullPrefill(jnp.array([640]), 640, None)
    target.run_layer(make_model(2).params["layer_0"], hidden, (angles,), mode, None, None, call=call, target=target)
    assert hidden.is_deleted()
