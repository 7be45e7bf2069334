"""Every family under every exact method: prefill and 32 cached decode steps equal transformers' logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import functional
from tests.fixtures import FAMILIES, load_family

METHODS = ("full", "offload", "kcache:n=999,device_layers=0", "kcache:n=999,granularity=kv")
TOLERANCE = 1e-4  # of the largest logit


def assert_close(ours, peer) -> None:
    np.testing.assert_allclose(ours, peer, atol=TOLERANCE * np.abs(peer).max(), rtol=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_cached_decode_steps_equal_transformers(family, method):
    config, params, expected = load_family(family)
    model, parsed = kvjax.Model(config, params), kvjax.parse(method)
    prompts = [row[:n].tolist() for row, n in zip(expected["tokens"], expected["lengths"], strict=True)]
    steps = expected["decode_tokens"].shape[1]
    last, state = kvjax.prefill(model, prompts, parsed, capacity=max(map(len, prompts)) + steps)
    for b, n in enumerate(expected["lengths"]):
        assert_close(last[b], expected["logits"][b, n - 1])
    feed = jax.jit(lambda params, state, tokens: jax.lax.scan(_step(params), state, tokens)[1])
    logits = feed(params, state, jnp.asarray(expected["decode_tokens"].T[:, :, None], jnp.int32))
    assert_close(np.asarray(logits)[:, :, 0].transpose(1, 0, 2), expected["decode_logits"])


def _step(params):
    def step(state, tokens):
        logits, state = functional.extend(params, tokens, state)
        return state, logits

    return step


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_makes_transformers_greedy_tokens(family):
    config, params, expected = load_family(family)
    prompts = [row[:n].tolist() for row, n in zip(expected["tokens"], expected["lengths"], strict=True)]
    out = kvjax.generate(kvjax.Model(config, params), prompts, kvjax.methods.full(), max_new_tokens=32, eos_ids=())
    assert out.tokens == expected["decode_tokens"].tolist()
