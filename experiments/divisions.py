"""Which tokens to keep, and how to divide them among heads and layers: scorers by divisions, at equal bytes.

python -m experiments.divisions --model smollm2-135m --out runs/divisions.smollm2 \\
    --results experiments/results/divisions.smollm2.json

Every setting is a method of kvjax, fitted to a share of the exact cache's bytes in bfloat16. Two protocols ask it:

  turns   the first question ends the prompt; the later ones, which no method has seen when it compresses, count
  alone   the context is compressed alone, and all questions count

A greedy answer begins with the reference exactly where each token of the reference is the likeliest after those before
it. So a question and its reference are read in one pass, and no answer is decoded. An evicted token and a hidden one
have the same effect on attention, so the contexts of a batch go through the model once, each scorer scores them once,
and a setting only hides what its method does not keep: `--check` runs some settings as they are beside this. Methods
that do more than keep tokens are always run as they are.

A run that was stopped goes on where it was. The tables of docs/results.md and their figure are made by
experiments/divisions_figure.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.bench.common import integers, progress
from experiments.papers.common import run
from kvjax import Context, KvjaxError, Model
from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.eviction.ranking import Counted
from kvjax.cache.eviction.scorers import Scorer, Scores
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention import attend_dense, merge
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock
from kvjax.engine.forward import Target
from kvjax.engine.layer_prompt import LayerPrompt, observed_block, select_queries
from kvjax.engine.plan import bind
from kvjax.engine.positions import token_positions
from kvjax.engine.prefill import replay
from kvjax.eval.run import harness
from kvjax.eval.run.equal_bytes import DTYPE, fit_methods, parse_shares
from kvjax.eval.run.machine import machine
from kvjax.eval.tasks import suite
from kvjax.eval.tasks.case import Case, Spec
from kvjax.generation.inputs import pad, round_up
from kvjax.generation.memory_plan import planned_bytes
from kvjax.generation.prompt_runner import replay_prompts
from kvjax.generation.reuse.full_kv import Exact, read_exactly
from kvjax.methods.strings import method_of

SETTINGS = Path(__file__).with_suffix(".toml")
TASKS = {"turns": "turns.essays", "alone": "shared.essays"}
EVERY_TOKEN = "random:budget=100%"  # a method whose heads have slots of their own, which hide what others evict


class Setting(NamedTuple):
    """A method at a share of the exact cache's bytes, as a table has it."""

    group: str  # "scorers", or what other settings are for
    scorer: str
    division: str
    share: str
    method: str
    hidden: bool  # whether hiding tokens does what the method does
    codec: str = ""  # what holds the tokens where they are hidden


def settings_of(model: Model, args: argparse.Namespace) -> list[Setting]:
    """The settings that are asked for; those that no size of the method fits are left out."""
    document, length = tomllib.loads(args.settings.read_text()), args.length
    groups, without = ([x for x in text.split(",") if x] for text in (args.groups, args.without))

    def wanted(group: str, text: str) -> bool:
        return (not groups or group in groups) and args.only in text and not any(x in text for x in without)

    found = []
    for share in parse_shares(args.shares):
        for division in document["division"] if not groups or "scorers" in groups else ():
            # Bytes depend on the division alone, so one fit serves all scorers.
            like = _fitted(divided(document["scorer"][0], division), share, model, length)
            for scorer in document["scorer"] if like else ():
                method = divided(scorer, division).replace("budget=512", f"budget={_budget(like)}")
                if division["name"] not in scorer.get("not", ()) and wanted("scorers", method):
                    found.append(Setting("scorers", scorer["name"], division["name"], str(share), method, True))
    for more in document["more"]:
        for share in parse_shares(more.get("shares", args.shares)):
            for text in (text for text in more["methods"] if wanted(more["name"], text)):
                method = _fitted(text, share, model, length)
                if method:
                    codec = more.get("codec", "")
                    found.append(Setting(more["name"], text, more["name"], str(share), method, "codec" in more, codec))
    return found


def divided(scorer: Mapping[str, Any], division: Mapping[str, str]) -> str:
    """A scorer's method with a division: its own level, or a component over it."""
    if "levels" in scorer:
        return f"{scorer['method']}{scorer['levels'][division['name']]}"
    return with_component(scorer["method"], division["component"])


