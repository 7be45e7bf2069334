"""Shared by the scripts: command lines, the quality of methods on one model, plots."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvjax
from experiments.bench.measuring import log_progress, make_parser, output_folder
from experiments.papers import questions
from kvjax import Context, KvjaxError, Method, Model
from kvjax.cli import use_compilation_cache
from kvjax.eval.page.intervals import score_interval
from kvjax.eval.tasks import data_files
from kvjax.eval.tasks.suite import split_words
from kvjax.eval.tasks.symbols import knows_symbols
from kvjax.models.tokenizer import FILE
from kvjax.reuse.full_kv import full_kv_from_context
from kvjax.testbed import corpus, tasks

FULL = kvjax.methods.full()
SEED = 2**32 + 1  # seeds of training contexts are below 2**32


def tasks_help(known: Iterable[str]) -> str:
    """Help text of --tasks; `known` are the tasks in the shipped model's symbols."""
    return f"of the shipped model: {', '.join(known)}; of any other: {', '.join(questions.TASKS)}"


def model_parser(doc: str) -> argparse.ArgumentParser:
    """A parser with the options of every script that loads a model."""
    p = make_parser(doc)
    p.add_argument("--model", default="testbed", help="a checkpoint directory (default: the shipped model)")
    p.add_argument("--length", type=int, default=2048, help="tokens of a context")
    p.add_argument("--text", type=Path, help="a UTF-8 text to continue, or essays (default: held-out source code)")
    p.add_argument("--out", type=output_folder, default=Path("out"), help="folder for plots")
    p.add_argument("--seed", type=int, default=SEED)
    return p


def add_quality_options(p: argparse.ArgumentParser, group: bool = True) -> argparse.ArgumentParser:
    """Adds the options of `measure`, and --group."""
    p.add_argument("--tasks", type=split_words, default=["variables"], help=tasks_help(tasks.TASKS))
    p.add_argument("--contexts", type=int, default=32, help="per task; variables and copying ask 4 questions each")
    p.add_argument("--windows", type=int, default=8, help="windows of text, of --length and --tokens together")
    p.add_argument("--tokens", type=int, default=128, help="tokens of each window that are decoded, not prefilled")
    p.add_argument("--batch", type=int, default=8, help="sequences at a time")
    if group:
        p.add_argument("--group", type=int, default=32, help="elements that share a scale and a minimum")
    p.add_argument(
        "--ask",
        choices=("prompt", "cache"),
        default="prompt",
        help="prompt: the question ends the exact prefill, as in the papers; cache: it follows the compressed cache",
    )
    return p


def run_script(main: Callable[[], None]) -> None:
    """Runs a script with compiled programs on disk; an unusable input ends it with one line and status 1."""
    use_compilation_cache()
    try:
        main()
    except (KvjaxError, OSError) as e:
        sys.exit(f"error: {e}")


def instances(args: argparse.Namespace, model: Model, task: str) -> list[tasks.Instance]:
    """Draws `args.contexts` held-out instances of a task; tasks of symbols alternate filler of code and of noise."""
    if task in questions.TASKS:
        return questions.in_text(args, model, task)
    # Code and noise in equal parts, as in the contexts that the shipped model was trained on.
    fillers = (corpus.load("held_out").window, tasks.noise)
    # Each instance has a seed, so that the first ones stay the same when --contexts grows.
    seeds = ([args.seed, list(tasks.TASKS).index(task), args.length, i] for i in range(args.contexts))
    try:
        return [tasks.TASKS[task](np.random.default_rng(s), args.length, fillers[i % 2]) for i, s in enumerate(seeds)]
    except ValueError as e:
        raise KvjaxError(f"task {task!r} does not fit --length {args.length}: {e}; raise --length") from e


