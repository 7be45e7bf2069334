"""`kvjax check NAME` tries every registered method at its defaults, and what users register, with true causes."""

from __future__ import annotations

import pytest

import kvjax
from kvjax import KvjaxError, cli
from kvjax.cache.protocol import num_layer_slots
from kvjax.engine.plan import bind
from kvjax.method_api import Method, TokenBudget, make_selection, register_method
from kvjax.registry.loading import load_all
from kvjax.testing import BrokenRule, check_method, toy_model
from kvjax.testing.preparation import prepare
from kvjax.testing.rules import NUM_STATIC_RULES, RULES, ModelRun
from tests.contract.test_check_method import Norms

LENGTH = 90  # the default of `kvjax check`


@pytest.fixture(scope="module")
def model():
    return toy_model(layers=1)


def number_of_slots(method, model) -> list[int]:
    return [num_layer_slots(layer, (LENGTH,), LENGTH) for layer in bind(method, model.config)]


@pytest.mark.parametrize("name", sorted(load_all()))
def test_every_method_is_prepared_at_its_defaults(name):
    """It fits the model that is chosen for it, and something leaves the cache or lies beyond the exact window."""
    _, method, twin, model, _ = prepare(name, None, LENGTH)
    run = ModelRun(method, [], [], model, twin)
    assert not [found for rule in RULES[:NUM_STATIC_RULES] if (found := rule.find(run))]
    # A side store holds what the main slots lack, and SimLayerKV's layers have slots for all until they are measured.
    if method.traits.evicts and not method.side_store and name != "simlayerkv":
        assert min(number_of_slots(method, model)) < LENGTH
    for codec in (method.k, method.v):
        residual = getattr(codec, "residual", 0)
        assert residual < LENGTH


@pytest.mark.parametrize(
    ("name", "checked"),
    [
        ("snapkv", "snapkv:budget=32,window=1"),
        ("snapkv:budget=80", "snapkv:budget=80"),
        ("snapkv:budget=25%", "snapkv:budget=25%"),
        ("random:budget=256,seed=99", "random:budget=32,seed=99"),
        ("h2o", "h2o:heavy=16,recent=16"),
        ("kivi", "kivi:group=8,residual=32"),
        ("criticalkv:share=0.25", "snapkv:budget=32,window=2 + criticalkv:share=0.25"),
        ("infllm", "infllm:block=8,sinks=8,local=32,topk=4,chunk=16"),
        ("full", "full"),
    ],
)
def test_sizes_beyond_the_prompt_are_divided(name, checked):
    assert prepare(name, None, LENGTH).name == checked


def test_a_method_that_the_toy_model_does_not_suit_is_checked_on_the_testbed_model():
    preparation = prepare("bfp", None, LENGTH)
    assert preparation.model.config == kvjax.load("testbed").config
    assert "the toy model does not suit it" in preparation.notes[0] and "block 32" in preparation.notes[0]


def test_a_method_that_the_users_model_does_not_suit_is_no_broken_rule(model):
    with pytest.raises(KvjaxError, match="block 32 does not divide the head size 8") as error:
        check_method("bfp", model)
    assert not isinstance(error.value, BrokenRule)


@pytest.mark.parametrize("name", ["kivi", "value_norms", "cam"])
def test_the_report_says_what_was_changed(name, model, clean_registry):
    @register_method
    def value_norms(budget: TokenBudget = 256) -> Method:
        return Method(select=make_selection(Norms(), budget))

    report = check_method(name, model, length=20)
    assert report.method != name and len(report.notes) == 1 and report.method in report.notes[0]
    assert str(report).startswith(report.notes[0]) and "--length" in report.notes[0]


def test_the_parameters_of_users_methods_are_found_by_type_and_by_size(clean_registry):
    @register_method
    def kept(tokens: TokenBudget = 256, width: int = 4) -> Method:
        return Method(select=make_selection(Norms(), tokens))

    @register_method
    def largest(last: int = 1024, seed: int = 1234) -> Method:
        return Method(select=make_selection(Norms(), last))

    assert prepare("kept", None, LENGTH).name == "kept:tokens=32"
    assert prepare("largest", None, LENGTH).name == "largest:last=32"


METHODS = """
import dataclasses, functools, random
import jax.numpy as jnp
from kvjax.method_api import Method, Scorer, TokenBudget, make_selection, register_method, token_scores

class Plain(Scorer):
    def scores(self, block, observation, spec):
        return token_scores(jnp.linalg.norm(block.v, axis=-1), block)

@dataclasses.dataclass
class Thawed(Plain):
    power: float = 1.0

@dataclasses.dataclass(frozen=True, eq=False)
class Unequal(Plain):
    power: float = 1.0

@dataclasses.dataclass(frozen=True)
class Frozen(Plain):
    power: object = 1.0

SCORERS = {
    "plain": Plain, "thawed": Thawed, "unequal": Unequal, "a_list": lambda: Frozen([1]), "a_dict": lambda: Frozen({}),
    "an_array": lambda: Frozen(jnp.ones(2)), "nan": lambda: Frozen(float("nan")),
    "drawn": lambda: Frozen(random.random()),
    "function": lambda: Frozen(lambda x: x),
    "partial": lambda: Frozen(functools.partial(abs)),
}
def register(name):
    def method(budget: TokenBudget = 256) -> Method:
        return Method(select=make_selection(SCORERS[name](), budget))
    method.__name__ = name
    register_method(method)

for name in SCORERS:
    register(name)
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("plain", "method.select.scorer is a Plain that is equal to itself alone"),
        ("thawed", "select.scorer is a Thawed, which must be a @dataclasses.dataclass(frozen=True)"),
        ("unequal", "without `eq=False`"),
        ("a_list", "select.scorer.power is a list, which has no hash"),
        ("a_dict", "select.scorer.power is a dict, which has no hash"),
        ("an_array", "which has no hash: a tuple has one; arrays go into a table"),
        ("nan", "method.select.scorer.power is NaN"),
        ("drawn", "in the same method made again. Make it of the method's parameters alone"),
        ("function", "Define it with `def` at the top of the file"),
        ("partial", "method.select.scorer.power is a partial that is equal to itself alone"),
    ],
)
def test_equal_strings_that_make_unequal_methods_are_named_by_the_command(name, says, tmp_path, capsys, clean_registry):
    file = tmp_path / "mine.py"
    file.write_text(METHODS)
    status = cli.main(["check", "--load", str(file), name])
    assert status in (1, 2) and says in capsys.readouterr().err
