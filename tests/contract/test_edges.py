"""A scorer gives every token a finite score in all edge cases; C10 asserts the same of states and outputs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.components import Scorer, Scores
from kvjax.cache.eviction.scorers import token_scores
from kvjax.cache.eviction.selection import make_selection
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock
from kvjax.engine.layer_prompt import observed_block
from kvjax.registry.strings import parse
from tests.contract import layer
from tests.contract.cases import FIRST_CASES
from tests.contract.edges import batches, non_finite_cases

METHODS = [parse(case.small) for case in FIRST_CASES.values()]
METHOD_OF_SCORER = {method.select.scorer: method for method in METHODS if method.select is not None}
"""Every scorer, with a method that selects by it."""


def non_finite_scores(bound: MethodLayer) -> set[str]:
    """The cases in which a prompt token has a score that is not finite; a selection would hide it."""

    @jax.jit
    def score_prompt(q: Array, block: KVBlock) -> Scores:
        observed = observed_block(bound, *layer.observe_prompt(bound, q, block))
        return bound.method.select.scorer.scores(*observed, bound.spec)

    failures: set[str] = set()
    for cases, batch in batches():
        q, block = layer.prompt(batch)
        scores, is_token = score_prompt(q, block), np.asarray(block.pos >= 0)
        failures |= {*non_finite_cases(np.where(is_token[:, :, None], scores.per_query_head, 0.0), cases)}
        failures |= {*non_finite_cases(np.where(is_token, scores.per_kv_head, 0.0), cases)}
    return failures


@pytest.mark.parametrize("scorer", METHOD_OF_SCORER, ids=str)
def test_scores_are_finite(scorer):
    assert not non_finite_scores(layer.bind(METHOD_OF_SCORER[scorer]))


@dataclasses.dataclass(frozen=True)
class Naive(Scorer):
    """Scores a token by the first channel of its key at length 1, and divides by zero for a key of zeros."""

    def scores(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Scores:
        return token_scores(block.k[..., 0] / jnp.sqrt(jnp.square(block.k).sum(-1)), block)


def test_a_division_by_zero_is_found():
    failures = non_finite_scores(layer.bind(Method(select=make_selection(Naive(), 5))))
    assert failures == {"zero keys", "all zeros", "tiny keys and values", "a single token of zeros"}
