"""`check_method` passes sound methods and names the faults of others, which would all run without an error."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, ClassVar

import jax.numpy as jnp
import pytest

import kvjax
from kvjax import KvjaxError
from kvjax.cache.protocol import Traits
from kvjax.core import memory
from kvjax.core.attention import attend_dense
from kvjax.core.types import KVBlock
from kvjax.method_api import (
    Codec,
    Fp8,
    Full,
    Host,
    Method,
    PerTokenCodec,
    Policy,
    Quantizer,
    Reader,
    ReadResult,
    Scorer,
    make_selection,
    token_scores,
)
from kvjax.testing import BrokenRule, check_method, rules, toy_model
from tests.contract.test_conformance import LastTokens, LastTokensLayer


@pytest.fixture(scope="module")
def model():
    return toy_model(layers=1)


def check(method: Any, model) -> None:
    check_method(method, model, length=20)


@dataclasses.dataclass(frozen=True)
class Norms(Scorer):
    """Scores a token by the norm of its value, with an optional `fault`."""

    fault: str = ""

    def scores(self, block, observation, spec):
        norms = jnp.linalg.norm(block.v.astype(jnp.float32), axis=-1)
        if self.fault == "a score that is no number":
            norms = norms.at[:, 0, 1].set(jnp.nan)
        if self.fault == "scores of all rows together":
            norms = jnp.broadcast_to(norms.mean(0), norms.shape)
        return token_scores(norms, block)


@dataclasses.dataclass(frozen=True)
class FirstLayer(Scorer):
    """Small values matter in the first layer, large ones in the others; `test` is how it is found out which it is."""

    comparison: str = "=="

    def is_first(self, spec):
        comparisons = {
            "==": lambda: spec.index == 0,
            "in": lambda: spec.index in (0, 7),
            "a set": lambda: spec.index in {0, 7},
            "not": lambda: not spec.index,
        }
        return comparisons[self.comparison]()

    def scores(self, block, observation, spec):
        norms = jnp.linalg.norm(block.v.astype(jnp.float32), axis=-1)
        return token_scores(-norms if self.is_first(spec) else norms, block)


@dataclasses.dataclass(frozen=True)
class BoundFirstLayer(FirstLayer):
    """The same scorer, which learns its layer when the method is bound."""

    first: bool = False

    def at(self, spec):
        return dataclasses.replace(self, first=spec.index == 0)

    def is_first(self, spec):
        return self.first


@dataclasses.dataclass(frozen=True)
class RecentWindow(Policy):
    """Keeps only the last tokens, with an optional `fault`."""

    recent: int
    fault: str = ""

    def num_slots(self):
        return self.recent + 1

    def init(self, spec, block, observation, num_slots):
        length = (block.pos >= 0).sum(2, keepdims=True, dtype=jnp.int32)
        newest = length - 1 - jnp.arange(min(num_slots, self.recent), dtype=jnp.int32)[None, None]
        if self.fault == "one token twice":
            newest = newest.at[..., 1].set(newest[..., 0])
        if self.fault == "the newest of one head":
            newest = jnp.broadcast_to(newest, (len(newest), 2, newest.shape[2]))
        return jnp.where(newest >= 0, newest, -1), None

    def after_token(self, spec, state, weights, q_pos):
        full = (state.pos >= 0).all(2, keepdims=True)
        if self.fault == "a neighbour that is full":
            full = full.any(0, keepdims=True)
        oldest = state.pos == jnp.where(state.pos >= 0, state.pos, 2**30).min(2, keepdims=True)
        leaves = full & oldest & (self.fault != "nothing leaves")
        if self.fault == "the newest of one head":
            newest = state.pos == state.pos.max(2, keepdims=True)
            leaves = leaves.at[:, 1].set((full & newest)[:, 1])
        later = 100 * (self.fault == "positions of the future")
        pos = jnp.where(leaves, -1, jnp.where(state.pos >= 0, state.pos + later, -1))
        return (jnp.sort(pos, 2) if self.fault == "positions of other tokens" else pos), None


@dataclasses.dataclass(frozen=True)
class RecentWindowWithAges(RecentWindow):
    """Keeps only the last tokens, and notes how many steps each has been there, with an optional `fault`."""

    def init(self, spec, block, observation, num_slots):
        chosen, _ = super().init(spec, block, observation, num_slots)
        return chosen, jnp.zeros((*block.k.shape[:2], num_slots))

    def after_token(self, spec, state, weights, q_pos):
        pos, _ = super().after_token(spec, state, weights, q_pos)
        stepped = (q_pos >= 0)[:, None] | (self.fault == "ages of a neighbour's step")
        ages = jnp.where(stepped & (pos >= 0), state.policy_state + 1, state.policy_state)
        return pos, jnp.where(pos >= 0, ages, 0.0) + (jnp.nan if self.fault == "ages that are no numbers" else 0.0)


@dataclasses.dataclass(frozen=True)
class Periodic(Policy):
    """Evicts all but the last 4 tokens whenever 2 more are stored, before the next token is written."""

    waits: bool = True  # for the sequence's own next token

    def num_slots(self):
        return 4 + 2 + 1

    def init(self, spec, block, observation, num_slots):
        return RecentWindow(4).init(spec, block, observation, num_slots)

    def before_token(self, storage, state, q, q_pos):
        full = (state.pos >= 0).sum(2, keepdims=True) >= 4 + 2
        due = full & (q_pos[:, :, None] >= 0) if self.waits else full
        old = state.pos <= state.pos.max(2, keepdims=True) - 4
        return dataclasses.replace(state, pos=jnp.where(due & old, -1, state.pos))

    def after_token(self, spec, state, weights, q_pos):
        return state.pos, None


@dataclasses.dataclass(frozen=True)
class Codes(Codec):
    """Stores 8-bit codes and a scale, with an optional `fault`."""

    fault: str = ""

    def parts(self, x):
        scale = jnp.maximum(jnp.abs(x).max(-1, keepdims=True) / 127, 1e-6).astype(jnp.float32)
        return jnp.round(x / scale).astype(jnp.int8), scale

    def encode(self, x, pos):
        codes, scale = self.parts(x)
        if self.fault == "slots first":
            return memory.pack(codes.swapaxes(1, 2)), memory.pack(scale)
        return memory.pack(codes), scale if self.fault == "a scale that is not packed" else memory.pack(scale)

    def decode(self, stored):
        codes, scale = (memory.unpack(buffer) for buffer in stored)
        return codes.astype(jnp.float32) * scale

    def append(self, stored, x, at):
        return tuple(memory.append(buffer, new, at) for buffer, new in zip(stored, self.parts(x), strict=True))

    def gather(self, stored, idx):
        codes, scale = (memory.gather_tokens(buffer, idx) for buffer in stored)
        return codes.astype(jnp.float32) * scale


@pytest.mark.parametrize(
    "method",
    [
        LastTokens(5),
        Method(decode=RecentWindow(4)),
        Method(decode=RecentWindowWithAges(4)),
        Method(decode=Periodic()),
        Method(select=make_selection(Norms(), 6)),
        Method(select=make_selection(BoundFirstLayer(), 6)),
        Method(v=Codes()),
        "offload",
    ],
    ids=str,
)
def test_a_sound_method_passes(method, model):
    check(method, model)


@dataclasses.dataclass(frozen=True)
class UndeclaredEviction(LastTokens):
    """Keeps the last tokens and does not declare that it evicts."""

    traits: ClassVar[Traits] = Traits()


@dataclasses.dataclass(frozen=True)
class FalselyExact(UndeclaredEviction):
    """Keeps the last tokens and declares that it is exact."""

    traits: ClassVar[Traits] = Traits(evicts=True, exact=True)


@dataclasses.dataclass(frozen=True)
class Growing(LastTokens):
    """Keeps all tokens, in a state that every step makes longer."""

    traits: ClassVar[Traits] = Traits()

    def bind(self, spec):
        return GrowingLayer(self.count, spec)


class GrowingLayer(LastTokensLayer):
    def num_slots(self, prompt_tokens, headroom_tokens):
        return prompt_tokens

    def _last(self, *blocks):
        k, v, pos = (jnp.concatenate(x, 2) for x in zip(*((b.k, b.v, b.pos) for b in blocks), strict=True))
        return KVBlock(k, v, pos).clean()


@dataclasses.dataclass(frozen=True)
class LargeState(LastTokens):
    """Keeps the last tokens, in slots that grow with the headroom."""

    def bind(self, spec):
        return LargeStateLayer(self.count, spec)


class LargeStateLayer(LastTokensLayer):
    def num_slots(self, prompt_tokens, headroom_tokens):
        return self.count + headroom_tokens

    def _last(self, *blocks):
        last = super()._last(*blocks)
        more = [(0, 0), (0, 0), (0, blocks[0].pos.shape[2] - last.pos.shape[2])]
        k, v = (jnp.pad(x, [*more, (0, 0)]) for x in (last.k, last.v))
        return KVBlock(k, v, jnp.pad(last.pos, more, constant_values=-1))


@dataclasses.dataclass(frozen=True)
class UnevenSlots(LastTokens):
    """Keeps the last tokens, in more slots for short prompts than for long ones."""

    def bind(self, spec):
        return UnevenSlotsLayer(self.count, spec)


class UnevenSlotsLayer(LargeStateLayer):
    def num_slots(self, prompt_tokens, headroom_tokens):
        return self.count + 2 * (prompt_tokens < 10)


@dataclasses.dataclass(frozen=True)
class NanCodec(Codec):
    """Stores token vectors and replaces the first by NaN."""

    def encode(self, x, pos):
        return memory.pack(x.at[:, :, 0].set(jnp.nan))

    def decode(self, stored):
        return memory.unpack(stored)

    def append(self, stored, x, at):
        return memory.append(stored, x, at)


@dataclasses.dataclass(frozen=True)
class Half(Codec):
    """Stores token vectors in half precision, with an optional `fault`."""

    fault: str = ""

    def encode(self, x, pos):
        return memory.pack(x.astype(jnp.float16))

    def decode(self, stored):
        numbers = memory.unpack(stored).astype(jnp.float32)
        return {"one token": numbers[:, :, :1], "whole numbers": numbers.astype(jnp.int32)}.get(self.fault, numbers)

    def append(self, stored, x, at):
        return stored if self.fault == "nothing new" else memory.append(stored, x.astype(jnp.float16), at)

    def gather(self, stored, idx):
        return memory.gather_tokens(stored, idx - int(self.fault == "the row before")).astype(jnp.float32)


def half_precision(fault: str) -> Method:
    return Method(k=Half(fault), v=Half(fault))


@dataclasses.dataclass(frozen=True)
class Uncapped(Full):
    """A reader that makes logits of its own."""

    def read(self, storage, state, q, q_pos, other_partial=None, cross_layer=None):
        return ReadResult(attend_dense(q, storage.decode(state.k, state.v, state.pos), q_pos), cross_layer=cross_layer)


@dataclasses.dataclass(frozen=True)
class UncomparedField(Norms):
    """Prefers tokens with large or small values, by a number that is not compared."""

    sign: float = dataclasses.field(default=1.0, compare=False)


class NotFrozen(Norms):
    """A scorer below no decorator, whose attribute is no field."""

    def __init__(self, sign=1.0):
        object.__setattr__(self, "sign", sign)


class Identity(Scorer):
    """A scorer that is equal to itself alone."""

    def scores(self, block, observation, spec):
        return Norms().scores(block, observation, spec)


@dataclasses.dataclass(frozen=True)
class WithField(Norms):
    """A scorer with a field of any value."""

    field: Any = None


FAULTY = {
    "a scorer that is no dataclass": (
        Method(select=make_selection(Identity(), 6)),
        "method.select.scorer is a Identity that is equal to itself alone, so that equal strings make unequal methods",
    ),
    "a codec that is no dataclass": (
        Method(k=type("Other", (Half,), {"__eq__": object.__eq__, "__hash__": object.__hash__})()),
        "method.k is a Other that is equal to itself alone",
    ),
    "a field that is NaN": (
        Method(select=make_selection(WithField(field=float("nan")), 6)),
        "method.select.scorer.field is NaN, which is unequal to itself",
    ),
    "an attribute that is no field": (
        Method(select=make_selection(NotFrozen(), 6)),
        "method.select.scorer.sign is not compared",
    ),
    "a scale that is not packed": (
        Method(v=Codes("a scale that is not packed")),
        r"Codes.encode stores float32\[1, 2, 1024, 1\] for 1024 slots, which `memory.pack` did not make",
    ),
    "slots first": (
        Method(v=Codes("slots first")),
        r"Codes.encode stores int8\[1, 1024, 2, 8\] for 1024 slots",
    ),
    "a field that is not compared": (
        Method(select=make_selection(UncomparedField(), 6)),
        "method.select.scorer.sign is not compared, so that methods which differ there share one compiled program",
    ),
    "a token for all": (
        half_precision("one token"),
        r"of the keys, Half.decode gives float32\[3,2,1,8\], and must give floats \[B K S H\], here \(3, 2, .*, 8\)",
    ),
    "whole numbers": (half_precision("whole numbers"), r"Half.decode gives int32\[3,2,.*\], and must give floats"),
    "rows of other tokens": (
        half_precision("the row before"),
        "of the keys, Half.gather gives other vectors than Half.decode",
    ),
    "nothing is written": (
        half_precision("nothing new"),
        "after step 6, the values that the first layer holds are not those of .* that were decoded .mean cosine",
    ),
    "positions of other tokens": (
        Method(decode=RecentWindow(4, "positions of other tokens")),
        "after step 6, the values that the first layer holds are not those of the tokens at their positions",
    ),
    "the newest of one head": (
        Method(decode=RecentWindow(4, "the newest of one head")),
        "in layer 0, sequence 0, after step .*, head 1 does not hold the newest token",
    ),
    "a neighbour that is full": (
        Method(decode=RecentWindow(4, "a neighbour that is full")),
        "sequence 1 holds other tokens in layer 0 when it is read alone than with others, after step 1",
    ),
    "a compression on another row's step": (
        Method(decode=Periodic(waits=False)),
        "sequence . holds other tokens in layer 0 when it is fed together with sequences that are fed other numbers of",
    ),
    "a score that is no number": (
        Method(select=make_selection(Norms("a score that is no number"), 6)),
        "Norms.scores gives NaN, which would win over every number",
    ),
    "scores of all rows together": (
        Method(select=make_selection(Norms("scores of all rows together"), 6)),
        "sequence 0 holds other tokens in layer 0 when it is read alone than with others",
    ),
    "one token twice": (
        Method(decode=RecentWindow(4, "one token twice")),
        "in layer 0, sequence 0, after the prompt, head 0 holds position 19 2 times, which counts it as often",
    ),
    "nothing leaves": (
        Method(decode=RecentWindow(4, "nothing leaves")),
        "in layer 0, sequence 0, after step 1, head 0 has no empty slot for the next token",
    ),
    "ages of a neighbour's step": (
        Method(decode=RecentWindowWithAges(4, "ages of a neighbour's step")),
        "the policy's state of sequence . is another in layer 0",
    ),
    "ages that are no numbers": (
        Method(decode=RecentWindowWithAges(4, "ages that are no numbers")),
        "the policy's state of sequence 0 has NaN in layer 0, after step 1",
    ),
    "positions of the future": (
        Method(decode=RecentWindow(4, "positions of the future")),
        "head 0 says that it holds position 1.. of a text of 21 tokens",
    ),
    "tokens that are lost": (UndeclaredEviction(5), "head 0 holds 5 of 20 tokens, and `traits.evicts` is False"),
    "other logits": (FalselyExact(5), "sequence 0 are not those of the full cache, and `traits.exact` is True"),
    "a state that grows": (Growing(5), "in layer 0 a step makes float32.* of an array float32.* of the state"),
    "logits without the layer's rule": (
        Method(read=Uncapped()),
        "a soft cap of 1 on loud logits changes nothing in a step",
    ),
    "bytes that grow": (LargeState(5), "its bytes grow with the room for more tokens, and `traits.constant` is True"),
    "bytes that no plan knows": (UnevenSlots(5), ".* are planned for these prompts and .* are held"),
    "no numbers": (Method(v=NanCodec()), "the logits of sequence 0 are not finite in step 1"),
}


MENDS = {
    "a scorer that is no dataclass": ("equality", "Write `@dataclasses.dataclass(frozen=True)` above `class Identity`"),
    "a codec that is no dataclass": ("equality", "Write `@dataclasses.dataclass(frozen=True)` above `class Other`"),
    "a field that is NaN": ("equality", "Take another number"),
    "an attribute that is no field": ("fields", ""),
    "a scale that is not packed": ("packed", "Return `memory.pack(x)` of each array"),
    "slots first": ("packed", "Pack arrays [B K S W]: slots are axis 2"),
    "a field that is not compared": ("fields", "Take `compare=False` off"),
    "a score that is no number": ("scores", "at empty slots: mask them"),
    "a state that grows": ("shapes", "write into slots"),
    "no numbers": ("finite", "mask empty slots: `block.pos >= 0`"),
    "one token twice": ("positions", "take the window out of what is scored"),
    "nothing leaves": ("positions", "In `after_token`, give one slot of each full head the position -1"),
    "the newest of one head": ("positions", "never let the slot with the greatest position go"),
    "ages of a neighbour's step": ("independence", "as in `jnp.where(q_pos >= 0, new, old)`"),
    "ages that are no numbers": ("finite", ""),
    "positions of the future": ("positions", "Take positions from `block.pos`"),
    "tokens that are lost": ("positions", "Set `evicts=True`"),
    "rows of other tokens": ("codecs", "jnp.take_along_axis"),
    "nothing is written": ("contents", "an `append` that drops what is new"),
    "a compression on another row's step": ("independence", "wait for its own next token"),
    "scores of all rows together": ("independence", "per sequence and head, with no mean, maximum or sort over axis 0"),
    "other logits": ("exact", "Set `exact=False`"),
    "logits without the layer's rule": ("kinds", "Turn scaled dot products into logits by `storage.spec.rule.logits"),
    "bytes that grow": ("bytes", "set `constant=False`"),
}


@pytest.mark.parametrize("comparison", ["==", "in", "a set", "not"])
def test_an_index_that_is_only_compared_is_found(comparison, model):
    """A bound layer's spec has no index, so the comparison would silently be false in every layer."""
    says = r"place: .*test_check_method.py, line \d+: `spec.index` is used when .* method `at\(self, spec\)`"
    with pytest.raises(BrokenRule, match=says) as error:
        check(Method(select=make_selection(FirstLayer(comparison=comparison), 6)), model)
    assert error.value.rule == "place"


