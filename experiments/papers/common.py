"""What the scripts share: arguments, the quality of methods on one model, decode loops, plots, errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.bench.common import progress
from experiments.bench.ours import Ours
from kvjax import KvjaxError, Method, Model, State
from kvjax.cli import use_compilation_cache
from kvjax.core import memory
from kvjax.core.types import Array
from kvjax.eval.run.command import words
from kvjax.eval.tasks.symbols import knows_symbols
from kvjax.models.tokenizer import FILE
from kvjax.run import api
from kvjax.testbed import corpus, tasks

FULL = kvjax.zoo.full()
SEED = 2**32 + 1  # training seeds are below 2**32


def parser(doc: str) -> argparse.ArgumentParser:
    """The arguments that every script with a model has."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="testbed", help="a checkpoint directory (default: the shipped model)")
    p.add_argument("--length", type=int, default=2048, help="tokens of a context")
    p.add_argument("--text", type=Path, help="text to continue, UTF-8 (default: held-out source code)")
    p.add_argument("--out", type=Path, default=Path("out"), help="folder for plots")
    p.add_argument("--seed", type=int, default=SEED)
    return p


def add_quality(p: argparse.ArgumentParser, group: bool = True) -> argparse.ArgumentParser:
    """The arguments of `measure`, and --group."""
    p.add_argument("--tasks", type=words, default=["variables"], help="of the shipped model: " + ", ".join(tasks.TASKS))
    p.add_argument("--contexts", type=int, default=32, help="per task; variables and copying ask 4 questions each")
    p.add_argument("--windows", type=int, default=8, help="windows of text, of --length and --tokens together")
    p.add_argument("--tokens", type=int, default=128, help="tokens of each window that are decoded, not prefilled")
    p.add_argument("--batch", type=int, default=8, help="rows at a time")
    if group:
        p.add_argument("--group", type=int, default=32, help="elements that share a scale and a minimum")
    p.add_argument(
        "--ask",
        choices=("prompt", "cache"),
        default="prompt",
        help="prompt: the question ends the exact prefill, as in the papers; cache: it is asked of the finished cache",
    )
    return p


def numbers(text: str) -> list[int]:
    """Comma-separated integers."""
    return [int(w) for w in words(text)]


def run(main: Callable[[], None]) -> None:
    """Runs a script; compiled programs are kept on disk, and an unusable input ends with one line and status 1."""
    use_compilation_cache()
    try:
        main()
    except (KvjaxError, OSError) as e:
        sys.exit(f"error: {e}")


def encoded(model: Model, method: Method, dense: Iterable[tuple[Array, Array]], lengths: Array, capacity: int) -> State:
    """The state that a method's prefill leaves, from exact keys and values [B K S H] of each layer.

    Only for methods that look at no query of the prompt.
    """
    c, setting = model.config, api.setting(model, method, capacity, np.asarray(lengths))
    q = jnp.zeros((len(lengths), c.kv_heads, c.groups, 0, c.head_dim), model.dtype)
    encode = lambda i, k, v: api.ENCODE(k=k, v=v, q=q, lengths=lengths, layer=i, setting=setting)  # noqa: E731
    layers = tuple(encode(i, k, v) for i, (k, v) in enumerate(dense))
    return State(layers, jnp.copy(lengths), capacity)


def encoded_like(model: Model, method: Method, exact: State) -> State:
    """`encoded`, from the state that `full` left."""
    # Copies, so that a decode loop, which consumes its state, leaves the exact one alone.
    dense = ((jnp.copy(memory.unpack(x.k)), jnp.copy(memory.unpack(x.v))) for x in exact.layers)
    return encoded(model, method, dense, exact.length, exact.capacity)


def random_loop(model: Model, method: Method, batch: int, tokens: int, room: int) -> Ours:
    """A decode loop on `batch` rows of `tokens` random keys and values, with room for so many more."""
    c = model.config
    shape = (batch, c.kv_heads, tokens, c.head_dim)
    draw = lambda i, j: jax.random.normal(jax.random.fold_in(jax.random.key(i), j), shape, model.dtype)  # noqa: E731
    dense = ((draw(i, 0), draw(i, 1)) for i in range(c.layers))
    loop = Ours(model, method)
    lengths = jnp.full((batch,), tokens, jnp.int32)
    loop.begin(jnp.zeros((batch, c.vocab_size)), encoded(model, method, dense, lengths, tokens + room), room)
    return loop


