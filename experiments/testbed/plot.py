"""The loss curve of a run, from its log."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

from experiments.axes import limit_percents  # noqa: E402
from experiments.testbed.batches import KINDS  # noqa: E402


def read_log(path: Path) -> list[dict]:
    """Reads the records of a run by step; a step repeated after a kill replaces the earlier one."""
    records = map(json.loads, path.read_text().splitlines())
    return [r for _, r in sorted({r["step"]: r for r in records}.items())]


def _running_mean(values: np.ndarray, span: int = 50) -> np.ndarray:
    """Running means over `span` values, or over all if there are fewer."""
    span = min(span, len(values))
    return np.convolve(values, np.full(span, 1 / span), "valid")


def draw_curve(log: Path, image: Path) -> None:
    """Draws the loss (nats per target) and the percent of predicted targets by kind, and the sequence length."""
    records = read_log(log)
    figure, axes = plt.subplots(3, sharex=True, figsize=(8, 8), height_ratios=(3, 3, 1), layout="constrained")
    labels = ("loss, nats per target", "targets predicted, %")
    for axis, name, label in zip(axes, ("loss", "hits"), labels, strict=False):
        for kind in KINDS:
            points = [(r["step"], r[f"{name}/{kind}"]) for r in records if f"{name}/{kind}" in r]
            if points:
                x, y = (_running_mean(np.array(v, float)) for v in zip(*points, strict=True))
                axis.plot(x, y if name == "loss" else 100 * y, label=kind)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    if axes[0].lines:
        axes[0].legend(ncols=3)
    axes[2].plot([r["step"] for r in records], [r["length"] for r in records], ".", markersize=1)
    axes[2].set(ylabel="length, tokens\n(logarithmic)", xlabel="training step", yscale="log")
    lengths = sorted({r["length"] for r in records})
    axes[2].set_yticks(lengths, [f"{n:,}" for n in lengths])
    axes[2].minorticks_off()
    if axes[1].lines:
        limit_percents(axes[1])
    figure.savefig(image, dpi=120)
    plt.close(figure)
