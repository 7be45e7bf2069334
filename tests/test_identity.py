"""A run is not continued with what has changed under one name: an edited method, another table, other weights."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.given import write
from kvjax.core.types import KvjaxError
from kvjax.engine.plan import specs
from kvjax.eval import Spec, compare
from kvjax.methods.identity import identity, identity_now
from kvjax.methods.strings import named
from kvjax.parts import Method, Scorer, by_tokens, recipe, selecting
from kvjax.testing import toy_model


def loud(sign: float) -> Method:
    """A method whose scorer has a value of the function that made it, and no field."""

    @dataclasses.dataclass(frozen=True)
    class Loud(Scorer):
        def scores(self, block, seen, spec):
            return by_tokens(sign * jnp.linalg.norm(block.v.astype(jnp.float32), axis=-1), block)

    return Method(select=selecting(Loud(), 8))


def of_text(text: str) -> Method:
    """The method that a piece of code calls `method`."""
    known = {"Method": Method, "Scorer": Scorer, "selecting": selecting, "dataclass": dataclasses.dataclass}
    exec(text, known := known | {"__name__": "__main__"})
    return known["method"]


CODE = """
@dataclass(frozen=True)
class Own(Scorer):
    {field}
    def scores(self, block, seen, spec):
        return {body}
method = Method(select=selecting(Own(), 8))
"""


@pytest.mark.parametrize("method", ["full", "snapkv:budget=8 + kvcrush", "cake", "matryoshka:table=shipped"])
def test_a_method_of_kvjax_is_known_by_its_values(method):
    assert identity(kvjax.parse(method)) == identity(kvjax.parse(method))
    assert identity(kvjax.parse(method)) != identity(kvjax.parse(f"{method} + offload"))


def test_a_method_of_ones_own_is_known_by_its_code():
    first = identity(of_text(CODE.format(field="factor = 1", body="block.k[..., 0] * self.factor")))
    assert first == identity(of_text(CODE.format(field="factor = 1", body="block.k[..., 0] * self.factor")))
    for field, body in [
        ("factor = 2", "block.k[..., 0] * self.factor"),
        ("factor = 1", "block.v[..., 0] * self.factor"),
        ("factor = 1", "block.k[..., 1] * self.factor"),
        ("factor = 1; queries = 4", "block.k[..., 0] * self.factor"),
    ]:
        assert identity(of_text(CODE.format(field=field, body=body))) != first
    assert identity(loud(1.0)) == identity(loud(1.0)) != identity(loud(-1.0))


GLOBAL = """
{value}
@dataclass(frozen=True)
class Own(Scorer):
    def scores(self, block, seen, spec):
        return {read}
method = Method(select=selecting(Own(), 8))
"""


@pytest.mark.parametrize(
    ("one", "other", "read"),
    [
        ("x = {'sign': 1}", "x = {'sign': 2}", "x['sign']"),
        ("x = [1, (2, 3)]", "x = [1, (2, 4)]", "x[1]"),
        ("import numpy; x = numpy.arange(3)", "import numpy; x = numpy.arange(4)", "x"),
    ],
)
def test_a_method_of_ones_own_is_known_by_the_variables_of_its_module(one, other, read):
    first, second = (identity(of_text(GLOBAL.format(value=value, read=read))) for value in (one, other))
    assert first == identity(of_text(GLOBAL.format(value=one, read=read)))
    assert first != second


def test_a_method_of_ones_own_is_known_by_modules_that_help_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def told(body: str, text: str) -> str:
        (tmp_path / "a_helper.py").write_text(f"def helped(x):\n    return {body}\n")
        monkeypatch.delitem(sys.modules, "a_helper", raising=False)
        importlib.invalidate_caches()
        return identity(of_text(text))

    for value, read in (("from a_helper import helped", "helped(1)"), ("import a_helper", "a_helper.helped(1)")):
        text = GLOBAL.format(value=value, read=read)
        assert told("x + 1", text) == told("x + 1", text) != told("x - 100", text)


def test_a_method_of_ones_own_is_known_by_all_its_fields():
    fields = "sign: float = __import__('dataclasses').field(default={}, compare=False)"
    one, other = (CODE.format(field=fields.format(n), body="self.sign") for n in (1.0, 2.0))
    assert identity(of_text(one)) == identity(of_text(one)) != identity(of_text(other))
    tuples = [CODE.format(field=f"powers = (1, {n})", body="self.powers") for n in (2, 3)]
    assert identity(of_text(tuples[0])) != identity(of_text(tuples[1]))


SIGN = 1.0


@dataclasses.dataclass(frozen=True)
class Signed(Scorer):
    """Tokens with large or small values matter, as a variable of this module says."""

    def scores(self, block, seen, spec):
        return by_tokens(SIGN * jnp.linalg.norm(block.v.astype(jnp.float32), axis=-1), block)


def test_programs_of_another_method_of_the_same_name_are_forgotten(monkeypatch):
    """A compiled program holds what the variable was."""
    model, method = toy_model(layers=1), Method(select=selecting(Signed(), 6))

    def kept() -> list[int]:
        identity_now(method)
        ids = np.arange(20)[None]
        return kvjax.read(model, ids, method).kept_positions()[0][0][0].tolist()

    large = kept()
    monkeypatch.setattr(sys.modules[__name__], "SIGN", -1.0)
    assert not set(kept()) & set(large)


def test_a_table_is_known_by_its_content(tmp_path):
    (spec,), table = specs(toy_model(layers=1).config), tmp_path / "table"
    write(table, "bases", spec, [{"keys": np.ones((2, 2))}])
    copy = shutil.copy(table, tmp_path / "copy")
    first = identity(kvjax.parse(f"matryoshka:table={table}"))
    assert identity(kvjax.parse(f"matryoshka:table={copy}")) == first
    write(table, "bases", spec, [{"keys": np.zeros((2, 2))}])
    assert identity(kvjax.parse(f"matryoshka:table={table}")) != first


def test_two_methods_of_one_name_are_not_put_in_one_table():
    with pytest.raises(KvjaxError, match="two different methods are both called"):
        named([loud(1.0), loud(-1.0)])
    same = loud(1.0)
    assert len(named([same, same, "full", "full"])) == 2


def test_a_run_is_continued_only_with_the_method_and_the_weights_that_began_it(tmp_path, clean_catalogue):
    model, spec = kvjax.load("testbed"), Spec(lengths=(64,), contexts=1)

    def run(model, method):
        return compare(model, [method], ["ppl"], spec, tmp_path / "run")

    def mine(budget: int = 8) -> Method:
        return loud(1.0)

    recipe("an idea of mine")(mine)
    before = run(model, "mine")
    assert run(model, "mine") == before

    def mine(budget: int = 8) -> Method:
        return loud(-1.0)

    recipe("a better idea")(mine)
    with pytest.raises(KvjaxError, match="'mine' is not the method that was recorded under this name"):
        run(model, "mine")
    other = dataclasses.replace(model, params=jax.tree.map(lambda x: x * 1.5, model.params))
    with pytest.raises(KvjaxError, match="holds another run: weights was"):
        run(other, "full")
