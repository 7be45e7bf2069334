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
from kvjax.methods.loading import load_all
from kvjax.methods.strings import Part, format_methods, method_of, name_of, parse_parts, split_methods
from kvjax.models.model import Model
from kvjax.testing.rules import DECODED_TOKENS, RULES, Breach, MethodRun, users_line
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
    seconds: float  # of everything, with the reading of the prompts

    def __repr__(self) -> str:
        return f"{self.method} keeps all {len(self.rules)} rules of methods ({self.seconds:.1f} s)"

    def __str__(self) -> str:
        width = max(len(rule.name) for rule in self.rules)
        lines = [f"  {rule.name:{width}}  {rule.seconds:5.1f} s  {rule.says}" for rule in self.rules]
        return "\n".join([repr(self), *lines])

    def _repr_html_(self) -> str:
        rows = [(rule.name, rule.says, rule.seconds) for rule in self.rules]
        return display.table(repr(self), ("rule", "what it says", "seconds"), rows)


@checks_keywords
def check_method(
    method: str | KVMethod, model: Model, *, length: int = 90, seed: int = 0, progress: bool | None = None
) -> CheckReport:
    """Tries a method on random prompts of a small model against the rules that all methods keep.

    A method that breaks them gives wrong answers without an error. `print` of the result lists the rules.

    Args:
      method: a value, or its string.
      model: any, best one of two layers (`kvjax.testing.toy_model`); one in float32 for the rule `loops`, since
        rounding in 16 bits may tell two sound loops apart.
      length: tokens of the longest prompt; it must be beyond the method's budget for anything to leave.
      seed: of the prompts.
      progress: whether a line says which rule is being tried; by default on a terminal and in a notebook.

    Returns:
      The rules, each with its words and the seconds of its check.

    Raises:
      BrokenRule: a KvjaxError that names the first rule that the method breaks, and the usual cause.
      KvjaxError: the method's own code raises something, or nothing can be said, since the method keeps all tokens of
        these prompts.
    """
    method = method_of(method)
    arguments.integer("length", length, 3)
    rng = np.random.default_rng(arguments.integer("seed", seed, 0))
    lengths, prompts, following = (length, 1, 2 * length // 3), [], []
    for n in lengths:
        # Different ids while there are any: scores of a token that comes twice tie but for rounding.
        rounds = -(-(n + DECODED_TOKENS) // model.config.vocab_size)
        ids = np.concatenate([rng.permutation(model.config.vocab_size) for _ in range(rounds)]).tolist()
        prompts.append(ids[:n])
        following.append(ids[n : n + DECODED_TOKENS])
    run, name, start = MethodRun(model, method, prompts, following), name_of(method), time.perf_counter()
    reports = []
    with display.StatusLine(progress) as status, _name_failures(name):
        status.say(f"{name}: reading prompts of {', '.join(map(str, lengths))} tokens")
        if method.traits.evicts and all(
            len(head) >= length for layer in kept_positions(run.first_cache) for head in layer[0]
        ):
            raise KvjaxError(
                f"{name} keeps all {length} tokens of the longest prompt, so nothing can be said of what "
                f"leaves; check it with a greater `length`, or a smaller budget{_smaller_budget(name, length)}"
            )
        for number, rule in enumerate(RULES, 1):
            status.say(f"{name}: rule {number} of {len(RULES)}, {rule.name}: {rule.says}")
            rule_start = time.perf_counter()
            if breach := rule.find(run):
                problem, remedy = breach if isinstance(breach, Breach) else (breach, rule.remedy)
                raise BrokenRule(f"{name} breaks a rule of methods: {rule.name}: {problem}. {remedy}", rule.name)
            reports.append(RuleReport(rule.name, rule.says, time.perf_counter() - rule_start))
    return CheckReport(name, tuple(reports), time.perf_counter() - start)


@contextlib.contextmanager
def _name_failures(name: str) -> Iterator[None]:
    """Turns an error of the method's own code into one line, with the line of its file; the cause has the traceback."""
    try:
        yield
    except KvjaxError:
        raise
    except Exception as e:
        first_line = (str(e).splitlines() or [""])[0]
        raise KvjaxError(f"{name} fails: {users_line(e)}{type(e).__name__}: {first_line}") from e


def _smaller_budget(name: str, length: int) -> str:
    """An example of a smaller budget, for a method that a string makes."""
    for i, part in enumerate(split_methods(name)):
        if sizes := [size for size in load_all()[part.name].size_parameters if isinstance(part.values.get(size), int)]:
            parts = list(parse_parts(name))
            values = parts[i].values | dict.fromkeys(sizes, max(length // 3 // len(sizes), 1))
            return f", such as {format_methods([*parts[:i], Part(part.name, values), *parts[i + 1 :]])}"
    return ""
