"""A prefix that is stored once gives the results of a prefix in every sequence."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kvjax
from kvjax import IncompatibleMethod, KvjaxError
from kvjax.core.attention import combine
from kvjax.core.types import Partial
from kvjax.models.sharding import param_shardings
from kvjax.testing import toy_model

RNG = np.random.default_rng(0)


@functools.cache
def make_model() -> kvjax.Model:
    return toy_model(layers=1, windows=(25,))  # the window reaches from most documents into the prefix


def random_texts(*lengths: int) -> list[list[int]]:
    return [RNG.integers(0, 97, n).tolist() for n in lengths]


PREFIX, DOCUMENTS, QUESTIONS = random_texts(30), random_texts(12, 1, 7), random_texts(3, 5, 4)
WHOLE = [PREFIX[0] + d for d in DOCUMENTS]


def test_the_micro_example():
    """Output 1 with log-sum-exp 0 and output 3 with ln 3 combine to (1 + 3 * 3) / 4 = 2.5."""
    one, three = (jnp.full((1, 1, 1, 1, 1), x) for x in (1.0, 9.0))
    combined = combine(
        Partial(one, jnp.zeros((1, 1, 1, 1)), jnp.ones((1, 1, 1, 1))),
        Partial(three, jnp.zeros((1, 1, 1, 1)), jnp.full((1, 1, 1, 1), 3.0)),
    )
    assert float((combined.o / combined.l[..., None]).squeeze()) == 2.5


@pytest.mark.parametrize(
    ("prefix", "own"),
    [
        ("full", "full"),
        ("offload", "int8"),
        ("full", "snapkv:budget=99,window=4"),
        ("full", "kivi:bits=4,group=8,residual=64 + offload"),
        ("full", "h2o:heavy=60,recent=60"),
        ("full", "quest:budget=99,page=4,device_layers=0"),
    ],
)
def test_shared_is_repeated(prefix, own):
    """These methods keep every token exactly, except that `int8` rounds."""
    prefix, own = f"{prefix} + in_windows", f"{own} + in_windows"
    shared = kvjax.read(make_model(), PREFIX, prefix, headroom=0).extend_prefix(DOCUMENTS, own, headroom=40)
    repeated = kvjax.read(make_model(), WHOLE, "full", headroom=40)
    tolerance = {"atol": 0.02 if "int8" in own else 2e-5}
    np.testing.assert_allclose(shared.last_logits, repeated.last_logits, **tolerance)
    np.testing.assert_allclose(shared.feed(QUESTIONS).last_logits, repeated.feed(QUESTIONS).last_logits, **tolerance)
    assert shared.cache.length.tolist() == [len(text) for text in WHOLE]
    positions = shared.kept_positions()[0]
    assert [[len(head) for head in sequence] for sequence in positions] == [[len(text)] * 2 for text in WHOLE]


def test_the_prefix_is_held_once():
    shared = kvjax.read(make_model(), [[7] * 1000], "full", headroom=0).extend_prefix([[1]] * 8, headroom=16)
    per_token = 2 * 2 * 8 * 4  # keys and values, heads, numbers, bytes
    assert shared.bytes.total["device"] < (1024 + 8 * 100) * per_token < 8 * 1000 * per_token


def test_a_method_chooses_among_a_rows_own_tokens():
    """A sequence keeps 4 of its own tokens under snapkv, and the whole prefix, whatever the batch is."""
    prefix = kvjax.read(make_model(), PREFIX, "int4 + in_windows", headroom=0)
    together = prefix.extend_prefix(DOCUMENTS, "snapkv:budget=4,window=2 + in_windows", headroom=40)
    positions = together.kept_positions()[0]
    assert [[len(head) for head in sequence] for sequence in positions] == [[30 + n] * 2 for n in (4, 1, 4)]
    assert all((head[:30] == np.arange(30)).all() for sequence in positions for head in sequence)
    alone = prefix.extend_prefix(DOCUMENTS[2:], "snapkv:budget=4,window=2 + in_windows", headroom=40)
    np.testing.assert_allclose(
        together.feed(QUESTIONS).last_logits[2], alone.feed(QUESTIONS[2:]).last_logits[0], atol=1e-5
    )


def test_a_policy_weighs_a_rows_tokens_as_in_the_whole_text():
    """The scores of H2O, sums of the attention that a token gets from later ones, contain what the prefix takes."""
    method = "h2o:heavy=60,recent=60 + in_windows"
    shared = (
        kvjax.read(make_model(), PREFIX, "full", headroom=0)
        .extend_prefix(DOCUMENTS, method, headroom=40)
        .feed(QUESTIONS)
    )
    own, whole = (
        shared.cache.layers[0].own,
        kvjax.read(make_model(), WHOLE, method, headroom=40).feed(QUESTIONS).cache.layers[0],
    )
    for b, (document, question) in enumerate(zip(DOCUMENTS, QUESTIONS, strict=True)):
        for head in range(2):
            by_position = []
            for state, first in ((own, 0), (whole, 30)):
                pos, scores = np.asarray(state.pos[b, head]), np.asarray(state.policy_state[b, head])
                order = np.argsort(pos)[np.sort(pos) >= first]
                assert (pos[order] == first + np.arange(len(document) + len(question))).all()
                by_position.append(scores[order])
            np.testing.assert_allclose(*by_position, rtol=1e-4)


def test_levels_nest_and_rows_follow_several_prefixes(tmp_path):
    """The tree has a root, two branches that extend it, and four leaves: three extend a branch, one stands alone."""
    branches, leaves = random_texts(5, 8), random_texts(4, 1, 6, 3)
    root = kvjax.read(make_model(), PREFIX, "full", headroom=0)
    tree = root.extend_prefix(branches, headroom=0).extend_prefix(leaves, of=[1, 0, 1, -1], headroom=40)
    texts = [PREFIX[0] + branches[p] + d for p, d in zip((1, 0, 1), leaves, strict=False)] + leaves[3:]
    repeated = kvjax.read(make_model(), texts, "full", headroom=40)
    more = random_texts(2, 3, 1, 5)
    np.testing.assert_allclose(tree.feed(more).last_logits, repeated.feed(more).last_logits, atol=2e-5)
    taken, expected = (context.take([3, 0]).feed(more[:2]).last_logits for context in (tree, repeated))
    np.testing.assert_allclose(taken, expected, atol=2e-5)
    cropped = tree.feed(more).crop([len(t) for t in texts])
    np.testing.assert_allclose(cropped.feed(more).last_logits, repeated.feed(more).last_logits, atol=2e-5)
    resumed = kvjax.resume(make_model(), tree.save(tmp_path / "tree"), tree.method)
    assert jax.tree.structure(resumed.cache) == jax.tree.structure(tree.cache)
    assert resumed.ask(more, max_new_tokens=3).tokens == tree.ask(more, max_new_tokens=3).tokens


def test_rows_behind_one_prefix_branch_and_join():
    shared = kvjax.read(make_model(), PREFIX, "full", headroom=0).extend_prefix(DOCUMENTS, headroom=40)
    branched = shared.fork(2)
    np.testing.assert_array_equal(branched.last_logits[::2], shared.last_logits)
    assert branched.bytes.total["device"] < 2 * shared.bytes.total["device"]
    joined = shared.feed(QUESTIONS).join(shared.feed(QUESTIONS).take([1]))
    answers = joined.feed([*QUESTIONS, QUESTIONS[1]]).last_logits
    np.testing.assert_allclose(answers[3], answers[1], atol=1e-6)
    with pytest.raises(IncompatibleMethod, match="last 13 tokens, 12 at most.*or in a shared prefix"):
        shared.crop([29, 31, 31])
    other = kvjax.read(make_model(), random_texts(30), "full", headroom=0).extend_prefix(DOCUMENTS, headroom=40)
    with pytest.raises(KvjaxError, match="shared prefixes that are not the same one"):
        shared.join(other)


def test_a_guessing_method_works_behind_a_prefix():
    shared = kvjax.read(make_model(), PREFIX, "full", headroom=0).extend_prefix(
        DOCUMENTS, "specache:group=8,residual=8,topk=99", headroom=40
    )
    repeated = kvjax.read(make_model(), WHOLE, "full", headroom=40)
    tokens, expected = (c.generate(max_new_tokens=6, eos_ids=()).tokens for c in (shared, repeated))
    assert tokens == expected


def test_a_mesh_shares_one_prefix():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    model = toy_model(layers=1, vocab_size=96)
    params = jax.device_put(model.params, param_shardings(model.config, mesh))
    spread = dataclasses.replace(model, params=params, mesh=mesh)
    texts = [[5, 6], [7, 8, 9]]
    one = kvjax.read(model, [list(range(20))], "offload", headroom=0).extend_prefix(texts, "full", headroom=8)
    four = kvjax.read(spread, [list(range(20))] * 2, "offload", headroom=0).extend_prefix(
        texts, "full", of=[0, 0], headroom=8
    )
    np.testing.assert_allclose(four.feed(texts).last_logits, one.feed(texts).last_logits, atol=1e-5)
    assert four.bytes == one.bytes
    with pytest.raises(KvjaxError, match="on a mesh all documents share one prefix"):
        kvjax.read(spread, texts, "full", headroom=0).extend_prefix(texts, of=[0, 1])


@pytest.mark.parametrize(
    ("prefix", "own", "says"),
    [
        ("h2o:heavy=8,recent=8", "full", "component `decode`, H2O.*read the prefix under another method"),
        ("quest:device_layers=0", "full", "component `read`, Retrieve"),
        ("full", "streaming_llm:recent=9", "component `positions`, cache, cannot work behind a prefix"),
        ("full", "a_shape", "component `attend`"),
        ("full", "infllm", "component `read`"),
        ("full", "cake:budget=8,window=2", "component `layer_budgets`"),
    ],
)
def test_what_cannot_share_says_so(prefix, own, says):
    with pytest.raises(IncompatibleMethod, match=says):
        kvjax.read(make_model(), PREFIX, f"{prefix} + in_windows", headroom=0).extend_prefix(
            DOCUMENTS, f"{own} + in_windows"
        )


def test_bad_input_is_named():
    context = kvjax.read(make_model(), DOCUMENTS, "full", headroom=0)
    for of, says in (
        (None, "names one of the sequences 0..2 of the context for each of 2 .* got None"),
        ([0], "names one of the sequences 0..2 of the context for each of 2"),
        ([0, 3], "names one of the sequences 0..2 of the context .* or -1"),
    ):
        with pytest.raises(KvjaxError, match=says):
            context.extend_prefix(DOCUMENTS[:2], of=of)
    with pytest.raises(KvjaxError, match="a shared prefix is read first"):
        kvjax.read(make_model(), DOCUMENTS, context.extend_prefix(DOCUMENTS, of=[0, 1, 2]).method)
