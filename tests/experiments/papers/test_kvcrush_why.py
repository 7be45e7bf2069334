"""The analysis of KVCrush's gain: the script's kept tokens are those of the methods."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from experiments import kvcrush_why
from kvjax.engine.plan import bind
from kvjax.reuse.full_kv import read_exactly
from kvjax.testing import toy_model

LENGTH, MORE, BUDGET = 60, 8, 24
METHODS = {"base": "snapkv:budget=24,window=8", "kvcrush": "snapkv:budget=24,window=8 + kvcrush:share=0.25"}


@pytest.fixture(scope="module")
def read():
    """The model, its rows, and the scores of each of its layers."""
    model = toy_model()
    rows = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, LENGTH + MORE))
    exact, plan = read_exactly(model, rows), bind(METHODS["base"], model.config)
    pairs = zip(plan, exact.prompts, strict=True)
    return model, rows, [kvcrush_why.score_layer(layer, prompt, exact, LENGTH) for layer, prompt in pairs]


@pytest.mark.parametrize("kind", METHODS)
def test_what_is_kept_is_what_the_method_keeps(read, kind):
    model, rows, layers = read
    kept_positions = kvjax.read(model, rows[:, :LENGTH], METHODS[kind]).kept_positions()
    for layer, expected in zip(layers, kept_positions, strict=True):
        selection, anyway = kvcrush_why.select_tokens(layer, layer.bits, BUDGET, kind)
        selected = [[np.flatnonzero(head).tolist() for head in row] for row in np.asarray(selection)]
        assert selected == [[sorted(head.tolist()) for head in row] for row in expected]
        assert not (anyway & ~selection).any() and bool(anyway.any()) <= (kind == "kvcrush")


@pytest.mark.parametrize("kind", kvcrush_why.KINDS)
def test_every_kind_keeps_the_budget(read, kind):
    for layer in read[2]:
        assert (np.asarray(kvcrush_why.select_tokens(layer, layer.bits, BUDGET, kind)[0]).sum(-1) == BUDGET).all()


def test_the_future_is_the_attention_of_what_follows(read):
    """NumPy computes it for the first layer."""
    model, rows, layers = read
    prompt = read_exactly(model, rows).prompts[0]
    q, k = (np.asarray(x, np.float64)[..., : LENGTH + MORE, :] for x in (prompt.q, prompt.k))
    s = np.einsum("bkgth,bksh->bkgts", q, k) / np.sqrt(q.shape[-1])
    s = np.where(np.tri(LENGTH + MORE, dtype=bool), s, -np.inf)[:, :, :, LENGTH:]
    p = np.exp(s - s.max(-1, keepdims=True))
    mass = (p / p.sum(-1, keepdims=True)).mean((2, 3))[:, :, :LENGTH]
    mass[:, :, 0] = 0
    np.testing.assert_allclose(layers[0].future, mass, atol=1e-6)