def windows(args: argparse.Namespace, model: Model, length: int) -> np.ndarray:
    """At most `args.windows` windows spread over the text, i32[n length], each with the tokenizer's first tokens."""
    if args.text is None and knows_symbols(model):
        ids, opening = corpus.load("held_out").tokens, []
    else:
        if model.tokenizer is None:
            raise KvjaxError(f"{model.name} has no {FILE} to turn text into tokens; copy the model's {FILE} there")
        if args.text is None:
            held_out = corpus.load("held_out").tokens
            text = held_out[held_out < 256].astype(np.uint8).tobytes().decode(errors="replace")
        else:
            text = data_files.read_text(args.text)
        opening = model.tokenizer.opening_ids
        ids = np.array(model.tokenizer.encode_prompt(text)[len(opening) :])
    body = length - len(opening)
    whole = len(ids) // body
    if not whole:
        raise KvjaxError(
            f"the text has {len(ids)} tokens, and one window takes {body}: give a longer --text, or a smaller --length"
        )
    # Windows are spread over the text: neighbors are of one file or essay, and their errors are not independent.
    chosen = np.linspace(0, whole - 1, min(args.windows, whole)).astype(int)
    return np.stack([np.concatenate([opening, ids[i * body : (i + 1) * body]]) for i in chosen]).astype(np.int32)


def answers(
    model: Model, methods: Mapping[str, Method], batch: Sequence[tasks.Instance], ask: str
) -> dict[str, list[bool]]:
    """Asks the questions of a batch of contexts under each method, greedily.

    The contexts are read once, exactly; each method compresses these keys and values.

    Args:
      model: the model.
      methods: by name.
      batch: contexts with equally many questions.
      ask: "prompt": the question is part of what the method compresses, so the first answer token is exact, as in the
        papers; "cache": the method compresses the context alone and then reads the question.

    Returns:
      by method, whether the answer to each question is exactly right.
    """
    right: dict[str, list[bool]] = {name: [] for name in methods}
    longest = max(len(q.prompt) + len(q.answer) for i in batch for q in i.questions)
    # Reading takes far longer than answering, and all methods here see the same exact prefill, as in the papers.
    exact = kvjax.read(model, [i.context for i in batch], FULL, headroom=longest)
    for asked in zip(*(i.questions for i in batch), strict=True):
        prompts, longest_answer = [q.prompt for q in asked], max(len(q.answer) for q in asked)
        more = {"max_new_tokens": longest_answer, "eos_ids": ()}
        # Each question starts from the context alone: answers of before would be further copies of the facts.
        known = exact.feed(prompts) if ask == "prompt" else exact
        for name, method in methods.items():
            context = compress(method, known)
            out = context.generate(**more) if ask == "prompt" else context.ask(prompts, **more)
            right[name] += [q.right(t) for t, q in zip(out.tokens, asked, strict=True)]
    return right


def compress(method: Method, context: Context) -> Context:
    """Compresses the keys and values of a context under `full`; only for methods that observe no queries."""
    return full_kv_from_context(context).compress(method, capacity=context.cache.capacity)


