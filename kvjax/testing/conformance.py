"""`check_method`: tries a method against the rules that every method keeps."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import numpy as np

from kvjax.cache.accounting import kept_positions
from kvjax.cache.protocol import KVMethod
from kvjax.errors import KvjaxError
from kvjax.models.model import Model
from kvjax.registry.strings import name_of
from kvjax.testing.preparation import prepare
from kvjax.testing.rules import (
    DECODED_TOKENS,
    NUM_QUICK_RULES,
    NUM_RULES_BEFORE_READING,
    RULES,
    Breach,
    ModelRun,
    users_line,
)
from kvjax.utils import arguments, display
from kvjax.utils.keywords import checks_keywords


class BrokenRule(KvjaxError):
    """A method breaks a rule of methods; `rule` is its short name."""

    def __init__(self, message: str, rule: str):
        super().__init__(message)
        self.rule = rule


@dataclasses.dataclass(frozen=True)
class RuleReport:
    """A rule that the method keeps: its short name, the rule in words, and the seconds of its check."""

    name: str
    says: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """The rules that `check_method` tried: prints as a small table."""

    method: str
    rules: tuple[RuleReport, ...]
    seconds: float  # of everything, the model and the reading of the prompts included
    reading_seconds: float  # of the prompts and steps that most rules look at, with their programs
    num_left_out: int  # rules that a quick check leaves out
    notes: tuple[str, ...]  # what was changed for the check: sizes, company, the model

    def __repr__(self) -> str:
        which = f"the {len(self.rules)} quick rules" if self.num_left_out else f"all {len(self.rules)} rules"
        return f"{self.method} keeps {which} of methods ({self.seconds:.1f} s)"

    def __str__(self) -> str:
        width = max(len(rule.name) for rule in self.rules)
        lines = [f"  {rule.name:{width}}  {rule.seconds:5.1f} s  {rule.says}" for rule in self.rules]
        reading = "(reading the prompts and decoding, which the rules below look at)"
        lines.insert(NUM_RULES_BEFORE_READING, f"  {'':{width}}  {self.reading_seconds:5.1f} s  {reading}")
        if self.num_left_out:
            lines.append(f"  {self.num_left_out} rules were left out: check without `quick` before you rely on it")
        return "\n".join([*self.notes, repr(self), *lines])

    def _repr_html_(self) -> str:
        rows = [(rule.name, rule.says, rule.seconds) for rule in self.rules]
        return display.table(repr(self), ("rule", "what it says", "seconds"), rows)


@checks_keywords
def check_method(
    method: str | KVMethod,
    model: Model | None = None,
    *,
    length: int = 90,
    seed: int = 0,
    quick: bool = False,
    progress: bool | None = None,
) -> CheckReport:
    """Tries a method on random prompts of a small model against the rules that all methods keep.

    A method that breaks them gives wrong answers without an error. `print` of the result lists the rules. A method from
    a string whose sizes exceed the prompt is checked with smaller ones, and a component of a selection on a selection;
    `notes` of the result says so.

    Args:
      method: a value, or its string.
      model: any, best one of two layers; one in float32 for the rule `loops`, since rounding in 16 bits may tell two
        sound loops apart. By default `kvjax.testing.toy_model()`, or the testbed model where the toy model does not
        suit the method: its heads of 8 channels are too few for some groups, and it has no calibrated tables.
      length: tokens of the longest prompt.
      seed: of the prompts.
      quick: whether only the first rules are tried, which find what breaks first: shapes, positions, numbers that are
        not finite, and codecs. Whether sequences are independent, bytes are the planned ones and loops agree is left
        out.
      progress: whether a line says which rule is being tried; by default on a terminal and in a notebook.

    Returns:
      The rules, each with its words and the seconds of its check.

    Raises:
      BrokenRule: a KvjaxError that names the first rule that the method breaks, and the usual cause.
      KvjaxError: the method's own code raises something, no model suits the method, or nothing can be said, since it
        keeps all tokens of these prompts.
    """
    name, start = method if isinstance(method, str) else name_of(method), time.perf_counter()
    arguments.integer("length", length, 3)
    with display.StatusLine(progress) as status, _name_failures(name):
        status.say(f"{name}: making the model and binding the method")
        name, checked, twin, model, notes = prepare(method, model, length)
    rng = np.random.default_rng(arguments.integer("seed", seed, 0))
    lengths, prompts, following = (length, 1, 2 * length // 3), [], []
    for n in lengths:
        # Different ids while there are any: scores of a token that comes twice tie but for rounding.
        rounds = -(-(n + DECODED_TOKENS) // model.config.vocab_size)
        ids = np.concatenate([rng.permutation(model.config.vocab_size) for _ in range(rounds)]).tolist()
        prompts.append(ids[:n])
        following.append(ids[n : n + DECODED_TOKENS])
    run, reports, reading_seconds = ModelRun(checked, prompts, following, model, twin), [], 0.0
    rules = RULES[:NUM_QUICK_RULES] if quick else RULES
    with display.StatusLine(progress) as status, _name_failures(name):
        for number, rule in enumerate(rules, 1):
            if number == NUM_RULES_BEFORE_READING + 1:
                # Here, so that the next rule is not charged for it.
                status.say(f"{name}: reading prompts of {', '.join(map(str, lengths))} tokens")
                reading_start = time.perf_counter()
                _check_that_tokens_leave(run, name)
                run.steps  # noqa: B018
                reading_seconds = time.perf_counter() - reading_start
            status.say(f"{name}: rule {number} of {len(rules)}, {rule.name}: {rule.says}")
            rule_start = time.perf_counter()
            if breach := rule.find(run):
                problem, remedy = breach if isinstance(breach, Breach) else (breach, rule.remedy)
                said = "".join(f" ({note})" for note in notes)
                raise BrokenRule(f"{name} breaks a rule of methods: {rule.name}: {problem}. {remedy}{said}", rule.name)
            reports.append(RuleReport(rule.name, rule.says, time.perf_counter() - rule_start))
    seconds, num_left_out = time.perf_counter() - start, len(RULES) - len(rules)
    return CheckReport(name, tuple(reports), seconds, reading_seconds, num_left_out, notes)


def _check_that_tokens_leave(run: ModelRun, name: str) -> None:
    """Raises KvjaxError if a method that evicts keeps the longest prompt whole."""
    length, heads = len(run.prompts[0]), [head for layer in kept_positions(run.first_cache) for head in layer[0]]
    if run.method.traits.evicts and all(len(head) >= length for head in heads):
        raise KvjaxError(
            f"{name} keeps all {length} tokens of the longest prompt, so nothing can be said of what leaves; check it "
            "with a longer prompt, --length N (`length` in Python), or with a smaller budget"
        )


@contextlib.contextmanager
def _name_failures(name: str) -> Iterator[None]:
    """Turns an error of the method's own code into one line, with the line of its file; the cause has the traceback."""
    try:
        yield
    except KvjaxError:
        raise
    except Exception as e:
        first_line = (str(e).splitlines() or [""])[0]
        hint = ""
        if isinstance(e, AttributeError | TypeError) and "NoneType" in first_line:
            hint = (
                "; `observation` is None unless the class says `num_queries = N` (or None, for all queries), its "
                "`hidden_states` and `output_projection` without `needs_hidden = True` and `needs_output = True`, the "
                "`weights` of a policy without `needs_weights = True`, and `spec.index` always"
            )
        raise KvjaxError(f"{name} fails: {users_line(e)}{type(e).__name__}: {first_line}{hint}") from e
