"""A saved context continues as if it had never left memory; another model or method is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import KvjaxError
from kvjax.core import memory
from kvjax.generation import archive, save
from kvjax.method_api import load_methods
from kvjax.testing import toy_model

RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(0, 97, n).tolist() for n in (40, 23)]
QUESTIONS = [RNG.integers(0, 97, n).tolist() for n in (3, 5)]
METHODS = (
    "full",
    "snapkv:budget=16,window=4 + kvcrush",
    "kivi:bits=2,group=8,residual=8",
    "kcache:n=8,device_layers=1",
    "specache:group=8,residual=8,topk=8",
    "h2o:heavy=8,recent=8",
)


@functools.cache
def make_model() -> kvjax.Model:
    return toy_model(layers=2)


@pytest.mark.parametrize("method", METHODS)
def test_it_answers_as_before(tmp_path, method):
    context = kvjax.read(make_model(), DOCUMENTS, method, headroom=32)
    resumed = kvjax.resume(make_model(), context.save(tmp_path / "context"))
    assert jax.tree.structure(resumed.cache) == jax.tree.structure(context.cache)
    for x, y in zip(jax.tree.leaves(resumed.cache), jax.tree.leaves(context.cache), strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.dtype == y.dtype and memory.memory_kind(x) == memory.memory_kind(y)
    assert resumed.bytes == context.bytes and resumed.method == context.method
    answers = (c.ask(QUESTIONS, max_new_tokens=4).tokens for c in (context, resumed))
    assert next(answers) == next(answers)
    assert [p.name for p in tmp_path.iterdir()] == ["context"]


def test_sixteen_bits_come_back_bit_by_bit(tmp_path):
    half = kvjax.random_model(make_model().config, dtype=jnp.bfloat16)
    context = kvjax.read(half, DOCUMENTS, "offload", headroom=32).feed(QUESTIONS)
    resumed = kvjax.resume(half, context.save(tmp_path / "context"))
    for x, y in zip(jax.tree.leaves(resumed.cache), jax.tree.leaves(context.cache), strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(resumed.last_logits, context.last_logits)


def test_another_model_or_method_is_refused(tmp_path):
    path = kvjax.read(make_model(), DOCUMENTS, "snapkv:budget=16,window=4", headroom=32).save(tmp_path / "context")
    with pytest.raises(KvjaxError, match="another configuration or dtype than random; load that model"):
        kvjax.resume(toy_model(layers=3), path)
    with pytest.raises(KvjaxError, match="other weights than random; load that model"):
        kvjax.resume(toy_model(seed=1, layers=2), path)
    with pytest.raises(KvjaxError, match="saved under snapkv:budget=16,window=4 and not under full"):
        kvjax.resume(make_model(), path, "full")
    assert kvjax.resume(make_model(), path, kvjax.methods.snapkv(budget=16, window=4)).num_sequences == 2


def test_a_method_without_a_string_has_to_be_passed(tmp_path):
    own = dataclasses.replace(kvjax.methods.kcache(n=8), device_layers=2)
    path = kvjax.read(make_model(), DOCUMENTS, own, headroom=32).save(tmp_path / "context")
    with pytest.raises(KvjaxError, match=r"Method\(.*which no string makes; pass it as method="):
        kvjax.resume(make_model(), path)
    with pytest.raises(KvjaxError, match="and not under kcache:n=9"):
        kvjax.resume(make_model(), path, "kcache:n=9")
    assert kvjax.resume(make_model(), path, own).method == own


OWN_METHOD_SOURCE = """
import dataclasses

import jax.numpy as jnp

from kvjax.method_api import Method, Scorer, token_scores, register_method, make_selection


@dataclasses.dataclass(frozen=True)
class Own(Scorer):
    def scores(self, block, observation, spec):
        return token_scores({sign}jnp.linalg.norm(block.v.astype(jnp.float32), axis=-1), block)


@register_method
def own(budget: int = 16) -> Method:
    return Method(select=make_selection(Own(), budget))
"""


def test_a_method_of_ones_own_whose_code_has_changed_is_refused(tmp_path, clean_registry):
    file = tmp_path / "own_of_a_saved_context.py"
    file.write_text(OWN_METHOD_SOURCE.format(sign="+"))
    load_methods(file)
    path = kvjax.read(make_model(), DOCUMENTS, "own", headroom=32).save(tmp_path / "context")
    assert kvjax.resume(make_model(), path).num_sequences == len(DOCUMENTS)
    file.write_text(OWN_METHOD_SOURCE.format(sign="-"))
    load_methods(file)
    with pytest.raises(KvjaxError, match="when its code or values were others; read the documents again"):
        kvjax.resume(make_model(), path)


def test_what_is_no_saved_context_says_so(tmp_path):
    path = kvjax.read(make_model(), DOCUMENTS, "full", headroom=32).save(tmp_path / "context")
    content = path.read_bytes()
    for damaged in (b"", b"no archive", content[: len(content) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(KvjaxError, match=r"a damaged one \(File is not a zip file\); save it again"):
            kvjax.resume(make_model(), path)
    for unreadable in (tmp_path / "none", tmp_path):
        with pytest.raises(
            KvjaxError, match=rf"cannot read {unreadable} \(.*directory\); give the path of a file that"
        ):
            kvjax.resume(make_model(), unreadable)


def test_a_link_stays_and_what_is_no_file_is_refused(tmp_path):
    context = kvjax.read(make_model(), DOCUMENTS, "full", headroom=32)
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    context.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and kvjax.resume(make_model(), tmp_path / "target").num_sequences == len(
        DOCUMENTS
    )
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(KvjaxError, match="pipe, which is a device or pipe; give the path of a file"):
        context.save(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_a_later_version_is_refused(tmp_path):
    header = {"format": save.FORMAT.name, "version": save.FORMAT.version + 1}
    with (tmp_path / "context").open("wb") as file:
        np.savez(file, **{archive.HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8)})
    with pytest.raises(KvjaxError, match="version 4, and this kvjax reads version 3 of 'kvjax-context'"):
        kvjax.resume(make_model(), tmp_path / "context")
