"""The code in docs/states.md runs as it stands there, from top to bottom; a toy model stands for the one in the box."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import kvjax
from kvjax.testing import toy_model

PAGE = Path(__file__).parents[1] / "docs" / "states.md"


def test_the_document_runs(monkeypatch):
    shipped = kvjax.load("testbed")
    toy = toy_model(layers=2, vocab_size=shipped.config.vocab_size)
    monkeypatch.setattr(kvjax, "load", lambda name: dataclasses.replace(toy, tokenizer=shipped.tokenizer))
    values: dict = {}
    for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        exec(compile(code, str(PAGE), "exec", dont_inherit=True), values)
    assert values["rows"].rows == 2 and values["edited"].rows == 1
    assert values["batch"].cache.layers[0].prefix.pos.shape[0] == 1
