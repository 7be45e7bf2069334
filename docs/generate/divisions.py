"""The table of docs/results.md that compares divisions of a budget, from the records of a closed study."""

from __future__ import annotations

import json

import numpy as np

from experiments.equal_bytes import RESULTS
from kvjax.eval.page.intervals import score_interval

RECORDS = [RESULTS.with_name(f"divisions.{model}.json") for model in ("smollm2", "qwen")]
MODELS = ("SmolLM2", "Qwen")
FRACTIONS = ("1/4", "1/8")
DIVISIONS = ("equal", "within a layer", "over the model")
ROWS = (
    *(("repeated prompt (KVzip)", division) for division in DIVISIONS),
    *((scorer, d) for scorer in ("turned queries", "key difference", "window (SnapKV)") for d in DIVISIONS[::2]),
)


def divisions_table() -> str:
    """Later questions by scores and division, percent right with Wilson's intervals over contexts."""
    heads = [f"{model}, {fraction}" for model in MODELS for fraction in FRACTIONS]
    lines = [f"| scores | division | {' | '.join(heads)} |", "|---|---|" + "---:|" * len(heads)]
    documents = [json.loads(path.read_text()) for path in RECORDS]
    for scorer, division in ROWS:
        cells = [_cell(document, scorer, division, x) for document in documents for x in FRACTIONS]
        lines.append(f"| {scorer} | {'equal heads' if division == 'equal' else division} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(document: dict, scorer: str, division: str, fraction: str) -> str:
    (method,) = {
        s["method"]
        for s in document["settings"]
        if (s["group"], s["scorer"], s["division"], s["share"]) == ("scorers", scorer, division, fraction)
    }
    by_seed = document["measured"][method]["turns"]
    # A context's questions share one compressed cache, so they are no independent samples.
    right = np.concatenate([np.mean(by_seed[seed]["right"], -1) for seed in sorted(by_seed)])
    low, high = score_interval(right)
    return f"{100 * right.mean():.0f} ({100 * low:.0f}–{100 * high:.0f})"
