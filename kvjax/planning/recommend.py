"""Which method suits a model, a budget and one's own texts: candidates of equal bytes, tried on these texts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.progress import Progress

from kvjax.errors import KvjaxError, KvjaxWarning
from kvjax.eval.page import summary
from kvjax.eval.page.paired_difference import BITS, SCORE, RecordedRun
from kvjax.eval.run import equal_bytes, store
from kvjax.eval.run.compare import compare
from kvjax.eval.run.comparison import Comparison
from kvjax.eval.run.equal_bytes import FittedMethod, fit_methods
from kvjax.eval.run.progress import describe_earlier
from kvjax.eval.tasks import own_questions, suite, symbols
from kvjax.eval.tasks.case import Case, Spec, take_first
from kvjax.eval.tasks.data_files import resolve_text_path
from kvjax.eval.tasks.texts import PREDICTED_TOKENS
from kvjax.generation.memory_plan import planned_bytes
from kvjax.models.model import Model, load
from kvjax.planning.device_bytes import Setting, count_device_bytes
from kvjax.planning.hardware import find_hardware
from kvjax.planning.models import PlannedModel
from kvjax.planning.plan_command import parse_tokens
from kvjax.registry.loading import load_all
from kvjax.registry.strings import Methods, format_methods, parse, parse_parts, resolve
from kvjax.utils import arguments, display
from kvjax.utils.files import expand_user, make_folder, write_text
from kvjax.utils.keywords import checks_keywords
from kvjax.utils.packages import import_optional

if TYPE_CHECKING:
    from kvjax.eval.page.charts import Picture

CANDIDATES = (
    *("turned_queries + int4", "kvzip + int4", "turned_queries", "kvzip"),
    *("turned_queries:page=32 + kivi:bits=4,residual=32", "kivi:residual=32", "int4", "turboquant:ends=0"),
    *("keydiff + int4", "expected_attention + int4", "snapkv + int4", "streaming_llm"),
    "turned_queries:level=head + head_shares",
)
"""What is tried by default, every kind of method that frees memory of the device: the settings of docs/results.md that
lose least, fewer bits alone, and the best known ways to choose tokens. A model without a table of `head_shares` is told
how to make one."""
LENGTH = 2048  # most tokens of a context that is tried by default, so that a recommendation takes minutes
CONTEXTS, QUESTIONS = 16, 4
FIRST_CONTEXTS = 4  # of each task, after which candidates are compared for the first time
MAX_NAMED = 3  # methods of a line; more are counted
LEAST_LENGTH = 64  # tokens of a context that an error proposes
UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
RESULT, PICTURE, TEXTS = "recommendation.json", "recommendation.png", "texts.txt"


@dataclasses.dataclass(frozen=True, repr=False)
class Recommendation:
    """The method that lost least on one's own texts; prints as the table and the reasons.

    Attributes:
      method: the string to use, at its size for contexts of `context` tokens.
      context: tokens of the contexts that it is for.
      share: the fraction of the exact cache's bytes that candidates could take.
      rows: all candidates and `full`, at the length that was tried.
      tried: the winner's string at that length.
      equals: candidates that these contexts do not tell apart from the winner.
      notes: what was left out, what it costs here, and how sure it is; sentences.
    """

    method: str
    context: int
    share: Fraction
    rows: Comparison
    tried: str
    equals: tuple[str, ...]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        lines = [f"- {note}" for note in self.notes]
        ends = f"recommended for contexts of {self.context:,} tokens: {self.method}"
        return "\n".join([repr(self.rows), "", *lines, "", ends])

    def to_json(self, path: str | Path | None = None) -> str:
        """Returns everything as a JSON object, and writes it to `path` if there is one."""
        about = {name: getattr(self, name) for name in ("method", "context", "tried", "equals", "notes")}
        about |= {"share": float(self.share), "rows": self.rows.to_dicts()}
        text = json.dumps(about, indent=2) + "\n"
        if path is not None:
            write_text(expand_user(path), text)
        return text

    def plot(self, path: str | Path | None = None) -> Picture:
        """Plots the quality of all candidates, which have equal bytes, and that of `full`, a panel per task.

        Args:
          path: a file to write, in the format of its ending (.png, .svg, .pdf, .html).

        Raises:
          KvjaxError: Altair is not installed.
        """
        import_optional("altair", "plots need")
        from kvjax.eval.page import charts

        rows = self.rows.to_dicts()
        chart = charts.draw_methods(rows, list(dict.fromkeys(row["method"] for row in rows)), self.tried)
        assert chart is not None  # every task has a score or bits
        picture = charts.Picture("methods", "methods", rows[0]["length"], chart)
        if path is not None:
            picture.save(expand_user(path))
        return picture


@checks_keywords
def recommend(
    model: Model,
    texts: str | Path,
    budget: str | None = None,
    *,
    questions: str | Path | None = None,
    hardware: str | None = None,
    context: int = LENGTH,
    length: int | None = None,
    contexts: int = CONTEXTS,
    candidates: Methods = CANDIDATES,
    out: str | Path = "out/recommend",
    batch: int = 4,
    seed: int = 0,
    speed: bool = True,
    progress: bool | Progress | None = None,
    announce: Callable[[str], None] | None = None,
) -> Recommendation:
    """Tries candidates of equal bytes on one's own texts, and says which lost least.

    Candidates are sized to take the same bytes of the device, at most the budget. Each reads contexts of these texts
    in which numbers were planted, before any question is known, and is asked for the numbers; then for the answers to
    one's own questions, if there are any; and predicts how the texts go on. The winner has the most right answers, the
    mean over these tasks; among equals it predicts the texts best. After 4, 8, 16 .. contexts of each task, candidates
    with fewer right answers than the first, with 95% confidence, are asked no further.

    Args:
      model: from `kvjax.load`.
      texts: a UTF-8 file, or a folder whose UTF-8 files are read, those in its folders too; or "essays".
      budget: of the cache on the device: a fraction of the exact cache's bytes, "25%" or "1/4", or bytes, "2GB", both
        for a context of `context` tokens and bfloat16 numbers. By default a quarter, or with `hardware` what the
        device's memory leaves beside the weights.
      questions: a file of JSON lines {"text": FILE, "question": .., "answer": ..}; the file's path is relative to it.
      hardware: a device by name, as `kvjax plan` takes it: a candidate that does not fit there at `context` tokens
        beside the weights is left out.
      context: tokens of the contexts that the method is for.
      length: tokens of the contexts that are tried, at the same fraction of bytes; by default `context`, at most 2,048.
      contexts: how many are tried of each task; candidates that fall behind have fewer.
      candidates: methods or their strings, of any size; see `CANDIDATES`.
      out: a folder that keeps every answer, where a run that was stopped goes on.
      batch: contexts at a time.
      seed: of the planted numbers and their places.
      speed: whether to measure the winner's speed here, beside the exact cache's.
      progress: as `kvjax.eval.compare` takes it.
      announce: called with lines for whoever waits, each row after its first batch and when it is finished.

    Returns:
      The recommendation, which prints itself. It is also in `out`, as `recommendation.json`.

    Raises:
      KvjaxError: before anything runs, for texts that are too short or cannot be read, a budget in which nothing or
        everything fits, questions without answers or about longer texts, and a folder with answers about other texts;
        later, where every candidate fails.

    Example:
      >>> from kvjax.planning.recommend import recommend
      >>> found = recommend(kvjax.load("smollm2-135m"), "contracts/", "25%")
      >>> print(found)
      >>> answer = kvjax.read(model, text, found.method).ask("Who signs?")
    """
    say = announce or _say_nothing
    for name, value in (("context", context), ("contexts", contexts), ("batch", batch)):
        arguments.integer(name, value)
    length = arguments.integer("length", min(context, LENGTH) if length is None else length)
    names = list(resolve(candidates))
    out = make_folder(expand_user(out), "out")
    text, num_files, skipped = read_texts(texts, out)
    check_amount(model, text, length, texts)
    check_same_texts(out, text, texts)
    setting = None if hardware is None else make_setting(model, hardware)
    share = choose_share(model, budget, context, setting)
    say(f"{display.count(num_files, 'file')}; {format_share(share)} of the exact cache's bytes at {context:,} tokens")
    notes = []

    def note(line: str) -> None:
        notes.append(line)
        say(line)

    if skipped:
        more = f" and {len(skipped) - MAX_NAMED} more" if len(skipped) > MAX_NAMED else ""
        note(f"no UTF-8 texts, and not read: {', '.join(skipped[:MAX_NAMED])}{more}")
    if (longest := max(context, length)) > model.config.max_positions:
        note(
            f"{longest:,} tokens are beyond the {model.config.max_positions:,} positions that {model.name} was made "
            "for: methods that keep true positions fail there, full too"
        )
    tasks = [
        "shared" if symbols.knows_symbols(model) else "planted",
        *(["questions"] if questions is not None else []),
        "ppl",
    ]
    data = None if questions is None else expand_user(questions)
    write_text(out / TEXTS, text)
    spec = Spec((length,), contexts, QUESTIONS, seed=seed, text=out / TEXTS, data=data)
    if questions is not None:
        with warnings.catch_warnings():  # they are given below
            warnings.simplefilter("ignore", KvjaxWarning)
            suite.cases(model, ["questions"], spec)  # texts that are all too long are an error, and not left out
    cases = suite.cases(model, tasks, spec, note)
    if earlier := store.parse_records(out / store.RECORDS):
        say(describe_earlier(out, earlier))
    say(f"sizing {display.count(len(names), 'candidate')}, which takes a while in a model of many layers")
    fitted, left_out = fit_candidates(model, names, share, context, length, setting)
    for line in left_out:
        note(line)
    options: dict[str, Any] = {"batch": batch, "progress": progress, "announce": announce, "left_out": _say_nothing}
    tried = ["full", *dict.fromkeys(trial.method for _, trial in fitted)]
    going_on = tried[1:]
    for num_contexts in plan_rounds(contexts, batch):
        failed = try_methods(model, ["full", *going_on], tasks, spec, out, **options, first=num_contexts)
        for method, problem in failed.items():
            tried.remove(method)
            going_on.remove(method)
            note(f"{method} is left out: {problem}")
        run = RecordedRun(select_records(store.read(out), ["full", *going_on], take_first(cases, num_contexts)))
        winner, equals, behind = rank(run, going_on)
        if num_contexts == contexts:
            break
        going_on = [method for method in going_on if method not in behind]
        if behind:
            note(
                f"{name_some(behind)}: fewer right answers than {winner} in {num_contexts} contexts of each task, with "
                "95% confidence, and not asked further"
            )
        going = display.count(len(going_on), "candidate")
        say(f"after {num_contexts} contexts of each task {winner} is first; {going} to be asked further")
    if speed:
        say(f"the speed of {winner} and of full")
        options |= {"progress": False, "announce": None}
        compare(model, ["full", winner], tasks, spec, out, **options, speed=True)
    rows = Comparison.of(summary.rows(select_records(store.read(out), tried, cases)))
    method = next(final.method for final, trial in fitted if trial.method == winner)
    notes += describe(run, rows, winner, equals, length, context)
    num_windows = sum(case.task == "ppl" for case in cases)
    if num_windows < contexts:
        notes.append(
            f"the texts have room for {display.count(num_windows, 'context')} of {length:,} tokens with what follows: "
            f"those with numbers overlap, and tell less than {contexts} of more texts would"
        )
    found = Recommendation(method, context, share, rows, winner, equals, tuple(notes))
    found.to_json(out / RESULT)
    return found


def _say_nothing(line: str) -> None:
    pass


def plan_rounds(contexts: int, batch: int) -> list[int]:
    """Returns the numbers of contexts after which candidates are compared: whole batches, twice as many each time."""
    rounds, num_contexts = [], batch * math.ceil(FIRST_CONTEXTS / batch)
    while num_contexts < contexts:
        rounds.append(num_contexts)
        num_contexts *= 2
    return [*rounds, contexts]


def try_methods(
    model: Model, methods: Sequence[str], tasks: Sequence[str], spec: Spec, out: Path, **options: Any
) -> dict[str, str]:
    """Asks `full`, which comes first, and the candidates; where one fails, each by itself, and the others go on.

    The arguments are those of `compare`.

    Returns:
      The reason for each candidate that failed.

    Raises:
      KvjaxError: all candidates fail. An error that `full` has as well, as one of the folder or the texts, is its own.
    """
    try:
        compare(model, methods, tasks, spec, out, **options)
        return {}
    except Exception as e:  # of a method, which may be the user's
        problem = e
    full, *candidates = methods
    # Answers that were given are in the folder, and are not asked for again.
    options |= {"left_out": _say_nothing}
    compare(model, [full], tasks, spec, out, **options)
    failed = {}
    for method in candidates:
        try:
            compare(model, [method], tasks, spec, out, **options)
        except Exception as e:
            failed[method] = describe_failure(e)
    if len(failed) == len(candidates):
        reasons = "; ".join(f"{method}: {reason}" for method, reason in failed.items())
        raise KvjaxError(f"no candidate runs to its end; give others (--candidates): {reasons}") from problem
    return failed


def describe_failure(error: Exception) -> str:
    """Says why a method is left out: an error of kvjax speaks for itself, another one is named."""
    return str(error) if isinstance(error, KvjaxError) else f"it fails with {type(error).__name__}: {error!s:.200}"


def select_records(records: Iterable[Any], methods: Sequence[str], cases: Sequence[Case]) -> list[Any]:
    """Selects the answers of methods about cases, and their speeds at these lengths.

    A folder may hold answers of an earlier command, of other methods, contexts and lengths.
    """
    keys = {(case.task, case.key) for case in cases}
    lengths = {case.about["length"] for case in cases}

    def is_wanted(record: Any) -> bool:
        if record["task"] == summary.SPEED:
            return summary.length_of(record) in lengths
        return (record["task"], record["key"]) in keys

    return [record for record in records if record["method"] in methods and is_wanted(record)]


def read_texts(path: Path | str, out: Path) -> tuple[str, int, list[str]]:
    """Reads a file, or all UTF-8 files of a folder in the order of their paths.

    A name of `NAMED_TEXTS`, such as "essays", is the text that a package brings. Files whose name begins with a dot are
    left out, and so are the folders that recommendations write, of which `out` is one: in a folder of texts, they would
    be other texts each time.

    Returns:
      The text, the number of files, and the names of those that are no text.
    """
    path = resolve_text_path(path)
    if not path.exists():
        raise KvjaxError(f"there are no texts at {path}; give a UTF-8 file, or a folder of such files")
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    written = {file.parent for file in files if file.name == TEXTS and (file.parent / store.RECORDS).is_file()}
    texts, skipped = [], []
    for file in files:
        if any(part.startswith(".") for part in file.relative_to(path).parts):
            continue
        if file != path and (written.intersection(file.parents) or file.resolve().is_relative_to(out.resolve())):
            continue
        try:
            text = file.read_bytes().decode("utf-8-sig")
        except (UnicodeDecodeError, OSError) as e:
            if file == path:
                raise KvjaxError(
                    f"{path} is no UTF-8 text that can be read ({e}); give one, or a folder of them"
                ) from e
            text = "\0"
        if "\0" in text:
            skipped.append(str(file.relative_to(path)))
        elif text.strip():
            texts.append(text.strip())
    if not texts:
        raise KvjaxError(f"{path} holds no UTF-8 file with a text; give a text file, or a folder of such files")
    return "\n\n".join(texts) + "\n", len(texts), skipped


def check_same_texts(out: Path, text: str, name: str | Path) -> None:
    """Raises KvjaxError for a folder whose answers are about other texts."""
    kept = out / TEXTS
    if (out / store.RECORDS).is_file() and kept.is_file() and kept.read_bytes() != text.encode():
        raise KvjaxError(
            f"{out} keeps answers about other texts than those of {name}; choose another folder (--out), or delete it"
        )


def format_share(share: Fraction) -> str:
    """Formats a fraction in percent, never as 0."""
    return f"{float(share):.1%}" if share >= Fraction(1, 1000) else f"{100 * float(share):.2g}%"


def check_amount(model: Model, text: str, length: int, name: str | Path) -> None:
    """Raises KvjaxError for a text that is too short for a single context and the tokens that follow it."""
    needed = length + min(PREDICTED_TOKENS, length)
    # A prefix says enough: a tokenizer has at most one token for each byte.
    found = len(model.text_tokenizer().encode_continuation(text[: 64 * needed], parse_special=False))
    if found < needed:
        most = max(found - PREDICTED_TOKENS, found // 2)
        shorter = f", or length={most} (--length {most}), so that shorter contexts are tried"
        raise KvjaxError(
            f"{name} has {found:,} tokens, and a context of {length:,} with what follows takes {needed:,}; give more "
            f"text{shorter if most >= LEAST_LENGTH else ''}"
        )


def make_setting(model: Model, hardware: str) -> Setting:
    """What `kvjax plan` counts with for a loaded model."""
    planned = PlannedModel(model.name or "this model", model.config, "the loaded model")
    return Setting(planned, find_hardware(hardware), weights=model.weights)


def choose_share(model: Model, budget: str | None, context: int, setting: Setting | None) -> Fraction:
    """Returns the fraction of the exact cache's bytes that a budget allows.

    Raises:
      KvjaxError: the budget is none, or the exact cache fits in it.
    """
    full = planned_bytes("full", model.config, context, dtype=equal_bytes.DTYPE).held["device"]
    if budget is None and setting is not None:
        needed = count_device_bytes(setting, parse("full"), context, 1)
        left = setting.usable_bytes - needed.weights - needed.workspace
        if left <= 0:
            raise KvjaxError(
                f"{setting.hardware.name} has {setting.usable_bytes / 1e9:.1f} GB for programs, and the weights "
                f"take {needed.weights / 1e9:.1f}: nothing is left for a cache; take weights='int8' (--weights int8) "
                "or another device"
            )
        share, name = Fraction(left, full), f"what {setting.hardware.name} has left"
    else:
        budget = "25%" if budget is None else budget
        share, name = parse_budget(budget, full), f"the budget of {budget}"
    if share >= 1:
        raise KvjaxError(
            f"the exact cache takes {full / 1e9:.3g} GB for {context:,} tokens, no more than {name}: use full, or give "
            "a longer context, or a smaller budget such as 25%"
        )
    return share


def parse_budget(text: str, full: int) -> Fraction:
    """Parses "25%", "1/4", "0.25" or bytes such as "2GB" as a fraction of `full` bytes."""
    if not isinstance(text, str):
        raise KvjaxError(f"budget {text!r:.60} is no text; write it as '25%' or '2GB'")
    word = text.strip()
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)\s*(%|[KMGT]i?B|B)", word, re.IGNORECASE)
    if match is None:
        try:
            (share,) = equal_bytes.parse_shares(word)
        except (KvjaxError, ValueError):
            raise KvjaxError(
                f"budget {text!r:.60} is neither a fraction of the exact cache's bytes, such as 25% or 1/4, nor bytes, "
                "such as 2GB or 500MiB"
            ) from None
        return share
    number, unit = Fraction(match[1]), match[2].upper()
    share = number / 100 if unit == "%" else number * int(UNITS[unit]) / full
    if share <= 0 or (unit == "%" and share > 1):
        raise KvjaxError(f"budget {text!r:.60} is no part of the exact cache; give more than 0% and at most 100%")
    return share


def fit_candidates(
    model: Model, names: Sequence[str], share: Fraction, context: int, length: int, setting: Setting | None
) -> tuple[list[tuple[FittedMethod, FittedMethod]], list[str]]:
    """Sizes the candidates; returns each for the context and for the length that is tried, and what was left out.

    Raises:
      KvjaxError: no candidate fits.
    """
    fitted, left_out = [], []
    too_large: dict[int, list[FittedMethod]] = {}  # by tokens of the context in which their smallest size is too large
    for name in names:
        try:
            (final,) = fit_methods([name], [share], model.config, context)
            (trial,) = [final] if length == context else fit_methods([name], [share], model.config, length)
        except Exception as e:  # of a method, which may be the user's
            left_out.append(f"{name} is left out: {describe_failure(e)}")
            continue
        if not final.method:
            too_large.setdefault(context, []).append(final)
        elif not trial.method:
            too_large.setdefault(length, []).append(trial)
        elif setting is not None and (problem := describe_excess(setting, final.method, context)):
            left_out.append(f"{final.method} is left out: {problem}")
        elif all(trial.method != other.method for _, other in fitted):
            fitted.append((final, trial))
    without_selection = {final.method: drop_whole_selection(final.method, context) for final, _ in fitted}
    in_vain = {method: rest for method, rest in without_selection.items() if rest in without_selection}
    fitted = [(final, trial) for final, trial in fitted if final.method not in in_vain]
    for method, rest in in_vain.items():
        left_out.append(f"{method} is left out: it keeps every token, as {rest} does in no more bytes")
    for tokens, smallest in too_large.items():
        left_out.append(describe_too_large(model, smallest, share, "" if tokens == context else f"{tokens:,}"))
    if not fitted:
        exact = {n: planned_bytes("full", model.config, n, dtype=equal_bytes.DTYPE).held["device"] for n in too_large}
        least = [Fraction(f.least_bytes, exact[n]) for n, smallest in too_large.items() for f in smallest]
        enough = f" (at least {math.ceil(1000 * min(least)) / 10:g}%)" if least else ""
        raise KvjaxError(
            f"no candidate takes at most {format_share(share)}: {'; '.join(left_out)}. Give a larger budget{enough}, a "
            "longer context, or other candidates"
        )
    return fitted, left_out


def describe_too_large(model: Model, smallest: Sequence[FittedMethod], share: Fraction, tokens_tried: str) -> str:
    """Says that no size of some methods fits; `tokens_tried` is empty for contexts of the length they are for."""
    takes = "is left out: at its smallest it takes"
    if len(smallest) > 1:
        takes = "are left out: at their smallest they take"
    tried = f" of {tokens_tried} tokens, as they are tried (--length)" if tokens_tried else ""
    has_windows = any(kind.attention.rule.window is not None for kind in model.config.kinds)
    windows = "; layers with sliding windows hold the whole window" if has_windows else ""
    names = "; ".join(fitted.asked for fitted in smallest)
    return f"{names} {takes} more than {format_share(share)}{tried}{windows}"


def drop_whole_selection(method: str, context: int) -> str:
    """Returns a method without its part that keeps all tokens of a context; empty where none does, or it is alone."""
    parts, entries = parse_parts(method), load_all()
    others = [p for p in parts if context not in (p.values.get(name) for name in entries[p.name].size_parameters)]
    return format_methods(others) if 0 < len(others) < len(parts) else ""


def describe_excess(setting: Setting, method: str, context: int) -> str:
    """Says why a method does not fit a device, whose prompts may wait on the host; empty where it fits."""
    for prompt_memory in ("device", "host"):
        needed = count_device_bytes(
            dataclasses.replace(setting, prompt_memory=prompt_memory), parse(method), context, 1
        )
        if setting.excess(needed) <= 0:
            return ""
    missing = max(needed.peak - setting.usable_bytes, needed.host - setting.hardware.host_bytes)
    return f"reading {context:,} tokens takes {missing / 1e9:.1f} GB more than {setting.hardware.name} has"


class Ranking(NamedTuple):
    """The winner, the methods whose scores are not told apart from its own, and those with lower ones."""

    winner: str
    equals: tuple[str, ...]
    behind: tuple[str, ...]


def rank(run: RecordedRun, methods: Sequence[str]) -> Ranking:
    """Ranks methods by their scores, then by their bits; by 95% intervals over the contexts of a run."""

    def quality(name: str) -> tuple[float, float]:
        score, bits = (run.difference(name, "full", measure) for measure in (SCORE, BITS))
        return (score.mean if score else 0.0, bits.mean if bits else 0.0)

    winner = max(methods, key=quality)
    equals, behind = [], []
    for name in methods:
        gap = run.difference(winner, name, SCORE) if name != winner else None
        if gap is not None and gap.low is not None:
            (equals if gap.low <= 0 else behind).append(name)
    return Ranking(winner, tuple(equals), tuple(behind))


def name_some(names: Sequence[str]) -> str:
    """Names the first methods, and counts the others."""
    more = [f"{len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
    return "; ".join([*names[:MAX_NAMED], *more])


def describe(
    run: RecordedRun, rows: Comparison, winner: str, equals: Sequence[str], length: int, context: int
) -> list[str]:
    """Says what was seen of the winner, what it costs here, and what is not known."""
    notes = []
    score, bits = (run.difference(winner, "full", measure) for measure in (SCORE, BITS))
    if score is not None and score.right < 0.2:
        notes.append(
            f"full itself answers only {score.right:.0%} of the questions, so that they tell little: look at the bits "
            "per byte, or give questions that this model answers"
        )
    if score is not None and score.low is not None and score.high is not None:
        notes.append(
            f"{winner} answers {score.left:.0%} of the questions, full {score.right:.0%} "
            f"({display.count(score.cases, 'context')}; the difference is {100 * score.low:+.0f} to "
            f"{100 * score.high:+.0f} points with 95% confidence)"
        )
    if bits is not None:
        line = f"its bits per byte of the texts are those of full {-bits.mean:+.3f}"
        if bits.low is not None and bits.high is not None:
            line += f" ({-bits.high:+.3f} to {-bits.low:+.3f} with 95% confidence)"
        notes.append(line)
    held = {row.task: row.device_percent or 0.0 for row in rows if row.method == winner}
    if "questions" in held and held["questions"] > 1.02 * held["ppl"]:
        notes.append(
            f"texts of your questions are shorter than {length:,} tokens, so that it held {held['questions']:.0f}% of "
            f"their bytes, not {held['ppl']:.0f}%"
        )
    speeds = {row.method: row for row in rows if row.tokens_per_second}
    if winner in speeds and "full" in speeds:
        own, exact = speeds[winner], speeds["full"]
        notes.append(
            f"here it reads {length:,} tokens in {own.prefill_seconds:.2g} s and decodes {own.tokens_per_second:,.0f} "
            f"tokens/s, full {exact.prefill_seconds:.2g} s and {exact.tokens_per_second:,.0f} tokens/s"
        )
    if equals:
        notes.append(
            f"these contexts do not tell its answers apart from those of {name_some(equals)}: more contexts may"
        )
    gaps = {name: run.difference(winner, name, BITS) for name in equals}
    if more_bits := [name for name, gap in gaps.items() if gap is not None and gap.low is not None and gap.low > 0]:
        notes.append(f"of these, {name_some(more_bits)} take more bits per byte, with 95% confidence")
    if context > length:
        notes.append(
            f"contexts of {length:,} tokens were tried, not of {context:,}, where the same fraction of bytes may lose "
            "more or less"
        )
    return notes


def run(args: argparse.Namespace) -> None:
    """The command `kvjax recommend`."""
    if args.candidates is not None:
        resolve(args.candidates)  # a misspelled method is reported before a large model is loaded
    read_texts(args.texts, make_folder(args.out, "--out"))
    if args.questions is not None:
        own_questions.read_questions(args.questions)
    context = parse_tokens(args.context)
    length = None if args.length is None else parse_tokens(args.length, "--length")
    if args.hardware is not None:
        find_hardware(args.hardware)
    model = load(args.model, dtype=args.dtype, weights=args.weights)
    names = ("questions", "hardware", "contexts", "out", "batch", "seed")
    options = {name: getattr(args, name) for name in names}
    options |= {"context": context, "length": length}
    try:
        found = recommend(
            model,
            args.texts,
            args.budget,
            **options,
            candidates=args.candidates or CANDIDATES,
            speed=not args.no_speed,
            announce=lambda line: print(f"kvjax: {line}", file=sys.stderr),
        )
    except KeyboardInterrupt:
        raise KvjaxError(f"stopped; {args.out} keeps its records, and the same command goes on from there") from None
    print(found)
    written = [args.out / RESULT]
    try:
        found.plot(args.out / PICTURE)
        written.append(args.out / PICTURE)
    except KvjaxError as e:
        print(f"kvjax: no picture: {e}", file=sys.stderr)
    print(f"wrote {' and '.join(map(os.fspath, written))}")
