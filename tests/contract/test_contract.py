"""The battery that every case of every method passes (C1 to C7, and C10).

C3, C4 and C7 are rules of `kvjax check`, which hold of one layer as of a model; its other rules need a whole model, and
`test_check_preparation.py` tries those that run nothing.
"""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import planned_bytes
from kvjax.cache.eviction.budget_allocation import SHARED_ROUNDING
from kvjax.core.memory import array_bytes
from kvjax.errors import IncompatibleMethod
from kvjax.testing.rules import RULES, Rule, changed_types
from tests.contract import edges, layer
from tests.contract.cases import CASES, FIRST_CASES
from tests.contract.method_case import MethodCase
from tests.contract.table import REGISTRY, layer_shape, representative_methods

LOSSLESS = [case for case in FIRST_CASES.values() if case.lossless and case.method in representative_methods()]

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def test_every_method_has_cases_of_itself():
    assert {case.method for case in CASES} == {*REGISTRY}, "tests/contract/cases.py has a line for every method"
    assert len({case.id for case in CASES}) == len(CASES)
    for case in CASES:
        assert case.method in {part.split(":")[0].strip() for part in case.small.split("+")}


@functools.cache
def run_case(method: str) -> layer.LayerRun:
    """The battery's sequences under a method, read and decoded once for all tests."""
    return layer.LayerRun.of(method)


def prefill_case(method: str) -> tuple:
    """Returns (the bound layer, the sequences, their state after the prompts)."""
    run = run_case(method)
    return run.layer, run.batch, run.first_cache.layers[0]


@pytest.mark.parametrize("case", LOSSLESS, ids=lambda case: case.id)
def test_c1_at_its_limit_it_is_dense_attention_in_a_window(case: MethodCase):
    """`test_toy.py` has every case without a window, in a layer with a soft cap, sinks and narrow values.

    A window changes what a component reads or evicts, and no score: hence each class of component once.
    """
    batch = layer.random_batch()
    out, expected = layer.decode(case.lossless, batch, window=5), layer.dense_outputs(batch, window=5)
    np.testing.assert_allclose(out[:, :, :, case.exact_from :], expected[:, :, :, case.exact_from :], atol=5e-6)


EAGER = ("h2o", "kivi", "quest", "specache")
"""Methods with a policy, with packed codes, with an index, and with host memory and a draft.

A layer's step has no branch on tracers, and an eager one compiles each of its operations by itself: 150 programs.
"""


@each_case
def test_c2_eager_jitted_scanned_and_chunked_agree(case: MethodCase):
    bound_layer, batch, state = prefill_case(case.small)
    steps = np.concatenate([out for out, _ in run_case(case.small).steps[1:]], 1)
    scanned = layer.decode(case.small, batch, state=state)
    np.testing.assert_allclose(np.moveaxis(steps, 1, 3), scanned, atol=1e-6)
    if case is FIRST_CASES[case.method] and case.method in EAGER:
        eager, _, _ = bound_layer.extend(state, *batch.token(0), 1, None)
        np.testing.assert_allclose(eager, scanned[:, :, :, :1], atol=1e-6)
    chunk, _ = layer.compile_extend(bound_layer, layer.STEPS)(state, batch.tokens(0, layer.STEPS))
    np.testing.assert_allclose(chunk, scanned, atol=2e-6)


ON_PURPOSE = {("tova", "positions"): "after step 4, head 0 does not hold the newest token"}
"""Rules that a method breaks as its authors' code does."""


@each_case
@pytest.mark.parametrize("rule", [rule for rule in RULES if not rule.needs_model], ids=lambda rule: rule.name)
def test_the_rules_of_kvjax_check_hold_of_one_layer(case: MethodCase, rule: Rule):
    """C3, C4 and C7: neighbours and padding, shapes and memory kinds, positions; and codecs, contents, numbers."""
    breach, on_purpose = rule.find(run_case(case.small)), ON_PURPOSE.get((case.id, rule.name))
    assert on_purpose in breach.problem if on_purpose else not breach


@each_case
def test_c3_only_the_committed_tokens_are_kept(case: MethodCase):
    bound_layer, batch, state = prefill_case(case.small)
    two, drafted = layer.compile_extend(bound_layer)(state, batch.tokens(0, 2))
    one, single = layer.compile_extend(bound_layer)(state, batch.token(0))
    # A reader may prefetch for the draft.
    states = [
        dataclasses.replace(state, reader_state=None) if hasattr(state, "reader_state") else state
        for state in (drafted, single)
    ]
    chex.assert_trees_all_equal(*states)
    np.testing.assert_allclose(two[:, :, :, :1], one, atol=1e-6)


