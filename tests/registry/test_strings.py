"""Method strings and composition."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest

from kvjax import Method, compose, methods, name_of, parse
from kvjax.cache.codecs.plain import Host, Plain
from kvjax.engine.plan import bind
from kvjax.errors import IncompatibleMethod, KvjaxError
from kvjax.method_api import register_method
from kvjax.methods.kcache import TopValues
from kvjax.registry.docstrings import parse_docstring
from kvjax.registry.loading import load_all
from kvjax.registry.registration import FAMILIES, OWN_FAMILY, REGISTRY
from kvjax.registry.strings import resolve, split_list
from kvjax.testing import toy_model


def test_a_string_is_the_call():
    assert parse("full") == methods.full()
    assert parse(" kcache : n=64 , device_layers=2 ") == methods.kcache(n=64, device_layers=2)
    assert parse("kcache:renormalise=true,granularity=kv") == methods.kcache(renormalise=True, granularity="kv")
    assert parse("kcache") == methods.kcache()
    assert split_list("full; kcache:n=64;") == ["full", "kcache:n=64"]


def test_the_papers_defaults():
    assert methods.kcache() == Method(v=Host(Plain()), read=TopValues(128), device_layers=1)


def test_a_plus_composes():
    both = parse("offload + kcache:n=8")
    assert both == Method(k=Host(Plain()), v=Host(Plain()), read=TopValues(8), device_layers=1)
    assert name_of(both) == "offload + kcache:n=8"
    assert compose(methods.full(), methods.kcache()) == methods.kcache() == compose(methods.kcache(), methods.full())


def test_compose_takes_strings_and_values_and_any_number_of_them():
    assert compose("snapkv:budget=8", "int4") == parse("snapkv:budget=8 + int4")
    three = compose("snapkv:budget=8", methods.int4(), "offload")
    assert three == parse("snapkv:budget=8 + int4 + offload") and name_of(three) == "snapkv:budget=8 + int4 + offload"
    assert compose("int4") == methods.int4()
    with pytest.raises(IncompatibleMethod, match="full \\+ kcache:n=8 and kcache:n=9 both fill the component `read`"):
        compose("full", "kcache:n=8", "kcache:n=9")
    with pytest.raises(KvjaxError, match="unknown method 'int5'"):
        compose("full", "int5")
    with pytest.raises(KvjaxError, match="int4 is a function that makes a method"):
        compose("full", methods.int4)


def test_two_fillings_of_one_slot_are_refused():
    with pytest.raises(IncompatibleMethod, match="kcache:n=8 and kcache:n=9 both fill the component `read`"):
        parse("kcache:n=8 + kcache:n=9")


def test_the_plan_keeps_the_first_layers_on_the_device():
    plan = bind(methods.kcache(n=8, device_layers=2), toy_model().config)
    assert tuple(layer.method for layer in plan) == (Method(), Method(), Method(v=Host(Plain()), read=TopValues(8)))
    assert dataclasses.replace(methods.kcache(), device_layers=0).traits.host


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kcach:n=3", "unknown method 'kcach'; did you mean 'kcache'"),
        ("zzz", "unknown method 'zzz'; `kvjax methods` lists"),
        ("kcache:m=3", "no parameter 'm'"),
        ("kcache:device_layer=1", "did you mean 'device_layers'"),
        ("kcache:n", "needs a value, as in n=128"),
        ("kcache:n=many", "'n' of kcache is int, got 'many' .default 128"),
        ("kcache:renormalise=maybe", "'renormalise' of kcache is bool"),
        ("full:n=3", "full has no parameter 'n'; it has none"),
        ("full +", "part 2 of 'full \\+' names no method, and one stands on each side of a `\\+`; write 'full'$"),
        ("snapkv+kivi+", "part 3 of .* names no method, .* write 'snapkv \\+ kivi'$"),
        ("+ snapkv", "part 1 of .* names no method, .* write 'snapkv'$"),
        ("snapkv++kivi", "part 2 of .* names no method, .* write 'snapkv \\+ kivi'$"),
        ("snapkv + + kivi:bits=4", "part 2 of .* names no method, .* write 'snapkv \\+ kivi:bits=4'$"),
        ("snapkv + :bits=4", "part 2 of .* names no method"),
        ("+", "part 1 of '\\+' names no method, .* write 'snapkv:budget=256'$"),
        ("", "no method in ''; write 'snapkv:budget=256'$"),
        (":budget=4", "no method in ':budget=4'"),
        (";", "no method in ';'; write 'snapkv:budget=256'$"),
        (" , ", "no method in ' , '; write 'snapkv:budget=256'$"),
        ("SNAPKV", "unknown method 'SNAPKV'; did you mean 'snapkv'"),
        ("H2O:heavy=4", "unknown method 'H2O'; did you mean 'h2o'"),
        ("kivi:BITS=4", "kivi has no parameter 'BITS'; did you mean 'bits'"),
        ("random:seed=9999999999", "seed must be at most 1,073,741,824, got 9999999999; use less$"),
        ("snapkv:budget", "'budget' of snapkv needs a value, as in budget=1024$"),
        ("snapkv:budget=", "'budget' of snapkv needs a value, as in budget=1024$"),
        ("snapkv:budget=4,budget=4", "'budget' of snapkv is given twice; leave one of them out$"),
        ("snapkv: budget=x, window=2", "'budget' of snapkv: a budget is a number of tokens.* got 'x'"),
        ("snapkv:window=x,", "'window' of snapkv is int, got 'x' .default 32.$"),
    ],
)
def test_a_wrong_string_names_the_nearest(text, says):
    with pytest.raises(KvjaxError, match=says):
        parse(text)


@pytest.mark.parametrize(
    "text", ["snapkv:", "snapkv:,", " snapkv : ", "snapkv:window=32,", "snapkv:,window=32", "snapkv: window = 32 , "]
)
def test_separators_that_separate_nothing_do_no_harm(text):
    assert parse(text) in (methods.snapkv(), methods.snapkv(window=32))
    assert list(resolve(f";{text};; full;")) == [text.strip(), "full"]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("full, snapkv", "full; snapkv"),
        ("full,snapkv,", "full; snapkv"),
        ("full snapkv", "full; snapkv"),
        ("full|snapkv:budget=64", "full; snapkv:budget=64"),
        ("full & snapkv", "full; snapkv"),
        ("full, snapkv + kivi, quest:budget=64,page=8", "full; snapkv + kivi; quest:budget=64,page=8"),
        ("snapkv:budget=64, kivi", "snapkv:budget=64; kivi"),
        ("snapkv:budget=64, kivi:bits=4", "snapkv:budget=64; kivi:bits=4"),
        ("snapkv:budget=64 kivi", "snapkv:budget=64; kivi"),
        ("snapkv budget=64", "snapkv:budget=64"),
        ("snapkv,budget=64,window=8", "snapkv:budget=64,window=8"),
        ("snapkv:budget=64:window=8", "snapkv:budget=64,window=8"),
        ("snapkv:window=8 budget=64", "snapkv:window=8,budget=64"),
        ("full\uff1bsnapkv\uff1abudget=64", "full; snapkv:budget=64"),  # separators of full width
        ("snapkv\uff0bkivi", "snapkv + kivi"),
    ],
)
def test_other_separators_are_named_with_the_string_that_is_meant(text, meant):
    problem = f"{text!r} is no method: `;` separates methods, .*; write {meant!r}$"
    for ask in (resolve, parse, lambda text: resolve([text]), lambda text: bind(text, toy_model().config)):
        with pytest.raises(KvjaxError, match=re.sub(r"([+|])", r"\\\1", problem)):
            ask(text)
    assert all(resolve(meant))


def test_several_methods_where_one_is_asked_for():
    with pytest.raises(KvjaxError, match="'full; snapkv:budget=64' are several methods, and one is asked for"):
        parse("full; snapkv:budget=64")
    with pytest.raises(KvjaxError, match="unknown method 'mine, yours'; .* `;` separates several"):
        resolve("mine, yours")


def test_no_method_is_an_error():
    with pytest.raises(KvjaxError, match="no method in"):
        split_list(" ; ")


def test_every_method_has_a_reference_and_a_summary():
    for r in load_all().values():
        assert r.docs.reference and r.docs.summary.endswith(".") and name_of(r.make()) == r.name


def test_every_method_of_kvjax_has_a_family_and_every_family_has_methods():
    assert {r.family for r in load_all().values()} == set(FAMILIES)
    assert all(line.endswith(".") and "\n" not in line for line in FAMILIES.values())


def test_the_files_of_methods_are_loaded_one_after_the_other():
    """A file that loaded the others while it registers its own would reverse their order, in which pages show them."""
    code = "from kvjax.registry.loading import load_all; print(*load_all())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[:4] == ["a2ats", "a_shape", "accumulated", "adakv"]


def test_a_method_of_ones_own_may_have_a_family_of_the_list_only(clean_registry):
    def idea() -> Method:
        return Method()

    register_method(idea)
    assert REGISTRY["idea"].family == OWN_FAMILY
    register_method(family="host memory")(idea)
    assert REGISTRY["idea"].family == "host memory"
    with pytest.raises(KvjaxError, match="no family 'mine' of methods; leave it out, or take one of exact, "):
        register_method(family="mine")(idea)


@pytest.mark.parametrize("text", ["cskv:table=runs+v2/t.st", "cskv:table=a,b/t.st", "cskv:table=runs/a,b.st"])
def test_a_path_that_is_cut_by_what_divides_methods_is_recognised(text):
    with pytest.raises(KvjaxError, match=".st' seems to be the end of a path, and a path in a method's string has no"):
        parse(text)
    with pytest.raises(KvjaxError, match="cskv has no parameter 'size'"):
        parse("cskv:table=runs/t.st,size=4")


@pytest.mark.parametrize("value", [None, 5, b"snapkv", ["snapkv"]])
def test_what_is_no_text_is_no_string_of_a_method(value):
    with pytest.raises(KvjaxError, match="a method's string is a text such as 'kcache:n=64', got "):
        parse(value)


def test_a_method_of_ones_own_needs_no_docstring(clean_registry):
    @register_method
    def silent(budget: int = 4) -> Method:
        return Method()

    assert load_all()["silent"].docs == parse_docstring("") and load_all()["silent"].meanings == {"budget": ""}


def test_a_method_that_no_string_could_name_is_refused(clean_registry):
    def no_type(budget=4) -> Method:
        return Method()

    def several(sizes: tuple[int, ...] = (1, 2)) -> Method:
        return Method()

    def snapkv(budget: int = 4) -> Method:
        return Method()

    def none(budget: int = 4) -> Method:
        """Nothing."""
        return None

    def sum_of() -> Method:
        return Method()

    sum_of.__name__ = "a+b"
    for make, says in [
        (no_type, "parameter 'budget' of no_type needs a type that can be made of a text, such as `budget: int = 4`"),
        (several, "parameter 'sizes' of several needs a type"),
        (snapkv, "kvjax has a method called snapkv .SnapKV.*; give yours another name"),
        (sum_of, "called by its function's name, and 'a.b' is no name of one"),
    ]:
        with pytest.raises(KvjaxError, match=says):
            register_method(make)
    with pytest.raises(KvjaxError, match="takes no source, got 'an idea'; write it into the docstring, below"):
        register_method("an idea")
    register_method(none)
    with pytest.raises(KvjaxError, match="none must return a method, and returned None"):
        parse("none")
    register_method(none)  # one's own may be written anew
