"""The folder of compiled programs that test runs share."""

from __future__ import annotations

import os

from tests.helpers import program_cache


def test_folder_is_outside_of_the_clone_and_can_be_chosen(tmp_path, monkeypatch):
    monkeypatch.setenv("KVJAX_TEST_CACHE", str(tmp_path))
    chosen = program_cache.folder()
    assert chosen.parent == tmp_path
    monkeypatch.delenv("KVJAX_TEST_CACHE")
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "user"))
    assert program_cache.folder() == tmp_path / "user" / "tests" / chosen.name


def test_the_oldest_programs_leave_first(tmp_path):
    for i in range(4):
        (tmp_path / f"program{i}").write_bytes(bytes(10))
        os.utime(tmp_path / f"program{i}", (100 - i, 100 - i))
    program_cache.remove_oldest(tmp_path, max_bytes=25)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["program0", "program1"]
    program_cache.remove_oldest(tmp_path / "absent")
