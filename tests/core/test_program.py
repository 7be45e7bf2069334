"""Compiled programs, and what the compiler is told for them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.core import product, program
from kvjax.core.product import WITHOUT_PACKING
from kvjax.core.compile_cache import Program
from kvjax.core.types import KvjaxError
from kvjax.run.by_layer import LAYER_IN_PLACE
from kvjax.testing import toy_model


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "tied", "told"),
    [
        (4, 768, jnp.float32, False, WITHOUT_PACKING),
        (32, 2048, jnp.float32, False, WITHOUT_PACKING),
        (8, 768, jnp.float32, True, {}),
        (4, 576, jnp.float32, False, {}),
        (1, 768, jnp.float32, False, {}),
        (64, 768, jnp.float32, False, {}),
        (4, 768, jnp.bfloat16, False, {}),
    ],
)
def test_few_rows_of_large_float32_weights_are_multiplied_without_packing(rows, width, dtype, tied, told):
    assert product.options(rows, width, dtype, tied) == told


def test_the_options_reach_the_compiler():
    adding = Program(lambda x: x + 1, options=lambda x: {"xla_backend_optimization_level": "high"})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_backend_optimization_level"):
        adding(x=jnp.zeros(3))


def test_what_a_version_of_the_compiler_does_not_know_is_left_out():
    adding = Program(lambda x: x + 1, options=lambda x: {"xla_of_another_version": True})
    np.testing.assert_array_equal(adding(x=jnp.zeros(3)), np.ones(3))


def test_a_process_with_many_mappings_drops_its_programs_and_goes_on(monkeypatch):
    model, first = toy_model(layers=1), Program(lambda x: x + 1)
    want = kvjax.generate(model, [[5, 3, 8]], "snapkv:budget=4,window=2", max_new_tokens=4).tokens
    first(x=jnp.zeros(3))
    assert first._done
    monkeypatch.setattr(program, "MAPPINGS", 0)  # every program then drops those before it
    second = Program(lambda x: x + 2)
    np.testing.assert_array_equal(second(x=jnp.zeros(3)), np.full(3, 2))
    assert second._done and not first._done
    compile_cache.clear_compiled()
    assert kvjax.generate(model, [[5, 3, 8]], "snapkv:budget=4,window=2", max_new_tokens=4).tokens == want


def test_a_batch_on_a_wide_model_is_decoded_without_packing_and_as_its_rows_alone():
    model, prompts = toy_model(width=768, layers=1), [[5, 3, 8], [7], [1, 2], [9, 9, 4]]
    known = set(LAYER_IN_PLACE._done)
    together = kvjax.generate(model, prompts, "full", max_new_tokens=4)
    new = [compiled.as_text() for key, compiled in LAYER_IN_PLACE._done.items() if key not in known]
    (step,) = (text for text in new if "f32[4,768]" in text)
    assert "dot(" in step and "ynn" not in step
    for prompt, tokens in zip(prompts, together.tokens, strict=True):
        assert kvjax.generate(model, [prompt], "full", max_new_tokens=4).tokens == [tokens]


@pytest.mark.parametrize("method", ["snapkv:budget=4,window=2 + kvcrush", "kcache:n=2,device_layers=0"])
def test_without_compiling_the_same_tokens_come(method):
    model, prompts = toy_model(layers=1), [[1, 2, 3, 4, 5, 6], [7]]
    compiled = kvjax.generate(model, prompts, method, max_new_tokens=3).tokens
    with jax.disable_jit():
        assert kvjax.generate(model, prompts, method, max_new_tokens=3).tokens == compiled


def test_sixty_four_bits_are_refused():
    with jax.enable_x64(True), pytest.raises(KvjaxError, match="JAX_ENABLE_X64 is set: unset it"):
        Program(lambda x: x + 1).compile(x=np.zeros(3))