@pytest.mark.usefixtures("unchecked_arrays")
@pytest.mark.parametrize("fault", FAULTY)
def test_a_rule_that_is_broken_is_named_with_the_usual_mend(fault, model):
    method, says = FAULTY[fault]
    with pytest.raises(BrokenRule, match="breaks a rule of methods: .*" + says) as error:
        check(method, model)
    rule, mend = MENDS.get(fault, (error.value.rule, ""))
    assert error.value.rule == rule and f"breaks a rule of methods: {rule}: " in str(error.value)
    assert mend in str(error.value) and "\n" not in str(error.value)


def test_the_report_has_every_rule_and_prints_as_a_table(model, capsys):
    report = check_method(Method(select=make_selection(Norms(), 6)), model, length=20)
    assert capsys.readouterr() == ("", "")  # no progress without a terminal
    assert [rule.name for rule in report.rules] == [rule.name for rule in rules.RULES]
    assert all(rule.seconds >= 0 for rule in report.rules) and report.seconds >= sum(r.seconds for r in report.rules)
    lines = str(report).splitlines()
    assert lines[0] == repr(report) and len(lines) == 2 + len(report.rules)
    (reading,) = (line for line in lines if "reading the prompts" in line)
    assert f"{report.reading_seconds:.1f} s" in reading and report.reading_seconds > 0
    lines.remove(reading)
    assert all(rule.name in line and rule.says in line for rule, line in zip(report.rules, lines[1:], strict=True))
    assert "<td" in report._repr_html_() and "independence" in report._repr_html_()