def with_component(method: str, component: str) -> str:
    """The string of both, where there is a component."""
    return f"{method} + {component}" if component else method


def _fitted(text: str, share: Any, model: Model, length: int) -> str:
    (found,) = fit_methods([text], [share], model.config, length)
    return found.method


def _budget(method: str) -> int:
    """The budget in a method's string."""
    return int(method.partition("budget=")[2].partition(",")[0].partition(" ")[0])


# A batch of contexts, and what is asked of them.


class Questions(NamedTuple):
    """Rows of tokens that follow the prompts in one pass, and where the counted answers stand in them."""

    rows: list[list[int]]
    decoded: list[list[bool]]  # which tokens stand for what would be decoded
    answers: list[list[tuple[int, int]]]  # [row][answer]: from where to where


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Contexts that run together."""

    protocol: str
    prompts: list[list[int]]
    questions: list[Questions]  # each is asked of the prompts' own state


def batch_of(model: Model, protocol: str, spec: Spec) -> Batch:
    """All contexts of a seed."""
    cases = suite.cases(model, [TASKS[protocol]], spec)
    if protocol == "turns":
        prompts = [[*c.context, *c.asks[0].prompt] for c in cases]
        return Batch(protocol, [list(map(int, p)) for p in prompts], [_conversation(model, cases)])
    each = [_one_question(model, cases, i) for i in range(spec.questions)]
    return Batch(protocol, [list(map(int, c.context)) for c in cases], each)


def _conversation(model: Model, cases: Sequence[Case]) -> Questions:
    """The first answer, and each later question with its answer; the later answers count."""
    rows, decoded, answers = [], [], []
    for case in cases:
        row: list[int] = []
        marks: list[bool] = []
        spans = []
        for i, ask in enumerate(case.asks):
            told = list(map(int, harness.reference_ids(model, ask)))
            asked = list(map(int, ask.prompt)) if i else []
            if i:
                spans.append((len(row) + len(asked), len(row) + len(asked) + len(told)))
            row += asked + told
            marks += [False] * len(asked) + [True] * len(told)
        rows.append(row)
        decoded.append(marks)
        answers.append(spans)
    return Questions(rows, decoded, answers)


def _one_question(model: Model, cases: Sequence[Case], i: int) -> Questions:
    rows, decoded, answers = [], [], []
    for case in cases:
        asked, told = (list(map(int, x)) for x in (case.asks[i].prompt, harness.reference_ids(model, case.asks[i])))
        rows.append(asked + told)
        decoded.append([False] * len(asked) + [True] * len(told))
        answers.append([(len(asked), len(asked) + len(told))])
    return Questions(rows, decoded, answers)


def ask(context: Context, batch: Batch, width: int) -> tuple[list[list[bool]], list[list[float]]]:
    """([context][question] whether greedy decoding would write the answer, its log-probability in nats)."""
    right: list[list[bool]] = [[] for _ in batch.prompts]
    told: list[list[float]] = [[] for _ in batch.prompts]
    for questions in batch.questions:
        scored = context.score(questions.rows, decoded=questions.decoded, width=width)
        for row, (logp, likeliest) in enumerate(scored):
            for start, end in questions.answers[row]:
                right[row].append(likeliest[start:end].tolist() == questions.rows[row][start:end])
                told[row].append(round(float(logp[start:end].sum()), 3))
    return right, told


# Scores, once for each scorer, and what a setting keeps by them.


class Known(Scorer):
    """Scores that are known already; only made while a selection is traced."""

    def __init__(self, known: Scores):
        self.known = known

    def scores(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Scores:
        return self.known


@functools.partial(jax.jit, static_argnames="layer")
def _score(prompt: LayerPrompt, lengths: Array, layer: MethodLayer) -> Scores:
    block, seen = observed_block(layer, prompt, lengths)
    return layer.method.select.scorer.scores(block, seen, layer.spec)


def score(exact: Exact, method: str, repeated: list[Array] | None) -> list[Scores]:
    """The scores of a method's scorer in every layer."""
    plan, found = cast(Any, bind(method, exact.model.config)), []
    for i, prompt in enumerate(exact.prompts):
        needs = plan[i].needs
        shown = (
            select_queries(plan[i], prompt.q, 0, exact.lengths)
            if needs.observed_queries != 0
            else prompt.q[:, :, :, :0]
        )
        seen = LayerPrompt(prompt.k, prompt.v, shown)
        if needs.replay is not None:
            seen = seen._replace(replay_scores=repeated[i])
        # Layers of these models are alike, and no scorer here depends on its layer's number.
        found.append(_score(seen, exact.lengths, plan[0]))
    return found