def continuations(
    model: Model, methods: Mapping[str, Method], texts: np.ndarray, context: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Teacher-forced decoding of texts i32[B T] after an exact prefill of their first `context` tokens.

    Returns:
      by method, bits per token f32[B] and the likeliest tokens i32[B T-context-1]. The first decoded token is left out:
      its logits come from the exact prefill.
    """
    exact, found = kvjax.read(model, texts[:, :context], FULL, capacity=texts.shape[1]), {}
    for name, method in methods.items():
        logp, likeliest = zip(*compress(method, exact).score(texts[:, context:]), strict=True)
        bits = -np.stack(logp)[:, 1:].mean(1) / np.log(2)
        found[name] = bits, np.stack(likeliest)[:, 1:]
    return found


def measure(args: argparse.Namespace, model: Model, method_strings: Sequence[str]) -> list[dict[str, Any]]:
    """Measures accuracy per task, bits per token of text, and agreement with `full`; returns a record per method."""
    methods = {text: kvjax.parse(text) for text in ("full", *method_strings)}
    records = {name: {"method": name, "tasks": {}} for name in methods}
    for task in questions.select_tasks(model, args.tasks):
        right: dict[str, list[bool]] = {name: [] for name in methods}
        for batch in batches(instances(args, model, task), args.batch, task):
            for name, more in answers(model, methods, batch, args.ask).items():
                right[name] += more
        for name, r in right.items():
            records[name]["tasks"][task] = accuracy(r)
    # Bits per token hardly show what compression loses, so the tokens predicted as under `full` are counted, too.
    parts: dict[str, list] = {name: [] for name in methods}
    for texts in batches(windows(args, model, args.length + args.tokens), args.batch, "text"):
        for name, part in continuations(model, methods, texts, args.length).items():
            parts[name].append(part)
    best = np.concatenate([likeliest for _, likeliest in parts["full"]])
    for name, found in parts.items():
        bits, likeliest = (np.concatenate(x) for x in zip(*found, strict=True))
        spread = {"bits": float(bits.mean()), "bits_error": float(bits.std() / len(bits) ** 0.5)}
        records[name] |= spread | {"agreement": float((likeliest == best).mean()), "tokens": int(best.size)}
    return list(records.values())


def batches(items: Any, size: int, what: str) -> Iterator[Any]:
    """Yields slices of `size` items and logs each on stderr."""
    for i in range(0, len(items), size):
        log_progress(f"{what}, {i + 1} to {min(i + size, len(items))} of {len(items)}")
        yield items[i : i + size]


def accuracy(right: Sequence[bool]) -> dict[str, float]:
    """Fraction of right answers, with its binomial standard error."""
    # Questions of one context are taken for independent ones here; `eviction` pairs and averages by context.
    p = float(np.mean(right))
    return {"accuracy": p, "error": (p * (1 - p) / len(right)) ** 0.5, "questions": len(right)}


def format_accuracy(task: Mapping[str, Any]) -> str:
    """Formats a result of `accuracy` with Wilson's interval over questions: a standard error is 0 at 0% and at 100%."""
    num_right = round(task["accuracy"] * task["questions"])
    low, high = score_interval(np.repeat([1.0, 0.0], [num_right, task["questions"] - num_right]))
    return f"{task['accuracy']:.1%} ({100 * low:.0f}–{100 * high:.0f})"


def mean_accuracy(record: Mapping[str, Any]) -> float:
    """Mean accuracy over the tasks of a record of `measure`, in percent; without tasks, the agreement with `full`."""
    right = [t["accuracy"] for t in record["tasks"].values()] or [record["agreement"]]
    return 100 * float(np.mean(right))


def brief(ours: Callable[[Any], str], paper: str, difference: str) -> Callable[[Any], tuple[str, str, str]]:
    """Makes a script's `in_brief`, its line in experiments/README.md: (ours, the paper's, the difference)."""
    return lambda results: (ours(results), paper, difference)


def summarize_accuracy(records: Iterable[Mapping[str, Any]]) -> str:
    """One line with the mean accuracy of each method."""
    return "; ".join(f"{r['method']} {mean_accuracy(r):.1f}%" for r in records)


def record_columns(args: argparse.Namespace, model: Model) -> tuple[str, ...]:
    """Headings of the cells of `format_record`."""
    return (*questions.select_tasks(model, args.tasks), "bits/B" if knows_symbols(model) else "bits/token", "= full")


def format_record(record: Mapping[str, Any]) -> list[str]:
    """Formats a record of `measure` as cells of a table."""
    right = [format_accuracy(task) for task in record["tasks"].values()]
    return [*right, f"{record['bits']:.3f} ±{record['bits_error']:.3f}", f"{record['agreement']:.1%}"]


def describe_protocol(args: argparse.Namespace, model: Model, records: Sequence[Mapping[str, Any]]) -> str:
    """One line that explains the columns of `format_record`."""
    kind = "bytes" if knows_symbols(model) else "tokens"
    where = "in the exact prompt" if args.ask == "prompt" else "asked of the compressed cache"
    counts = [f"{t}: {r['questions']} questions" for t, r in records[0]["tasks"].items()]
    text = f"text: {records[0]['tokens']:,} {kind} decoded after {args.length:,}; = full: likeliest token as in `full`"
    return (
        "; ".join([*counts, *[f"questions {where}"] * bool(counts), text])
        + "; (..): 95% intervals over questions; ± standard errors."
    )


def save_figure(path: Path, draw: Callable[[Any], None], columns: int = 1) -> None:
    """Draws and writes a plot; `draw` gets one axis, or a row of them."""
    # Imported here, so that nobody waits for it who draws nothing; Agg draws without a display.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(1, columns, figsize=(5.5 * columns, 4), layout="constrained")
    draw(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=150)
    plt.close(fig)
    log_progress(f"wrote {path}")
