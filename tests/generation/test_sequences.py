"""Caches as values: crop, fork, take and join change no later result."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import kvjax
from kvjax import IncompatibleMethod, KvjaxError, functional
from kvjax.core import memory
from kvjax.models.sharding import param_shardings
from kvjax.models.tokenizer import Tokenizer
from kvjax.testbed import vocab
from kvjax.testing import toy_model

RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(0, 97, n).tolist() for n in (40, 23, 1)]
MORE = [RNG.integers(0, 97, n).tolist() for n in (9, 2, 5)]
QUESTIONS = [RNG.integers(0, 97, n).tolist() for n in (3, 5, 4)]
APPEND_ONLY = ("full", "int4 + offload", "quest:budget=12,page=4,device_layers=0")


@functools.cache
def make_model() -> kvjax.Model:
    return toy_model(layers=1, windows=(25,))


@functools.cache
def make_other() -> kvjax.Model:
    return kvjax.random_model(make_model().config, seed=5)


def assert_same_context(a: kvjax.Context, b: kvjax.Context, atol: float = 1e-6) -> None:
    """Asserts that both contexts hold the same tokens and give the same logits."""
    for layer_a, layer_b in zip(a.kept_positions(), b.kept_positions(), strict=True):
        for heads_a, heads_b in zip(layer_a, layer_b, strict=True):
            np.testing.assert_array_equal(np.stack(heads_a), np.stack(heads_b))
    assert a.bytes == b.bytes
    np.testing.assert_allclose(a.feed(QUESTIONS).last_logits, b.feed(QUESTIONS).last_logits, atol=atol)


@pytest.mark.parametrize("method", APPEND_ONLY)
def test_cropping_takes_back_what_was_fed(method):
    before = kvjax.read(make_model(), DOCUMENTS, f"{method} + in_windows", headroom=40)
    after = before.feed(MORE).crop([len(d) for d in DOCUMENTS])
    assert_same_context(after, before)
    kinds = [[memory.memory_kind(x) for x in jax.tree.leaves(c.cache)] for c in (before, after)]
    assert kinds[0] == kinds[1]


def test_cropping_goes_back_into_the_prompt():
    lengths = [30, 20, 1]
    short = [d[:n] for d, n in zip(DOCUMENTS, lengths, strict=True)]
    whole = kvjax.read(make_model(), DOCUMENTS, "full", capacity=64)
    cropped = whole.crop(lengths)
    assert_same_context(cropped, kvjax.read(make_model(), short, "full", capacity=64), atol=2e-5)
    emptied = cropped.crop(0)
    np.testing.assert_allclose(emptied.feed(DOCUMENTS).last_logits, whole.last_logits, atol=2e-5)


CODED = "kivi:bits=2,group=8,residual=8"


@pytest.mark.parametrize("method", ["full", "int4 + offload", CODED, f"{CODED} + in_windows"])
@pytest.mark.parametrize("lengths", [0, [0, 25, 0]])
def test_a_sequence_of_no_tokens_is_empty_whatever_has_left_its_window_or_is_coded_for_good(method, lengths):
    whole = kvjax.read(make_model(), DOCUMENTS, method, headroom=40).feed(MORE)
    before = jax.tree.map(np.array, whole.cache)
    emptied, first = whole.crop(lengths), whole.cache
    none = functional.empty(first.plan, first.config, 3, first.capacity)
    none = dataclasses.replace(whole, cache=dataclasses.replace(none, weights=first.weights))
    expected = none if lengths == 0 else none.take([0]).join(whole.take([1]), none.take([2]))
    assert emptied.cache.length.tolist() == expected.cache.length.tolist() == [0, 25 * (lengths != 0), 0]
    assert_same_context(emptied, expected)
    jax.tree.map(np.testing.assert_array_equal, whole.cache, before)  # it stays as it was


def test_a_ring_gives_back_all_that_it_still_holds():
    """The first sequence has filled its ring of 41 tokens and goes on, the others have not."""
    whole = kvjax.read(make_model(), DOCUMENTS, "full", headroom=40).feed(MORE)
    lengths = [32, 3, 1]
    expected = kvjax.read(make_model(), [d[:n] for d, n in zip(DOCUMENTS, lengths, strict=True)], "full", capacity=128)
    np.testing.assert_allclose(whole.crop(lengths).feed(MORE).last_logits, expected.feed(MORE).last_logits, atol=2e-5)
    with pytest.raises(IncompatibleMethod, match="crop to 32 tokens or more"):
        whole.crop([31, 0, 0])


def test_a_prefix_that_others_share_stays():
    context = kvjax.read(make_model(), DOCUMENTS[:1], "full").extend_prefix(MORE)
    with pytest.raises(IncompatibleMethod, match="in a shared prefix"):
        context.crop(0)


FED = ([[5, 6], [], [7]], [[], [8, 9, 10], []])


@pytest.mark.parametrize(
    "method",
    [
        "full",
        CODED,
        "full + offload + in_windows",
        "kivi:bits=4,group=8,residual=8 + in_windows",
        "snapkv:budget=8,window=4 + int8 + in_windows",
        "h2o:heavy=8,recent=8 + in_windows",
        "streaming_llm:recent=8 + in_windows",
        "specache:group=8,residual=8,topk=8 + in_windows",
        "quest:budget=12,page=4,device_layers=0 + in_windows",
    ],
)
def test_a_sequence_without_more_text_stays_as_it_is(method):
    context = kvjax.read(make_model(), DOCUMENTS, method, headroom=40)
    for more in FED:
        fed = context.feed(more)
        lengths = [len(text) + len(row) for text, row in zip(DOCUMENTS, more, strict=True)]
        assert fed.cache.length.tolist() == lengths and [len(row) for row in fed.ids] == lengths
        logits, longer = kvjax.extend(make_model(), more, context.cache)
        assert logits.shape[1] == max(map(len, more)) and longer.length.tolist() == lengths
        for i, row in enumerate(more):
            alone = context.take([i])
            assert_same_tokens(fed.take([i]), alone.feed([row]) if row else alone)
            if not row:
                np.testing.assert_array_equal(fed.last_logits[i], context.last_logits[i])


def assert_same_tokens(a: kvjax.Context, b: kvjax.Context) -> None:
    np.testing.assert_allclose(a.last_logits, b.last_logits, atol=2e-6)
    for more in ([[11]], [[12, 13, 14]]):
        a, b = a.feed(more), b.feed(more)
        np.testing.assert_allclose(a.last_logits, b.last_logits, atol=2e-6)
    for layer_a, layer_b in zip(a.kept_positions(), b.kept_positions(), strict=True):
        np.testing.assert_array_equal(np.stack(layer_a[0]), np.stack(layer_b[0]))


def test_texts_may_be_empty_too_but_not_all_of_them():
    model = dataclasses.replace(toy_model(layers=1, vocab_size=vocab.SIZE), tokenizer=Tokenizer(vocab.tokenizer()))
    context = kvjax.read(model, ["a b", "c"], "full")
    fed = context.feed(["", " b"])
    assert fed.cache.length.tolist()[0] == context.cache.length.tolist()[0]
    np.testing.assert_array_equal(fed.last_logits[0], context.last_logits[0])
    assert fed.ids == context.feed([[], model.tokenizer.encode_continuation(" b")]).ids
    for nothing in (["", ""], [[], []], [np.zeros(0, int), ""]):
        for call in (context.feed, lambda more: kvjax.extend(model, more, context.cache)):
            with pytest.raises(KvjaxError, match="all 2 texts are empty.*give one of them a token at least"):
                call(nothing)
    # What needs logits of new tokens still asks for some.
    for call in (context.ask, context.score, lambda more: kvjax.generate(model, more, cache=context.cache)):
        with pytest.raises(KvjaxError, match="text 0, '', has no tokens to continue with"):
            call(["", " b"])
    # After a crop nobody knows the logits of a sequence that is fed nothing, and a text still begins an empty one.
    emptied = context.crop(0).feed(["a", ""])
    assert emptied.cache.length.tolist() == [len(model.tokenizer.encode_prompt("a")), 0]
    with pytest.raises(KvjaxError, match="at least one token per sequence"):
        emptied.generate(max_new_tokens=2)
    assert emptied.feed(["", "c"]).cache.length.tolist()[1] == len(model.tokenizer.encode_prompt("c"))


def test_groups_that_are_coded_stay_coded():
    """Keys leave a residual of 8 tokens in groups, values one by one."""
    before = kvjax.read(make_model(), [list(range(20))] * 2, f"{CODED} + in_windows", headroom=40)
    fed = before.feed([[1, 2], [3, 4]])
    with pytest.raises(IncompatibleMethod, match="sequence 0 of layer 0 cannot give back its last 2 tokens, 1 at most"):
        fed.crop(20)
    cropped, fed_one_token = fed.crop(21), before.feed([[1], [3]])
    np.testing.assert_allclose(cropped.feed(MORE[:2]).last_logits, fed_one_token.feed(MORE[:2]).last_logits, atol=1e-6)
    assert cropped.crop([21, 21]).cache.length.tolist() == [21, 21]


@pytest.mark.parametrize(
    ("method", "slot"),
    [
        ("snapkv:budget=8,window=4", "`select`, Selection, has made its choice"),
        ("h2o:heavy=8,recent=8", "`decode`"),
        ("zipcache", "`side_store`"),
        ("specache:group=8,residual=8,topk=8", "`read`, SpeculativeReader, keeps something of all tokens"),
        ("int4 + quest:budget=12,page=4,device_layers=0", "`k`, PerTokenCodec, holds keys inexactly"),
    ],
)
def test_a_method_that_cannot_go_back_says_so(method, slot):
    context = kvjax.read(make_model(), DOCUMENTS, f"{method} + in_windows", headroom=40)
    with pytest.raises(IncompatibleMethod, match=slot + ".*keep the (one|context) of before"):
        context.crop(0)


def test_after_a_crop_something_must_be_fed(tmp_path):
    context = kvjax.read(make_model(), DOCUMENTS, "full", headroom=40).crop(1)
    for call in (context.generate, lambda: context.score(QUESTIONS)):
        with pytest.raises(KvjaxError, match="known when something has been fed"):
            call()
    resumed = kvjax.resume(make_model(), context.save(tmp_path / "cropped"))
    assert resumed.ask(QUESTIONS, max_new_tokens=3).tokens == context.ask(QUESTIONS, max_new_tokens=3).tokens
    assert context.feed([[5], [6], [7]]).generate(max_new_tokens=2).decode_steps == 1


@pytest.mark.parametrize(
    "method",
    [
        "full",
        f"{CODED} + offload",
        "kivi:bits=4,group=8,residual=8 + offload + in_windows",
        "h2o:heavy=8,recent=8 + in_windows",
    ],
)
def test_branches_and_joined_rows_are_the_rows(method):
    context = kvjax.read(make_model(), DOCUMENTS[:2], method, headroom=40)
    branched = context.fork(2)
    assert branched.num_sequences == 4 and branched.cache.length.tolist() == [40, 40, 23, 23]
    for x, y in zip(jax.tree.leaves(branched.cache), jax.tree.leaves(context.cache), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y)[[0, 0, 1, 1]])
        assert memory.memory_kind(x) == memory.memory_kind(y) and x.dtype == y.dtype
    np.testing.assert_array_equal(
        kvjax.cache_ops.fork(context.cache, 2).length, kvjax.cache_ops.take(context.cache, [0, 0, 1, 1]).length
    )
    joined = branched.take([0, 1]).join(branched.take([2]), branched.take([3]))
    pairs = zip(*(jax.tree.leaves((c.cache, c.last_logits)) for c in (joined, branched)), strict=True)
    for x, y in pairs:
        np.testing.assert_array_equal(x, y)
    answers = context.ask(QUESTIONS[:2], max_new_tokens=3).tokens
    assert branched.ask([QUESTIONS[0], QUESTIONS[1]] * 2, max_new_tokens=3).tokens[::3] == answers


@pytest.mark.parametrize(
    "method",
    [
        "turned_queries:budget=10",
        "kvzip:budget=10 + int4",
        "snapkv:budget=10,window=2 + kivi:bits=2,group=8,residual=8 + offload",
        "snapkv:budget=10,window=2 + adakv:page=4",
        "zipcache:every=4",
        "shadowkv:rank=8,chunk=4,budget=12,outliers=4",
    ],
)
def test_documents_of_unlike_lengths_that_were_read_with_one_capacity_join(method):
    """Their caches have different numbers of slots; joined, each sequence answers as it does alone."""
    model = toy_model(layers=2, width=32, head_dim=32, mlp_width=16)
    alone = [kvjax.read(model, [document], method, capacity=64) for document in DOCUMENTS[:2]]
    joined = alone[0].join(alone[1]).feed(QUESTIONS[:2])
    expected = [context.feed([question]) for context, question in zip(alone, QUESTIONS, strict=False)]
    np.testing.assert_allclose(joined.last_logits, np.concatenate([c.last_logits for c in expected]), atol=1e-5)
    for both, *each in zip(joined.kept_positions(), *(c.kept_positions() for c in expected), strict=True):
        for heads, (own,) in zip(both, each, strict=True):
            for found, kept in zip(heads, own, strict=True):
                np.testing.assert_array_equal(found, kept)


@pytest.mark.parametrize("sizes", [(2, 2), (1, 1), (1, 2), (2, 1)])
def test_what_all_sequences_share_is_stored_once_when_batches_are_joined(sizes):
    """CSKV's basis has one entry, whatever the number of sequences."""
    model = toy_model(layers=1, width=8, head_dim=32, mlp_width=16)  # a table ships for this size
    prompts = [RNG.integers(0, 97, 30).tolist() for _ in range(sum(sizes))]
    parts = [prompts[: sizes[0]], prompts[sizes[0] :]]
    first, second = (kvjax.read(model, part, "cskv:window=3", capacity=64) for part in parts)
    together = kvjax.read(model, prompts, "cskv:window=3", capacity=64)
    joined = first.join(second)
    question = [[5, 6, 7]] * sum(sizes)
    np.testing.assert_allclose(joined.feed(question).last_logits, together.feed(question).last_logits, atol=1e-5)
    if max(sizes) > 1:
        assert joined.bytes == together.bytes
    forked = together.fork(2)
    assert forked.take(range(0, len(prompts) * 2, 2)).bytes == together.bytes
    # A state of one sequence cannot tell its own entry from a shared one: its forks join with any batch all the same.
    mixed = first.fork(2).join(second)
    expected = together.take([i for i in range(sizes[0]) for _ in range(2)] + list(range(sizes[0], sum(sizes))))
    question = [[5, 6, 7]] * mixed.cache.length.shape[0]
    np.testing.assert_allclose(mixed.feed(question).last_logits, expected.feed(question).last_logits, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: c.crop(41), "sequence 0 has 40 tokens: lengths must be 0 to 40 for it, got 41"),
        (lambda c: c.crop([1, 2]), "lengths must be a whole number, or one for each of 3 sequences"),
        (lambda c: c.crop(0.5), "lengths must be a whole number"),
        (lambda c: c.take([3]), "the cache has sequences 0..2"),
        (lambda c: c.take([]), "a list of one number or more"),
        (lambda c: c.fork(0), "times must be an integer from 1 to 2147483647, got 0"),
        (lambda c: kvjax.cache_ops.join([]), "no caches were given"),
        (lambda c: c.join(kvjax.read(make_model(), [[1]], "int4", capacity=128)), "another model or method"),
        (lambda c: c.join(kvjax.read(make_other(), [[1]], "full", capacity=128)), "of a model with other weights"),
        (lambda c: c.join(kvjax.read(make_model(), [[1]], "full", capacity=256)), "room for 256 tokens per sequence"),
    ],
)
def test_bad_input_is_named(call, says):
    context = kvjax.read(make_model(), DOCUMENTS, "full", capacity=128)
    with pytest.raises(KvjaxError, match=says):
        call(context)


