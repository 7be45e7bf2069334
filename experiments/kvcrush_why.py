"""KVCrush: where it can gain, from what its signatures tell apart and what its representatives stand for.

python -m experiments.kvcrush_why [--model smollm2-135m --text essays] [--budgets 1/32,1/16,1/8,1/4,1/2]

Windows of text are read exactly. After --length tokens SnapKV's selection is made, alone and with a quarter of its
budget for KVCrush's representatives, for representatives drawn evenly among the same candidates, and for KVCrush's with
the signatures of --join layers joined. What counts is the attention that the next --tokens tokens pay to the prompt:
how much of it falls on the tokens kept (the mean over layers and heads; the first token, which takes most, apart).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.bench.common import machine, progress, report, table
from experiments.papers import common
from kvjax import KvjaxError, Model
from kvjax.cache.eviction.granularity import by_unit, evictable, split, top
from kvjax.cache.eviction.representatives import Units
from kvjax.cache.protocol import BoundLayer
from kvjax.core.attention import NEG, scores, visible, weights
from kvjax.core.random import draw
from kvjax.core.types import Array, KVBlock
from kvjax.engine.layer_prompt import LayerPrompt, observed_block, select_queries
from kvjax.engine.plan import bind
from kvjax.eval.run.equal_bytes import parse_shares
from kvjax.generation.reuse.full_kv import Exact, read_exactly
from kvjax.methods.kvcrush import KVCrush, votes

WINDOW = 8  # of SnapKV: the last tokens, which always stay
SHARE = 0.25  # of the budget beside the window, for representatives
KINDS = ("base", "kvcrush", "joined", "even")
TITLES = {"base": "SnapKV", "kvcrush": "+ KVCrush", "joined": "+ KVCrush, joined", "even": "+ evenly drawn"}


class Layered(NamedTuple):
    """What is known of one layer, of each row of the windows."""

    scores: Array  # f32[B K G T], SnapKV's of the prompt's tokens
    bits: Array  # bool[B T N], the signature of each token that can be evicted
    future: Array  # f32[B K T], attention of the tokens that follow, the first token left out


def layered(layer: BoundLayer, prompt: LayerPrompt, exact: Exact, length: int) -> Layered:
    """The layer's prompt of `length` tokens, and what follows."""
    lengths = jnp.full_like(exact.lengths, length)
    queries = select_queries(layer, prompt.q[:, :, :, :length], 0, lengths)
    cut = LayerPrompt(prompt.k[:, :, :length], prompt.v[:, :, :length], queries)
    block, seen = observed_block(layer, cut, lengths)
    select = layer.method.select
    found = select.scorer.scores(block, seen, layer.spec)
    units = _units(found.per_query_head, block, length)
    return Layered(found.per_query_head, votes(units), _future(prompt, length, int(exact.lengths[0])))


def _units(heads: Array, block: KVBlock, length: int) -> Units:
    part = split(block.pos, jnp.full(block.pos.shape[0], length // 2, jnp.int32), length, 0, WINDOW, 1)
    by_one = by_unit(heads, 0, 1)
    valid = evictable(part, by_one.shape[3])
    return Units(by_one, by_unit(block.k, 0, 1, 2), valid, valid)


def _future(prompt: LayerPrompt, length: int, end: int) -> Array:
    """f32[B K T]: the mean attention of the queries length..end-1 to the tokens before them but the first."""
    q, k = prompt.q[:, :, :, length:end], prompt.k[:, :, :end]
    pos = jnp.broadcast_to(jnp.arange(end, dtype=jnp.int32), (k.shape[0], end))
    p, _, total = weights(jnp.where(visible(pos[:, None], pos[:, length:]), scores(q, k), NEG))
    mass = (p / total[..., None]).mean((2, 3))[:, :, :length]
    return mass.at[:, :, 0].set(0.0)


@functools.partial(jax.jit, static_argnames=("budget", "kind"))
def kept(found: Layered, bits: Array, budget: int, kind: str) -> tuple[Array, Array]:
    """bool[B K T]: the tokens that stay, and those representatives (the same for all heads) that would have anyway."""
    T = found.scores.shape[3]
    own = found.scores.mean(2)
    old = jnp.broadcast_to(jnp.arange(T)[None] < T - WINDOW, (own.shape[0], T))
    quota = budget - WINDOW
    count = jnp.full(own.shape[0], int(quota * SHARE), jnp.int32)
    best = top(own, old[:, None], jnp.full(own.shape[0], quota, jnp.int32))
    if kind == "base":
        return best | ~old[:, None], jnp.zeros_like(best)
    important = top(own, old[:, None], quota - count).any(1)
    candidates = old & ~important
    if kind == "even":
        places = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], old.shape)
        taken = top(draw(0, places).astype(jnp.float32)[:, None], candidates[:, None], count)[:, 0]
    else:
        taken = _representatives(bits, old, candidates, count, int(quota * SHARE))
    others = top(own, (old & ~taken)[:, None], quota - taken.sum(-1, dtype=jnp.int32))
    return others | taken[:, None] | ~old[:, None], best & taken[:, None]


def _representatives(bits: Array, valid: Array, candidates: Array, count: Array, places: int) -> Array:
    """bool[B T], by KVCrush's own rule with these signatures."""
    chosen = KVCrush(SHARE).by_signature(bits, Units(None, None, valid, candidates), count, places)
    B, T = valid.shape
    at = jnp.where(chosen < 0, T, chosen)
    return jnp.zeros((B, T), bool).at[jnp.arange(B)[:, None], at].set(True, mode="drop")


