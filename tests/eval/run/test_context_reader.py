"""Contexts of evaluation: read once for many methods where memory has room, and the same as without that."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import kvjax
from kvjax.eval.run import context_reader
from kvjax.eval.run.context_reader import ContextReader
from kvjax.testing import toy_model
from tests.fixtures import load_family

ROWS = [np.arange(1, 40, dtype=np.int32), np.arange(50, 61, dtype=np.int32)]
METHODS = (
    "full",
    "snapkv:budget=8,window=4",
    "kvzip:budget=8",
    "h2o:heavy=4,recent=4",
    "infllm:local=8,sinks=2,chunk=8,block=4,topk=2",
)


@functools.cache
def make_model() -> kvjax.Model:
    return toy_model()


@pytest.fixture
def exact_reads(monkeypatch):
    """The number of sequences that each call read exactly."""
    counts, read_exactly = [], context_reader.read_exactly

    def read_and_count(model, rows, **more):
        counts.append(len(rows))
        return read_exactly(model, rows, **more)

    monkeypatch.setattr(context_reader, "read_exactly", read_and_count)
    return counts


@pytest.mark.parametrize("method", METHODS)
def test_it_reads_as_read_does(method):
    expected = kvjax.read(make_model(), ROWS, method, headroom=20, width=64)
    context = ContextReader(make_model()).read(ROWS, method, headroom_tokens=20, width=64)
    np.testing.assert_allclose(context.last_logits, expected.last_logits, atol=1e-5)
    assert context.cache.capacity == expected.cache.capacity and context.bytes == expected.bytes
    for a, b in zip(context.kept_positions(), expected.kept_positions(), strict=True):
        for row, other in zip(a, b, strict=True):
            assert [head.tolist() for head in row] == [head.tolist() for head in other]
    questions = [[7, 8], [9]]
    assert context.ask(questions, max_new_tokens=4).tokens == expected.ask(questions, max_new_tokens=4).tokens


def test_rows_go_through_the_model_once(exact_reads):
    reads = ContextReader(make_model())
    for method in ("full", "snapkv:budget=8,window=4", "kivi:bits=2,group=8,residual=8"):
        reads.read(ROWS, method, headroom_tokens=20, width=64)
        reads.read(ROWS[:1], method, headroom_tokens=20, width=64)
    assert exact_reads == [2, 1]


def test_the_oldest_rows_go_where_memory_is_short(exact_reads, monkeypatch):
    reads = ContextReader(make_model())
    monkeypatch.setattr(reads, "_max_exact_bytes", lambda: 2 * reads._exact_bytes(1, 64))
    for row in (0, 1, 0, 1, 0):
        reads.read(ROWS[row : row + 1], "full", headroom_tokens=20, width=64)
    assert exact_reads == [1, 1]
    reads.read([ROWS[0][:5]], "full", headroom_tokens=20, width=64)
    reads.read(ROWS[1:], "full", headroom_tokens=20, width=64)
    assert exact_reads == [1, 1, 1]
    reads.read(ROWS[:1], "full", headroom_tokens=20, width=64)
    assert exact_reads == [1, 1, 1, 1]


def test_rows_too_large_to_be_kept_are_read_by_each_method(exact_reads, monkeypatch):
    reads = ContextReader(make_model())
    monkeypatch.setattr(reads, "_max_exact_bytes", lambda: reads._exact_bytes(2, 64) - 1)
    context = reads.read(ROWS, "full", headroom_tokens=20, width=64)
    assert not exact_reads and context.cache.length.tolist() == [39, 11]


@pytest.mark.parametrize("family", ["gemma4_shared", "qwen3_5"])
def test_models_whose_layers_lack_keys_and_values_are_read_by_each_method(exact_reads, monkeypatch, family):
    model = kvjax.random_model(load_family(family)[0])
    monkeypatch.setattr(context_reader, "read", lambda model, contexts, method, **sizes: (method, sizes))
    context = ContextReader(model).read([row % 32 for row in ROWS], "full", headroom_tokens=20, width=64)
    assert not exact_reads and context == ("full", {"headroom": 20, "width": 64})
