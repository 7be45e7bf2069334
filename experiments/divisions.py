"""The choice of tokens and their division among heads and layers: scorers by divisions, at equal bytes.

python -m experiments.divisions --model smollm2-135m --out runs/divisions.smollm2 \\
    --results experiments/results/divisions.smollm2.json

Every setting is a method of kvjax, fitted to a fraction of the exact cache's bytes in bfloat16, under two protocols:

  turns   the first question ends the prompt; the later ones, which come after the compression, count
  alone   the context is compressed alone, and all questions count

Greedy decoding writes the reference answer if and only if each of its tokens is the likeliest after the tokens before.
One pass over a question and its reference therefore replaces decoding. An evicted token and a hidden one have the same
effect on attention: the contexts of a batch run through the model once, each scorer scores them once, and a setting
hides the tokens that its method would evict. `--check` also runs each such setting as its method does. Methods that do
more than select tokens always run as they are.

A run continues an interrupted one. experiments/divisions_figure.py makes the tables of docs/results.md and its figures.
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
from experiments.bench.measuring import log_progress, make_parser, output_file, parse_integers
from experiments.papers.common import run_script
from kvjax import Context, KvjaxError, Model
from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.components import Scores
from kvjax.cache.eviction.selection import MeasuredHeadTokens, count_kept, score_candidates, select_slots
from kvjax.cache.method import Method
from kvjax.core.attention import attend_dense, merge
from kvjax.core.types import Array, KVBlock
from kvjax.engine.forward import Target, layer_calls
from kvjax.engine.layer_prompt import LayerPrompt, observed_block, select_queries
from kvjax.engine.plan import bind
from kvjax.engine.positions import token_positions
from kvjax.engine.prefill import replay
from kvjax.eval.run import harness
from kvjax.eval.run.equal_bytes import DTYPE, fit_methods, parse_shares
from kvjax.eval.run.machine import machine
from kvjax.eval.tasks import suite
from kvjax.eval.tasks.case import Spec
from kvjax.generation.inputs import pad, round_up
from kvjax.generation.memory_plan import planned_bytes
from kvjax.generation.model_calls import replay_prompts
from kvjax.registry.strings import method_of
from kvjax.reuse.full_kv import FullKV, read_exactly
from kvjax.utils.files import check_output

SETTINGS = Path(__file__).with_suffix(".toml")
TASKS = {"turns": "turns.essays", "alone": "shared.essays"}
EVERY_TOKEN = "random:budget=100%"  # keeps all tokens in slots per head, so that each head can hide its own


class Setting(NamedTuple):
    """A method at a fraction of the exact cache's bytes: one cell of a table."""

    group: str  # "scorers" for the grid, or a name of [[more]]
    scorer: str
    division: str
    share: str
    method: str
    hidden: bool  # whether hiding tokens has the method's effect
    codec: str = ""  # of the cache whose tokens are hidden


def make_settings(model: Model, args: argparse.Namespace) -> list[Setting]:
    """Fits the settings of the command line to their bytes; settings that do not fit at any size are left out."""
    document, length = tomllib.loads(args.settings.read_text()), args.length
    groups, without = ([x for x in text.split(",") if x] for text in (args.groups, args.without))

    def is_selected(group: str, text: str) -> bool:
        return (not groups or group in groups) and args.only in text and not any(x in text for x in without)

    found = []
    for share in parse_shares(args.shares):
        for division in document["division"] if not groups or "scorers" in groups else ():
            # Bytes depend on the division alone, so one fit serves all scorers.
            first = _fit(add_division(document["scorer"][0], division), share, model, length)
            for scorer in document["scorer"] if first else ():
                # Every scorer gets the very same budget, so that bytes explain no difference between scorers.
                budget = first.partition("budget=")[2].partition(",")[0].partition(" ")[0]
                method = add_division(scorer, division).replace("budget=512", f"budget={budget}")
                if division["name"] not in scorer.get("not", ()) and is_selected("scorers", method):
                    found.append(Setting("scorers", scorer["name"], division["name"], str(share), method, True))
    for more in document["more"]:
        for share in parse_shares(more.get("shares", args.shares)):
            for text in (text for text in more["methods"] if is_selected(more["name"], text)):
                method = _fit(text, share, model, length)
                if method:
                    codec = more.get("codec", "")
                    found.append(Setting(more["name"], text, more["name"], str(share), method, "codec" in more, codec))
    return found


