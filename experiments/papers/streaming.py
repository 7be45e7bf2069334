"""StreamingLLM on a long text: bytes and loss along the text (arXiv 2309.17453, Figure 5).

python -m experiments.papers.streaming [--tokens 100000] [--recent 1020] [--text FILE] [--out out]

One long text (default: held-out source code, file after file) goes through one cache, --chunk tokens a call, with the
same result as single steps. The baselines: no first tokens (the paper's window attention), true positions instead of
indices inside the cache, and `full` up to --full tokens. Exact attention in recomputed windows (the paper's sliding
window with re-computation) measures how hard the text is at each place.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.bench.measuring import log_progress, machine, report, table
from experiments.papers import common
from experiments.papers.eviction_tables import make_panels, save_panels
from kvjax import KvjaxError, Method, Model
from kvjax.core.types import Array
from kvjax.generation.model_calls import log_probs

NUM_POINTS = 100  # of the curve and of the slope
NUM_PARTS = 10  # rows of the table


def stream_text(
    model: Model, method: Method, tokens: np.ndarray, first: int, chunk: int
) -> tuple[np.ndarray, set[int]]:
    """Nats of tokens[first:], read through one cache, and the cache's sizes in bytes after each call."""
    # As many tokens as the cache holds are read exactly under every method; streams differ behind them.
    last, cache = kvjax.prefill(model, [tokens[:first]], method, capacity=len(tokens) + chunk)
    nats, sizes = [_nats(last[:, None], tokens[first : first + 1])], {_bytes(cache)}
    for at in range(first, len(tokens) - 1, chunk):
        if (at - first) // chunk % 20 == 0:  # a line for each chunk would be hundreds
            log_progress(f"token {at:,} of {len(tokens):,}")
        part = tokens[at : at + chunk + 1]
        # Only the last chunk is shorter; padded, it shares the other chunks' compiled program.
        chunk_ids = np.pad(part[:-1], (0, chunk + 1 - len(part)))
        logits, cache = kvjax.extend(model, [chunk_ids], cache)
        nats.append(_nats(logits, part[1:]))
        sizes.add(_bytes(cache))
    return np.concatenate(nats), sizes


def _nats(logits: Array, target: np.ndarray) -> np.ndarray:
    return -np.asarray(log_probs(logits[:, : len(target)], jnp.asarray(target[None], jnp.int32)))[0]


def _bytes(cache: kvjax.Cache) -> int:
    return sum(kvjax.state_bytes(cache).total.values())


def recompute_windows(model: Model, tokens: np.ndarray, first: int, batch: int) -> np.ndarray:
    """Nats of tokens[first:] under exact attention to between `first` and 2 first - 1 tokens before each."""
    # The paper recomputes a window for every token. Here one window serves `first` tokens, which is hundreds of times
    # cheaper and enough to say how hard the text is at each place.
    starts = range(first, len(tokens), first)
    windows = [np.pad(tokens[s - first : s + first], (0, max(s + first - len(tokens), 0))) for s in starts]
    nats = []
    for i in range(0, len(windows), batch):
        # The last batch is filled up, to share the others' program; the surplus is cut off below.
        together = np.stack(windows[i : i + batch] + windows[:1] * (i + batch - len(windows)))
        logits = kvjax.logits(model, together)[:, first - 1 : -1]
        nats.append(-np.asarray(log_probs(logits, jnp.asarray(together[:, first:], jnp.int32))))
    return np.concatenate(nats).reshape(-1)[: len(tokens) - first]


def parts(nats: np.ndarray, count: int) -> np.ndarray:
    """Mean of each of `count` consecutive parts."""
    return np.array([p.mean() for p in np.array_split(nats, count)])


def slope(excess: np.ndarray, points: int) -> tuple[float, float]:
    """Least-squares slope of an excess over its parts, in nats per 100,000 tokens: (slope, standard error)."""
    # The fit is to means of parts: losses of neighboring tokens are correlated, and the error would look too small.
    y = parts(excess, points)
    x = (np.arange(points) + 0.5) * len(excess) / points / 1e5
    x = x - x.mean()
    fit = (x * y).sum() / (x * x).sum()
    rest = y - y.mean() - fit * x
    return float(fit), float(np.sqrt((rest**2).sum() / (points - 2) / (x * x).sum()))


def sides(args: argparse.Namespace) -> Iterator[tuple[str, Method, int]]:
    """Yields (name, method, tokens) of each stream."""
    yield "streaming_llm", kvjax.methods.streaming_llm(recent=args.recent, sinks=args.sinks), args.length
    if args.others:
        yield "no first tokens", kvjax.methods.streaming_llm(recent=args.recent, sinks=0), args.length
        true = kvjax.methods.streaming_llm(recent=args.recent, sinks=args.sinks, reindex=False)
        yield "true positions", true, args.length
        # Far enough to leave the positions that the shipped model has seen; its cache grows with every token.
        yield "full", kvjax.methods.full(), min(args.full, args.length)


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.model_parser(__doc__)
    parser.add_argument("--tokens", dest="length", type=int, default=100_000, help="of the text; same as --length")
    parser.set_defaults(length=100_000)
    parser.add_argument("--recent", type=int, default=1020)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=512, help="tokens a call; 1 for single steps")
    parser.add_argument("--full", type=int, default=12_288, help="tokens of `full`")
    parser.add_argument("--batch", type=int, default=4, help="recomputed windows at a time")
    parser.add_argument("--others", type=int, default=1, choices=(0, 1), help="0: streaming_llm alone")
    args = parser.parse_args(argv)
    first = args.recent + args.sinks
    if args.length < 2 * first:
        raise KvjaxError(f"--tokens {args.length} is less than two caches of {first}; use {2 * first} or more")
    before, model = machine(), kvjax.load(args.model)
    tokens = common.windows(argparse.Namespace(text=args.text, windows=1), model, args.length)[0]
    found, sizes = {}, {}
    for name, method, count in sides(args):
        log_progress(name)
        found[name], all_sizes = stream_text(model, method, tokens[:count], first, args.chunk)
        sizes[name] = sorted(all_sizes)
    log_progress("recomputed windows")
    anew = recompute_windows(model, tokens, first, args.batch)
    report("streaming", before, *summarize(args, model, found, sizes, anew))


