"""Decode speed of heads that keep unequal numbers of tokens, against equal heads in the same bytes, in one run.

python -m experiments.bench.heads [--models small,125m] [--tokens 1024,4096] [--batches 1,8] [--pages 16]

All sides decode in turns from the same random keys, values and queries. Some heads attend to few tokens and some to
many, so that a budget shared within a layer or over the model gives them unequal numbers of tokens. Pages are rounded
up to whole ones; unequal heads therefore get one page less of budget. "tokens of a head" are the fewest, the mean and
the most that a head of any layer keeps; "MB held" counts the stored tokens, "MB in all" all arrays of the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.bench import measuring
from experiments.bench.decoders import KvjaxDecoder, time_decode_steps
from experiments.bench.shapes import SHAPES, describe
from kvjax.engine.layer_prompt import LayerPrompt
from kvjax.eval.run.machine import machine
from kvjax.reuse.full_kv import FullKV

EQUAL = "equal heads"
MAX_POSITIONS = 2**20  # no prompt of random keys reaches the model's own limit


def random_prompts(model: kvjax.Model, batch: int, tokens: int) -> FullKV:
    """Random keys, values and queries of every layer, as if a prompt had been read; no model runs."""
    c, key = model.config, jax.random.key(0)
    # Queries are scaled by 1/4 to 4: small ones attend to all tokens alike, large ones to few.
    a = c.kind(0).attention
    spread = 4.0 ** jax.random.uniform(key, (c.layers, a.kv_heads), minval=-1.0, maxval=1.0)

    def draw(layer: int, which: int, *more: int) -> jax.Array:
        shape = (batch, a.kv_heads, *more, tokens, a.head_dim)
        return jax.random.normal(jax.random.fold_in(key, 3 * layer + which), shape, model.dtype)

    scale = spread[:, None, :, None, None, None].astype(model.dtype)
    layers = [LayerPrompt(draw(i, 0), draw(i, 1), draw(i, 2, a.groups) * scale[i]) for i in range(c.layers)]
    lengths, logits = jnp.full((batch,), tokens, jnp.int32), jnp.zeros((batch, c.vocab_size))
    return FullKV(model, tuple(layers), lengths, logits)


def methods(tokens: int, fraction: float, pages: Sequence[int]) -> dict[str, str]:
    """Method strings by the name of their division, for prompts of `tokens` tokens."""
    budget = int(fraction * tokens)
    # alpha=0 guarantees no head anything: lengths are as unequal as the scores make them.
    found = {EQUAL: f"snapkv:budget={budget}"}
    for page in pages:
        for scope in ("layer", "model"):
            where = "within a layer" if scope == "layer" else "over the model"
            division = f"adakv:alpha=0,page={page},scope={scope}"
            found[f"{where}, pages of {page}"] = f"snapkv:budget={budget - page} + {division}"
    return found


def measure(
    model: kvjax.Model, sides: dict[str, str], batch: int, tokens: int, steps: int, repeats: int
) -> dict[str, Any]:
    """Seconds per step, bytes, and tokens of the heads, of each side."""
    prompts, room = random_prompts(model, batch, tokens), steps * (repeats + 1)
    loops, cells = {}, {}
    for name, text in sides.items():
        loops[name] = KvjaxDecoder(model, kvjax.parse(text))
        loops[name].begin(prompts.compress(text, capacity=tokens + room), room)
        num_kept = []
        for layer in kvjax.kept_positions(loops[name].cache):
            for sequence in layer:
                num_kept += [(head < tokens).sum() for head in sequence]  # of the prompt's tokens
        kept = np.array(num_kept)
        size = kvjax.state_bytes(loops[name].cache)
        cells[name] = {
            "method": text,
            "tokens_of_a_head": [int(kept.min()), float(kept.mean()), int(kept.max())],
            "bytes": {"held": size.held["device"], "total": size.total["device"]},
        }
    del prompts  # every layer's exact keys, values and queries, several times what a side holds
    for loop in loops.values():  # compiles
        loop.decode(steps)
    seconds = time_decode_steps(loops, steps, repeats)
    return {name: {**cell, "seconds_per_step": measuring.summary(seconds[name])} for name, cell in cells.items()}


COLUMNS = ("model", "tokens", "batch", "heads", "tokens of a head", "MB held", "MB in all", "ms/step", "tok/s")
COLUMNS += ("vs equal",)


def rows(model: str, tokens: int, batch: int, cells: dict[str, Any]) -> list[list[Any]]:
    """Formats a cell, one row per side; a ratio above 1 is faster than equal heads."""
    equal = cells[EQUAL]["seconds_per_step"]["median"]
    lines = []
    for name, cell in cells.items():
        seconds, (least, mean, most) = cell["seconds_per_step"]["median"], cell["tokens_of_a_head"]
        sizes = [f"{cell['bytes'][kind] / 1e6:.1f}" for kind in ("held", "total")]
        speed = [f"{seconds * 1e3:.2f}", f"{batch / seconds:.1f}", f"{equal / seconds:.2f}x"]
        lines.append([model, tokens, batch, name, f"{least}, {mean:.0f}, {most}", *sizes, *speed])
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--models", default=",".join(SHAPES), help="from: " + ", ".join(SHAPES))
    parser.add_argument("--tokens", type=measuring.parse_integers, default=[1024, 4096], help="of the prompt")
    parser.add_argument("--batches", type=measuring.parse_integers, default=[1, 8])
    parser.add_argument("--fraction", type=float, default=0.25, help="of the prompt's tokens, which equal heads keep")
    parser.add_argument("--pages", type=measuring.parse_integers, default=[16], help="slots of a page")
    parser.add_argument("--steps", type=int, default=8, help="tokens per turn")
    parser.add_argument("--repeats", type=int, default=9, help="turns; the table shows their median")
    args = parser.parse_args(argv)

    before, notes, lines, results = machine(), [], [], []
    for name in args.models.split(","):
        # Weights are random, too: no program depends on their values, and only the caches have to be unequal.
        model = kvjax.random_model(dataclasses.replace(SHAPES[name], max_positions=MAX_POSITIONS))
        notes.append(describe(name, model.config, model.params))
        for tokens in args.tokens:
            for batch in args.batches:
                measuring.log_progress(f"{name}, {tokens} tokens, batch {batch}")
                sides = methods(tokens, args.fraction, args.pages)
                cells = measure(model, sides, batch, tokens, args.steps, args.repeats)
                results.append({"model": name, "tokens": tokens, "batch": batch, "sides": cells})
                lines += rows(name, tokens, batch, cells)
        jax.clear_caches()
    measuring.report(
        "heads", before, [measuring.table("Decode, heads of unequal length", COLUMNS, lines)], notes, results
    )


if __name__ == "__main__":
    main()