def test_four_devices_do_what_one_does():
    model = toy_model(layers=1, vocab_size=96)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    params = jax.device_put(model.params, param_shardings(model.config, mesh))
    documents, more, last = [[5, 6, 7, 8, 9], [1, 2, 3]], [[10, 11], [12]], [[13], [14, 15]]

    def edit_and_branch(model: kvjax.Model) -> tuple[kvjax.Context, list[np.ndarray]]:
        context = kvjax.read(model, documents, "offload", headroom=40)
        back = context.feed(more).crop([5, 3])
        branched = back.fork(2).join(back)
        edited = context.edit([1, 0], [2, 1], [[20, 21], []])
        return branched, [c.feed(last).last_logits for c in (back, branched.take([0, 2]), edited)]

    _, expected = edit_and_branch(model)
    branched, logits = edit_and_branch(dataclasses.replace(model, params=params, mesh=mesh))
    for on_mesh, on_one_device in zip(logits, expected, strict=True):
        np.testing.assert_allclose(on_mesh, on_one_device, atol=1e-5)
    for x in filter(np.size, jax.tree.leaves(branched.cache.layers)):
        assert max(shard.data.size for shard in x.addressable_shards) < x.size
    with pytest.raises(KvjaxError, match="axis B of size 1 does not divide over the 2 devices"):
        branched.take([0])
