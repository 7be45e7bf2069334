"""A cache distilled by gradient, in miniature: the trained arrays, the texts, and the gain of training."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import answers, cartridge
from experiments.papers.eviction import draw_instances
from kvjax.testbed import vocab
from kvjax.testing import toy_model

LENGTH = 96


@pytest.fixture(scope="module")
def model():
    return toy_model(layers=2, vocab_size=vocab.SIZE)


@pytest.fixture(scope="module")
def packed_questions():
    return answers.pack(draw_instances("phrases", 2, LENGTH, 1, "held_out", pairs=6, questions=6))


@pytest.fixture(scope="module")
def full(model, packed_questions):
    return answers.compress(model, packed_questions.contexts, "full")


@pytest.mark.parametrize("method", ("snapkv:budget=16,window=4", "kvzip:budget=16"))
def test_what_is_trained_are_the_keys_and_values(model, packed_questions, method):
    cache = answers.compress(model, packed_questions.contexts, method)
    slots = cartridge.slot_arrays(cache)
    same = cartridge.replace_slots(cache, slots)
    assert jax.tree.structure(same) == jax.tree.structure(cache)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(cache), strict=True))
    moved = cartridge.replace_slots(cache, [x + 1.0 for x in slots])
    for before, after in zip(cache.layers, moved.layers, strict=True):
        assert (after.k.data != before.k.data).all() and (after.v.data != before.v.data).all()
        assert (after.pos == before.pos).all()


def test_after_the_first_tokens_the_text_goes_on_at_the_contexts_end(model, packed_questions, full):
    cache = cartridge.keep_first_tokens(model, packed_questions.contexts, 16)
    assert cache.length.tolist() == [LENGTH] * 2 and cache.capacity == full.capacity
    everything = cartridge.keep_first_tokens(model, packed_questions.contexts, LENGTH)
    logits, expected = (answers.extend_each(model.params, packed_questions.tokens, x) for x in (everything, full))
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_a_few_steps_bring_the_slots_nearer_to_the_full_cache(model, packed_questions, full):
    start = answers.compress(model, packed_questions.contexts, "snapkv:budget=16,window=4")
    texts = [packed_questions.contexts[:, :32].reshape(2, 4, 8)]
    trained, losses = cartridge.distill(model, full, start, texts, steps=8, batch=4, rate=0.02)
    target = [jax.nn.log_softmax(answers.extend_each(model.params, texts[0], full))]
    ends = [
        float(cartridge.divergence(cartridge.slot_arrays(cache), model.params, start, texts, target))
        for cache in (start, trained)
    ]
    assert losses[0] == pytest.approx(ends[0], rel=1e-4) and ends[1] < 0.9 * ends[0]


def test_questions_count_as_right_when_every_token_of_the_answer_is_the_likeliest(packed_questions):
    logits = jax.nn.one_hot(jnp.roll(packed_questions.tokens, -1, 2), vocab.SIZE)
    assert answers.is_right(logits, packed_questions).all()
    wrong = logits.at[0, 1, 3].set(jax.nn.one_hot(0, vocab.SIZE))
    assert answers.is_right(wrong, packed_questions).sum() == packed_questions.tokens.shape[1] * 2 - 1
    unasked = logits.at[0, 1, 0].set(jax.nn.one_hot(0, vocab.SIZE))
    assert answers.is_right(unasked, packed_questions).all()
