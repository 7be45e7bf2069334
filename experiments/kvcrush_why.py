"""KVCrush's possible gain: the tokens that its signatures distinguish, and the attention on its representatives.

python -m experiments.kvcrush_why [--model smollm2-135m --text essays] [--budgets 1/32,1/16,1/8,1/4,1/2]

Windows of text are read exactly. After --length tokens SnapKV selects tokens: alone, with a quarter of its budget for
KVCrush's representatives, for representatives drawn evenly among the same candidates, and for KVCrush's with the joined
signatures of --join layers. The measure is the fraction of the next --tokens tokens' attention to the prompt that falls
on the selected tokens, as the mean over layers and heads. The first token, which takes most attention, is left out.
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
from experiments.bench.measuring import log_progress, machine, report, table
from experiments.papers import common
from kvjax import KvjaxError, Model
from kvjax.cache.components import EvictableUnits, Token
from kvjax.cache.eviction.granularity import evictable_mask, group_into_units, split_prompt
from kvjax.cache.protocol import BoundLayer
from kvjax.core.attention import MASKED_LOGIT, scores, visible, weights
from kvjax.core.random import draw
from kvjax.core.top_k import top_k_mask
from kvjax.core.types import Array
from kvjax.engine.layer_prompt import LayerPrompt, observed_block, select_queries
from kvjax.engine.plan import bind
from kvjax.eval.run.equal_bytes import parse_shares
from kvjax.methods.kvcrush import KVCrush, unit_signatures
from kvjax.reuse.full_kv import FullKV, read_exactly

WINDOW_TOKENS = 8  # of SnapKV: the last tokens, which always stay
SHARE = 0.25  # of the budget without the window, for representatives
KINDS = ("base", "kvcrush", "joined", "even")
TITLES = {"base": "SnapKV", "kvcrush": "+ KVCrush", "joined": "+ KVCrush, joined", "even": "+ evenly drawn"}


class LayerScores(NamedTuple):
    """Scores, signatures and future attention of one layer's prompt tokens."""

    scores: Array  # f32[B K G T], SnapKV's
    bits: Array  # bool[B T N], the signature of each token that can be evicted
    future: Array  # f32[B K T], attention of the following tokens, 0 for the first token


def score_layer(layer: BoundLayer, prompt: LayerPrompt, exact: FullKV, length: int) -> LayerScores:
    """Scores the first `length` tokens of a layer's keys and queries."""
    lengths = jnp.full_like(exact.lengths, length)
    queries = select_queries(layer, prompt.q[:, :, :, :length], 0, lengths)
    cut = LayerPrompt(prompt.k[:, :, :length], prompt.v[:, :, :length], queries)
    block, observation = observed_block(layer, cut, lengths)
    found = layer.method.select.scorer.scores(block, observation, layer.spec).per_query_head
    # Signatures depend on the tokens that can be evicted and not on how many are: any number kept gives the same bits.
    num_kept = jnp.full(block.pos.shape[0], length // 2, jnp.int32)
    part = split_prompt(block.pos, num_kept, length, 0, WINDOW_TOKENS, Token())
    by_one = group_into_units(found, 0, 1)
    valid = evictable_mask(part, by_one.shape[3])
    units = EvictableUnits(by_one, group_into_units(block.k, 0, 1, 2), valid, valid)
    return LayerScores(found, unit_signatures(units), _future(prompt, length, int(exact.lengths[0])))


def _future(prompt: LayerPrompt, length: int, end: int) -> Array:
    """Mean attention of the queries length..end-1 to the prompt's tokens, f32[B K T], 0 for the first token."""
    q, k = prompt.q[:, :, :, length:end], prompt.k[:, :, :end]
    pos = jnp.broadcast_to(jnp.arange(end, dtype=jnp.int32), (k.shape[0], end))
    p, _, total = weights(jnp.where(visible(pos[:, None], pos[:, length:]), scores(q, k), MASKED_LOGIT))
    # Later tokens stand in the softmax but not in the sum: their keys are kept by every method.
    mass = (p / total[..., None]).mean((2, 3))[:, :, :length]
    return mass.at[:, :, 0].set(0.0)


@functools.partial(jax.jit, static_argnames=("budget", "kind"))
def select_tokens(found: LayerScores, bits: Array, budget: int, kind: str) -> tuple[Array, Array]:
    """Selects the budget's tokens in one way of KINDS.

    Returns:
      bool[B K T], the selected tokens, and the representatives that SnapKV alone would have selected in that head.
    """
    T = found.scores.shape[3]
    own = found.scores.mean(2)  # a head of the cache serves a group of query heads
    old = jnp.broadcast_to(jnp.arange(T)[None] < T - WINDOW_TOKENS, (own.shape[0], T))
    quota = budget - WINDOW_TOKENS
    count = jnp.full(own.shape[0], int(quota * SHARE), jnp.int32)
    best = top_k_mask(own, old[:, None], jnp.full(own.shape[0], quota, jnp.int32))
    if kind == "base":
        return best | ~old[:, None], jnp.zeros_like(best)
    # One set of representatives serves all heads of a layer, so candidates are tokens that no head wants.
    important = top_k_mask(own, old[:, None], quota - count).any(1)
    candidates = old & ~important
    if kind == "even":
        # The control: the same candidates and the same number, without looking at signatures.
        places = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], old.shape)
        taken = top_k_mask(draw(0, places).astype(jnp.float32)[:, None], candidates[:, None], count)[:, 0]
    else:
        taken = _representatives(bits, old, candidates, count, int(quota * SHARE))
    # The budget is the same in all kinds: representatives take the places of the least wanted tokens.
    others = top_k_mask(own, (old & ~taken)[:, None], quota - taken.sum(-1, dtype=jnp.int32))
    return others | taken[:, None] | ~old[:, None], best & taken[:, None]


