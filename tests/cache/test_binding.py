"""Bound layers that do the same are equal values, wherever they stand, and so share compiled programs."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.binding import bind_component
from kvjax.cache.codecs.plain import Plain
from kvjax.cache.eviction.budgets import Uniform
from kvjax.cache.protocol import LayerSpec
from kvjax.engine.plan import bind, specs
from kvjax.method_api import Method, Policy, Scorer, make_selection, token_scores
from kvjax.methods.pyramidkv import Pyramid
from kvjax.testing import toy_model
from tests.contract.cases import CASES

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [2, 7, 1]]

OWN_ARRAYS = "a table gives every layer arrays of its own, and they are constants of its programs"
OWN_NUMBERS = "every layer draws other random numbers"
OWN_BUDGET = "every layer, or every head, keeps another number of tokens"

DIFFERENT = {
    "attention_gate": (4, 1, OWN_ARRAYS),
    "cam": (4, 1, OWN_NUMBERS),
    "cskv": (4, 4, OWN_ARRAYS),
    "double_sparsity, calibrated channels": (4, 4, OWN_ARRAYS),
    "dms": (4, 1, OWN_ARRAYS),
    "duo_attention": (2, 1, OWN_BUDGET),
    "expected_attention, queries of a table": (4, 1, OWN_ARRAYS),
    "fastkvzip": (4, 1, OWN_ARRAYS),
    "head_shares": (4, 1, OWN_BUDGET),
    "headkv": (4, 1, OWN_BUDGET),
    "keyformer": (4, 4, OWN_NUMBERS),
    "kvtc": (4, 4, OWN_ARRAYS),
    "kvzap": (4, 1, OWN_ARRAYS),
    "lococo": (4, 1, OWN_ARRAYS),
    "locret": (4, 1, OWN_ARRAYS),
    "lukv": (4, 1, OWN_BUDGET),
    "matryoshka": (4, 4, OWN_ARRAYS),
    "merged_heads": (4, 4, OWN_ARRAYS),
    "minicache": (3, 3, "below the pairs, and the lower and the upper layer of a pair"),
    "oscar": (4, 4, OWN_ARRAYS),
    "pyramidkv": (4, 1, OWN_BUDGET),
    "qfilters": (4, 1, OWN_ARRAYS),
    "razor_attention": (3, 1, OWN_BUDGET),
    "triattention, queries of a table": (4, 4, OWN_ARRAYS),
    "tidal_decode": (2, 2, "layers that choose tokens, and layers that read the tokens chosen below"),
}
"""Numbers of unequal layers among four, when they read a prompt and in a decode step, and why they differ."""

SELECTING = (
    "snapkv:budget=8,window=4",
    "keydiff:budget=6",
    "snapkv:budget=8,window=4 + kvcrush:share=0.5",
    "snapkv:budget=8,window=4 + criticalkv",
    "cake:budget=8,window=4",
    "kvzip:budget=8,level=head",
    "pyramidkv:budget=9,window=4",
)
"""Methods that only select: they store and read the selected tokens as `full` does."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_layers_that_do_the_same_are_equal_values(case):
    plan = bind(case.small, kvjax.load("testbed").config)
    prompt, decode, _ = DIFFERENT.get(case.id, (1, 1, ""))
    assert len(plan) == 4 and len(set(plan)) == prompt
    assert len({layer.after_prompt for layer in plan}) == decode
    assert all(layer.spec.index is None for layer in plan)
    assert len({id(layer) for layer in plan}) == prompt  # one object each, so that comparing them is cheap


def test_layers_of_unequal_windows_differ():
    plan = bind("snapkv:budget=8", toy_model(layers=4, windows=(None, 5, None, 5)).config)
    assert plan[0] == plan[2] != plan[1] == plan[3]


def test_after_the_prompt_methods_that_select_are_one():
    config = toy_model(layers=2).config
    token_layers = {layer.after_prompt for method in SELECTING for layer in bind(method, config)}
    assert token_layers == set(bind("full", config))
    allocations = "adakv:page=4", "adakv:page=4,alpha=0.5", "adakv:page=4,scope=model"
    page_layers = {layer.after_prompt for x in allocations for layer in bind(f"{SELECTING[0]} + {x}", config)}
    assert len(page_layers) == 1 and not page_layers & token_layers  # whichever rule filled the pages


def test_a_policy_keeps_its_selection():
    layer = bind("snapkv:budget=8,window=4 + recompress:every=4", toy_model().config)[0]
    assert layer.after_prompt is layer


