"""Passes layer by layer: few programs however deep the model, and the same numbers as one program for all layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import functional
from kvjax.engine import decode, forward, prefill
from kvjax.engine.forward import Target
from kvjax.engine.plan import bind
from kvjax.generation.compile_options import compiled_for
from kvjax.testing import full_copies, toy_model

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [2, 7, 1]]
PLACED = (
    "keyformer:budget=8,recent=2",
    "accumulated:budget=8,recent=4 + cam:window=2",
    "tidal_decode:topk=4,dense=1,reselect=2",
    "pyramidkv:budget=9",
)
"""Methods that do something else in each layer."""

METHODS = ("full", "kivi:bits=2,group=8,residual=8", "snapkv:budget=8,window=4", "offload", *PLACED)


@pytest.mark.parametrize("method", ["full", "kivi:bits=2,group=8,residual=8", "snapkv:budget=8,window=4"])
def test_a_deep_model_compiles_as_many_programs_as_a_shallow_one(traced_calls, method):
    counts = []
    for layers in (4, 9):
        traced_calls.clear()
        # A head size that no other test has: programs that one of them compiled would be used again.
        kvjax.generate(toy_model(layers=layers, head_dim=40), PROMPTS, method, max_new_tokens=4, loop="layers")
        counts.append(len(traced_calls))
    assert counts == [2, 2]  # a prompt's layer, and a step's


def test_layers_with_windows_of_their_own_have_programs_of_their_own(traced_calls):
    model = toy_model(layers=4, windows=(None, 5, None, 5))
    kvjax.generate(model, PROMPTS, "full", max_new_tokens=4, loop="layers")
    assert len(traced_calls) == 2 + 2  # a prompt's first and second layer, and a step's
    exact = kvjax.generate(model, PROMPTS, "full", max_new_tokens=4, loop="while")
    assert kvjax.generate(model, PROMPTS, "full", max_new_tokens=4, loop="layers").tokens == exact.tokens


@pytest.mark.parametrize("method", METHODS)
def test_of_a_long_prompts_last_layer_only_what_is_looked_at_is_asked(method, traced_calls, monkeypatch):
    model = toy_model(layers=3, windows=(None, 5, 5))
    want, exact = kvjax.prefill(model, PROMPTS, method, capacity=64)
    monkeypatch.setattr(prefill, "SHORT_PROMPT_TOKENS", 0)
    traced_calls.clear()
    got, few = kvjax.prefill(model, PROMPTS, method, capacity=64)
    np.testing.assert_allclose(got, want, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, kvjax.kept_positions(few), kvjax.kept_positions(exact))
    after = [kvjax.extend(model, [[7], [8]], cache)[0] for cache in (few, exact)]
    np.testing.assert_allclose(*after, atol=1e-5)
    asks_all = any(layer.needs.observed_queries is None for layer in few.plan)
    assert any(call.selects_queries for call in traced_calls) or asks_all


@pytest.mark.parametrize("method", METHODS)
def test_a_step_is_that_of_one_program(method):
    model = toy_model(layers=4)
    last, cache = kvjax.prefill(model, PROMPTS, method, capacity=64)
    tokens = last.argmax(-1).astype(jnp.int32)[:, None]
    whole, one, other = jax.jit(functional.extend), cache, cache
    for _ in range(3):
        want, one = whole(model.params, tokens, one)
        got, other = functional.extend(model.params, tokens, other)
        np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_array_equal(one.length, other.length)
    jax.tree.map(np.testing.assert_array_equal, kvjax.kept_positions(one), kvjax.kept_positions(other))


@pytest.mark.parametrize("method", PLACED)
def test_a_method_that_asks_for_its_place_gets_it(method):
    """Under one program for all layers alike they would all do what the first one does."""
    assert len(set(bind(method, toy_model(layers=4).config))) == (3 if "tidal" in method else 4)


def test_a_step_in_place_copies_no_host_buffer():
    model = toy_model()
    _, cache = kvjax.prefill(model, PROMPTS, "specache:bits=1,group=8,residual=8,topk=3", capacity=64)
    target, tokens = Target(model.config), jnp.zeros((2, 2), jnp.int32)  # each sequence's token and its draft
    programs = []

    def lowered(*args, call, target):
        run_layer = compiled_for(model, tokens.size, in_place=True).run_layer
        programs.append(run_layer.lower(*args, call=call, target=target).compile().as_text())
        return run_layer(*args, call=call, target=target)

    shape = cache.layers[0].k.data.shape
    decode.step(model.params, tokens, cache, 1, target, compiled=forward.Compiled(run_layer=lowered))
    assert len(programs) == model.config.layers
    assert not any(full_copies(text, shape) for text in programs)