def summarize(
    args: argparse.Namespace, model: Model, found: dict[str, np.ndarray], sizes: dict[str, list[int]], anew: np.ndarray
) -> tuple[list, list[str], dict[str, Any]]:
    """Draws the plot; returns tables, notes and the JSON document."""
    first, points = args.recent + args.sinks, min(NUM_POINTS, len(anew) // 20)
    span = len(anew) / NUM_PARTS
    rows = []
    for i, hard in enumerate(parts(anew, NUM_PARTS)):
        pieces = [x[int(i * span) : int((i + 1) * span)] for x in found.values()]
        means = [x.mean() if len(x) > span / 2 else None for x in pieces]  # `full` ends before the others
        rows.append((f"{first + int((i + 1) * span):,}", f"{hard:.4f}", *(m and f"{m:.4f}" for m in means)))
    title = f"nats per token of each tenth of the text; a cache of {args.sinks} + {args.recent} tokens"
    tables = [table(title, ("up to token", "recomputed", *found), rows)]
    # The text itself is harder in places, and its slope would be taken for the method's.
    excess = {name: x - anew[: len(x)] for name, x in found.items()}
    slopes = {name: slope(x, min(points, len(x) // 20)) for name, x in excess.items()}
    lines = []
    for name, x in excess.items():
        least, most = sizes[name][0], sizes[name][-1]
        tenths = parts(x, 10)
        rise, error = slopes[name]
        cells = (f"{x.mean():+.4f}", f"{tenths[0]:+.4f}", f"{tenths[-1]:+.4f}", f"{rise:+.4f} ±{error:.4f}")
        lines.append((name, f"{least:,}" if least == most else f"{least:,} to {most:,}", *cells))
    columns = ("method", "bytes of the cache", "excess loss", "first tenth", "last tenth", "slope per 100,000 tokens")
    tables.append(table("loss above recomputed windows, nats per token (each over its own tokens)", columns, lines))
    notes = [
        "The paper's Figure 5 streams 4 million tokens at a flat perplexity (no numbers). This model saw positions up "
        f"to {model.config.max_positions} in training; the cache of `full` is allocated once, for all of its tokens.",
        plot(args.out / "streaming.png", found, anew, first, points),
    ]
    results = {
        "script": "streaming",
        "tokens": args.length,
        "cache": [args.sinks, args.recent],
        "bytes": sizes,
        "anew": parts(anew, NUM_PARTS).tolist(),
        "nats": {name: parts(x, NUM_PARTS).tolist() for name, x in found.items()},
        "excess": {name: float(x.mean()) for name, x in excess.items()},
        "slope": slopes,
    }
    return tables, notes, results


def plot(path: Path, found: dict[str, np.ndarray], anew: np.ndarray, first: int, points: int) -> str:
    """Draws the loss and the loss above re-computation along the text."""
    fig, axes = make_panels(path, 2, share=False)
    for i, (name, x) in enumerate({"recomputed": anew, **found}.items()):
        # Later lines are thinner, so that lines that coincide stay visible.
        style = {"color": f"C{i - 1}" if i else "0.75", "linewidth": max(4 - i, 1), "label": name}
        count = max(int(points * len(x) / len(anew)), 2)
        at = first + (np.arange(count) + 0.5) * len(x) / count
        axes[0].plot(at, parts(x, count), **style)
        if x is not anew:
            axes[1].plot(at, parts(x - anew[: len(x)], count), **style)
    axes[0].set(xlabel="place in the text, tokens", ylabel="nats per token")
    axes[1].set(xlabel="place in the text, tokens", ylabel="nats per token above re-computation")
    for ax in axes:
        ax.locator_params(axis="x", nbins=5)
        ax.xaxis.set_major_formatter("{x:,.0f}")
    return save_panels(fig, axes, path, 5)


def describe(results: Mapping[str, Any]) -> str:
    """Bytes, the slope of the loss, and its excess over re-computation."""
    sizes, (rise, error) = results["bytes"]["streaming_llm"], results["slope"]["streaming_llm"]
    return (
        f"{results['tokens']:,} tokens in {sizes[-1]:,} bytes; slope {rise:+.3f} ±{error:.3f} nats per 100,000 tokens; "
        f"{results['excess']['streaming_llm']:+.3f} nats above re-computation"
    )


in_brief = common.brief(
    describe, "4 million tokens at a flat perplexity (no numbers)", "Fewer tokens; the loss at all lengths is measured."
)

if __name__ == "__main__":
    common.run_script(main)