def add_division(scorer: Mapping[str, Any], division: Mapping[str, str]) -> str:
    """The string of a scorer's method under a division: the scorer's own level, or a component."""
    if "levels" in scorer:
        return f"{scorer['method']}{scorer['levels'][division['name']]}"
    return add_component(scorer["method"], division["component"])


def add_component(method: str, component: str) -> str:
    """The composed string of a method and a component, which may be empty."""
    return f"{method} + {component}" if component else method


def _fit(text: str, share: Any, model: Model, length: int) -> str:
    (found,) = fit_methods([text], [share], model.config, length)
    return found.method


# A batch of contexts and its questions.


class Questions(NamedTuple):
    """Questions and answers that follow the prompts in one pass, one text per context."""

    texts: list[list[int]]
    decoded: list[list[bool]]  # marks the tokens that decoding would write
    answers: list[list[tuple[int, int]]]  # [context][answer]: (start, end) of the counted answers


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Contexts that run together."""

    protocol: str
    prompts: list[list[int]]
    questions: list[Questions]  # each starts from the prompts' cache


def make_batch(model: Model, protocol: str, spec: Spec) -> Batch:
    """Makes the batch of all contexts of a seed."""
    cases = suite.cases(model, [TASKS[protocol]], spec)
    if protocol == "turns":
        # The first question is known when its context is compressed, as in a conversation; its answer does not count.
        prompts = [[*c.context, *c.asks[0].prompt] for c in cases]
        return Batch(protocol, [list(map(int, p)) for p in prompts], [_join(model, [c.asks for c in cases], True)])
    # Each question is a text of its own: it follows the context alone, without the answers of before.
    each = [_join(model, [[c.asks[i]] for c in cases], False) for i in range(spec.questions)]
    return Batch(protocol, [list(map(int, c.context)) for c in cases], each)


def _join(model: Model, asks: Sequence[Sequence[Any]], first_in_prompt: bool) -> Questions:
    """Joins questions and answers of each context.

    With `first_in_prompt` the first question ends the context's prompt: its text has the answer alone, which does not
    count.
    """
    found = Questions([], [], [])
    for own in asks:
        text: list[int] = []
        mask: list[bool] = []
        spans = []
        for i, ask in enumerate(own):
            counts = i > 0 or not first_in_prompt
            prompt = list(map(int, ask.prompt)) if counts else []
            answer = list(map(int, harness.reference_ids(model, ask)))
            if counts:
                spans.append((len(text) + len(prompt), len(text) + len(prompt) + len(answer)))
            text += prompt + answer
            # Some methods treat decoded tokens and fed ones differently.
            mask += [False] * len(prompt) + [True] * len(answer)
        for field, value in zip(found, (text, mask, spans), strict=True):
            field.append(value)
    return found


def ask(context: Context, batch: Batch, width: int) -> tuple[list[list[bool]], list[list[float]]]:
    """Asks all questions of a batch.

    Returns:
      [context][question], whether greedy decoding would write the answer, and the answer's log-probability in nats.
    """
    right: list[list[bool]] = [[] for _ in batch.prompts]
    log_probs: list[list[float]] = [[] for _ in batch.prompts]
    for questions in batch.questions:
        scored = context.score(questions.texts, decoded=questions.decoded, width=width)
        for i, (logp, likeliest) in enumerate(scored):
            for start, end in questions.answers[i]:
                # The log-probability goes on telling settings apart where all answers are wrong.
                right[i].append(likeliest[start:end].tolist() == questions.texts[i][start:end])
                log_probs[i].append(round(float(logp[start:end].sum()), 3))
    return right, log_probs


# Scores, computed once for each scorer, and the tokens that a setting selects by them.


@functools.partial(jax.jit, static_argnames="layer")
def _score(prompt: LayerPrompt, lengths: Array, layer: MethodLayer) -> Scores:
    block, observation = observed_block(layer, prompt, lengths)
    return layer.method.select.scorer.scores(block, observation, layer.spec)


def compute_scores(exact: FullKV, method: str, replayed: list[Array] | None) -> list[Scores]:
    """Scores the prompts in every layer with a method's scorer, which may need the scores of `replay_scores`."""
    plan, found = cast(Any, bind(method, exact.model.config)), []
    for i, prompt in enumerate(exact.prompts):
        needs = plan[i].needs
        queries = prompt.q[:, :, :, :0]  # as in a prefill, a scorer sees no query that it has not asked for
        if needs.observed_queries != 0:
            queries = select_queries(plan[i], prompt.q, 0, exact.lengths)
        observed = LayerPrompt(prompt.k, prompt.v, queries)
        if needs.replay is not None:
            observed = observed._replace(replay_scores=replayed[i])
        # plan[0] serves all layers, and compiles once: these layers are alike, and no scorer depends on its index.
        found.append(_score(observed, exact.lengths, plan[0]))
    return found