def _representatives(bits: Array, valid: Array, candidates: Array, count: Array, places: int) -> Array:
    """bool[B T], by KVCrush's own rule with these signatures."""
    chosen = KVCrush(SHARE).choose_by_signature(bits, EvictableUnits(None, None, valid, candidates), count, places)
    B, T = valid.shape
    at = jnp.where(chosen < 0, T, chosen)
    return jnp.zeros((B, T), bool).at[jnp.arange(B)[:, None], at].set(True, mode="drop")


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Fractions of one layer and budget by kind, f32[B] each."""

    kept: dict[str, np.ndarray]  # of the following tokens' attention, on selected tokens
    anyway: dict[str, np.ndarray]  # of the representatives, on tokens that SnapKV alone selects too


def measure_coverage(found: LayerScores, joined: Array, budget: int) -> Coverage:
    """Measures all kinds in one layer."""
    total, keeps, anyway = found.future.sum((1, 2)), {}, {}
    for kind in KINDS:
        stays, same = select_tokens(found, joined if kind == "joined" else found.bits, budget, kind)
        keeps[kind] = np.asarray(jnp.where(stays, found.future, 0.0).sum((1, 2)) / total)
        reps = int((budget - WINDOW_TOKENS) * SHARE)
        if kind != "base" and reps:
            anyway[kind] = np.asarray(same.mean(1, dtype=jnp.float32).sum(-1) / reps)
    return Coverage(keeps, anyway)


def signatures(bits: np.ndarray) -> dict[str, float]:
    """Mean number of distinct signatures in bool[B T N], and the fraction of tokens with the most frequent one."""
    counts = [np.unique(sequence, axis=0, return_counts=True)[1] for sequence in bits]
    return {
        "bits": bits.shape[2],
        "distinct": float(np.mean([len(buckets) for buckets in counts])),
        "largest": float(np.mean([buckets.max() / buckets.sum() for buckets in counts])),
    }


def measure(model: Model, args: Any) -> dict[str, Any]:
    """Measures all layers at all budgets."""
    texts = common.windows(args, model, args.length + args.tokens)
    exact = read_exactly(model, texts)
    # The plan is there for SnapKV's scores, on which the budget has no influence.
    plan = bind(f"snapkv:budget={args.length},window={WINDOW_TOKENS}", model.config)
    log_progress("scores and signatures")
    found = [score_layer(layer, prompt, exact, args.length) for layer, prompt in zip(plan, exact.prompts, strict=True)]
    budgets = {str(share): int(args.length * share) for share in args.budgets}
    if least := [share for share, budget in budgets.items() if (budget - WINDOW_TOKENS) * SHARE < 1]:
        raise KvjaxError(f"of {args.length} tokens {least[0]} leaves no room for representatives; use larger --budgets")
    results: dict[str, list[Coverage]] = {share: [] for share in budgets}
    alone, together = [], []
    for i, layer in enumerate(found):
        log_progress(f"layer {i + 1} of {len(found)}")
        first = min(max(i - args.join // 2, 0), max(len(found) - args.join, 0))
        # Neighboring layers' heads vote, too: 45 bits of SmolLM2, more than the 32 of the paper's Llama-3-8B.
        joined = jnp.concatenate([x.bits for x in found[first : first + args.join]], -1)
        old = args.length - WINDOW_TOKENS
        alone.append(signatures(np.asarray(layer.bits)[:, :old]))
        together.append(signatures(np.asarray(joined)[:, :old]))
        for share, budget in budgets.items():
            results[share].append(measure_coverage(layer, joined, budget))
    return {
        "length": args.length,
        "windows": len(texts),
        "signatures": {
            name: {key: float(np.mean([x[key] for x in every])) for key in every[0]}
            for name, every in (("one layer", alone), ("joined", together))
        },
        "budgets": {share: _average_layers(every) for share, every in results.items()},
    }


def _average_layers(every: Sequence[Coverage]) -> dict[str, Any]:
    """The mean over layers; gains over SnapKV alone with the standard error over windows."""
    covered = {kind: np.mean([layer.kept[kind] for layer in every], 0) for kind in KINDS}
    # Gains are paired by window, since texts differ by more than the kinds do.
    gains = {kind: mass - covered["base"] for kind, mass in covered.items() if kind != "base"}
    return {
        "kept": {kind: float(mass.mean()) for kind, mass in covered.items()},
        "gain": {
            kind: (float(more.mean()), float(more.std(ddof=1) / len(more) ** 0.5)) for kind, more in gains.items()
        },
        "anyway": {kind: float(np.mean([layer.anyway[kind].mean() for layer in every])) for kind in every[0].anyway},
    }


def rows(results: Mapping[str, Any]) -> list[list[str]]:
    """Formats the results, one row per budget."""
    lines = []
    for share, found in results["budgets"].items():
        gains = (f"{100 * mean:+.2f} ± {100 * error:.2f}" for mean, error in found["gain"].values())
        anyway = found["anyway"].get("kvcrush")
        lines.append([share, f"{found['kept']['base']:.1%}", *gains, "-" if anyway is None else f"{anyway:.0%}"])
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.model_parser(__doc__)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="following tokens")
    parser.add_argument("--budgets", type=parse_shares, default="1/32,1/16,1/8,1/4,1/2", help="fractions of the tokens")
    parser.add_argument("--join", type=int, default=5, help="number of layers with joined signatures")
    args = parser.parse_args(argv)
    before, model = machine(), kvjax.load(args.model)
    results = measure(model, args)
    title = f"Attention of the next {args.tokens} tokens to the tokens kept of {args.length}, {args.model}"
    columns = ("budget", "SnapKV keeps", *(f"{TITLES[kind]}, points" for kind in KINDS[1:]), "kept anyway")
    notes = [
        f"Signatures, {name}: {found['bits']:.0f} bits, {found['distinct']:.1f} distinct ones among "
        f"{args.length - WINDOW_TOKENS} tokens, the largest bucket holds {found['largest']:.0%}."
        for name, found in results["signatures"].items()
    ]
    notes.append("\"Kept anyway\": KVCrush's representatives that a head's own scores keep without KVCrush.")
    report("kvcrush_why", before, [table(title, columns, rows(results))], notes, results)


if __name__ == "__main__":
    common.run_script(main)
