"""A run is not continued with what has changed under one name: an edited method, another table, other weights."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import re
import shutil
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.calibration.table_file import write
from kvjax.engine.plan import specs
from kvjax.errors import KvjaxError
from kvjax.eval import Spec, compare
from kvjax.eval.run import store
from kvjax.method_api import Method, Scorer, make_selection, register_method, token_scores
from kvjax.registry.loading import load_all
from kvjax.registry.method_hash import method_hash
from kvjax.registry.strings import parse, resolve
from kvjax.testing import toy_model
from tests.contract.cases import CASES


@dataclasses.dataclass(frozen=True)
class Signed(Scorer):
    """Tokens with large or small values matter; `note` is not compared."""

    sign: float = 1.0
    powers: tuple[int, ...] = (1, 2)
    note: str = dataclasses.field(default="", compare=False)

    def scores(self, block, observation, spec):
        return token_scores(self.sign * jnp.linalg.norm(block.v.astype(jnp.float32), axis=-1), block)


def signed_method(sign: float = 1.0, budget: int = 8, **more: Any) -> Method:
    return Method(select=make_selection(Signed(sign, **more), budget))


@pytest.mark.parametrize("method", ["full", "snapkv:budget=8 + kvcrush", "cake", "matryoshka:table=shipped"])
def test_a_method_of_kvjax_is_known_by_its_values(method):
    assert method_hash(parse(method)) == method_hash(parse(method))
    assert method_hash(parse(method)) != method_hash(parse(f"{method} + offload"))


def test_every_setting_of_every_method_is_told_apart():
    """Strings that make equal methods have one identity, and others another."""
    methods = {parse(text) for case in CASES for text in (case.small, case.lossless) if text}
    for entry in load_all().values():  # each parameter by itself, where the others may stay as they are
        for name, value in itertools.product(entry.parameters, (3, 7, 0.5, True, "layer")):
            with contextlib.suppress(KvjaxError, TypeError):
                methods.add(entry.make(**{name: value}))
    assert len(methods) > 300
    assert len({method_hash(method) for method in methods}) == len(methods)


def test_a_method_of_ones_own_is_known_by_all_its_fields():
    others = [signed_method(-1.0), signed_method(budget=9), signed_method(powers=(1, 3)), signed_method(note="another")]
    assert method_hash(signed_method()) == method_hash(signed_method())
    assert len({method_hash(method) for method in (signed_method(), *others)}) == 5


OWN = """
import dataclasses

from kvjax.method_api import Scorer


@dataclasses.dataclass(frozen=True)
class Base(Scorer):
    def factor(self):
        return {factor}


@dataclasses.dataclass(frozen=True)
class Own(Base):
    {doc}
    def scores(self, block, observation, spec):
        return {sign}block.k[..., 0] * self.factor()
"""


def test_a_method_of_ones_own_is_known_by_the_text_of_its_classes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def hash_of_source(**text: str) -> str:
        (tmp_path / "an_own_scorer.py").write_text(OWN.format(**{"factor": "1", "sign": "+", "doc": ""} | text))
        monkeypatch.delitem(sys.modules, "an_own_scorer", raising=False)
        importlib.invalidate_caches()
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        return method_hash(Method(select=make_selection(importlib.import_module("an_own_scorer").Own(), 8)))

    assert hash_of_source() == hash_of_source() != hash_of_source(sign="-")
    assert hash_of_source() != hash_of_source(factor="22")  # of what it inherits


def test_another_version_of_kvjax_is_another_identity(monkeypatch):
    before = method_hash(parse("full"))
    monkeypatch.setattr(kvjax, "__version__", "99.0", raising=False)
    assert method_hash(parse("full")) != before


def test_a_function_is_not_known_by_its_address():
    @dataclasses.dataclass(frozen=True)
    class Own(Scorer):
        by: Any

        def scores(self, block, observation, spec):
            return token_scores(self.by(block.v[..., 0]), block)

    def make_method() -> Method:
        return Method(select=make_selection(Own(lambda x: x), 8))

    assert method_hash(make_method()) == method_hash(make_method())


def test_a_table_is_known_by_its_content(tmp_path):
    (spec,), table = specs(toy_model(layers=1).config), tmp_path / "table"
    write(table, "bases", spec, [{"keys": np.ones((2, 2))}])
    copy = shutil.copy(table, tmp_path / "copy")
    first = method_hash(parse(f"matryoshka:table={table}"))
    assert method_hash(parse(f"matryoshka:table={copy}")) == first
    write(table, "bases", spec, [{"keys": np.zeros((2, 2))}])
    assert method_hash(parse(f"matryoshka:table={table}")) != first


def same_named_method() -> Method:
    """A method of a class that is made anew at each call, always under one name."""

    @dataclasses.dataclass(frozen=True)
    class Own(Scorer):
        def scores(self, block, observation, spec):
            return token_scores(block.v[..., 0], block)

    return Method(select=make_selection(Own(), 8))


def test_two_methods_of_one_name_are_not_put_in_one_table():
    with pytest.raises(KvjaxError, match="two different methods are both called"):
        resolve([same_named_method(), same_named_method()])
    same = signed_method()
    assert len(resolve([same, same, "full", "full"])) == 2


def test_a_run_is_continued_only_with_the_method_and_the_weights_that_began_it(tmp_path, clean_registry):
    model, spec = kvjax.load("testbed"), Spec(lengths=(64,), contexts=1)

    def run(model, method):
        return compare(model, [method], ["ppl"], spec, tmp_path / "run")

    def own_method(budget: int = 8) -> Method:
        return signed_method(1.0)

    register_method(own_method)
    before = run(model, "own_method")
    assert run(model, "own_method") == before

    records = tmp_path / "run" / store.RECORDS
    written = records.read_text()
    records.write_text(re.sub('"method_hash": "[0-9a-f]+"', '"method_hash": "0123456789abcdef"', written))
    assert len(store.read(tmp_path / "run")) == written.count("\n")
    with pytest.raises(KvjaxError, match="or the version of kvjax have changed. Choose another --out"):
        run(model, "own_method")
    records.write_text(written)

    def own_method(budget: int = 8) -> Method:
        return signed_method(-1.0)

    register_method(own_method)
    with pytest.raises(KvjaxError, match="'own_method' is not the method that was recorded under this name"):
        run(model, "own_method")
    other = dataclasses.replace(model, params=jax.tree.map(lambda x: x * 1.5, model.params))
    with pytest.raises(KvjaxError, match="holds another run: weights was"):
        run(other, "full")
