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
from kvjax.cache.accounting import array_bytes
from kvjax.cache.eviction.budget_allocation import SHARED_ROUNDING
from kvjax.errors import IncompatibleMethod
from kvjax.methods.strings import method_of
from kvjax.models import Config
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
    """All steps of the battery's rows, f32[B K G STEPS H]."""
    return layer.run(method, layer.data())


@functools.cache
def start(method: str) -> tuple:
    """(the bound layer, the rows, their state after the prompts)."""
    bound, d = layer.bound(method), layer.data()
    return bound, d, layer.prefill(bound, d)


@pytest.mark.parametrize("case", LOSSLESS, ids=lambda case: case.id)
@pytest.mark.parametrize("window", [None, 5])
def test_c1_at_its_limit_it_is_dense_attention(case: MethodCase, window):
    d = layer.data()
    out, want = (x[:, :, :, case.exact_from :] for x in (layer.run(case.lossless, d, window), layer.dense(d, window)))
    np.testing.assert_allclose(out, want, atol=5e-6)


@each_case
def test_c2_eager_jitted_scanned_and_chunked_agree(case: MethodCase):
    bound, d, state = start(case.small)
    scanned = steps(case.small)
    first, after = layer.extend(bound)(state, d.token(0))
    second, _ = layer.extend(bound)(after, d.token(1))
    np.testing.assert_allclose(np.concatenate([first, second], 3), scanned[:, :, :, :2], atol=1e-6)
    eager, _, _ = bound.extend(state, *d.token(0), 1, None)
    np.testing.assert_allclose(eager, first, atol=1e-6)
    chunk, _ = layer.extend(bound, layer.STEPS)(state, d.tokens(0, layer.STEPS))
    np.testing.assert_allclose(chunk, scanned, atol=2e-6)


@each_case
def test_c3_rows_are_independent_of_neighbours_and_padding(case: MethodCase):
    bound, clean, _ = start(case.small)
    together, dirty = steps(case.small), layer.data(padding=1e4)
    other = layer.run(case.small, dirty, state=layer.prefill(bound, dirty, padding=1e4))
    np.testing.assert_array_equal(together, other)
    for b in range(layer.B):  # in its own company instead of the others'
        again = layer.run(case.small, layer.rows(clean, [b] * layer.B))
        for row in again:
            np.testing.assert_allclose(row, together[b], atol=1e-6)


RAGGED = ((1, 3, 5), (3, 5, 1), (5, 1, 3), (2, 4, 6), (4, 6, 2), (6, 2, 4))
"""Tokens that the sequences are fed in one call: each gets each number up to 6, while another gets more."""


@each_case
@pytest.mark.parametrize("counts", RAGGED, ids=str)
def test_c3_after_a_ragged_question_every_row_goes_on_as_if_alone(case: MethodCase, counts: tuple[int, ...]):
    """Whatever falls due when a row is full, such as a compression, waits for that row's own next token."""
    bound, d, state = start(case.small)
    alone, fed = steps(case.small), np.array(counts)
    chunk = layer.cut_short(d.tokens(0, layer.STEPS), list(counts), padding=1e4)
    out, state = layer.extend(bound, layer.STEPS)(state, chunk)
    for b, count in enumerate(counts):
        np.testing.assert_allclose(out[b, :, :, :count], alone[b, :, :, :count], atol=2e-6)
    for _ in range(layer.STEPS - min(counts)):
        more = (fed < layer.STEPS).astype(int)
        one = layer.cut_short(d.tokens(np.minimum(fed, layer.STEPS - 1), 1), more.tolist(), padding=1e4)
        out, state = layer.extend(bound)(state, one)
        for b in np.flatnonzero(more):
            np.testing.assert_allclose(out[b, :, :, 0], alone[b, :, :, fed[b]], atol=2e-6)
        fed = fed + more


@each_case
def test_c3_only_the_committed_tokens_are_kept(case: MethodCase):
    bound, d, state = start(case.small)
    two, ahead = layer.extend(bound)(state, d.tokens(0, 2))
    one, alone = layer.extend(bound)(state, d.token(0))
    # A reader may prefetch for the draft.
    kept = [dataclasses.replace(s, reader_state=None) if hasattr(s, "reader_state") else s for s in (ahead, alone)]
    chex.assert_trees_all_equal(*kept)
    np.testing.assert_allclose(two[:, :, :, :1], one, atol=1e-6)


