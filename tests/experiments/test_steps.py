"""What a compiled step is read for: launches, copies, and what touches the host."""

from __future__ import annotations

import json
import signal

import pytest

from experiments.bench import process, steps
from kvjax import KvjaxError

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
  %w = (s32[], f32[8]{0}) while(%t), condition=%condition, body=%inner
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
    assert steps.Step.of(PROGRAM) == steps.Step(launches=4, fusions=1, products=1, copies=1, host=1, host_before=1)


def test_a_program_without_a_loop_is_refused():
    with pytest.raises(KvjaxError, match="has no loop"):
        steps.Step.of(PROGRAM.replace(" while(", " call("))


def test_steps_of_this_machine_are_told(capsys):
    steps.main("--methods full;snapkv:budget=8,window=4 --shape small --layers 1 --tokens 64 --dtype float32".split())
    full, fewer = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["steps"]
    assert full["launches"] > full["fusions"] > 0 and full["host"] == full["host_bytes"] == 0
    assert fewer["device_bytes"] < full["device_bytes"]
    assert full["bound_bytes"] < full["counted_bytes"]


def test_a_compiler_that_ends_its_process_leaves_a_row_of_dashes(monkeypatch, capsys):
    with pytest.raises(process.Killed, match="ended with status -9"):
        process.alone(signal.raise_signal, signal.SIGKILL)

    def killed(*args):
        raise process.Killed("ended")

    monkeypatch.setattr(steps, "alone", killed)
    monkeypatch.setattr(steps, "ABSENT", {})
    steps.main(["--methods", "full", "--topology", "v5e:2x2"])
    told = capsys.readouterr().out.splitlines()
    assert json.loads(told[-1])["results"]["steps"] == [{"method": "full"}]
    assert any(line.count(" - ") == len(steps.COLUMNS) - 1 for line in told)


def test_a_machine_that_nobody_knows_is_refused():
    with pytest.raises(KvjaxError, match="cannot compile for 'v9:1x1'.*; pip install libtpu"), steps.target("v9:1x1"):
        pass
