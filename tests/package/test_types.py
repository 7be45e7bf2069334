"""Type checkers and editors see the public calls. The checker itself runs in `make check`, not here."""

from __future__ import annotations

import inspect

import kvjax
from kvjax.registry.loading import load_all
from tests.helpers import typecheck


def test_blocks_stand_on_the_lines_of_their_page(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.helpers.documents.ROOT", tmp_path)
    monkeypatch.setattr(typecheck, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("# A page\n\n```python\na = 1\n```\n\n```sh\nls\n```\n\n```python\nb = a\n```\n")
    lines = typecheck.code_of("page.md").splitlines()
    assert {i + 1: line for i, line in enumerate(lines) if line} == {4: "a = 1", 12: "b = a"}


def test_the_public_modules_are_among_those_that_are_checked():
    checked = {str(path.relative_to(typecheck.ROOT)) for path in typecheck.modules()}
    for name in (
        "",
        ".cache_ops",
        ".cachegen",
        ".eval",
        ".methods",
        ".method_api",
        ".reuse",
        ".speculative",
        ".testing",
    ):
        path = inspect.getsourcefile(__import__(f"kvjax{name}", fromlist=["x"]))
        assert path and path.removeprefix(f"{typecheck.ROOT}/") in checked, name


def test_editors_are_told_of_the_types():
    """`py.typed` is what makes a type checker read the annotations of an installed package (PEP 561)."""
    assert (typecheck.ROOT / "kvjax/py.typed").is_file()


def test_a_registered_function_shows_the_signature_and_the_docstring_of_its_function():
    for entry in load_all().values():
        assert inspect.signature(entry.make) == inspect.signature(inspect.unwrap(entry.make))
        assert entry.make.__doc__ == inspect.unwrap(entry.make).__doc__
    assert list(inspect.signature(kvjax.methods.snapkv).parameters)[:2] == ["budget", "window"]