def repeat(exact: Exact, method: str) -> list[Array]:
    """What the second pass over the prompts says of their tokens, in every layer: f32[B K S]."""
    copies = [LayerPrompt(jnp.copy(p.k), jnp.copy(p.v), p.q[:, :, :, :0]) for p in exact.prompts]
    plan = bind(method, exact.model.config)
    model, tokens = exact.model, jnp.asarray(pad(exact.ids, copies[0].k.shape[2])[0])
    arguments = model.params, tokens, exact.lengths, copies, plan, Target(model.config), replay_prompts(model, plan)
    return [prompt.replay_scores for prompt in replay(*arguments)]


@functools.partial(jax.jit, static_argnames="layer")
def _candidates(block: KVBlock, scores: Scores, layer: MethodLayer) -> Any:
    select = dataclasses.replace(layer.method.select, scorer=Known(scores))
    found = select.candidates(block, None, layer.spec)
    return layer.method.layer_budgets.rescale(found)


@functools.partial(jax.jit, static_argnames="layer")
def _kept(block: KVBlock, scores: Scores, tokens: Array | None, layer: MethodLayer) -> Array:
    method, spec, width = layer.method, layer.spec, block.pos.shape[2]
    select = dataclasses.replace(method.select, scorer=Known(scores))
    slots = select.most_of(width)
    share = None if method.side_store is None else method.side_store.share
    if tokens is not None:
        share = Counted(tokens, select.unit.size)
    keep = select.counts(block, None, slots)
    found = select.choose(block, None, keep, slots, spec, method.representatives, share, method.second_stage).slots
    B, K = block.k.shape[:2]
    rows, heads = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None]
    found = jnp.broadcast_to(found, (B, K, found.shape[2]))
    return jnp.zeros((B, K, width), bool).at[rows, heads, jnp.where(found < 0, width, found)].set(True, mode="drop")


def kept(exact: Exact, method: str, scores: Sequence[Scores]) -> list[Array]:
    """bool[B K S] for each layer: the tokens that the method keeps of the prompts."""
    plan = cast(Any, bind(method, exact.model.config))
    pos = token_positions(exact.prompts[0].k[:, 0, :, 0], exact.lengths)[:, None]
    blocks = [KVBlock(p.k, p.v, pos) for p in exact.prompts]
    tokens: Any = [None] * len(plan)
    if plan[0].needs.global_budget:
        measures = [_candidates(*of_layer) for of_layer in zip(blocks, scores, plan, strict=True)]
        tokens = plan[0].divide_budget(jax.tree.map(lambda *x: jnp.stack(x), *measures), exact.lengths)
    return [_kept(*of_layer) for of_layer in zip(blocks, scores, tokens, plan, strict=True)]


def hidden(context: Context, masks: Sequence[Array]) -> Context:
    """The context of every token, without those that are not kept."""
    layers = []
    for state, mask in zip(context.cache.layers, masks, strict=True):
        there = jnp.pad(mask, [(0, 0), (0, 0), (0, max(state.pos.shape[2] - mask.shape[2], 0))])
        layers.append(dataclasses.replace(state, pos=_hide(state.pos, there[:, :, : state.pos.shape[2]])))
    return dataclasses.replace(context, cache=dataclasses.replace(context.cache, layers=tuple(layers)))


@jax.jit
def _hide(pos: Array, there: Array) -> Array:
    return jnp.where(there, pos, -1)


# How far attention is from the exact one, for the queries of the later questions.


class Later(NamedTuple):
    """What the later questions and their answers look at, and what they get from the exact cache."""

    exact: Exact  # of prompts with all that follows
    prompt: Array  # i32[B], tokens of the prompts
    asking: Array  # i32[B Q], positions of the later questions' tokens, -1 for none
    out: list[Array]  # f32[B K G Q H] for each layer


