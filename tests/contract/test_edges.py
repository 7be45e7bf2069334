"""A scorer gives every token a finite score, whatever it looks at; C10 says the same of states and outputs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.eviction.scorers import Scorer, Scores, token_scores
from kvjax.cache.eviction.selection import make_selection
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock
from kvjax.engine.layer_prompt import observed_block
from kvjax.methods.strings import parse
from tests.contract import layer
from tests.contract.cases import FIRST_CASES
from tests.contract.edges import batches, non_finite_cases

METHODS = [parse(case.small) for case in FIRST_CASES.values()]
SELECTING = {method.select.scorer: method for method in METHODS if method.select is not None}
"""Each scorer once, with a method that chooses by it."""


def badly_scored(bound: MethodLayer) -> set[str]:
    """The cases in which a token of a prompt has a score that is no finite number; a selection would hide it."""

    def scored(q: Array, block: KVBlock) -> Scores:
        seen = observed_block(bound, *layer.observed(bound, q, block))
        return bound.method.select.scorer.scores(*seen, bound.spec)

    program, found = jax.jit(scored), set()
    for cases, d in batches():
        q, block = layer.prompt(d)
        given, real = program(q, block), np.asarray(block.pos >= 0)
        found |= {*non_finite_cases(np.where(real[:, :, None], given.per_query_head, 0.0), cases)}
        found |= {*non_finite_cases(np.where(real, given.per_kv_head, 0.0), cases)}
    return found


@pytest.mark.parametrize("scorer", SELECTING, ids=str)
def test_scores_are_finite(scorer):
    assert not badly_scored(layer.bound(SELECTING[scorer]))


@dataclasses.dataclass(frozen=True)
class Naive(Scorer):
    """The first channel of a key at length 1, wherever a key has a length."""

    def scores(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Scores:
        return token_scores(block.k[..., 0] / jnp.sqrt(jnp.square(block.k).sum(-1)), block)


def test_a_division_by_zero_is_found():
    found = badly_scored(layer.bound(Method(select=make_selection(Naive(), 5))))
    assert found == {"zero keys", "all zeros", "tiny keys and values", "a single token of zeros"}
