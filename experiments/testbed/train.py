"""Trains the shipped model: python -m experiments.testbed.train --out DIR [--preset cpu|gpu] [--minutes M].

A killed run continues when it is started again with the same arguments. DIR gets checkpoints/ (Orbax), log.jsonl (one
record a step), curve.png and model/, which `kvjax.load` opens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import time
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import kvjax
from experiments.bench.measuring import output_folder
from experiments.testbed import batches, plot
from experiments.testbed.curriculum import Curriculum
from experiments.testbed.trainer import Recipe, Run, open_manager
from kvjax.models import Config, checkpoint
from kvjax.testbed import corpus, vocab

MODEL = Config.llama(
    vocab_size=vocab.SIZE, width=160, layers=4, heads=4, kv_heads=2, head_dim=32, mlp_width=448,
    rope_theta=500_000.0, tie_embeddings=True, eos_ids=(vocab.END,),
)  # fmt: skip

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# About 4,000 tokens a step on a CPU, where a step is bound by arithmetic; 16 times that on an accelerator.
PRESETS = {"cpu": {"tokens": 4096, "steps": 6000}, "gpu": {"tokens": 65_536, "steps": 6000}}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=output_folder, required=True, help="directory of the run")
    p.add_argument("--preset", choices=PRESETS, default="cpu", help="tokens per step and steps")
    p.add_argument("--tokens", type=int, help="tokens per step (default: the preset's)")
    p.add_argument("--start", help="start from this model's weights, past all stages: 'testbed', or a directory")
    p.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="sequence lengths, growing")
    p.add_argument("--steps", type=int, help="steps of the whole run; may change when it is resumed")
    p.add_argument(
        "--decay", type=float, default=0.3, help="last fraction of the steps, over which the rate falls to 0"
    )
    p.add_argument("--minutes", type=float, default=float("inf"), help="stop, resumably, after this long")
    p.add_argument("--leave-out", nargs="*", default=[], choices=batches.KINDS, help="kinds of sequences not to draw")
    p.add_argument("--learning-rate", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    return p.parse_args(argv)


def shapes(lengths: tuple[int, ...], tokens: int) -> tuple[tuple[int, int], ...]:
    """(length, sequences) of the batches, with `tokens` tokens a step, and half of that at lengths 128 and 256."""
    # At those lengths the number of steps matters more than the number of tokens.
    return tuple((n, max(2, tokens // (2 if 64 < n <= 256 else 1) // n)) for n in lengths)


def recipe(args: argparse.Namespace) -> Recipe:
    """Makes the recipe that the command line describes."""
    preset = PRESETS[args.preset]
    config = dataclasses.replace(MODEL, max_positions=max(args.lengths))
    curriculum = Curriculum(
        shapes(tuple(args.lengths), args.tokens or preset["tokens"]), left_out=tuple(args.leave_out)
    )
    steps = args.steps or preset["steps"]
    return Recipe(config, curriculum, args.seed, steps, args.learning_rate, decay=args.decay)


def train(run: Run, out: Path, minutes: float, save_every: int) -> None:
    """Trains until the last step or for `minutes`; saves every `save_every` steps and at the end."""
    begin = time.monotonic()
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
    with open_manager(out / "checkpoints") as manager, Progress(*columns) as bars, open(out / "log.jsonl", "a") as log:
        if run.restore(manager):
            bars.console.print(f"resumed at step {run.at}")
        task = bars.add_task("", total=run.recipe.steps, completed=run.at)
        while run.at < run.recipe.steps and time.monotonic() - begin < 60 * minutes:
            record = run.step() | {"seconds": round(time.monotonic() - begin, 2)}
            print(json.dumps(record), file=log, flush=True)
            note = f"stage {run.progress.stage} length {record['length']} recall {run.progress.recall:.2f}"
            bars.update(task, completed=run.at, description=note)
            if run.at % save_every == 0:
                run.save(manager)
        if run.at not in manager.all_steps():
            run.save(manager)


def export(run: Run, directory: Path, start: str | None = None) -> None:
    """Writes the run's parameters and the tokenizer as a checkpoint that `kvjax.load` opens."""
    source = f"experiments.testbed.train, seed {run.recipe.seed}, step {run.at}, Python {platform.python_version()}"
    source += f", from {start}" if start else ""
    extra = vocab.tokenizer_files()
    checkpoint.save(directory, run.recipe.config, run.params, source=source, extra_files=extra, replace=True)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    run = Run(recipe(args), corpus.load("train"))
    if args.start:
        run.begin_grown(kvjax.load(args.start).params)
    train(run, args.out, args.minutes, args.save_every)
    plot.draw_curve(args.out / "log.jsonl", args.out / "curve.png")
    export(run, args.out / "model", args.start)
    print(json.dumps({"step": run.at, **dataclasses.asdict(run.progress), "model": str(args.out / "model")}))


if __name__ == "__main__":
    main()
