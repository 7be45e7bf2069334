"""Axes of the experiments' pictures."""

from __future__ import annotations

from matplotlib.axes import Axes


def limit_percents(ax: Axes) -> None:
    """Ends the y axis of percents at 0 and 100, with room for markers there. Call it when everything is drawn."""
    low, high = ax.get_ylim()
    ax.set_ylim(max(low, -4), min(high, 104))
    ax.set_yticks([tick for tick in ax.get_yticks() if max(low, 0) <= tick <= min(high, 100)])