def replay_scores(exact: FullKV, method: str) -> list[Array]:
    """Runs the prompts a second time, for scorers that need it; returns the scores f32[B K S] of every layer."""
    prompts = [LayerPrompt(p.k, p.v, p.q[:, :, :, :0]) for p in exact.prompts]
    plan = bind(method, exact.model.config)
    model, tokens = exact.model, jnp.asarray(pad(exact.ids, prompts[0].k.shape[2])[0])
    arguments = model.params, tokens, exact.lengths, prompts, layer_calls(plan, model.config), Target(model.config)
    replayed = replay(*arguments, replay_prompts=replay_prompts(model, plan))
    return [prompt.replay_scores for prompt in replayed]


@functools.partial(jax.jit, static_argnames="layer")
def _measure_candidates(block: KVBlock, scores: Scores, layer: MethodLayer) -> Any:
    """Measures what a layer would offer to one ranking over the model, as the method does in a prefill."""
    return layer.method.layer_budgets.rescale(score_candidates(layer.selection, block, None, scores))


@functools.partial(jax.jit, static_argnames="layer")
def _select(block: KVBlock, scores: Scores, tokens: Array | None, layer: MethodLayer) -> Array:
    """Selects a layer's tokens, bool[B K S]; `tokens` i32[B K] of each head where the model's ranking has set them."""
    method, width = layer.method, block.pos.shape[2]
    slots = int(method.select.num_kept_by_length(width).max())
    head_budgets = None if method.side_store is None else method.side_store.head_budgets
    if tokens is not None:
        head_budgets = MeasuredHeadTokens(tokens, method.select.granularity.size)
    num_kept = count_kept(method.select, block, slots)
    choice = select_slots(layer.selection, block, None, num_kept, slots, head_budgets=head_budgets, scores=scores)
    found = choice.slots
    B, K = block.k.shape[:2]
    sequences, heads = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None]
    found = jnp.broadcast_to(found, (B, K, found.shape[2]))
    # Empty slots (-1) point behind the last token, where `drop` ignores them; as -1 they would mark the last one.
    place = jnp.where(found < 0, width, found)
    return jnp.zeros((B, K, width), bool).at[sequences, heads, place].set(True, mode="drop")


