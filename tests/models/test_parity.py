"""The uncached forward pass equals transformers': on stored fixtures, and live where transformers is installed."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import kvjax
from checkpoints_convert.convert import read
from kvjax import functional
from kvjax.core import attention
from kvjax.engine.forward import exact_logits
from tests.fixtures import FAMILIES, load_family

TOLERANCE = 1e-4  # of the largest logit
LIVE_SEED = 20_240_229  # not one of the fixtures'


def relative_error(ours, theirs) -> float:
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


def rows_of(expected) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(expected["tokens"], expected["lengths"], strict=True)]


def assert_parity(config, params, expected):
    model = kvjax.Model(config, params)
    rows = rows_of(expected)
    batch = kvjax.logits(model, rows)
    for i, row in enumerate(rows):
        theirs = expected["logits"][i, : len(row)]
        assert relative_error(kvjax.logits(model, [row])[0], theirs) < TOLERANCE
        assert relative_error(batch[i, : len(row)], theirs) < TOLERANCE
        # what the cached steps of transformers saw, teacher-forced in one uncached pass
        longer = kvjax.logits(model, [[*row, *expected["decode_tokens"][i].tolist()]])[0]
        assert relative_error(longer[len(row) :], expected["decode_logits"][i]) < TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_stored(name):
    assert_parity(*load_family(name))


def test_fixtures_cover_every_variant():
    configs = {name: load_family(name)[0].llama_arguments() for name in FAMILIES}
    scalings = {c["rope_scaling"].kind for c in configs.values() if c["rope_scaling"]}
    assert scalings == {"linear", "llama3"}
    assert {c["kv_heads"] for c in configs.values()} >= {1, 2, 4}
    fields = ("tie_embeddings", "qkv_bias", "out_bias", "mlp_bias", "qk_norm", "windows")
    for field in fields:
        assert len({bool(c[field]) for c in configs.values()}) == 2, field
    assert configs["phi3_partial"]["rope_fraction"] == 0.5


@pytest.mark.parametrize("name", ["mistral", "qwen2_sliding", "qwen3_sliding", "phi3"])
def test_the_window_matters(name, monkeypatch):
    """The prompts are long enough for a wrong window to show: without it, parity fails."""
    exact = attention.causal_attention
    monkeypatch.setattr("kvjax.engine.forward.causal_attention", lambda *a, rule=None, **kw: exact(*a, **kw))
    config, params, expected = load_family(name)
    exact_logits.clear_cache()
    logits = functional.logits(params, expected["tokens"][-1:], config)
    exact_logits.clear_cache()
    assert relative_error(logits[0], expected["logits"][-1]) > 100 * TOLERANCE


if all(importlib.util.find_spec(name) for name in ("torch", "transformers")):

    @pytest.mark.parametrize("name", FAMILIES)
    @pytest.mark.filterwarnings("default")  # what the peer's import warns of is not ours to fix
    def test_live(name, tmp_path):
        from tests.fixtures import make

        make.build(name, tmp_path, LIVE_SEED)
        assert_parity(*read(tmp_path), make.reference(tmp_path, make.prompts(LIVE_SEED)))