def later(model: Model, batch: Batch) -> Later:
    """The queries of everything behind the first answer."""
    (questions,) = batch.questions
    rows = [p + q for p, q in zip(batch.prompts, questions.rows, strict=True)]
    exact = read_exactly(model, rows)
    first = [len(p) + q.index(False) for p, q in zip(batch.prompts, questions.decoded, strict=True)]
    number = max(len(row) - start for row, start in zip(rows, first, strict=True))
    asking = np.full((len(rows), number), -1, np.int32)
    for i, (row, start) in enumerate(zip(rows, first, strict=True)):
        asking[i, : len(row) - start] = np.arange(start, len(row))
    lengths, at = jnp.array([len(p) for p in batch.prompts], jnp.int32), jnp.array(asking)
    found = Later(exact, lengths, at, [])
    every = jnp.ones((len(rows), model.config.kv_heads, exact.prompts[0].k.shape[2]), bool)
    return found._replace(out=[_attended(p, exact.lengths, lengths, at, every) for p in exact.prompts])


@jax.jit
def _attended(prompt: LayerPrompt, lengths: Array, before: Array, asking: Array, there: Array) -> Array:
    """What queries get from the tokens of the prompt that are there and from all that follow it."""
    pos = jnp.arange(prompt.k.shape[2], dtype=jnp.int32)[None]
    real, follows = pos < lengths[:, None], pos >= before[:, None]
    seen = jnp.where(real[:, None] & (there | follows[:, None]), pos[:, None], -1)
    q = jnp.take_along_axis(prompt.q, jnp.maximum(asking, 0)[:, None, None, :, None], 3)
    return merge([attend_dense(q, KVBlock(prompt.k, prompt.v, seen), asking)])


@jax.jit
def _error(found: Array, exact: Array, asking: Array) -> Array:
    """The mean relative error of attention's outputs."""
    each = jnp.linalg.norm(found - exact, axis=-1) / jnp.maximum(jnp.linalg.norm(exact, axis=-1), 1e-30)
    real = jnp.broadcast_to((asking >= 0)[:, None, None], each.shape)
    return jnp.where(real, each, 0.0).sum() / real.sum(dtype=jnp.float32)


def errors(asked: Later, masks: Sequence[Array]) -> list[float]:
    """The relative error of each layer's attention where only some tokens of the prompts are kept."""
    width = asked.exact.prompts[0].k.shape[2]
    found = []
    for prompt, exact, mask in zip(asked.exact.prompts, asked.out, masks, strict=True):
        there = jnp.pad(mask, [(0, 0), (0, 0), (0, max(width - mask.shape[2], 0))])[:, :, :width]
        out = _attended(prompt, asked.exact.lengths, asked.prompt, asked.asking, there)
        found.append(_error(out, exact, asked.asking))
    return [round(float(x), 4) for x in found]


# Runs.


def measure(model: Model, protocol: str, seed: int, settings: Sequence[Setting], args: argparse.Namespace) -> None:
    """Asks all settings that have no record yet."""
    about = {"model": args.model, "length": args.length, "contexts": args.contexts, "questions": args.questions}
    made = list(records(args.out))
    if foreign := next((r["about"] for r in made if r["about"] != about), None):
        raise KvjaxError(f"{args.out} has records of {foreign}, not of {about}; choose another --out")
    done = {r["method"] for r in made if (r["protocol"], r["seed"]) == (protocol, seed)}
    todo = list({s.method: s for s in settings if s.method not in done}.values())
    if "full" not in done:
        todo.insert(0, Setting("exact", "full", "", "1", "full", False))
    if not todo:
        return
    batch = batch_of(model, protocol, Spec((args.length,), args.contexts, args.questions, seed=seed))
    progress(f"{args.model}, {protocol}, seed {seed}: {len(todo)} settings")
    width = round_up(max(len(row) for q in batch.questions for row in q.rows), 16)
    prompt = round_up(max(map(len, batch.prompts)))
    exact, capacity = read_exactly(model, batch.prompts, width=prompt), prompt + round_up(width)
    asked = later(model, batch) if protocol == "turns" and any(s.hidden for s in todo) else None
    repeated: list[Array] | None = None
    scores: dict[Any, list[Scores]] = {}
    every: dict[str, Context] = {}
    for setting in todo:
        start = time.perf_counter()
        found: dict[str, Any] = {}
        if setting.hidden:
            scorer = cast(Method, method_of(setting.method)).select.scorer
            if scorer not in scores:
                if repeated is None and scorer.replay is not None:
                    repeated = repeat(exact, setting.method)
                scores[scorer] = score(exact, setting.method, repeated)
            if setting.codec not in every:
                every[setting.codec] = exact.under(with_component(EVERY_TOKEN, setting.codec), capacity)
            masks = kept(exact, setting.method, scores[scorer])
            context = hidden(every[setting.codec], masks)
            tokens = np.stack([np.asarray(mask.sum(2)) for mask in masks])  # i64[L B K]
            found["kept"] = tokens.mean(1).round(1).tolist()
            if asked is not None and not setting.codec:
                found["errors"] = errors(asked, masks)
        else:
            context = exact.under(setting.method, capacity)
        found["right"], found["log_probabilities"] = ask(context, batch, width)
        record = {"about": about, "protocol": protocol, "seed": seed, "method": setting.method, **found}
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if args.check and setting.hidden:
            check(exact, setting, capacity, batch, width, found["right"])
        number = np.mean(found["right"])
        progress(f"{setting.method}: {100 * number:.0f}% ({time.perf_counter() - start:.1f} s)")


