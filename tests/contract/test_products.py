"""Every pair of methods composes or says why not (C8); all that compose are traced, and a choice of them runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from docs.generate.pairs import defined_components, judge_pair
from kvjax import parse
from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.protocol import BoundLayer
from kvjax.errors import IncompatibleMethod
from kvjax.testing.rules import find_dependence
from tests.contract import layer
from tests.contract.cases import FIRST_CASES
from tests.contract.table import PAIRS, REGISTRY, bind_pair, pair_string, split_case

NUMBER = re.compile(r"[\d.]+")
REMEDY = re.compile(r"[;:] (compose|give|leave|use) ")
OF_THE_PAPERS = (
    "offload kcache kivi specache snapkv pyramidkv accumulated keynorm random sinks_and_recent kvcrush recompress "
    "streaming_llm h2o scissorhands infllm"
).split()
SELECTION = ["snapkv:budget=100,window=2,kernel=3", "kvcrush:share=0.5"]
CODECS = ("", "kivi:bits=4,group=4,residual=24")
PLACES = ("", "offload")
READERS = ("", "kcache:n=100,device_layers=0", "specache:bits=1,group=4,residual=4,topk=100")


def abstract_types(bound: BoundLayer) -> list:
    """Types of the state after the prompts, and after steps that commit one token, or none, and may draft one."""
    batch = layer.random_batch()
    commits = [(1, 1), (2, 1), (1, 0)] if bound.needs.draft_tokens else [(1, 1)]

    def run(q, block, steps):
        state = layer.make_state(bound, q, block, layer.num_slots(bound))
        states = [state]
        for tokens, (_, commit) in zip(steps, commits, strict=True):
            states.append(bound.extend(state, *tokens, commit, None)[1])
        return [jax.tree.map(jax.typeof, tree) for tree in states]

    return layer.trace(run, *layer.prompt(batch), [batch.tokens(0, num_tokens) for num_tokens, _ in commits])


@pytest.mark.parametrize("a", REGISTRY)
def test_c8_every_pair_exists_or_names_slots_and_remedy(a):
    for b in REGISTRY:
        bound_layer = bind_pair(*sorted((a, b))) if a != b else None
        if isinstance(bound_layer, IncompatibleMethod):
            assert "component `" in str(bound_layer) and REMEDY.search(str(bound_layer)), f"{a} + {b}: {bound_layer}"


@functools.cache
def component_names(name: str) -> set[str]:
    """The components that a method defines by itself."""
    return set(defined_components(parse(split_case(name)[0][0])))


@functools.cache
def component_kinds(name: str) -> set[tuple[str, ...]]:
    """The kinds of component that a method defines: their classes, and what decides the form of a selected state."""
    method = parse(" + ".join(split_case(name)[0]))
    kinds = set()
    for slot, component in defined_components(method).items():
        kind = type(component).__name__ if dataclasses.is_dataclass(component) else NUMBER.sub("", str(component))
        form = () if slot != "select" else (type(component.budget).__name__, component.granularity, component.scope)
        kinds.add((slot, kind, *form))
    return kinds


# Binding all pairs takes seconds, and each worker of a test run collects all tests: the tests themselves choose their
# pairs, and not their parameters.


@contextlib.contextmanager
def naming(a: str, b: str) -> Iterator[None]:
    """Adds a pair's names to an error."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the pair {a} + {b}")
        raise


def choose_pairs(meetings: dict[tuple[str, str], set]) -> list[tuple[str, str]]:
    """A few pairs in which all that meets in any pair meets at least once: each time the pair with the most of it."""
    missing, pairs = set().union(*meetings.values()), []
    while missing:
        best = max(meetings, key=lambda pair: len(meetings[pair] & missing))
        missing -= meetings[best]
        pairs.append(best)
    return pairs


OF_THE_SELECTION = ("second_stage", "representatives", "merge", "layer_budgets", "side_store")
PLACE_OF_SLOT = dict.fromkeys(OF_THE_SELECTION, "select") | {"v": "k"}
"""Slots whose components work together with those of another slot, which stands for them all."""


def component_places(name: str) -> set[str]:
    """Names the places at which a method's components work: the selection, the codecs, or another slot."""
    return {PLACE_OF_SLOT.get(slot, slot) for slot in component_names(name)}


def distinct_pairs() -> list[tuple[str, str]]:
    """Pairs in which each kind of component meets what other methods define beside it, by its place."""
    meetings = {}
    for a, b in PAIRS:
        if not isinstance(bind_pair(a, b), IncompatibleMethod):
            sides = (component_kinds(a), component_places(b)), (component_kinds(b), component_places(a))
            meetings[a, b] = set().union(*(itertools.product(*side) for side in sides))
    return choose_pairs(meetings)


def test_c8_every_kind_of_pair_keeps_its_types_through_a_step():
    for a, b in distinct_pairs():
        with naming(a, b):
            first, *others = abstract_types(bind_pair(a, b))
            for other in others:
                assert other == first


def test_at_most_twelve_pairs_of_the_papers_methods_are_impossible_apart_from_two_values_for_one_slot():
    verdicts = {pair: judge_pair(*pair) for pair in itertools.combinations(OF_THE_PAPERS, 2)}
    assert len(verdicts) == 120
    assert len([v for v in verdicts.values() if not v.composes and not v.reason.startswith("both ")]) <= 12


@functools.cache
def covering_pairs() -> list[tuple[str, str]]:
    """A few pairs that together define every two components that any pair of methods defines."""
    return choose_pairs(
        {
            pair: {frozenset(names) for names in itertools.product(*map(component_names, pair))}
            for pair in PAIRS
            if isinstance(bind_pair(*pair), MethodLayer)
        }
    )


def test_a_sequence_under_two_methods_is_independent_of_neighbours_and_padding():
    for a, b in covering_pairs():
        with naming(a, b):
            assert not find_dependence(layer.LayerRun.of(pair_string(a, b)))


def assert_dense(text: str, exact_from: int) -> None:
    batch = layer.random_batch()
    out, expected = (steps[:, :, :, exact_from:] for steps in (layer.decode(text, batch), layer.dense_outputs(batch)))
    np.testing.assert_allclose(out, expected, atol=5e-6)


def test_two_methods_at_their_limits_are_dense_attention():
    pairs = [pair for pair in covering_pairs() if all(FIRST_CASES[name].lossless for name in pair)]
    assert pairs
    for a, b in pairs:
        with naming(a, b):
            assert_dense(pair_string(a, b, lossless=True), max(FIRST_CASES[name].exact_from for name in (a, b)))


@pytest.mark.parametrize(
    "extra", [*itertools.product(CODECS, PLACES, READERS)], ids=lambda parts: " + ".join(filter(None, parts))
)
def test_selected_represented_held_placed_and_read_at_its_limit_it_is_dense_attention(extra):
    assert_dense(" + ".join([*SELECTION, *filter(None, extra)]), int("specache" in extra[2]))
