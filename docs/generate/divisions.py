"""The table of docs/results.md that compares divisions of a budget, from the records of a closed study."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.equal_bytes import RESULTS
from kvjax.eval.page.intervals import score_interval

RECORDS = [RESULTS.with_name(f"divisions.{model}.json") for model in ("smollm2", "qwen")]
MODELS = ("SmolLM2", "Qwen")
FRACTIONS = ("1/4", "1/8")
TITLES = {"equal": "equal heads", "within a layer": "within a layer", "over the model": "over the model"}
"""A division's name in the records -> in the table."""
ROWS = {
    "repeated prompt (KVzip)": ("equal", "within a layer", "over the model"),
    "turned queries": ("equal", "over the model"),
    "key difference": ("equal", "over the model"),
    "window (SnapKV)": ("equal", "over the model"),
}
"""Scores -> the divisions that the table shows."""


def divisions_table() -> str:
    """Later questions by scores and division, percent right with Wilson's intervals over contexts."""
    documents = [json.loads(path.read_text()) for path in RECORDS]
    heads = [f"{model}, {fraction}" for model in MODELS for fraction in FRACTIONS]
    lines = [f"| scores | division | {' | '.join(heads)} |", "|---|---|" + "---:|" * len(heads)]
    for scorer, divisions in ROWS.items():
        for division in divisions:
            cells = [_format_cell(document, scorer, division, x) for document in documents for x in FRACTIONS]
            lines.append(f"| {scorer} | {TITLES[division]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _format_cell(document: Mapping[str, Any], scorer: str, division: str, fraction: str) -> str:
    wanted = "scorers", scorer, division, fraction
    settings = document["settings"]
    (method,) = {s["method"] for s in settings if (s["group"], s["scorer"], s["division"], s["share"]) == wanted}
    by_seed = document["measured"][method]["turns"]
    # A context's questions share one compressed cache, so they are no independent samples.
    right = np.concatenate([np.mean(by_seed[seed]["right"], -1) for seed in sorted(by_seed)])
    low, high = score_interval(right)
    return f"{100 * right.mean():.0f} ({100 * low:.0f}–{100 * high:.0f})"