def test_a_quick_check_tries_the_first_rules_and_says_what_it_left_out(model):
    method = Method(select=make_selection(Norms(), 6))
    report = check_method(method, model, length=20, quick=True)
    names = [rule.name for rule in report.rules]
    assert names == [rule.name for rule in rules.RULES[: rules.NUM_QUICK_RULES]]
    assert {"shapes", "positions", "finite", "scores", "codecs"} <= set(names)
    assert f"{len(rules.RULES) - len(names)} rules were left out" in str(report) and "all" not in repr(report)
    with pytest.raises(BrokenRule, match="Norms.scores gives NaN"):
        check_method(Method(select=make_selection(Norms("a score that is no number"), 6)), model, length=20, quick=True)
    mean_of_all = Method(select=make_selection(Norms("scores of all rows together"), 6))
    assert check_method(mean_of_all, model, length=20, quick=True)  # which `independence` would find


def test_it_shows_the_rule_that_it_is_at(model, capsys):
    check_method("full", model, length=20, progress=True)
    output = capsys.readouterr().err
    assert "full: reading prompts of 20, 1, 13 tokens" in output
    assert all(f"of {len(rules.RULES)}, {rule.name}" in output for rule in rules.RULES)
    assert output.endswith("\r")  # the line is cleared at the end


