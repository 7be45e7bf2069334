"""JSON of other people, their names on a terminal, and files that are written whole."""

from __future__ import annotations

import pytest

from kvjax.errors import KvjaxError, escape_unprintable
from kvjax.utils import json_documents
from kvjax.utils.files import replace_atomically

DEEP = "[" * 100_000 + "]" * 100_000
LESS_DEEP = '{"a":' * 300 + "1" + "}" * 300  # which Python reads, and then cannot show or copy everywhere


@pytest.mark.parametrize("content", [DEEP, DEEP.encode(), LESS_DEEP, "{", b"\xff{}", "1" * 5000, ""])
def test_what_is_no_json_is_a_value_error(content):
    with pytest.raises(ValueError):
        json_documents.loads(content)
    with pytest.raises(KvjaxError, match="^here is not valid JSON .*; copy it again$"):
        json_documents.parse_object(content, "here")


def test_what_is_json_comes_back():
    brackets = [[[]] * 3 for _ in range(json_documents.MAX_DEPTH)]
    assert json_documents.loads(str(brackets)) == brackets
    assert json_documents.parse_object('{"ä": "[[["}'.encode(), "here") == {"ä": "[[["}
    with pytest.raises(KvjaxError, match="here does not hold a JSON object; do this"):
        json_documents.parse_object("[1]", "here", "do this")


def test_escape_codes_are_spelled_out():
    name = "\x1b[31mred\x07\n\u202e\x9b"
    assert escape_unprintable(name) == "\\x1b[31mred\\x07\\n\\u202e\\x9b"
    assert str(KvjaxError(f"{name}: naïve → 日本")) == "\\x1b[31mred\\x07\n\\u202e\\x9b: naïve → 日本"


def test_a_file_is_replaced_when_it_is_whole(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="full"), replace_atomically(path) as file:
        file.write(b"half of the n")
        raise OSError("full")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    with replace_atomically(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_replaced_leaves_the_others_of_its_folder(tmp_path):
    path, other = tmp_path / "file", tmp_path / "file.partial"
    other.write_bytes(b"mine")
    with replace_atomically(path) as file:
        file.write(b"new")
    with pytest.raises(OSError, match="full"), replace_atomically(path):
        raise OSError("full")
    assert other.read_bytes() == b"mine" and path.read_bytes() == b"new"
    assert set(tmp_path.iterdir()) == {path, other} and path.stat().st_mode == other.stat().st_mode


def test_where_no_file_can_be_made_the_path_is_named(tmp_path):
    for path, why in (
        (tmp_path / "none" / "file", r"\(No such file or directory\); give a path in a folder that exists"),
        (tmp_path, "which is a folder; give the path of a file in it"),
    ):
        with pytest.raises(KvjaxError, match=f"cannot write {path},? {why}") as e, replace_atomically(path):
            pass
        assert "partial" not in str(e.value) and not list(tmp_path.iterdir())
