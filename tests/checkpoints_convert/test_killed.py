"""Conversions that are killed at random moments: no partial checkpoint ever loads, and the next one succeeds."""

from __future__ import annotations

import multiprocessing
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

import kvjax
from checkpoints_convert.convert import convert, read
from kvjax.errors import KvjaxError
from kvjax.models import checkpoint
from tests.checkpoints_convert.gguf.gguf_files import write
from tests.fixtures import ROOT

KILLS = 20


def convert_and_kill_at(source: Path, out: Path, seconds: float, processes) -> None:
    """Converts in a process of its own, and kills it `seconds` after it has begun to write."""
    process = processes.Process(target=convert, args=(source, out))
    process.start()
    left = set(out.parent.glob(".kvjax-*"))
    while process.is_alive() and not set(out.parent.glob(".kvjax-*-*")) - left:
        time.sleep(0.001)
    process.join(seconds)
    process.kill()
    process.join()


def test_after_twenty_kills_nothing_has_loaded_that_is_not_whole(tmp_path):
    source, out = write(ROOT / "llama2", tmp_path / "model.gguf"), tmp_path / "out"
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["checkpoints_convert.convert"])
    start = time.perf_counter()
    convert_and_kill_at(source, tmp_path / "whole", 60, processes)
    whole = time.perf_counter() - start
    expected, interrupted = read(source)[1]["embedding"], 0
    for seconds in np.random.default_rng(0).uniform(0, whole, KILLS):
        shutil.rmtree(out, ignore_errors=True)
        convert_and_kill_at(source, out, seconds, processes)
        if out.exists():  # it was done before it was killed
            np.testing.assert_array_equal(checkpoint.restore(out)[1]["embedding"], expected)
            continue
        interrupted += 1
        with pytest.raises(KvjaxError, match="there is no checkpoint directory"):
            kvjax.load(out)
    assert interrupted
    shutil.rmtree(out, ignore_errors=True)
    convert(source, out)
    np.testing.assert_array_equal(checkpoint.restore(out)[1]["embedding"], expected)