@each_case
def test_c4_extend_keeps_shapes_dtypes_and_memory_kinds(case: MethodCase):
    bound, d, state = start(case.small)
    _, after = layer.extend(bound)(state, d.token(0))
    assert not changed_types(state, after)
    kinds = [jax.tree.map(lambda x: x.sharding.memory_kind, s) for s in (after, state)]
    assert kinds[0] == kinds[1]


@each_case
def test_c5_one_trace_per_shape(case: MethodCase):
    bound, d, state = start(case.small)
    _, state = layer.extend(bound)(state, d.token(0))
    traced = layer.TRACES[bound]
    for t in (1, 2):
        _, state = layer.extend(bound)(state, d.token(t))
    assert layer.TRACES[bound] == traced


@each_case
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_c6_bytes_are_the_papers_and_the_planned_ones(case: MethodCase, dtype):
    """The prompt is no multiple of 16 tokens, in which room is counted."""
    want = case.state_bytes(layer_shape(jnp.dtype(dtype).itemsize))
    want = {"device": want.device, "pinned_host": want.pinned_host}
    bound, d = layer.bound(case.small), layer.data(dtype=dtype)

    def states(q, block, fresh):
        state = layer.after_prompt(bound, q, block, layer.slots(bound))
        return [jax.tree.map(jax.typeof, s) for s in (state, bound.extend(state, *fresh, 1, None)[1])]

    for state in layer.traced(states, *layer.prompt(d), d.token(0)):
        assert array_bytes(state) == want
    if dtype == jnp.float32:
        assert array_bytes(start(case.small)[2]) == want
    sizes_of = {"capacity": layer.CAPACITY, "batch": layer.B, "width": layer.LONGEST, "dtype": dtype}
    planned = planned_bytes(case.small, MODEL, layer.LONGEST, **sizes_of)
    want["device"] += 4 * layer.B  # the cache's own lengths
    if not bound.needs.global_budget:
        assert planned.total == want
    else:  # a plan adds the slots by which a layer's share of the budget may be rounded up, and no more
        roomy = layer.after_prompt(bound, *layer.prompt(d), layer.slots(bound) + SHARED_ROUNDING - 1)
        assert want["device"] < planned.total["device"] <= array_bytes(roomy)["device"] + 4 * layer.B


@each_case
def test_c7_a_head_holds_tokens_of_the_text_each_once_and_the_newest(case: MethodCase):
    bound, d, state = start(case.small)
    for step in range(3):
        for row, heads in enumerate(np.asarray(bound.positions(state))):
            assert not wrong_positions(method_of(case.small), heads, int(d.lengths[row]) + step, bool(step))
        _, state = layer.extend(bound)(state, d.token(step))


@each_case
def test_c10_what_breaks_naive_code_gives_numbers(case: MethodCase):
    bound = layer.bound(case.small)
    for cases, d in edges.batches():
        state = layer.prefill(bound, d)
        for x in jax.tree.leaves(state):
            assert not (jnp.issubdtype(x.dtype, jnp.floating) and np.isnan(x).any()), f"{x.shape} of one of {cases}"
        assert not edges.non_finite_cases(layer.run(case.small, d, state=state), cases)


@each_case
def test_c10_a_token_that_is_taken_back_leaves_no_trace(case: MethodCase):
    """Or the method says that it cannot give tokens back, and what to do."""
    bound, d, state = start(case.small)
    q, block = d.token(0)
    loud = dataclasses.replace(block, k=block.k * 7, v=block.v * 7)
    _, more = layer.extend(bound)(state, (q, loud))
    try:
        most = np.asarray(bound.max_rollback(more))
        back = bound.crop(more, jnp.asarray(np.minimum(most, 1), jnp.int32))
    except IncompatibleMethod as e:
        assert "keep" in str(e)
        return
    assert not changed_types(state, back)
    for t in (0, 1):
        (mine, back), (want, state) = (layer.extend(bound)(s, d.token(t)) for s in (back, state))
        np.testing.assert_allclose(mine[most > 0], want[most > 0], atol=1e-6)
