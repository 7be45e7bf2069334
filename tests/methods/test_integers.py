"""Numbers in methods: every integer gives a method that can be planned, or an error that names it."""

from __future__ import annotations

import pytest

from kvjax import Config, KvjaxError, methods, parse, planned_bytes
from kvjax.cache.eviction.budgets import TokenBudget
from kvjax.registry.loading import load_all
from kvjax.registry.registration import MAX_NUMBER

CONFIG = Config.llama(97, 32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=48)
INTEGERS = [(r, n) for r in load_all().values() for n, p in r.parameters.items() if p.annotation in (int, TokenBudget)]


@pytest.mark.parametrize("value", [2**31, 2**63, 2**64, -(2**31)])
def test_larger_integers_than_a_device_has_are_refused_by_name(value):
    for entry, name in INTEGERS:
        with pytest.raises(KvjaxError, match=f"^{entry.name}: {name} must be at most 1,073,741,824, got"):
            parse(f"{entry.name}:{name}={value}")
        with pytest.raises(KvjaxError, match=f"^{entry.name}: {name} must be at most"):
            entry.make(**{name: value})


@pytest.mark.parametrize("value", [MAX_NUMBER, 0, -1])
def test_others_make_a_method_that_can_be_planned_or_are_refused(value):
    for entry, name in INTEGERS:
        try:
            method = parse(f"{entry.name}:{name}={value}")
            planned_bytes(method, CONFIG, 20, capacity=24, dtype="bfloat16")
        except KvjaxError:
            continue


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: methods.kcache(n=1.5), "kcache: n must be a whole number, got 1.5"),
        (lambda: methods.kcache(n="8"), "kcache: n must be a whole number, got '8'"),
        (lambda: methods.kcache(n=True), "kcache: n must be a whole number, got True"),
        (lambda: methods.kcache(n=None), "kcache: n must be a whole number, got None"),
        (lambda: parse("kcache:n=" + "9" * 5000), "parameter 'n' of kcache is int, got '99999"),
    ],
)
def test_what_is_no_integer_is_named(make, says):
    with pytest.raises(KvjaxError, match=says) as e:
        make()
    assert len(str(e.value)) < 200


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400"])
def test_floats_are_finite(value):
    floats = [(r, name) for r in load_all().values() for name, p in r.parameters.items() if p.annotation is float]
    assert floats
    for entry, name in floats:
        with pytest.raises(KvjaxError, match=f"^{entry.name}: {name} must "):
            parse(f"{entry.name}:{name}={value}")
