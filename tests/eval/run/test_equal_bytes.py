"""Sizes that take a fraction of the full cache's bytes."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvjax import Config, planned_bytes
from kvjax.errors import KvjaxError
from kvjax.eval.run import equal_bytes, eval_command
from kvjax.registry.strings import format_methods, parse, parse_parts
from kvjax.testing import toy_model

CONFIG, PROMPT, DTYPE = Config.llama(97, 32, layers=1, heads=4, kv_heads=2, head_dim=32, mlp_width=48), 128, "bfloat16"
FULL = planned_bytes("full", CONFIG, PROMPT, dtype=DTYPE).held["device"]


def fit(method: str, share: str) -> equal_bytes.FittedMethod:
    return equal_bytes.fit_methods([method], [Fraction(share)], CONFIG, PROMPT)[0]


@pytest.mark.parametrize(
    "method", ["keydiff", "h2o", "snapkv:window=8 + kvcrush", "keynorm + int8", "snapkv:window=8 + adakv:page=4"]
)
@pytest.mark.parametrize("share", ["1/4", "1/6"])
def test_one_token_more_would_not_fit(method, share):
    fitted = fit(method, share)
    held_bytes = planned_bytes(fitted.method, CONFIG, PROMPT, dtype=DTYPE).held["device"]
    assert fitted.bytes == held_bytes <= FULL * Fraction(share)
    first, *others = parse_parts(fitted.method)
    sizes = ("heavy", "recent") if method == "h2o" else ("budget",)
    more = first._replace(values=first.values | {name: first.values[name] + 2 for name in sizes})
    larger = format_methods([more, *others])
    assert planned_bytes(larger, CONFIG, PROMPT, dtype=DTYPE).held["device"] > FULL * Fraction(share)


@pytest.mark.parametrize("step", [1, 16, 32])
@pytest.mark.parametrize("fixed", [0, 3000])
@pytest.mark.parametrize("impossible", [0, 20])
def test_the_largest_size_is_that_of_trying_all(step, fixed, impossible):
    def count_bytes(size):
        counted.append(size)
        return fixed + -(-size // step) * step * 7 if size > impossible else 0

    for max_bytes in (0, 50, 2999, 3100, 4000, 5000, 6583, 6584, 10_000):
        counted = []
        found = equal_bytes.find_largest_size(count_bytes, 512, max_bytes)
        assert len(counted) <= 2 + equal_bytes.MAX_GUESSES + 9  # halving 512 sizes takes nine
        assert found == max((n for n in range(1, 513) if count_bytes(n) <= max_bytes), default=0)


def test_two_guesses_find_a_size_in_proportion():
    counted = []
    found = equal_bytes.find_largest_size(lambda n: counted.append(n) or 1000 + 13 * n, 8192, 30_000)
    assert found == (30_000 - 1000) // 13 and counted == [8192, 1, found, found + 1]


def test_bits_are_the_most_that_fit_and_what_is_read_is_no_size():
    assert fit("kivi:group=8,residual=8", "1/2").method == "kivi:group=8,residual=8,bits=2"
    assert fit("quest:page=32,device_layers=0 + kivi:group=8,residual=8", "1/2").method.startswith(
        "quest:page=32,device_layers=0 + kivi"
    )


def test_a_method_of_one_size_is_taken_where_it_fits_and_nothing_where_nothing_does():
    assert fit("int4", "1/2").method == "int4"
    assert fit("int4", "1/16").method == "" and fit("quest:device_layers=0", "1/2").method == ""
    assert fit("full", "1").method == "full"


def test_strings_are_taken_apart_and_joined():
    text = "snapkv:budget=5,pool=avg + offload"
    assert format_methods(parse_parts(text)) == text and parse(text) == parse(format_methods(parse_parts(text)))


@pytest.mark.parametrize(
    "text", ["0", "3/2", "half", "1/0", "-1/2", "1e-9999999999", "1e9999999999", "1/" + "9" * 5000]
)
def test_what_is_no_share_is_an_error(text):
    with pytest.raises(KvjaxError, match="such as 1/4, several with commas, got"):
        equal_bytes.parse_shares(text)


def test_shares_may_be_written_as_any_fraction():
    assert equal_bytes.parse_shares("1/4, 0.25,.25,2.5e-1,25E-02") == [Fraction(1, 4)] * 5


def test_the_command_says_what_fits_nowhere(capsys):
    model = toy_model(layers=1, head_dim=32)
    methods = eval_command._at_equal_bytes(model, "keydiff; quest:device_layers=0", [Fraction(1, 2)], PROMPT)
    assert methods[0] == "full" and methods[1].startswith("keydiff:budget=") and len(methods) == 2
    assert (
        "quest:device_layers=0 takes more than 1/2 of the bytes of full in bfloat16: left out"
        in capsys.readouterr().err
    )
