"""A gate trained by gradient, in miniature: its soft choice, its gradient, and the effect of training."""

from __future__ import annotations

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import answers, gate
from experiments.papers.eviction import draw_instances
from kvjax import functional
from kvjax.testbed import vocab
from kvjax.testing import toy_model

LENGTH, BUDGET = 112, 24


@pytest.fixture(scope="module")
def model():
    return toy_model(layers=2, vocab_size=vocab.SIZE)


@pytest.fixture(scope="module")
def packed_questions():
    return answers.pack(draw_instances("phrases", 2, LENGTH, 1, "held_out", questions=2))


@pytest.fixture(scope="module")
def loss(model, packed_questions):
    """The loss of a gate and parameters under one draw of the noise, and its gradients to both."""
    plan = functional.bind("full", model.config)

    def value(weights, params):
        copy = dataclasses.replace(model, params=params)
        return gate.loss(
            weights, copy, plan, packed_questions, budget=BUDGET, sharpness=jnp.float32(2.0), key=jax.random.key(3)
        )

    return jax.jit(jax.value_and_grad(value, (0, 1)))


def test_a_soft_choice_keeps_the_budget_whatever_is_added_to_all_scores():
    score = jax.random.normal(jax.random.key(0), (2, 3, 40)) * 3
    score = score.at[:, :, 30:].set(-jnp.inf)

    def weighted_sum(shift, weights):
        return jnp.exp(gate.soft_choice(score + shift, 8, jnp.float32(4.0), jax.random.key(1))) @ weights

    np.testing.assert_allclose(weighted_sum(0.0, jnp.ones(40)), 8.0, rtol=1e-3)
    slope = jax.grad(lambda shift: weighted_sum(shift, jnp.arange(40.0)).sum())(0.0)
    assert abs(slope) < 1e-2
    assert float(weighted_sum(0.0, jnp.where(jnp.arange(40) < 30, 0.0, 1.0)).max()) < 1e-3


def test_the_gradient_through_prefill_and_extend_is_that_of_finite_differences(model, loss):
    weights = gate.init(model.config, jax.random.key(5), width=8)
    keys = iter(jax.random.split(jax.random.key(6), 100))

    def draw_direction(tree):
        return jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape) * 0.05, tree)

    moves = draw_direction(weights), draw_direction(model.params)
    _, gradients = loss(weights, model.params)
    for which in range(2):
        ends = []
        for step in (1e-2, -1e-2):
            at = [weights, model.params]
            at[which] = jax.tree.map(lambda x, d, step=step: x + step * d, at[which], moves[which])
            ends.append(float(loss(*at)[0]))
        pairs = zip(*map(jax.tree.leaves, (gradients[which], moves[which])), strict=True)
        slope = sum(jnp.vdot(a, b) for a, b in pairs)
        assert float(slope) == pytest.approx((ends[0] - ends[1]) / 2e-2, rel=0.05, abs=2e-4)
        assert abs(float(slope)) > 1e-4


def test_a_few_steps_lower_the_loss(model, loss):
    weights = gate.init(model.config, jax.random.key(5), width=8)
    before, (gradient, _) = loss(weights, model.params)
    for _ in range(5):
        norm = jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(gradient)))
        weights = jax.tree.map(lambda x, g, norm=norm: x - 0.1 * g / norm, weights, gradient)
        after, (gradient, _) = loss(weights, model.params)
    assert after < before


def test_the_hard_gate_keeps_each_heads_best(model, packed_questions):
    weights = gate.init(model.config, jax.random.key(7))
    full = answers.compress(model, packed_questions.contexts, "full")
    cache = gate.keep_best(full, weights, BUDGET)
    for state, score in zip(cache.layers, gate.score_slots(weights, full), strict=True):
        positions = np.asarray(state.pos).reshape(-1, state.pos.shape[2])
        for pos, head_scores in zip(positions, per_head(score), strict=True):
            assert sorted(pos[pos >= 0]) == sorted(np.argsort(-head_scores)[:BUDGET])
    hidden = [jnp.where(state.pos >= 0, 0.0, -1e9) for state in cache.layers]
    other = answers.extend_each(model.params, packed_questions.tokens, gate.add_choice(full, hidden))
    np.testing.assert_allclose(answers.extend_each(model.params, packed_questions.tokens, cache), other, atol=1e-5)


def per_head(score):
    return np.asarray(score).reshape(-1, score.shape[2])


def test_training_asks_only_about_files_of_the_training_split(model, monkeypatch):
    splits = []

    def draw(task, num, length, seed, split, **sizes):
        splits.append((task, split))
        return draw_instances(task, num, length, seed, split, **sizes)

    monkeypatch.setattr(gate, "draw_instances", draw)
    args = argparse.Namespace(steps=2, rate=0.01, batch=1, length=LENGTH, budget=BUDGET, seed=0)
    start, trained, losses = gate.train(model, args)
    assert splits == [("phrases", "train"), ("variables", "train")] and len(losses) == 2
    assert all((a != b).any() for a, b in zip(*map(jax.tree.leaves, (start, trained)), strict=True))
