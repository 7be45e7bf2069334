"""Errors about a method's string speak of its parameters, and never of the components that they become."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import warnings

import pytest

from kvjax import method_api as kv
from kvjax.engine.plan import bind
from kvjax.errors import KvjaxError
from kvjax.generation.memory_plan import planned_bytes
from kvjax.models.model import Model
from kvjax.registry.loading import load_all
from kvjax.registry.strings import parse
from kvjax.testing import toy_model
from kvjax.utils.parameter_types import PositiveInt, check_fields

METHODS = sorted(load_all())
VALUES = {
    int: ("-1", "0", "1", "2", "100000", "1073741824"),
    float: ("-1", "0", "2", "1e9", "nan", "inf"),
    str: ("nonsense", "chunk0", "page3"),
    bool: ("maybe",),
}
BUDGETS = ("-1", "0", "1", "2", "0%", "200%", "100000", "nonsense")


@functools.cache
def make_model() -> Model:
    return toy_model(layers=1)


def find_errors(name: str) -> dict[str, str]:
    """The errors of a method's strings with one strange value each, by string."""
    errors = {}
    for key, parameter in load_all()[name].parameters.items():
        for value in VALUES.get(parameter.annotation, BUDGETS):
            string = f"{name}:{key}={value}"
            try:
                bind(string, make_model().config)
                if key == "budget":  # what a prompt shows first; other parameters take too long for all methods
                    planned_bytes(string, make_model(), 64)
            except KvjaxError as e:
                errors[string] = str(e)
    return errors


def name_classes() -> set[str]:
    """The classes of components, without the names that methods have in their papers."""
    own = [module for name, module in sys.modules.items() if name.startswith(("kvjax.cache.", "kvjax.methods."))]
    classes = {x for module in own for x in vars(module).values() if inspect.isclass(x) and dataclasses.is_dataclass(x)}
    published = {name.replace("_", "") for name in METHODS}
    return {x.__name__ for x in classes if x.__name__.lower() not in published}


@pytest.mark.parametrize("name", METHODS)
def test_an_error_names_parameters_of_the_string_and_no_component(name):
    known, classes = load_all()[name].parameters, name_classes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        errors = find_errors(name)
    for string, error in errors.items():
        # Not what is quoted, as in "compose it with one, as in 'snapkv:budget=256 + cam'", nor the sizes of a model.
        text = re.sub(r"Elastic Cache|(?<!\w)'[^']*'|for a model of [^;]*|table=\.\.\.", "", error)
        assert not classes & set(re.findall(r"\w+", text)), (string, error)
        named = re.findall(r"(\w+)(?:=|[<>]=)", text) + re.findall(r"^\w+: (\w+) must", text)
        assert set(named) <= known.keys(), (string, error)
        assert re.search(r"; |use |give |got |as in |must ", error), (string, error)


def test_every_kind_of_parameter_is_tried():
    assert len([name for name in METHODS if find_errors(name)]) > 60


@pytest.mark.parametrize(
    ("string", "says"),
    [
        ("snapkv:budget=4", r"^budget=4 .* less than the 32 tokens .* window=32; give budget>=32, or window<=4$"),
        ("snapkv:budget=4,window=8", r"^budget=4 .* window=8; give budget>=8, or window<=4$"),
        ("snapkv:budget=4,sinks=2,window=8", r"sinks=2, window=8; give budget>=10, or sinks \+ window<=4$"),
        ("keydiff:budget=4,recent=8", r"recent=8; give budget>=8, or recent<=4$"),
        ("ems:budget=4", r"window=32; give budget>=32, or window<=4$"),
        ("snapkv:budget=4 + kivi:group=8", r"window=32; give budget>=32, or window<=4$"),
        ("pyramidkv:budget=4", r"window of 8 tokens .* got budget=4; use at least 9"),
        ("kvzip:budget=4", r"^budget=4 .*\(sinks=4\).* give budget>=5, or protect fewer"),
        ("snapkv:kernel=2", r"^snapkv: kernel must be odd and at least 1, got 2; use 7, the default"),
        ("chunkkv:chunk=0", r"^chunkkv: chunk must be at least 1, got 0; use 10, the default"),
        ("mikv:low=-1", r"^mikv: low must be one of 1, 2, 3, 4, 8, got -1"),
        ("snapkv:unit=chunk0", r"^unit must be 'token', 'chunk' or 'page' with a size, .* got 'chunk0'"),
        ("snapkv:sinks=-1,window=8", r"^snapkv: sinks must be 0 or more, got -1"),
    ],
)
def test_given_values(string, says):
    with pytest.raises(KvjaxError) as e:
        planned_bytes(string, make_model(), 64)
    assert re.search(says, str(e.value)), e.value
    assert not re.search("Selection|Uniform|WindowAttention|recents", str(e.value))


def test_the_parameter_of_a_users_method_is_named_by_its_value(clean_registry):
    @dataclasses.dataclass(frozen=True)
    class Inner(kv.Scorer):
        width: PositiveInt = 3
        __post_init__ = check_fields

    @kv.register_method
    def mine(budget: int = 8, size: int = 3, other: int = 0) -> kv.Method:
        """Keeps what is wide."""
        return kv.Method(select=kv.make_selection(Inner(size), budget))

    with pytest.raises(KvjaxError, match="^mine: size must be at least 1, got 0; use 3, the default$"):
        parse("mine:size=0")
    with pytest.raises(KvjaxError, match="^mine: size must be at least 1, got -2; use 3, the default$"):
        mine(8, -2)
    with pytest.raises(KvjaxError, match="^Inner: width must be at least 1, got 0; use 3, the default$"):
        Inner(0)
