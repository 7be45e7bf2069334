"""Passes layer by layer: few programs however deep the model, and the same numbers as one program for all layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.core.program import Program
from kvjax.run import by_layer, passes, prefill
from kvjax.run.clock import Clock
from kvjax.run.forward import Setting
from kvjax.run.plan import bind
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


@pytest.fixture
def compiled(monkeypatch):
    """The sites of which layer programs have been compiled."""
    sites = []
    lower = Program.lower

    def counted(self, **kwargs):
        program = lower(self, **kwargs)
        if "site" in kwargs:
            sites.append(kwargs["site"])
        return program

    monkeypatch.setattr(Program, "lower", counted)
    return sites


@pytest.mark.parametrize("method", ["full", "kivi:bits=2,group=8,residual=8", "snapkv:budget=8,window=4"])
def test_a_deep_model_compiles_as_many_programs_as_a_shallow_one(compiled, method):
    counts = []
    for layers in (4, 9):
        compiled.clear()
        # A head size that no other test has: programs that one of them compiled would be used again.
        kvjax.generate(toy_model(layers=layers, head_dim=40), PROMPTS, method, max_new_tokens=4, loop="layers")
        counts.append(len(compiled))
    assert counts == [2, 2]  # a prompt's layer, and a step's


def test_layers_with_windows_of_their_own_have_programs_of_their_own(compiled):
    model = toy_model(layers=4, windows=(None, 5, None, 5))
    kvjax.generate(model, PROMPTS, "full", max_new_tokens=4, loop="layers")
    assert len(compiled) == 2 + 2  # a prompt's first and second layer, and a step's
    exact = kvjax.generate(model, PROMPTS, "full", max_new_tokens=4, loop="while")
    assert kvjax.generate(model, PROMPTS, "full", max_new_tokens=4, loop="layers").tokens == exact.tokens


@pytest.mark.parametrize("method", METHODS)
def test_of_a_long_prompts_last_layer_only_what_is_looked_at_is_asked(method, compiled, monkeypatch):
    model = toy_model(layers=3, windows=(None, 5, 5))
    want, exact = kvjax.prefill(model, PROMPTS, method, capacity=64)
    monkeypatch.setattr(prefill, "SHORT", 0)
    compiled.clear()
    got, few = kvjax.prefill(model, PROMPTS, method, capacity=64)
    np.testing.assert_allclose(got, want, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, kvjax.kept_positions(few), kvjax.kept_positions(exact))
    after = [kvjax.extend(model, [[7], [8]], cache)[0] for cache in (few, exact)]
    np.testing.assert_allclose(*after, atol=1e-5)
    asks_all = any(layer.needs.queries is None for layer in few.plan)
    assert any(site.last for site in compiled) or asks_all


@pytest.mark.parametrize("method", METHODS)
def test_a_step_is_that_of_one_program(method):
    model = toy_model(layers=4)
    last, cache = kvjax.prefill(model, PROMPTS, method, capacity=64)
    tokens = last.argmax(-1).astype(jnp.int32)[:, None]
    traced = jax.jit(passes.advance, static_argnames=("setting", "commit"))
    one, other, steps = cache, cache, by_layer.Stepper(model, Clock(), 1)
    for _ in range(3):
        want, one = traced(model.params, tokens, one, Setting(model.config), 1)
        got, other = steps.advance(tokens, other)
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
    steps = by_layer.Stepper(model, Clock(), 1, in_place=True)
    shape = cache.layers[0].k.data.shape
    steps.advance(jnp.zeros((2, 2), jnp.int32), cache)  # each row's token and its guess
    assert len(steps.programs) == 2 + model.config.layers
    assert not full_copies(steps.programs[1].as_text(), shape)
