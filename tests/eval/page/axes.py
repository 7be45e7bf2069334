"""Checks of the axes of plots, for tests of all plots."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.axis import Axis


def ticks(axis: Axis) -> list[tuple[float, str]]:
    """The place and the label of every tick within the axis' limits."""
    axis.figure.draw_without_rendering()
    low, high = sorted(axis.get_view_interval())
    places_and_labels = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
    return [(float(at), label.get_text()) for at, label in places_and_labels if low <= at <= high]


def check_percents(axis: Axis, whole: float = 1.0) -> None:
    """Checks that every tick is a round number from 0 to 100 at its place, and that the axis ends at 100 at most."""
    percent_ticks = ticks(axis)
    assert len(percent_ticks) > 1
    for at, text in percent_ticks:
        assert 0 <= at <= whole * (1 + 1e-9) and abs(float(text) - 100 * at / whole) < 1e-6
    step = float(percent_ticks[1][1]) - float(percent_ticks[0][1])
    assert any(abs(step / 10**e - s) < 1e-6 for e in (-2, -1, 0, 1) for s in (1, 2, 5))
    spines = axis.axes.spines
    if not spines["top"].get_visible():
        assert spines["bottom" if axis.axis_name == "x" else "left"].get_bounds()[1] <= whole


def check_scales(ax: Axes) -> None:
    """Checks that a logarithmic axis says so, and that each axis with numbers says what they are."""
    for axis in (ax.xaxis, ax.yaxis):
        label = axis.get_label_text()
        assert ("(logarithmic)" in label) == (axis.get_scale() in ("log", "symlog")), label