@each_case
def test_c3_a_draft_that_keeps_no_token_changes_no_type(case: MethodCase):
    """A codec then encodes no tokens, and `reshape` can infer no size of an empty array."""
    bound_layer, batch, state = prefill_case(case.small)

    def trace_draft(state, q, block):
        _, drafted, _ = bound_layer.extend(state, q, block, 0, None)
        return jax.tree.map(jax.typeof, state), jax.tree.map(jax.typeof, drafted)

    before, after = layer.trace(trace_draft, state, *batch.tokens(0, 2))
    assert after == before


@each_case
def test_c5_one_trace_per_shape(case: MethodCase):
    bound_layer, batch, state = prefill_case(case.small)
    _, state = layer.compile_extend(bound_layer)(state, batch.token(0))
    num_traces = layer.TRACES[bound_layer]
    for t in (1, 2):
        _, state = layer.compile_extend(bound_layer)(state, batch.token(t))
    assert layer.TRACES[bound_layer] == num_traces


@each_case
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_c6_bytes_are_the_papers_and_the_planned_ones(case: MethodCase, dtype):
    """The prompt is no multiple of 16 tokens, the unit of headroom."""
    expected = case.state_bytes(layer_shape(jnp.dtype(dtype).itemsize))
    expected = {"device": expected.device, "pinned_host": expected.pinned_host}
    bound_layer, batch = layer.bind(case.small), layer.random_batch(dtype=dtype)

    def trace_states(q, block, fresh):
        state = layer.make_state(bound_layer, q, block, layer.num_slots(bound_layer))
        return [jax.tree.map(jax.typeof, s) for s in (state, bound_layer.extend(state, *fresh, 1, None)[1])]

    if dtype == jnp.float32:
        states = [cache.layers[0] for _, cache in run_case(case.small).steps[:2]]
    else:
        states = layer.trace(trace_states, *layer.prompt(batch), batch.token(0))
    for state in states:
        assert array_bytes(state) == expected
    sizes_of = {"capacity": layer.CAPACITY, "batch": layer.B, "width": layer.LONGEST, "dtype": dtype}
    planned = planned_bytes(case.small, layer.MODEL, layer.LONGEST, **sizes_of)
    expected["device"] += 4 * layer.B  # the cache's own lengths
    if not bound_layer.needs.global_budget:
        assert planned.total == expected
    else:  # a plan adds the slots by which a layer's part of the budget may be rounded up, and no more
        slots = layer.num_slots(bound_layer) + SHARED_ROUNDING - 1
        make_largest = functools.partial(layer.make_state, bound_layer, slots=slots)
        largest = layer.trace(lambda *x: jax.tree.map(jax.typeof, make_largest(*x)), *layer.prompt(batch))
        assert expected["device"] <= planned.total["device"] <= array_bytes(largest)["device"] + 4 * layer.B


@each_case
def test_c10_what_breaks_naive_code_gives_numbers(case: MethodCase):
    bound_layer = layer.bind(case.small)
    for cases, batch in edges.batches():
        state = layer.prefill(bound_layer, batch)
        for x in jax.tree.leaves(state):
            assert not (jnp.issubdtype(x.dtype, jnp.floating) and np.isnan(x).any()), f"{x.shape} of one of {cases}"
        assert not edges.non_finite_cases(layer.decode(case.small, batch, state=state), cases)


@each_case
def test_c10_a_token_that_is_taken_back_leaves_no_trace(case: MethodCase):
    """A method that cannot roll back raises an error that says what to do."""
    bound_layer, batch, state = prefill_case(case.small)
    q, block = batch.token(0)
    loud = dataclasses.replace(block, k=block.k * 7, v=block.v * 7)
    _, more = layer.compile_extend(bound_layer)(state, (q, loud))
    try:
        limit = np.asarray(bound_layer.max_rollback(more))
        cropped = bound_layer.crop(more, jnp.asarray(np.minimum(limit, 1), jnp.int32))
    except IncompatibleMethod as error:
        assert "keep" in str(error)
        return
    assert not changed_types(state, cropped)
    for t in (0, 1):
        (out, cropped), (expected, state) = (
            layer.compile_extend(bound_layer)(any_state, batch.token(t)) for any_state in (cropped, state)
        )
        np.testing.assert_allclose(out[limit > 0], expected[limit > 0], atol=1e-6)