def test_loops_that_differ_are_named(model, monkeypatch):
    def generate(model, prompts, method, loop, **how):
        return types.SimpleNamespace(tokens=[[1]] if loop == "while" else [[2]])

    monkeypatch.setattr(rules, "generate", generate)
    with pytest.raises(KvjaxError, match=r"a compiled loop makes the tokens \[\[1\]\], and step after step \[\[2\]\]"):
        check("full", model)


@dataclasses.dataclass(frozen=True)
class FailingScorer(Scorer):
    """Raises an error in `scores`."""

    def scores(self, block, observation, spec):
        return token_scores(block.v @ block.v, block)


def test_what_a_methods_code_raises_is_told_with_its_line(model):
    line = FailingScorer.scores.__code__.co_firstlineno + 1
    with pytest.raises(KvjaxError, match=rf"fails: .*test_check_method.py, line {line}: TypeError: .*") as error:
        check(Method(select=make_selection(FailingScorer(), 6)), model)
    assert "\n" not in str(error.value) and isinstance(error.value.__cause__, TypeError)


@dataclasses.dataclass(frozen=True)
class Mistaken(RecentWindowWithAges):
    """A policy with a mistake of its author, `fault`."""

    needs_weights: ClassVar[bool] = False

    def init(self, spec, block, observation, num_slots):
        if self.fault == "no observation":
            return observation.pos, None
        chosen, ages = super().init(spec, block, observation, num_slots)
        too_many = jnp.pad(chosen, [(0, 0), (0, 0), (0, num_slots)], constant_values=-1)
        return {
            "slots alone": chosen,
            "no heads": (chosen[:, 0], ages),
            "a list": (chosen, [0.0]),
            "too many": (too_many, ages),
            "slots beyond the prompt": (chosen + 10_000, ages),
        }.get(self.fault, (chosen, ages))

    def after_token(self, spec, state, weights, q_pos):
        if self.fault == "no weights":
            return state.pos, weights.sum(2)
        pos, ages = super().after_token(spec, state, weights, q_pos)
        results = {
            "positions alone": pos,
            "positions of a sequence": (pos[:, 0], ages),
            "positions as floats": (pos.astype(jnp.float32), ages),
            "positions of some slots": (pos[..., 1:], ages),
        }
        return results.get(self.fault, (pos, ages))