def select_tokens(exact: FullKV, method: str, scores: Sequence[Scores]) -> list[Array]:
    """Selects the tokens that the method keeps of the prompts, bool[B K S] for each layer."""
    plan = cast(Any, bind(method, exact.model.config))
    pos = token_positions(exact.prompts[0].k[:, 0, :, 0], exact.lengths)[:, None]
    blocks = [KVBlock(p.k, p.v, pos) for p in exact.prompts]
    tokens: Any = [None] * len(plan)
    if plan[0].needs.global_budget:
        # One ranking over the model needs the candidates of all layers before any layer can choose.
        measures = [_measure_candidates(*of_layer) for of_layer in zip(blocks, scores, plan, strict=True)]
        stacked = jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *measures)
        tokens = plan[0].divide_budget(stacked, exact.lengths)
    return [_select(*of_layer) for of_layer in zip(blocks, scores, tokens, plan, strict=True)]


def hide_tokens(context: Context, masks: Sequence[Array]) -> Context:
    """Hides the tokens outside bool[B K S] masks from all later queries."""
    layers = []
    for state, mask in zip(context.cache.layers, masks, strict=True):
        # Position -1 marks an empty slot. The key stays in memory, but no query attends to it.
        pos = jnp.where(_fit_width(mask, state.pos.shape[2]), state.pos, -1)
        layers.append(dataclasses.replace(state, pos=pos))
    return dataclasses.replace(context, cache=dataclasses.replace(context.cache, layers=tuple(layers)))


def _fit_width(mask: Array, width: int) -> Array:
    """Pads or cuts a mask [B K S] to `width` slots, as a cache has other numbers of them than a padded prompt."""
    return jnp.pad(mask, [(0, 0), (0, 0), (0, max(width - mask.shape[2], 0))])[:, :, :width]


# The error of attention for the queries of the later questions.


class LaterQueries(NamedTuple):
    """Queries of the later questions and answers, and their exact attention."""

    exact: FullKV  # keys, values and queries of prompts with all that follows
    lengths: Array  # i32[B], of the prompts
    query_pos: Array  # i32[B Q], -1 for padding
    output: list[Array]  # f32[B K G Q H] for each layer, of exact attention


def read_later_queries(model: Model, batch: Batch) -> LaterQueries:
    """Reads the queries of everything after the first answer."""
    (questions,) = batch.questions
    texts = [p + q for p, q in zip(batch.prompts, questions.texts, strict=True)]
    exact = read_exactly(model, texts)
    # The text begins with the first answer, whose tokens are decoded; the next question begins where they end.
    first = [len(p) + q.index(False) for p, q in zip(batch.prompts, questions.decoded, strict=True)]
    num_queries = max(len(text) - start for text, start in zip(texts, first, strict=True))
    query_pos = np.full((len(texts), num_queries), -1, np.int32)
    for i, (text, start) in enumerate(zip(texts, first, strict=True)):
        query_pos[i, : len(text) - start] = np.arange(start, len(text))
    lengths, at = jnp.array([len(p) for p in batch.prompts], jnp.int32), jnp.array(query_pos)
    every = jnp.ones((len(texts), model.config.kind(0).attention.kv_heads, exact.prompts[0].k.shape[2]), bool)
    output = [_attend(p, exact.lengths, lengths, at, every) for p in exact.prompts]
    return LaterQueries(exact, lengths, at, output)


@jax.jit
def _attend(prompt: LayerPrompt, lengths: Array, prompt_lengths: Array, query_pos: Array, mask: Array) -> Array:
    """Attention of later queries to the masked tokens of the prompt and to all tokens after the prompt."""
    pos = jnp.arange(prompt.k.shape[2], dtype=jnp.int32)[None]
    is_token, follows = pos < lengths[:, None], pos >= prompt_lengths[:, None]
    visible_pos = jnp.where(is_token[:, None] & (mask | follows[:, None]), pos[:, None], -1)
    q = jnp.take_along_axis(prompt.q, jnp.maximum(query_pos, 0)[:, None, None, :, None], 3)
    return merge([attend_dense(q, KVBlock(prompt.k, prompt.v, visible_pos), query_pos)])


