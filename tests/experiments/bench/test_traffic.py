"""Launches of a step and the bytes that it moves in the device's memory, read from programs written by hand."""

from __future__ import annotations

import pytest

from experiments.bench.steps import Step
from experiments.bench.traffic import Program
from kvjax import KvjaxError

PROGRAM = """HloModule made_by_hand

%row_of (p.0: f32[100,8], p.1: s32[]) -> f32[1,8] {
  %p.0 = f32[100,8]{1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %row = f32[1,8]{1,0} dynamic-slice(%p.0, %p.1, %zero), dynamic_slice_sizes={1,8}
}

%write_row (q.0: f32[100,8], q.1: f32[1,8], q.2: s32[]) -> f32[100,8] {
  %q.0 = f32[100,8]{1,0} parameter(0)
  %q.1 = f32[1,8]{1,0} parameter(1)
  %q.2 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %put = f32[100,8]{1,0} dynamic-update-slice(%q.0, %q.1, %q.2, /*index=3*/%zero.1)
}

%inner_condition (s: (s32[], f32[8])) -> pred[] {
  %s = (s32[], f32[8]{0}) parameter(0)
  %j = s32[] get-tuple-element(%s), index=0
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%j, %five), direction=LT
}

%inner (s.1: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s.1 = (s32[], f32[8]{0}) parameter(0)
  %j.1 = s32[]{:S(1)} get-tuple-element(%s.1), index=0
  %x.1 = f32[8]{0} get-tuple-element(%s.1), index=1
  %twice = f32[8]{0} add(%x.1, %x.1)
  ROOT %again = (s32[], f32[8]{0}) tuple(%j.1, %twice)
}

%condition (t: (s32[], f32[100,8], f32[8])) -> pred[] {
  %t = (s32[], f32[100,8]{1,0}, f32[8]{0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

%body (t.1: (s32[], f32[100,8], f32[8])) -> (s32[], f32[100,8], f32[8]) {
  %t.1 = (s32[], f32[100,8]{1,0}, f32[8]{0}, u16[400]{0:S(5)}, f32[8]{0:S(1)}) parameter(0)
  %i = s32[]{:S(1)} get-tuple-element(%t.1), index=0
  %cache = f32[100,8]{1,0} get-tuple-element(%t.1), index=1
  %x = f32[8]{0} get-tuple-element(%t.1), index=2
  %far = u16[400]{0:S(5)} get-tuple-element(%t.1), index=3
  %kept = f32[8]{0:S(1)} get-tuple-element(%t.1), index=4
  %at = s32[]{:S(1)} copy(%i)
  %read = f32[1,8]{1,0:S(1)} fusion(%cache, %at), kind=kLoop, calls=%row_of
  %written = f32[100,8]{1,0} fusion(%cache, %read, %at), kind=kLoop, calls=%write_row
  %start = (f32[100,8]{1,0:T(8,128)S(1)}, f32[100,8]{1,0}, u32[]{:S(2)}) copy-start(%written)
  %near = f32[100,8]{1,0:T(8,128)S(1)} copy-done(%start)
  %sum = f32[8]{0:S(1)} reduce(%near, %kept), to_apply=%row_of
  %back = (f32[100,8]{1,0}, f32[100,8]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%near)
  %new = f32[100,8]{1,0} copy-done(%back)
  %fetch = (u16[400]{0}, u16[400]{0:S(5)}, u32[]{:S(2)}) copy-start(%far)
  %fetched = u16[400]{0} copy-done(%fetch)
  %loop = (s32[], f32[8]{0}) while(%t.1), condition=%inner_condition, body=%inner
  ROOT %out = (s32[], f32[100,8]{1,0}, f32[8]{0}) tuple(%i, %new, %x)
}

ENTRY %main (p: f32[100,8]) -> f32[100,8] {
  %p = f32[100,8]{1,0} parameter(0)
  %w = (s32[], f32[100,8]{1,0}, f32[8]{0}) while(%p), condition=%condition, body=%body
  ROOT %r = f32[100,8]{1,0} get-tuple-element(%w), index=1
}
"""


def test_a_step_counts_what_crosses_the_devices_memory():
    """A row read (32 bytes), a row written (32), the cache into the scratchpad and back (3,200 each), an array that the
    loop keeps in the scratchpad (32), one fetched from the host (800), and five rounds of 8 + 8 + 8 numbers, where
    an operand that is given twice is read twice. The loop's counter is carried, and read (4)."""
    counts = Program.from_text(PROGRAM).step_counts(full_size=3200)
    assert counts == {
        "step_bytes": 4 + 32 + 32 + 2 * 3200 + 32 + 800 + 5 * 3 * 32,
        "copied_bytes": 3200 + 800,
        "full_copies": 1,
        "fetched_bytes": 800,
    }


def test_a_program_without_a_loop_has_no_step():
    text = "HloModule m\n\nENTRY %main (p: f32[8]) -> f32[8] {\n  ROOT %p = f32[8]{0} parameter(0)\n}\n"
    with pytest.raises(KvjaxError, match="has no loop"):
        Program.from_text(text).step_counts(1)


LAUNCHES = """HloModule made_by_hand

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p)
}

%inner (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%t), index=1
  %sum = f32[8]{0} add(%x, %x)
  ROOT %out = (s32[], f32[8]{0}) tuple(%x, %sum)
}

%condition (t: (s32[], f32[8])) -> pred[] {
  %t = (s32[], f32[8]{0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%t), index=1
  %a = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  %m = f32[8]{0} dot(%a, %a), lhs_contracting_dims={0}
  %c = (f32[8]{0}, f32[8]{0:S(5)}, u32[]) copy-start(%m)
  %d = f32[8]{0} copy-done(%c)
  %h = f32[8]{0:S(5)} get-tuple-element(%t), index=2
  %g = ((f32[8]{0:S(5)}), f32[4]{0}, u32[]) custom-call-start(%h), custom_call_target="HostExecute"
  %r = f32[4]{0} custom-call-done(%g)
  %f = ((f32[8]{0:S(5)}), f32[4]{0}) call-start(%h), to_apply=%fused
  %w = (s32[], f32[8]{0}) while(%t), condition=%condition, body=%inner
  %q = f32[4]{0} call-done(%f)
  ROOT %out = (s32[], f32[8]{0}) tuple(%x, %d)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0:S(5)} parameter(0)
  %s = (f32[8]{0}, f32[8]{0:S(5)}, u32[]) copy-start(%p)
  %e = f32[8]{0} copy-done(%s)
  %w = (s32[], f32[8]{0}) while(%e), condition=%condition, body=%body
  ROOT %r = f32[8]{0} get-tuple-element(%w), index=1
}
"""


def test_a_step_is_the_loops_body_with_the_loops_in_it():
    """A fusion, a product, three fetches, and an addition in the inner loop, which overlaps the last of them."""
    expected = Step(launches=6, fusions=1, products=1, copies=1, host=3, fetches=3, waits=2, outside=1)
    assert Step.from_program(Program.from_text(LAUNCHES)) == expected
