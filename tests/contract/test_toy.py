"""Every method on a layer with a soft cap that bites, sinks and values narrower than keys, see `tests.contract.toy`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvjax.cache.calibration import table_file
from kvjax.core.attention import Rule
from kvjax.errors import KvjaxError
from kvjax.registry.strings import parse
from tests.contract import toy
from tests.contract.cases import CASES, FIRST_CASES
from tests.contract.table import REGISTRY

NO_LOSSLESS_FORM = {case.method for case in FIRST_CASES.values() if not case.lossless}
"""Methods that are lossy at every size."""

LOSSY = sorted(
    NO_LOSSLESS_FORM
    | {"cskv", "gear", "kivi", "kvarn", "kvquant", "kvtc", "matryoshka", "mikv", "oscar", "rotatekv", "saq", "think"}
)
"""Methods that store keys or values inexactly: what they read is what their codecs decode."""


@pytest.fixture(autouse=True)
def tables_of_the_toy(monkeypatch):
    """Methods that name no table take those made for the layer, also while a program is traced."""
    monkeypatch.setattr(table_file, "SHIPPED_TABLES", toy.tables())


def run(method: str) -> tuple[np.ndarray, list]:
    """The outputs of all steps on the toy layer, and what each step read."""
    return toy.decode(toy.bind(method), toy.batch())


def test_a_cap_or_a_sink_that_is_left_out_is_seen():
    expected = toy.dense_outputs(toy.batch())
    assert np.abs(expected - toy.dense_outputs(toy.batch(), soft_cap=None)).max() > 0.1
    assert np.abs(expected - toy.dense_outputs(toy.batch(), sinks=None)).max() > 0.1
    plain = dataclasses.replace(toy.spec(), rule=Rule())
    out, _ = toy.decode(parse("full").bind(plain), toy.batch())
    assert np.abs(out - toy.dense_outputs(toy.batch())).max() > 0.1


def test_no_method_is_left_out():
    assert {*REGISTRY} == {name for name, case in FIRST_CASES.items() if case.lossless} | {*LOSSY}


@pytest.mark.parametrize("case", [case for case in CASES if case.lossless], ids=lambda case: case.id)
def test_without_loss_it_is_dense_attention_under_the_cap(case):
    out, expected = (x[:, :, :, case.exact_from :] for x in (run(case.lossless)[0], toy.dense_outputs(toy.batch())))
    np.testing.assert_allclose(out, expected, atol=5e-6)


@pytest.mark.parametrize("method", LOSSY)
def test_with_loss_it_is_dense_attention_to_what_it_decodes(method):
    out, blocks = run(FIRST_CASES[method].small)
    np.testing.assert_allclose(out, toy.decoded_outputs(blocks), atol=1e-5)
    # It lost something, or the oracle would be trivial.
    assert np.abs(out - toy.dense_outputs(toy.batch())).max() > 1e-4


def test_codes_that_do_not_fit_the_width_of_values_say_so():
    with pytest.raises(KvjaxError, match="3-bit codes fill 32-bit words 32 at a time, and the head size 16 is no"):
        run("turboquant:k_bits=3,v_bits=3")
