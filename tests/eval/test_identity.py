"""A run is not continued with what has changed under one name: an edited method, another table, other weights."""

from __future__ import annotations

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.given import write
from kvjax.core.types import KvjaxError
from kvjax.eval import Spec, compare
from kvjax.eval.run.identity import identity
from kvjax.methods.strings import named
from kvjax.parts import Method, Scorer, by_tokens, recipe, selecting
from kvjax.run.plan import specs
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
    module = {"Method": Method, "Scorer": Scorer, "selecting": selecting, "dataclass": dataclasses.dataclass}
    exec(text, module | {"__name__": "a_notebook"}, found := {})
    return found["method"]


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
