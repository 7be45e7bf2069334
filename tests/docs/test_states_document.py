"""The code in docs/states.md runs as it stands there, from top to bottom; a toy model stands for the one in the box."""

from __future__ import annotations

from tests.helpers.documents import run_page


def test_the_document_runs(monkeypatch, tmp_path):
    values = run_page("docs/states.md", monkeypatch, tmp_path)
    assert values["nested"].num_sequences == 2 and values["edited"].num_sequences == 1
    assert values["batch"].cache.layers[0].prefix.pos.shape[0] == 1
