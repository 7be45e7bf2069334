"""Families whose features move the logits far equal transformers: exactly, under methods that keep all, in bfloat16."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import functional
from kvjax.errors import KvjaxError
from kvjax.models import checkpoint
from kvjax.models.kinds import LayerKind
from tests.fixtures import LOUD, load_family

TOLERANCE = 1e-4  # of the largest logit
CAPACITY = 64
METHODS = (
    "full",
    "snapkv:budget=64",
    "kivi:bits=8,group=4,residual=64 + in_windows",  # without it a window holds codes from its first token on
    "streaming_llm:recent=64",
    "h2o:heavy=32,recent=32",
    "kvzip:budget=64,level=head",
)
"""They keep all tokens as they are, each by its own path."""


def read_rows(expected) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the prompts, and the prompts with the tokens decoded after them."""
    prompts = [row[:n].tolist() for row, n in zip(expected["tokens"], expected["lengths"], strict=True)]
    return prompts, [row + more.tolist() for row, more in zip(prompts, expected["decode_tokens"], strict=True)]


def assert_close(ours, theirs) -> None:
    np.testing.assert_allclose(np.asarray(ours), theirs, atol=TOLERANCE * np.abs(theirs).max(), rtol=0)


@pytest.mark.parametrize("name", LOUD)
def test_logits_of_a_padded_batch_equal_transformers(name):
    config, params, expected = load_family(name)
    prompts, longer = read_rows(expected)
    logits = kvjax.logits(kvjax.Model(config, params), longer)
    for i, (prompt, row) in enumerate(zip(prompts, longer, strict=True)):
        assert_close(logits[i, : len(prompt)], expected["logits"][i, : len(prompt)])
        assert_close(logits[i, len(prompt) : len(row)], expected["decode_logits"][i])


@pytest.mark.parametrize(("name", "method"), [(name, METHODS[i % len(METHODS)]) for i, name in enumerate(LOUD)])
def test_decode_steps_under_a_method_that_keeps_all_equal_transformers(name, method):
    config, params, expected = load_family(name)
    prompts, _ = read_rows(expected)
    last, state = kvjax.prefill(kvjax.Model(config, params), prompts, kvjax.parse(method), capacity=CAPACITY)
    for i, prompt in enumerate(prompts):
        assert_close(last[i], expected["logits"][i, len(prompt) - 1])

    @jax.jit
    def feed(params, state, tokens):
        def step(state, tokens):
            logits, state = functional.extend(params, tokens, state)
            return state, logits

        return jax.lax.scan(step, state, tokens)[1]

    logits = feed(params, state, jnp.asarray(expected["decode_tokens"].T[:, :, None], jnp.int32))
    assert_close(np.asarray(logits)[:, :, 0].transpose(1, 0, 2), expected["decode_logits"])


@pytest.mark.parametrize(
    "name", ["deepseek_v2_lite", "gemma2", "gemma3", "gemma4_shared", "gpt_oss", "granite", "olmo2"]
)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name):
    config, params, expected = load_family(name)
    prompts, _ = read_rows(expected)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    logits = np.asarray(kvjax.logits(kvjax.Model(config, narrow), prompts), np.float32)
    errors = {"ours": [], "theirs": []}
    for i, prompt in enumerate(prompts):
        exact = expected["logits"][i, : len(prompt)]
        errors["ours"].append(np.abs(logits[i, : len(prompt)] - exact).ravel())
        errors["theirs"].append(np.abs(expected["bfloat16_logits"][i, : len(prompt)] - exact).ravel())
    ours, theirs = (float(np.concatenate(x).mean()) for x in errors.values())
    assert 0 < ours < 1.5 * theirs


