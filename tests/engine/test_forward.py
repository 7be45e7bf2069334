"""Layer-by-layer passes compile few programs however deep the model, and compute what one program computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import functional
from kvjax.engine import decode, prefill
from kvjax.engine.forward import Target
from kvjax.engine.plan import bind
from kvjax.generation.programs import target_for
from kvjax.testing import full_copies, toy_model

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [2, 7, 1]]
LAYER_DEPENDENT = (
    "keyformer:budget=8,recent=2",
    "accumulated:budget=8,recent=4 + cam:window=2",
    "tidal_decode:topk=4,dense=1,reselect=2",
    "pyramidkv:budget=9",
)
"""Methods whose layers differ."""

METHODS = ("full", "kivi:bits=2,group=8,residual=8", "snapkv:budget=8,window=4", "offload", *LAYER_DEPENDENT)


@pytest.mark.parametrize("method", ["full", "kivi:bits=2,group=8,residual=8", "snapkv:budget=8,window=4"])
def test_a_deep_model_compiles_as_many_programs_as_a_shallow_one(traced_calls, method):
    counts = []
    for layers in (3, 5):
        traced_calls.clear()
        # No other test has this head size, so that no program exists before.
        kvjax.generate(toy_model(layers=layers, head_dim=40), PROMPTS, method, max_new_tokens=4, loop="layers")
        counts.append(len(traced_calls))
    assert counts == [2, 2]  # one for a prompt's layers, one for a step's


def test_layers_with_windows_of_their_own_have_programs_of_their_own(traced_calls):
    model = toy_model(layers=4, windows=(None, 5, None, 5))
    kvjax.generate(model, PROMPTS, "full", max_new_tokens=4, loop="layers")
    assert len(traced_calls) == 2 + 2  # two for a prompt's layers, two for a step's
    exact = kvjax.generate(model, PROMPTS, "full", max_new_tokens=4, loop="while")
    assert kvjax.generate(model, PROMPTS, "full", max_new_tokens=4, loop="layers").tokens == exact.tokens


@pytest.mark.parametrize("method", METHODS)
def test_of_a_long_prompts_last_layer_only_what_is_looked_at_is_asked(method, traced_calls, monkeypatch):
    model = toy_model(layers=3, windows=(None, 5, 5))
    expected, exact_cache = kvjax.prefill(model, PROMPTS, method, capacity=64)
    monkeypatch.setattr(prefill, "SHORT_PROMPT_TOKENS", 0)
    traced_calls.clear()
    logits, cache = kvjax.prefill(model, PROMPTS, method, capacity=64)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, kvjax.kept_positions(cache), kvjax.kept_positions(exact_cache))
    next_logits = [kvjax.extend(model, [[7], [8]], x)[0] for x in (cache, exact_cache)]
    np.testing.assert_allclose(*next_logits, atol=1e-5)
    asks_all = any(layer.needs.observed_queries is None for layer in cache.plan)
    assert any(call.selects_queries for call in traced_calls) or asks_all


@pytest.mark.parametrize("method", METHODS)
def test_a_step_is_that_of_one_program(method):
    model = toy_model(layers=4)
    logits, cache = kvjax.prefill(model, PROMPTS, method, capacity=64)
    tokens = logits.argmax(-1).astype(jnp.int32)[:, None]
    extend_in_one_program = jax.jit(functional.extend)
    expected_cache = cache
    for _ in range(3):
        expected, expected_cache = extend_in_one_program(model.params, tokens, expected_cache)
        logits, cache = functional.extend(model.params, tokens, cache)
        np.testing.assert_allclose(logits, expected, atol=1e-5)
    np.testing.assert_array_equal(expected_cache.length, cache.length)
    jax.tree.map(np.testing.assert_array_equal, kvjax.kept_positions(expected_cache), kvjax.kept_positions(cache))


@pytest.mark.parametrize("method", LAYER_DEPENDENT)
def test_a_method_that_asks_for_its_place_gets_it(method):
    """If the layers shared a program, all would behave like the first one."""
    assert len(set(bind(method, toy_model(layers=4).config))) == (3 if "tidal" in method else 4)


def test_a_step_in_place_copies_no_host_buffer():
    model = toy_model()
    _, cache = kvjax.prefill(model, PROMPTS, "specache:bits=1,group=8,residual=8,topk=3", capacity=64)
    tokens = jnp.zeros((2, 2), jnp.int32)  # each sequence's token and its draft
    programs = []

    def run_and_record_program(*args, call, target):
        run_layer = target_for(model, tokens.size, in_place=True).run_layer
        programs.append(run_layer.lower(*args, call=call, target=target).compile().as_text())
        return run_layer(*args, call=call, target=target)

    shape = cache.layers[0].k.data.shape
    decode.step(model.params, tokens, cache, 1, Target(model.config, run_layer=run_and_record_program))
    assert len(programs) == model.config.layers
    assert not any(full_copies(text, shape) for text in programs)
