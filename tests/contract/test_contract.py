"""The battery that every case of every method passes (C1 to C7, and C10).

C4 and C7 use rules of `kvjax.testing.rules`; its other rules need a whole model.
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
from kvjax.models import Config
from kvjax.registry.strings import method_of
from kvjax.testing.rules import changed_types, wrong_positions
from tests.contract import edges, layer
from tests.contract.cases import CASES
from tests.contract.method_case import MethodCase
from tests.contract.table import REGISTRY, layer_shape

MODEL = Config(2, layer.D, layers=1, heads=layer.K * layer.G, kv_heads=layer.K, head_dim=layer.H, mlp_width=layer.D)
LOSSLESS = [case for case in CASES if case.lossless]

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def test_every_method_has_cases_of_itself():
    assert {case.method for case in CASES} == {*REGISTRY}, "tests/contract/cases.py has a line for every method"
    assert len({case.id for case in CASES}) == len(CASES)
    for case in CASES:
        assert case.method in {part.split(":")[0].strip() for part in case.small.split("+")}


@functools.cache
def steps(method: str) -> np.ndarray:
    """The outputs of all steps of the battery's sequences, f32[B K G STEPS H]."""
    return layer.decode(method, layer.random_batch())


@functools.cache
def prefill_case(method: str) -> tuple:
    """Returns (the bound layer, the sequences, their state after the prompts)."""
    bound_layer, batch = layer.bind(method), layer.random_batch()
    return bound_layer, batch, layer.prefill(bound_layer, batch)


@pytest.mark.parametrize("case", LOSSLESS, ids=lambda case: case.id)
@pytest.mark.parametrize("window", [None, 5])
def test_c1_at_its_limit_it_is_dense_attention(case: MethodCase, window):
    batch = layer.random_batch()
    out, expected = (
        x[:, :, :, case.exact_from :]
        for x in (layer.decode(case.lossless, batch, window), layer.dense_outputs(batch, window))
    )
    np.testing.assert_allclose(out, expected, atol=5e-6)


@each_case
def test_c2_eager_jitted_scanned_and_chunked_agree(case: MethodCase):
    bound_layer, batch, state = prefill_case(case.small)
    scanned = steps(case.small)
    first, state_after = layer.compile_extend(bound_layer)(state, batch.token(0))
    second, _ = layer.compile_extend(bound_layer)(state_after, batch.token(1))
    np.testing.assert_allclose(np.concatenate([first, second], 3), scanned[:, :, :, :2], atol=1e-6)
    eager, _, _ = bound_layer.extend(state, *batch.token(0), 1, None)
    np.testing.assert_allclose(eager, first, atol=1e-6)
    chunk, _ = layer.compile_extend(bound_layer, layer.STEPS)(state, batch.tokens(0, layer.STEPS))
    np.testing.assert_allclose(chunk, scanned, atol=2e-6)


@each_case
def test_c3_rows_are_independent_of_neighbours_and_padding(case: MethodCase):
    bound_layer, clean, _ = prefill_case(case.small)
    mixed, noisy = steps(case.small), layer.random_batch(padding=1e4)
    other = layer.decode(case.small, noisy, state=layer.prefill(bound_layer, noisy, padding=1e4))
    np.testing.assert_array_equal(mixed, other)
    for b in range(layer.B):  # a batch of copies of one sequence
        copies = layer.decode(case.small, layer.take_sequences(clean, [b] * layer.B))
        for out in copies:
            np.testing.assert_allclose(out, mixed[b], atol=1e-6)


RAGGED = ((1, 3, 5), (3, 5, 1), (5, 1, 3), (2, 4, 6), (4, 6, 2), (6, 2, 4))
"""Tokens that each sequence gets in one call: every sequence gets every number up to 6 while another gets more."""


@each_case
@pytest.mark.parametrize("counts", RAGGED, ids=str)
def test_c3_after_a_ragged_question_every_row_goes_on_as_if_alone(case: MethodCase, counts: tuple[int, ...]):
    """A compression that is due when a sequence is full waits for that sequence's own next token."""
    bound_layer, batch, state = prefill_case(case.small)
    expected, num_fed = steps(case.small), np.array(counts)
    chunk = layer.truncate_chunk(batch.tokens(0, layer.STEPS), list(counts), padding=1e4)
    out, state = layer.compile_extend(bound_layer, layer.STEPS)(state, chunk)
    for b, count in enumerate(counts):
        np.testing.assert_allclose(out[b, :, :, :count], expected[b, :, :, :count], atol=2e-6)
    for _ in range(layer.STEPS - min(counts)):
        is_fed = (num_fed < layer.STEPS).astype(int)
        token = batch.tokens(np.minimum(num_fed, layer.STEPS - 1), 1)
        out, state = layer.compile_extend(bound_layer)(state, layer.truncate_chunk(token, is_fed.tolist(), padding=1e4))
        for b in np.flatnonzero(is_fed):
            np.testing.assert_allclose(out[b, :, :, 0], expected[b, :, :, num_fed[b]], atol=2e-6)
        num_fed = num_fed + is_fed


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
def test_c4_extend_keeps_shapes_dtypes_and_memory_kinds(case: MethodCase):
    bound_layer, batch, state = prefill_case(case.small)
    _, after = layer.compile_extend(bound_layer)(state, batch.token(0))
    assert not changed_types(state, after)
    kinds = [jax.tree.map(lambda x: x.sharding.memory_kind, tree) for tree in (after, state)]
    assert kinds[0] == kinds[1]


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

    def states(q, block, fresh):
        state = layer.make_state(bound_layer, q, block, layer.num_slots(bound_layer))
        return [jax.tree.map(jax.typeof, s) for s in (state, bound_layer.extend(state, *fresh, 1, None)[1])]

    for state in layer.trace(states, *layer.prompt(batch), batch.token(0)):
        assert array_bytes(state) == expected
    if dtype == jnp.float32:
        assert array_bytes(prefill_case(case.small)[2]) == expected
    sizes_of = {"capacity": layer.CAPACITY, "batch": layer.B, "width": layer.LONGEST, "dtype": dtype}
    planned = planned_bytes(case.small, MODEL, layer.LONGEST, **sizes_of)
    expected["device"] += 4 * layer.B  # the cache's own lengths
    if not bound_layer.needs.global_budget:
        assert planned.total == expected
    else:  # a plan adds the slots by which a layer's part of the budget may be rounded up, and no more
        largest = layer.make_state(
            bound_layer, *layer.prompt(batch), layer.num_slots(bound_layer) + SHARED_ROUNDING - 1
        )
        assert expected["device"] <= planned.total["device"] <= array_bytes(largest)["device"] + 4 * layer.B


@each_case
def test_c7_a_head_holds_tokens_of_the_text_each_once_and_the_newest(case: MethodCase):
    bound_layer, batch, state = prefill_case(case.small)
    for step in range(3):
        for b, heads in enumerate(np.asarray(bound_layer.positions(state))):
            assert not wrong_positions(method_of(case.small), heads, int(batch.lengths[b]) + step, bool(step))
        _, state = layer.compile_extend(bound_layer)(state, batch.token(step))


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