def check(exact: Exact, setting: Setting, capacity: int, batch: Batch, width: int, right: list[list[bool]]) -> None:
    """Runs a setting as it is, and raises KvjaxError where it answers otherwise than by hiding."""
    context = exact.under(setting.method, capacity)
    as_it_is, _ = ask(context, batch, width)
    progress(f"{setting.method} as it is: {100 * np.mean(as_it_is):.0f}%, {context.bytes}")
    if as_it_is != right:
        raise KvjaxError(f"{setting.method} answers {as_it_is} as it is, and {right} where tokens are hidden")


def drop_torn_line(path: Path) -> None:
    """Takes away the last line of records where a kill has torn it."""
    text = path.read_text() if path.is_file() else ""
    if text and not text.endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1])


def records(path: Path) -> Iterator[dict[str, Any]]:
    """What has been measured."""
    yield from map(json.loads, path.read_text().splitlines() if path.is_file() else ())


def sum_up(model: Model, settings: Sequence[Setting], args: argparse.Namespace) -> dict[str, Any]:
    """The document that tables and figures are made of."""
    found = {}
    for record in records(args.out):
        by_method = found.setdefault(record["method"], {})
        by_method.setdefault(record["protocol"], {})[str(record["seed"])] = {
            name: record[name] for name in ("right", "kept", "errors") if name in record
        }
    asked = [s for s in settings if s.method in found]
    planned = {s.method: planned_bytes(s.method, model.config, args.length, dtype=DTYPE) for s in asked}
    return {
        "model": args.model,
        "length": args.length,
        "contexts_per_seed": args.contexts,
        "questions": args.questions,
        "computed_in": model.dtype.name,
        "bytes_in": DTYPE,
        "machine": machine(),
        "settings": [s._asdict() for s in asked],
        "bytes": {m: (p.fraction_of_full, p.host_fraction_of_full) for m, p in planned.items()},
        "measured": found,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--settings", type=Path, default=SETTINGS)
    p.add_argument("--shares", default="1/4,1/8,1/2,1/16", help="of the exact cache's bytes")
    p.add_argument("--protocols", default="turns,alone")
    p.add_argument("--length", type=int, default=1024, help="tokens of a context")
    p.add_argument("--contexts", type=int, default=8, help="per seed")
    p.add_argument("--questions", type=int, default=3, help="per context")
    p.add_argument("--seeds", type=integers, default=[0, 1, 2])
    p.add_argument(
        "--groups", default="", help='only these, by name, separated by commas: "scorers" or a name of [[more]]'
    )
    p.add_argument("--only", default="", help="only methods whose string has this in it")
    p.add_argument("--without", default="", help="no methods whose strings have one of these in them")
    p.add_argument("--check", action="store_true", help="run each setting as it is, too")
    p.add_argument("--out", type=Path, default=Path("runs/divisions.jsonl"), help="the records")
    p.add_argument("--results", type=Path, help="their sum")
    args = p.parse_args(argv)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    drop_torn_line(args.out)
    model = kvjax.load(args.model)
    settings = settings_of(model, args)
    for protocol in args.protocols.split(","):
        for seed in args.seeds:
            measure(model, protocol, seed, settings, args)
    if args.results:
        args.results.write_text(json.dumps(sum_up(model, settings, args)) + "\n")
        progress(f"wrote {args.results}")


if __name__ == "__main__":
    run(main)
