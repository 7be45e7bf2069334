"""Edited texts: exact in the first layer; above it later keys are rotated and later values stay."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import IncompatibleMethod, KvjaxError
from kvjax.core import memory
from kvjax.testing import toy_model

RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(0, 97, n).tolist() for n in (40, 23, 6)]
QUESTIONS = [RNG.integers(0, 97, n).tolist() for n in (3, 5, 4)]
START, STOP, NEW = [10, 3, 6], [14, 23, 6], [[7, 8, 9, 10, 11, 12], [], [1, 2]]
EDITED = [d[:a] + n + d[b:] for d, a, b, n in zip(DOCUMENTS, START, STOP, NEW, strict=True)]


@functools.cache
def make_one() -> kvjax.Model:
    return toy_model(layers=1)


@functools.cache
def make_two() -> kvjax.Model:
    return toy_model(layers=2, windows=(None, 9), rope_fraction=0.5)


@pytest.mark.parametrize(
    ("method", "atol"),
    [("full", 2e-5), ("offload", 2e-5), ("int8 + offload", 0.03), ("quest:budget=12,page=4,device_layers=0", 2e-5)],
)
def test_one_layer_knows_no_difference(method, atol):
    """Keys and values of the first layer depend on the token and its position alone: an edit equals reading anew."""
    edited = kvjax.read(make_one(), DOCUMENTS, method, headroom=40).edit(START, STOP, NEW)
    anew = kvjax.read(make_one(), EDITED, method, capacity=edited.cache.capacity)
    np.testing.assert_allclose(edited.feed(QUESTIONS).last_logits, anew.feed(QUESTIONS).last_logits, atol=atol)
    assert edited.bytes == anew.bytes and edited.cache.length.tolist() == [len(d) for d in EDITED]


def test_later_keys_are_turned_and_later_values_stay():
    before = kvjax.read(make_two(), DOCUMENTS, "full + in_windows", headroom=40)
    after = before.edit(START, STOP, NEW)
    rope = make_two().config.kind(0).attention.rope
    for i in range(2):
        old, new = before.cache.layers[i], after.cache.layers[i]
        k, v, k_new, v_new = (np.asarray(memory.unpack(x))[0] for x in (old.k, old.v, new.k, new.v))
        np.testing.assert_array_equal(v_new[:, 16:42], v[:, 14:40])
        pos = jnp.arange(40, dtype=jnp.int32)[None, None]
        rotated = rope.rotate(rope.unrotate(jnp.asarray(k)[None, :, :40], pos), pos + 2)[0]
        np.testing.assert_allclose(k_new[:, 16:42], rotated[:, 14:40], atol=1e-5)
        np.testing.assert_array_equal(k_new[:, :10], k[:, :10])
    np.testing.assert_array_equal(after.cache.layers[1].pos[0, 0, :43], [*range(42), -1])


@pytest.mark.parametrize("method", ["full", "offload"])
def test_the_same_tokens_at_the_same_place_change_nothing(method):
    context = kvjax.read(make_two(), DOCUMENTS, f"{method} + in_windows", headroom=40)
    replaced_tokens = [d[a:b] for d, a, b in zip(DOCUMENTS, START, STOP, strict=True)]
    edited = context.edit(START, STOP, replaced_tokens)
    np.testing.assert_allclose(edited.feed(QUESTIONS).last_logits, context.feed(QUESTIONS).last_logits, atol=1e-5)


def test_an_edit_at_the_end_is_a_crop_and_a_feed():
    context = kvjax.read(make_two(), DOCUMENTS, "full + in_windows", headroom=40)
    ends = [len(d) for d in DOCUMENTS]
    edited = context.edit(ends, ends, QUESTIONS).feed(QUESTIONS)
    np.testing.assert_allclose(edited.last_logits, context.feed(QUESTIONS).feed(QUESTIONS).last_logits, atol=1e-5)
    emptied = context.edit(4, ends, [[], [], []])
    np.testing.assert_allclose(
        emptied.feed(QUESTIONS).last_logits, context.crop(4).feed(QUESTIONS).last_logits, atol=1e-6
    )


def test_own_tokens_behind_a_shared_prefix_are_edited():
    context = kvjax.read(make_one(), DOCUMENTS[:1], "full", headroom=0).extend_prefix(DOCUMENTS[1:], headroom=40)
    edited = context.edit([42, 40], [50, 41], [[1], [2, 3]])
    texts = [DOCUMENTS[0] + d for d in (DOCUMENTS[1][:2] + [1] + DOCUMENTS[1][10:], [2, 3] + DOCUMENTS[2][1:])]
    anew = kvjax.read(make_one(), texts, "full", headroom=40)
    np.testing.assert_allclose(edited.feed(QUESTIONS[1:]).last_logits, anew.feed(QUESTIONS[1:]).last_logits, atol=2e-5)
    with pytest.raises(IncompatibleMethod, match="in a shared prefix"):
        context.edit(39, 40, [[1], [1]])


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("snapkv:budget=8,window=4", "component `select`"),
        ("kivi:bits=4,group=8,residual=64", "`k`, Kivi, takes tokens one by one"),
        ("kivi:bits=4,group=8,residual=8", "cannot give back its last"),
    ],
)
def test_a_method_that_cannot_be_edited_says_so(method, says):
    with pytest.raises(IncompatibleMethod, match=says):
        kvjax.read(make_two(), DOCUMENTS, f"{method} + in_windows", headroom=40).edit(1, 2, [[5]] * 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((5, 4, [[1]] * 3), "sequence 0 has 40 tokens: stop must be 5 to 40 for it, got 4"),
        ((5, 7, [[1]] * 3), "sequence 2 has 6 tokens"),
        ((0, 1, [[1]]), "one text or list of ids per sequence, empty ones to delete: 3 of them"),
        ((0, 0, [[1] * 100] * 3), "the edited text has 140 tokens and the cache room for 128"),
        ((0, 1, [[97]] * 3), "token id 97"),
    ],
)
def test_bad_input_is_named(arguments, says):
    with pytest.raises(KvjaxError, match=says):
        kvjax.read(make_two(), DOCUMENTS, "full + in_windows", capacity=128).edit(*arguments)