def change(config: kvjax.models.Config, what: str, value) -> kvjax.models.Config:
    """Sets a field of a config, or with a path such as "attention.scale" that of each kind that differs in it."""
    if "." not in what:
        return dataclasses.replace(config, **{what: value})

    def change_kind(kind: LayerKind) -> LayerKind:
        part, *path = what.split(".")
        if part == "layer":
            return dataclasses.replace(kind, **{path[0]: value})
        inner = getattr(kind, part)
        if len(path) == 2:  # a part of the part
            nested = getattr(inner, path[0])
            if nested is None:
                return kind
            value_of_part = {path[0]: dataclasses.replace(nested, **{path[1]: value})}
        else:
            value_of_part = {path[0]: value}
        return dataclasses.replace(kind, **{part: dataclasses.replace(inner, **value_of_part)})

    by_layer = [change_kind(config.kind(i)) for i in range(config.layers)]
    kinds = tuple(dict.fromkeys(by_layer))
    return dataclasses.replace(config, kinds=kinds, pattern=tuple(map(kinds.index, by_layer)))


@pytest.mark.parametrize(
    ("name", "what", "value"),
    [
        ("gemma", "embed_scale", 1.0),
        ("granite", "embed_scale", 1.0),
        ("granite", "logit_scale", 1.0),
        ("granite", "attention.scale", None),
        ("gemma2", "final_cap", None),
        ("gemma2", "attention.rule.soft_cap", None),
        ("gemma2", "attention.rule.window", None),
        ("gemma3", "attention.scale", None),
        ("gemma3_vision", "attention.rope.theta", 10_000.0),
        ("gemma4", "attention.scale", None),
        ("gemma4", "attention.value_norm", False),
        ("gemma4", "attention.rope.scaling", None),
        ("gemma4", "layer.output_scale", False),
        ("gemma4", "final_cap", None),
        ("gemma4_shared", "per_layer_embedding", None),
        ("gemma4_moe", "mlp.experts.own_norms", False),
        ("ministral3", "attention.query_temperature", None),
        ("mistral3", "attention.query_temperature.beta", 1.0),
        ("olmo3", "attention.rope.scaling", None),
        ("olmo3", "attention.rule.window", None),
        ("smollm3", "attention.rule.window", None),
        ("gpt_oss", "mlp.limit", 7.0),
        ("gpt_oss", "mlp.slope", 1.702),
        ("gpt_oss", "attention.rope.scaling", None),
        ("phi3_longrope", "attention.rope.scaling", None),
        ("qwen3_moe", "mlp.experts.normalize", True),
        ("qwen3_next", "attention.output_gate", False),
        ("qwen3_next", "mlp.experts.shared_gate", False),
        ("deepseek_v2", "mlp.experts.top_groups", 3),
        ("deepseek_v2", "mlp.experts.factor", 1.0),
        ("deepseek_v2", "attention.scale", None),
        ("deepseek_v3", "mlp.experts.scoring", "softmax"),
        ("deepseek_v3", "mlp.experts.top_groups", 4),
        ("glm4_moe", "mlp.experts.normalize", False),
        ("glm4_moe", "attention.rope.dim", 8),
    ],
)
def test_what_a_family_differs_in_moves_the_logits(name, what, value):
    """Without it parity fails by far, so that the tests above see it."""
    config, params, expected = load_family(name)
    changed = change(config, what, value)
    assert changed != config
    n = int(expected["lengths"][-1])
    logits = kvjax.logits(kvjax.Model(changed, params), [expected["tokens"][-1, :n].tolist()])[0]
    difference = np.abs(np.asarray(logits) - expected["logits"][-1, :n]).max()
    assert difference > 100 * TOLERANCE * np.abs(expected["logits"]).max()


def test_longrope_takes_the_factors_for_the_positions_asked_for(tmp_path):
    config, params, expected = load_family("phi3_longrope")
    checkpoint.save(tmp_path / "model", config, params)
    prompt = expected["tokens"][-1, :4].tolist()
    logits = {}
    for positions, is_long in ((None, True), (5, True), (4, False)):
        model = kvjax.load(tmp_path / "model", max_positions=positions)
        scaling = model.config.kind(0).attention.rope.scaling
        assert (scaling.is_long, model.config.max_positions) == (is_long, positions or 128)
        logits[is_long] = np.asarray(kvjax.logits(model, [prompt])[0])
    assert np.abs(logits[True] - logits[False]).max() > 0.01
    with pytest.raises(KvjaxError, match="max_positions must be an integer from 1 to 128, got 129"):
        kvjax.load(tmp_path / "model", max_positions=129)