def instances(args: argparse.Namespace, task: str) -> list[tasks.Instance]:
    """`args.contexts` held-out instances of a task, in filler of code and of noise in turn."""
    if task not in tasks.TASKS:
        raise KvjaxError(f"unknown task {task!r}; use {', '.join(tasks.TASKS)}")
    fillers = (lambda rng, n: corpus.load("held_out").window(rng, n), tasks.noise)
    seeds = ([args.seed, list(tasks.TASKS).index(task), args.length, i] for i in range(args.contexts))
    try:
        return [tasks.TASKS[task](np.random.default_rng(s), args.length, fillers[i % 2]) for i, s in enumerate(seeds)]
    except ValueError as e:
        raise KvjaxError(f"task {task!r} does not fit --length {args.length}: {e}; raise --length") from e


def windows(args: argparse.Namespace, model: Model, length: int) -> np.ndarray:
    """i32[n length], at most `args.windows` windows spread over the text, each opened as the tokenizer opens a text."""
    if args.text is None and knows_symbols(model):
        ids, opening = corpus.load("held_out").tokens, []
    else:
        if model.tokenizer is None:
            raise KvjaxError(f"{model.name} has no {FILE} to turn text into tokens; copy the model's {FILE} there")
        ids = np.array(model.tokenizer.encode(_text(args.text), special_tokens=False))
        opening = model.tokenizer.encode("")
    body = length - len(opening)
    whole = len(ids) // body
    if not whole:
        raise KvjaxError(
            f"the text has {len(ids)} tokens, and one window takes {body}: give a longer --text, or a smaller --length"
        )
    chosen = np.linspace(0, whole - 1, min(args.windows, whole)).astype(int)
    return np.stack([np.concatenate([opening, ids[i * body : (i + 1) * body]]) for i in chosen]).astype(np.int32)


def _text(path: Path | None) -> str:
    if path is None:
        tokens = corpus.load("held_out").tokens
        return tokens[tokens < 256].astype(np.uint8).tobytes().decode(errors="replace")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise KvjaxError(f"cannot read --text {path} ({e}); give a UTF-8 text file") from e


def answers(
    model: Model, methods: Mapping[str, Method], batch: Sequence[tasks.Instance], ask: str
) -> dict[str, list[bool]]:
    """Whether each question of a batch of contexts is answered exactly, greedily, under each method.

    The contexts are prefilled once, exactly; each method then encodes their keys and values, with the question
    ("prompt": the first answer token is exact, as in the papers) or without it ("cache": it is fed to the method).
    """
    right: dict[str, list[bool]] = {name: [] for name in methods}
    longest = max(len(q.prompt) + len(q.answer) for i in batch for q in i.questions)
    contexts = [i.context for i in batch]
    _, exact = api.prefill(model, contexts, FULL, capacity=max(map(len, contexts)) + longest)
    for asked in zip(*(i.questions for i in batch), strict=True):
        prompts, new = [q.prompt for q in asked], len(asked[0].answer)
        if ask == "prompt":
            logits, known = api.extend(model, prompts, exact, FULL)
        for name, method in methods.items():
            if ask == "prompt":
                out = _continued(model, method, logits[:, -1], encoded_like(model, method, known), new)
            else:
                state = encoded_like(model, method, exact)
                out = kvjax.generate(model, prompts, method, max_new_tokens=new, state=state, eos_ids=()).tokens
            right[name] += [q.right(t) for t, q in zip(out, asked, strict=True)]
    return right


def _continued(model: Model, method: Method, last: Array, state: State, new: int) -> list[list[int]]:
    """`new` greedy tokens per row, the first from logits f32[B V]."""
    loop = Ours(model, method)
    loop.begin(last, state, new - 1)
    if new > 1:
        loop.decode(new - 1)
    return loop.tokens.tolist()