@dataclasses.dataclass(frozen=True)
class Told:
    """Of one layer and budget: f32[B] each."""

    kept: dict[str, np.ndarray]  # by kind, the share of the following tokens' attention
    anyway: dict[str, np.ndarray]  # by kind, of the representatives those that a head would have kept without them


def told(found: Layered, joined: Array, budget: int) -> Told:
    """What all kinds keep in one layer."""
    total, keeps, anyway = found.future.sum((1, 2)), {}, {}
    for kind in KINDS:
        stays, same = kept(found, joined if kind == "joined" else found.bits, budget, kind)
        keeps[kind] = np.asarray(jnp.where(stays, found.future, 0.0).sum((1, 2)) / total)
        reps = int((budget - WINDOW) * SHARE)
        if kind != "base" and reps:
            anyway[kind] = np.asarray(same.mean(1, dtype=jnp.float32).sum(-1) / reps)
    return Told(keeps, anyway)


def signatures(bits: np.ndarray) -> dict[str, float]:
    """Of signatures bool[B T N] of evictable tokens: how many differ, and the share of tokens that have the same."""
    counts = [np.unique(row, axis=0, return_counts=True)[1] for row in bits]
    return {
        "bits": bits.shape[2],
        "distinct": float(np.mean([len(buckets) for buckets in counts])),
        "largest": float(np.mean([buckets.max() / buckets.sum() for buckets in counts])),
    }


def measure(model: Model, args: Any) -> dict[str, Any]:
    """All layers, all budgets."""
    rows = common.windows(args, model, args.length + args.tokens)
    exact = read_exactly(model, rows)
    plan = bind(f"snapkv:budget={args.length},window={WINDOW}", model.config)
    progress("scores and signatures")
    found = [layered(layer, prompt, exact, args.length) for layer, prompt in zip(plan, exact.prompts, strict=True)]
    budgets = {str(share): int(args.length * share) for share in args.budgets}
    if least := [share for share, budget in budgets.items() if (budget - WINDOW) * SHARE < 1]:
        raise KvjaxError(f"of {args.length} tokens {least[0]} leaves no room for representatives; use larger --budgets")
    results: dict[str, list[Told]] = {share: [] for share in budgets}
    alone, together = [], []
    for i, layer in enumerate(found):
        progress(f"layer {i + 1} of {len(found)}")
        first = min(max(i - args.join // 2, 0), max(len(found) - args.join, 0))
        joined = jnp.concatenate([x.bits for x in found[first : first + args.join]], -1)
        old = args.length - WINDOW
        alone.append(signatures(np.asarray(layer.bits)[:, :old]))
        together.append(signatures(np.asarray(joined)[:, :old]))
        for share, budget in budgets.items():
            results[share].append(told(layer, joined, budget))
    return {
        "length": args.length,
        "windows": len(rows),
        "signatures": {name: _mean(every) for name, every in (("one layer", alone), ("joined", together))},
        "budgets": {share: _summed(every) for share, every in results.items()},
    }


def _mean(every: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([x[name] for x in every])) for name in every[0]}


def _summed(every: Sequence[Told]) -> dict[str, Any]:
    """The mean over layers; gains over SnapKV alone with the standard error over windows."""
    held = {kind: np.mean([layer.kept[kind] for layer in every], 0) for kind in KINDS}
    gains = {kind: mass - held["base"] for kind, mass in held.items() if kind != "base"}
    return {
        "kept": {kind: float(mass.mean()) for kind, mass in held.items()},
        "gain": {kind: (float(more.mean()), _standard_error(more)) for kind, more in gains.items()},
        "anyway": {kind: float(np.mean([layer.anyway[kind].mean() for layer in every])) for kind in every[0].anyway},
    }


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5)


def rows_of(results: Mapping[str, Any]) -> list[list[str]]:
    """A line per budget."""
    lines = []
    for share, found in results["budgets"].items():
        gains = (f"{100 * mean:+.2f} ± {100 * error:.2f}" for mean, error in found["gain"].values())
        anyway = found["anyway"].get("kvcrush")
        lines.append([share, f"{found['kept']['base']:.1%}", *gains, "-" if anyway is None else f"{anyway:.0%}"])
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="tokens that follow")
    parser.add_argument("--budgets", type=parse_shares, default="1/32,1/16,1/8,1/4,1/2", help="shares of the tokens")
    parser.add_argument("--join", type=int, default=5, help="layers whose signatures are joined")
    args = parser.parse_args(argv)
    before, model = machine(), kvjax.load(args.model)
    results = measure(model, args)
    title = f"Attention of the next {args.tokens} tokens that falls on what is kept of {args.length}, {args.model}"
    columns = ("budget", "SnapKV keeps", *(f"{TITLES[kind]}, points" for kind in KINDS[1:]), "kept anyway")
    notes = [
        f"Signatures, {name}: {found['bits']:.0f} bits, {found['distinct']:.1f} distinct ones among "
        f"{args.length - WINDOW} tokens, the largest bucket holds {found['largest']:.0%}."
        for name, found in results["signatures"].items()
    ]
    notes.append("\"Kept anyway\": of KVCrush's representatives, those that a head's own scores keep without KVCrush.")
    report("kvcrush_why", before, [table(title, columns, rows_of(results))], notes, results)


if __name__ == "__main__":
    common.run(main)