@jax.jit
def _relative_error(found: Array, exact: Array, query_pos: Array) -> Array:
    """Mean relative error of attention's outputs."""
    # Relative to each output, so that heads with large values do not decide the mean.
    each = jnp.linalg.norm(found - exact, axis=-1) / jnp.maximum(jnp.linalg.norm(exact, axis=-1), 1e-30)
    real = jnp.broadcast_to((query_pos >= 0)[:, None, None], each.shape)
    return jnp.where(real, each, 0.0).sum() / real.sum(dtype=jnp.float32)


def attention_errors(later: LaterQueries, masks: Sequence[Array]) -> list[float]:
    """Relative error of each layer's attention if only the masked tokens of the prompts, bool[B K S], are kept."""
    width = later.exact.prompts[0].k.shape[2]
    found = []
    for prompt, exact, mask in zip(later.exact.prompts, later.output, masks, strict=True):
        out = _attend(prompt, later.exact.lengths, later.lengths, later.query_pos, _fit_width(mask, width))
        found.append(_relative_error(out, exact, later.query_pos))
    return [round(float(x), 4) for x in found]


# Runs.


def measure(model: Model, protocol: str, seed: int, settings: Sequence[Setting], args: argparse.Namespace) -> None:
    """Asks all settings without a record, and appends their records."""
    # These decide the prompts: records of other prompts under the same method string would be taken for this run's.
    about = {"model": args.model, "length": args.length, "contexts": args.contexts, "questions": args.questions}
    existing = list(read_records(args.out))
    if foreign := next((r["about"] for r in existing if r["about"] != about), None):
        raise KvjaxError(f"{args.out} has records of {foreign}, not of {about}; choose another --out")
    done = {r["method"] for r in existing if (r["protocol"], r["seed"]) == (protocol, seed)}
    todo = list({s.method: s for s in settings if s.method not in done}.values())
    if "full" not in done:
        todo.insert(0, Setting("exact", "full", "", "1", "full", False))
    if not todo:
        return
    batch = make_batch(model, protocol, Spec((args.length,), args.contexts, args.questions, seed=seed))
    log_progress(f"{args.model}, {protocol}, seed {seed}: {len(todo)} settings")
    # One width for all questions and settings, so that they share one program.
    width = round_up(max(len(text) for q in batch.questions for text in q.texts), 16)
    prompt = round_up(max(map(len, batch.prompts)))
    exact, capacity = read_exactly(model, batch.prompts, width=prompt), prompt + round_up(width)
    later = read_later_queries(model, batch) if protocol == "turns" and any(s.hidden for s in todo) else None
    replayed: list[Array] | None = None
    scores: dict[Any, list[Scores]] = {}
    every: dict[str, Context] = {}
    for setting in todo:
        start = time.perf_counter()
        found: dict[str, Any] = {}
        if setting.hidden:
            scorer = cast(Method, method_of(setting.method)).select.scorer
            # All divisions and shares of a scorer rank the same scores. KVzip's take a second pass over the prompt.
            if scorer not in scores:
                if replayed is None and scorer.replay is not None:
                    replayed = replay_scores(exact, setting.method)
                scores[scorer] = compute_scores(exact, setting.method, replayed)
            if setting.codec not in every:
                every[setting.codec] = exact.compress(add_component(EVERY_TOKEN, setting.codec), capacity=capacity)
            masks = select_tokens(exact, setting.method, scores[scorer])
            context = hide_tokens(every[setting.codec], masks)
            tokens = np.stack([np.asarray(mask.sum(2)) for mask in masks])  # i64[L B K]
            found["kept"] = tokens.mean(1).round(1).tolist()
            if later is not None and not setting.codec:  # with a codec, the error would be the quantizer's, too
                found["errors"] = attention_errors(later, masks)
        else:
            context = exact.compress(setting.method, capacity=capacity)
        found["right"], found["log_probabilities"] = ask(context, batch, width)
        record = {"about": about, "protocol": protocol, "seed": seed, "method": setting.method, **found}
        with args.out.open("a") as file:  # a line at a time: a killed run goes on from here
            file.write(json.dumps(record) + "\n")
        if args.check and setting.hidden:
            check(exact, setting, capacity, batch, width, found["right"])
        log_progress(f"{setting.method}: {100 * np.mean(found['right']):.0f}% ({time.perf_counter() - start:.1f} s)")


