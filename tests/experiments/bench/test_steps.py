"""Counts read from a compiled step: launches, copies, and traffic with the host."""

from __future__ import annotations

from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from experiments.bench import cross_compile, steps
from kvjax.core import memory

PROGRAM = """HloModule made_by_hand

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
    expected = steps.Step(launches=6, fusions=1, products=1, copies=1, host=3, fetches=3, waits=2, outside=1)
    assert steps.Step.from_program(PROGRAM) == expected


def test_arguments_of_another_machine_lie_in_the_same_memories():
    arrays = {"a": jnp.zeros((2, 3)), "b": jax.device_put(jnp.zeros(4, jnp.int8), memory.HOST)}
    mesh = AbstractMesh((1,), ("x",))
    moved = cross_compile._move_to(mesh, {"held": arrays, "n": 3}, ("n",))
    assert moved["n"] == 3
    kinds = {name: (x.shape, x.dtype, x.sharding.memory_kind) for name, x in moved["held"].items()}
    assert kinds == {"a": ((2, 3), jnp.float32, "device"), "b": ((4,), jnp.int8, "pinned_host")}


def test_bytes_are_counted_for_machines_whose_compiler_does_not_tell():
    """A product of 64 x 64 with itself: two operands and a result."""
    compiled = jax.jit(lambda x: x @ x).lower(jnp.zeros((64, 64))).compile()
    silent = mock.Mock(cost_analysis=lambda: None, runtime_executable=compiled.runtime_executable)
    assert cross_compile.count_bytes(silent) == cross_compile.count_bytes(compiled) == 2 * 64 * 64 * 4