@dataclasses.dataclass(frozen=True)
class FlatGate(Full):
    """A reader with a bias that has no heads."""

    def read(self, layer, state, q, q_pos, other_partial=None, cross_layer=None):
        gated = dataclasses.replace(state, bias=jnp.zeros(state.pos.shape[::2]))
        return super().read(layer, gated, q, q_pos, other_partial, cross_layer)


@dataclasses.dataclass(frozen=True)
class PartAlone(Full):
    """A reader that returns attention and not a `ReadResult`, or one with finished outputs in place of a partial."""

    is_wrapped: bool = False

    def read(self, layer, state, q, q_pos, other_partial=None, cross_layer=None):
        part = super().read(layer, state, q, q_pos, other_partial, cross_layer).part
        return ReadResult(part.o) if self.is_wrapped else part


@dataclasses.dataclass(frozen=True)
class MistakenQuantizer(Quantizer):
    """A quantizer with a mistake of its author, `fault`."""

    fault: str

    def encode(self, x):
        scale = jnp.abs(x).max(-1)
        return {"a scale without an axis": (x, scale), "a constant": (x, 127)}.get(self.fault, (x, scale[..., None]))

    def decode(self, coded):
        x = coded[0]
        return {"a tuple": (x,), "half a vector": x[..., ::2]}.get(self.fault, x)


