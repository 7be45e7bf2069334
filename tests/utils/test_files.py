"""JSON of other people, their names on a terminal, and files that are written whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvjax.errors import KvjaxError, escape_unprintable
from kvjax.utils.files import (
    Busy,
    Unwritable,
    lock,
    make_folder,
    parse_json_object,
    read_text_file,
    replace_atomically,
    write_text,
)


@pytest.mark.parametrize("content", ["[" * 100_000 + "]" * 100_000, "{", b"\xff{}", "1" * 5000, "[1]"])
def test_what_is_no_json_object_is_named_with_the_remedy(content):
    with pytest.raises(KvjaxError, match="^here (is not valid JSON .*|does not hold a JSON object); do this$"):
        parse_json_object(content, "here", "do this")


def test_one_holder_of_a_lock_at_a_time(tmp_path):
    with lock(tmp_path / "lock", tmp_path):
        with pytest.raises(Busy, match="another process writes .*wait until"), lock(tmp_path / "lock", tmp_path):
            pass
    with pytest.raises(OSError, match="full"), lock(tmp_path / "lock", tmp_path):
        raise OSError("full")
    assert not list(tmp_path.iterdir())


def test_a_lock_that_cannot_be_made_is_not_held_by_another_process(tmp_path):
    with pytest.raises(Unwritable, match="cannot write into .*absent .No such file or directory.; give a folder"):
        lock(tmp_path / "absent" / "lock", tmp_path).__enter__()


def test_a_link_that_leads_nowhere_is_not_called_a_file(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("mine")
    for name, problem in (("link", "a link that leads nowhere"), ("loop", "a link"), ("file", "a file of that name")):
        with pytest.raises(Unwritable, match=f"cannot write into .*{name} .*{problem}"):
            make_folder(tmp_path / name)


def test_escape_codes_are_spelled_out():
    name = "\x1b[31mred\x07\n\u202e\x9b"
    assert escape_unprintable(name) == "\\x1b[31mred\\x07\\n\\u202e\\x9b"
    assert str(KvjaxError(f"{name}: naïve → 日本")) == "\\x1b[31mred\\x07\n\\u202e\\x9b: naïve → 日本"


def test_a_file_is_replaced_when_it_is_whole(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KvjaxError, match="cannot write .*full"), replace_atomically(path) as file:
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
    with pytest.raises(KvjaxError, match="cannot write .*full"), replace_atomically(path):
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


def test_a_text_that_does_not_fit_on_the_disk_leaves_the_one_of_before(tmp_path, monkeypatch):
    def raise_disk_full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = write_text(tmp_path / "page.html", "before")
    monkeypatch.setattr(os, "fsync", raise_disk_full)
    with pytest.raises(KvjaxError, match=r"cannot write .*page\.html \(No space left on device\)"):
        write_text(path, "after")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_a_text_goes_through_links_and_pipes(tmp_path):
    (tmp_path / "target").write_text("before")
    (tmp_path / "link").symlink_to("target")
    write_text(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "after"
    assert write_text(Path(os.devnull), "gone").is_char_device()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xef\xbb\xbfa", "a"),
        (b"\xef\xbb\xbf", ""),
        (b"\xef\xbb\xbf\xef\xbb\xbfa", "\ufeffa"),  # the first mark is the file's, the second the text's
        (b"a\xef\xbb\xbfb", "a\ufeffb"),
        (b"a\r\nb\rc\n", "a\r\nb\rc\n"),
    ],
)
def test_a_text_file_is_read_as_it_is_but_for_its_byte_order_mark(content, text, tmp_path):
    (tmp_path / "text").write_bytes(content)
    assert read_text_file(tmp_path / "text", "--text") == text


def test_a_file_in_another_encoding_is_named(tmp_path):
    (tmp_path / "text").write_bytes("a".encode("utf-16"))
    with pytest.raises(KvjaxError, match="cannot read --text .*; give a UTF-8 text file"):
        read_text_file(tmp_path / "text", "--text")
    with pytest.raises(KvjaxError, match=r"cannot read --text .*absent \(No such file or directory\); give a UTF-8"):
        read_text_file(tmp_path / "absent", "--text")
    with pytest.raises(KvjaxError, match="cannot read --text - .*; give a UTF-8 text file"):
        read_text_file(Path("-"), "--text", b"\xff")