def test_methods_that_select_share_a_decode_program(traced_calls):
    model = toy_model(layers=3, head_dim=24)  # a head size that no other test has
    methods = "snapkv:budget=8,window=4", "keydiff:budget=8", "snapkv:budget=8,window=4 + kvcrush:share=0.5"
    outputs = []
    for method in methods:
        _, cache = kvjax.prefill(model, PROMPTS, method, capacity=64)
        logits, next_cache = kvjax.extend(model, [[7], [8]], cache)
        assert next_cache.plan == cache.plan == bind(method, model.config)
        outputs.append(np.asarray(logits))
    decode_calls = {call for call in traced_calls if not call.num_slots}
    assert [call.layer.method for call in decode_calls] == [Method()]
    assert not np.allclose(outputs[0], outputs[1]) and not np.allclose(outputs[0], outputs[2])  # their tokens differ


@dataclasses.dataclass(frozen=True)
class SpecScorer(Scorer):
    """A scorer that stores its layer's spec and prefers late tokens, but early ones in the first layer."""

    spec: LayerSpec | None = None

    def at(self, spec):
        return SpecScorer(spec)

    def scores(self, block, observation, spec):
        positions = jnp.arange(block.pos.shape[2], dtype=jnp.float32)
        sign = -1.0 if self.spec.index == 0 else 1.0
        return token_scores(jnp.broadcast_to(sign * positions, block.k.shape[:3]), block)


def test_a_component_that_keeps_the_whole_spec_is_right_with_programs_of_its_own():
    model = toy_model(layers=3)
    method = Method(select=make_selection(SpecScorer(), 2))
    assert len(set(bind(method, model.config))) == 3
    _, cache = kvjax.prefill(model, PROMPTS, method)
    positions = kvjax.kept_positions(cache)
    assert [[head.tolist() for head in layer[0]] for layer in positions] == [
        [[0, 1]] * 2,
        [[14, 15]] * 2,
        [[14, 15]] * 2,
    ]


def test_what_depends_on_a_place_is_found_in_whatever_holds_it():
    spec = specs(toy_model(layers=3).config)[2]

    @dataclasses.dataclass(frozen=True)
    class Pair:
        both: tuple
        name: str = "pair"

    bound_pair = bind_component(Pair((SpecScorer(), Pair((Pyramid(16, 4),)))), spec)
    assert bound_pair == Pair((SpecScorer(spec), Pair((Pyramid(16, 4, layer=2, layers=3),))))
    untouched = Pair((Plain(), Uniform(3), SpecScorer))  # a class is no component
    assert bind_component(untouched, spec) is untouched


def test_the_hash_is_cached_and_not_carried_into_another_process():
    one, other = (bind("kivi:bits=2,group=8,residual=8", toy_model().config)[0] for _ in range(2))
    assert one == other and one is not other and hash(one) == hash(other)
    assert one != bind("full", toy_model().config)[0] and one != "a text"
    assert "_hash" in vars(one)
    for twin in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)):
        assert twin == one and hash(twin) == hash(one)
    assert "_hash" not in vars(pickle.loads(pickle.dumps(bind("full", toy_model().config)[0])))


def test_what_is_asked_of_a_cache_is_asked_of_the_layers_as_bound():
    model = toy_model(layers=2)
    method = "snapkv:budget=8,window=4 + adakv:page=4"
    _, cache = kvjax.prefill(model, PROMPTS, method, capacity=64)
    _, next_cache = kvjax.extend(model, [[7, 3], [8, 5]], cache)
    jitted = jax.jit(lambda cache: cache)(next_cache)
    for other in (next_cache, jitted):
        assert other.plan == bind(method, model.config) and other.plan[0].method.select is not None
        assert kvjax.state_bytes(other).held["device"] > kvjax.state_bytes(cache).held["device"]


@dataclasses.dataclass(frozen=True)
class LayerSizedPolicy(Policy):
    """A policy with another number of slots in every layer, computed from the layer's index."""

    count: int = 0

    def at(self, spec):
        return LayerSizedPolicy(4 + spec.index)

    def num_slots(self):
        return self.count + 1

    def init(self, spec, block, observation, num_slots):
        length = (block.pos >= 0).sum(2, keepdims=True, dtype=jnp.int32)
        newest = length - 1 - jnp.arange(min(num_slots, self.count), dtype=jnp.int32)[None, None]
        return jnp.where(newest >= 0, newest, -1), None

    def after_token(self, spec, state, weights, q_pos):
        full = (state.pos >= 0).all(2, keepdims=True)
        oldest = state.pos == jnp.where(state.pos >= 0, state.pos, 2**30).min(2, keepdims=True)
        return jnp.where(full & oldest, -1, state.pos), None


def test_any_component_may_be_one_of_its_place():
    model = toy_model(layers=3)
    _, cache = kvjax.prefill(model, PROMPTS, Method(decode=LayerSizedPolicy()))
    assert [len(layer[0][0]) for layer in kvjax.kept_positions(cache)] == [4, 5, 6]