@dataclasses.dataclass(frozen=True)
class PlainAppend(Codes):
    """A codec that forgets to quantize what it appends."""

    def append(self, stored, x, at):
        return tuple(memory.append(buffer, x, at) for buffer in stored)


@dataclasses.dataclass(frozen=True)
class NothingPacked(Codes):
    """A codec that hands plain arrays to the functions of `memory`."""

    def encode(self, x, pos):
        return self.parts(x)


MISTAKES = {
    "no observation": (
        Mistaken(4, "no observation"),
        r"line \d+: AttributeError: .*unless the class says `num_queries",
    ),
    "no weights": (Mistaken(4, "no weights"), r"line \d+: AttributeError: .*without `needs_weights = True`"),
    "slots alone": (
        Mistaken(4, "slots alone"),
        r"Mistaken.init must return two things, slots of the prompt i32\[B 1\|K n",
    ),
    "no heads": (
        Mistaken(4, "no heads"),
        r"Mistaken.init must return slots .*, here \[., 1 or 2, ..\], and returned int32",
    ),
    "a list": (
        Mistaken(4, "a list"),
        "must return a policy state of arrays, such as f32.*and returned one with a float",
    ),
    "positions alone": (Mistaken(4, "positions alone"), "Mistaken.after_token must return two things, positions"),
    "positions of a sequence": (Mistaken(4, "positions of a sequence"), "Mistaken.after_token must return positions"),
    "positions as floats": (
        Mistaken(4, "positions as floats"),
        r"Mistaken.after_token must return positions i32\[B 1\|K S\], .*and returned float32\[., 1, \d+\]",
    ),
    "positions of some slots": (
        Mistaken(4, "positions of some slots"),
        r"Mistaken.after_token must return the positions of all (\d+) slots, and returned \d+",
    ),
    "slots beyond the prompt": (
        Mistaken(4, "slots beyond the prompt"),
        "positions: .*after the prompt, head 0 holds no token. Usual cause: slots beyond the prompt: `init` chooses",
    ),
    "outputs in place of a part": (
        PartAlone(is_wrapped=True),
        r"must return ReadResult\(part\), .*, and returned (ArrayImpl|\w*Tracer)",
    ),
    "too many": (Mistaken(4, "too many"), r"Mistaken.init must return at most num_slots = \d+ slots .* returned \d+"),
    "a part alone": (PartAlone(), r"PartAlone.read must return ReadResult\(part\), .*, and returned Partial"),
    "a scale without an axis": (
        PerTokenCodec(MistakenQuantizer("a scale without an axis")),
        r"MistakenQuantizer.encode must return arrays .*, here \[., 2, .*, 'w'\], .*shape \[., 2, \d+\]; keep an axis",
    ),
    "a constant": (PerTokenCodec(MistakenQuantizer("a constant")), r"one of shape \[\]; keep .*constants in fields"),
    "a tuple": (PerTokenCodec(MistakenQuantizer("a tuple")), "MistakenQuantizer.decode must return .*returned tuple"),
    "half a vector": (
        PerTokenCodec(MistakenQuantizer("half a vector")),
        r"MistakenQuantizer.decode must return .*, here \[., 2, .*, 8\], and returned \[., 2, .*, 4\]",
    ),
    "a flat bias": (FlatGate(), r"must be f32\[B K S\], here \(., 2, .*\); got float32"),
    "vectors for codes": (PlainAppend(), "`append` takes new token vectors in the buffer's dtype int8, got float32"),
    "plain arrays": (NothingPacked(), "packed: NothingPacked.encode stores int8.*`memory.pack` did not make"),
}