def continuations(
    model: Model, methods: Mapping[str, Method], rows: np.ndarray, context: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Teacher-forced decoding of rows i32[B T] after an exact prefill of the first `context` tokens.

    The first decoded token's logits are the prefill's, hence left out. Per method: (bits per token f32[B], the
    likeliest tokens i32[B T-context-1]).
    """
    _, exact = api.prefill(model, rows[:, :context], FULL, capacity=rows.shape[1])
    target, found = jnp.asarray(rows[:, context + 1 :]), {}
    for name, method in methods.items():
        logits, _ = api.extend(model, rows[:, context:-1], encoded_like(model, method, exact), method)
        bits = -np.asarray(api.log_probs(logits, target)).mean(1) / np.log(2)
        found[name] = bits, np.asarray(logits.argmax(-1))
    return found


def measure(args: argparse.Namespace, model: Model, texts: Sequence[str]) -> list[dict[str, Any]]:
    """One record per method, `full` first: accuracy per task, bits per token of text, agreement with `full`."""
    methods = {text: kvjax.parse(text) for text in ("full", *texts)}
    records = {name: {"method": name, "tasks": {}} for name in methods}
    for task in args.tasks if knows_symbols(model) else ():
        right: dict[str, list[bool]] = {name: [] for name in methods}
        for batch in batches(instances(args, task), args.batch, task):
            for name, more in answers(model, methods, batch, args.ask).items():
                right[name] += more
        for name, r in right.items():
            records[name]["tasks"][task] = share(r)
    parts: dict[str, list] = {name: [] for name in methods}
    for rows in batches(windows(args, model, args.length + args.tokens), args.batch, "text"):
        for name, part in continuations(model, methods, rows, args.length).items():
            parts[name].append(part)
    best = np.concatenate([likeliest for _, likeliest in parts["full"]])
    for name, found in parts.items():
        bits, likeliest = (np.concatenate(x) for x in zip(*found, strict=True))
        spread = {"bits": float(bits.mean()), "bits_error": float(bits.std() / len(bits) ** 0.5)}
        records[name] |= spread | {"agreement": float((likeliest == best).mean()), "tokens": int(best.size)}
    return list(records.values())


def batches(rows: Any, size: int, what: str):
    """Slices of `size`, each announced on stderr."""
    for i in range(0, len(rows), size):
        progress(f"{what}, {i + 1} to {min(i + size, len(rows))} of {len(rows)}")
        yield rows[i : i + size]


def share(right: Sequence[bool]) -> dict[str, float]:
    """Share of questions answered exactly, with its binomial standard error."""
    p = float(np.mean(right))
    return {"accuracy": p, "error": (p * (1 - p) / len(right)) ** 0.5, "questions": len(right)}


def average(record: Mapping[str, Any]) -> float:
    """Mean accuracy over the tasks of a record of `measure`, in percent; without tasks its agreement with `full`."""
    right = [t["accuracy"] for t in record["tasks"].values()] or [record["agreement"]]
    return 100 * float(np.mean(right))


def brief(records: Iterable[Mapping[str, Any]]) -> str:
    """Methods with their averages, for the table of all scripts."""
    return "; ".join(f"{r['method']} {average(r):.1f}%" for r in records)


def columns(args: argparse.Namespace, model: Model) -> tuple[str, ...]:
    """Headings of `cells`."""
    named = tuple(args.tasks) if knows_symbols(model) else ()
    return (*named, "bits/B" if knows_symbols(model) else "bits/token", "= full")


def cells(record: Mapping[str, Any]) -> list[str]:
    """A record of `measure` for people."""
    right = [f"{t['accuracy']:.1%} ±{t['error']:.1%}" for t in record["tasks"].values()]
    return [*right, f"{record['bits']:.3f} ±{record['bits_error']:.3f}", f"{record['agreement']:.1%}"]


def protocol(args: argparse.Namespace, model: Model, records: Sequence[Mapping[str, Any]]) -> str:
    """One line on what the columns mean."""
    kind = "bytes" if knows_symbols(model) else "tokens"
    where = "in the exact prompt" if args.ask == "prompt" else "asked of the finished cache"
    asked = [f"{t}: {r['questions']} questions" for t, r in records[0]["tasks"].items()]
    text = f"text: {records[0]['tokens']:,} {kind} decoded after {args.length:,}; = full: likeliest token as in `full`"
    return "; ".join([*asked, *[f"questions {where}"] * bool(asked), text]) + "; ± standard errors."


def figure(path: Path, draw: Callable[[Any], None], columns: int = 1) -> None:
    """Writes a plot; draw(axes) gets one axis, or a row of them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(1, columns, figsize=(5.5 * columns, 4), layout="constrained")
    draw(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=150)
    plt.close(fig)
    progress(f"wrote {path}")