def check(exact: FullKV, setting: Setting, capacity: int, batch: Batch, width: int, right: list[list[bool]]) -> None:
    """Runs a setting as its method does; raises KvjaxError if its answers differ from those with hidden tokens."""
    context = exact.compress(setting.method, capacity=capacity)
    as_it_is, _ = ask(context, batch, width)
    log_progress(f"{setting.method} as it is: {100 * np.mean(as_it_is):.0f}%, {context.bytes}")
    if as_it_is != right:
        raise KvjaxError(f"{setting.method} answers {as_it_is} as it is, and {right} where tokens are hidden")


def drop_torn_line(path: Path) -> None:
    """Removes the last line of the records if a kill has torn it."""
    text = path.read_text() if path.is_file() else ""
    if text and not text.endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1])


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a run."""
    yield from map(json.loads, path.read_text().splitlines() if path.is_file() else ())


def sum_up(model: Model, settings: Sequence[Setting], args: argparse.Namespace) -> dict[str, Any]:
    """The document from which divisions_figure makes tables and figures."""
    found = {}
    for record in read_records(args.out):
        by_method = found.setdefault(record["method"], {})
        by_method.setdefault(record["protocol"], {})[str(record["seed"])] = {
            name: record[name] for name in ("right", "kept", "errors") if name in record
        }
    measured = [s for s in settings if s.method in found]
    planned = {s.method: planned_bytes(s.method, model.config, args.length, dtype=DTYPE) for s in measured}
    return {
        "model": args.model,
        "length": args.length,
        "contexts_per_seed": args.contexts,
        "questions": args.questions,
        "computed_in": model.dtype.name,
        "bytes_in": DTYPE,
        "machine": machine(),
        "settings": [s._asdict() for s in measured],
        "bytes": {m: (p.fraction_of_full, p.host_fraction_of_full) for m, p in planned.items()},
        "measured": found,
    }


def main(argv: Sequence[str] | None = None) -> None:
    p = make_parser(__doc__)
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--settings", type=Path, default=SETTINGS)
    p.add_argument("--shares", default="1/4,1/8,1/2,1/16", help="of the exact cache's bytes")
    p.add_argument("--protocols", default="turns,alone")
    p.add_argument("--length", type=int, default=1024, help="tokens of a context")
    p.add_argument("--contexts", type=int, default=8, help="per seed")
    p.add_argument("--questions", type=int, default=3, help="per context")
    p.add_argument("--seeds", type=parse_integers, default=[0, 1, 2])
    p.add_argument("--groups", default="", help='only these, separated by commas: "scorers" or a name of [[more]]')
    p.add_argument("--only", default="", help="only methods whose string contains this")
    p.add_argument("--without", default="", help="no methods whose string contains one of these")
    p.add_argument("--check", action="store_true", help="run each setting as its method does, too")
    p.add_argument("--out", type=output_file, default=Path("runs/divisions.jsonl"), help="the records")
    p.add_argument("--results", type=output_file, help="their sum")
    args = p.parse_args(argv)
    check_output(args.out)
    drop_torn_line(args.out)
    model = kvjax.load(args.model)
    settings = make_settings(model, args)
    for protocol in args.protocols.split(","):
        for seed in args.seeds:
            measure(model, protocol, seed, settings, args)
    if args.results:
        args.results.write_text(json.dumps(sum_up(model, settings, args)) + "\n")
        log_progress(f"wrote {args.results}")


if __name__ == "__main__":
    run_script(main)