@pytest.mark.parametrize("quantizer", [Fp8, "fp8", PerTokenCodec()], ids=str)
def test_a_codec_of_single_vectors_takes_a_value_of_a_quantizer(quantizer):
    with pytest.raises(KvjaxError, match="the quantizer of PerTokenCodec is a Quantizer, got .*(Fp8|MinMax)"):
        PerTokenCodec(quantizer)


@pytest.mark.parametrize("fault", MISTAKES)
def test_an_authors_mistake_is_named(fault, model):
    component, says = MISTAKES[fault]
    field = next(
        name for kind, name in ((Policy, "decode"), (Reader, "read"), (Codec, "v")) if isinstance(component, kind)
    )
    with pytest.raises(KvjaxError, match=says) as error:
        check(Method(**{field: component}), model)
    assert "\n" not in str(error.value)


def test_arrays_that_were_not_packed_are_named_where_they_are_used():
    x, at = jnp.zeros((1, 2, 4, 8)), jnp.zeros((1, 1), jnp.int32)
    calls = {
        "append": lambda: memory.append(x, x[:, :, :1], at),
        "gather_tokens": lambda: memory.gather_tokens(x, jnp.zeros((1, 2, 1), jnp.int32)),
        "unpack": lambda: memory.unpack(x),
        "dot_products": lambda: memory.dot_products(x, x[:, :, None]),
    }
    for name, call in calls.items():
        with pytest.raises(
            KvjaxError, match=rf"`memory.{name}` takes what `memory.pack` returned, got the array float32"
        ):
            call()
    with pytest.raises(KvjaxError, match="NothingPacked.encode packs nothing, and only what `memory.pack` made"):
        Host(NothingPacked()).encode(x, jnp.zeros((1, 1, 4), jnp.int32))


def test_what_says_nothing_is_an_error(model):
    with pytest.raises(KvjaxError, match="keeps all 20 tokens of the longest prompt.*longer prompt, --length N"):
        check(Method(decode=RecentWindow(100)), model)
    with pytest.raises(KvjaxError, match="keeps all 20 tokens of the longest prompt.*or with a smaller budget"):
        check("snapkv:budget=100%,window=2 + int4", model)
    with pytest.raises(KvjaxError, match="length must be an integer from 3"):
        check_method("full", model, length=1)


@pytest.mark.parametrize("text", ["locret:budget=4,recent=1", "fastkvzip:budget=4"])
def test_a_method_whose_table_fits_no_lone_layer_breaks_no_rule_of_such_a_layer(text):
    """Its scorer reads the table when the prompt comes, or when all layers have it."""
    run = types.SimpleNamespace(method=kvjax.parse(text))
    assert rules.find_ignored_kind(run) == ""
