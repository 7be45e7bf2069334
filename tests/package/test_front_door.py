"""First steps that are slightly wrong: each is refused, and the error says how to write it."""

from __future__ import annotations

import re

import jax.numpy as jnp
import pytest

import kvjax
from checkpoints_convert.commands import parser as convert_parser
from checkpoints_convert.convert import convert
from kvjax import KvjaxError, cli, methods
from kvjax.errors import UnknownKeyword
from kvjax.models import checkpoint
from kvjax.testing import toy_model
from kvjax.utils.arguments import float_type
from tests.fixtures import ROOT


@pytest.mark.parametrize(
    ("budget", "remedy"),
    [
        (100.9, "got 100.9; write budget=100, a whole number of tokens"),
        (256.0, "got 256.0; write budget=256, a whole number of tokens"),
        (0.25, 'got 0.25; for this fraction write budget="25%"'),
        (0.001, 'got 0.001; for this fraction write budget="0.1%"'),
        (True, "got True; write a number of tokens, as in budget=256"),
        (None, "got None"),
        (float("nan"), "got nan"),
        ("100.9", "got '100.9'; write budget=100, a whole number of tokens"),
        ("0.25", "got '0.25'; for this fraction write 25%"),
    ],
)
@pytest.mark.parametrize("method", ["snapkv", "kvzip", "random"])
def test_a_budget_is_whole_or_a_share(method, budget, remedy):
    with pytest.raises(KvjaxError, match=f"parameter 'budget' of {method}: a budget is a .*" + re.escape(remedy)):
        getattr(methods, method)(budget=budget)


@pytest.mark.parametrize(("text", "remedy"), [("0.25", "for this fraction write 25%"), ("64.0", "budget=64, a")])
def test_a_budget_in_a_string_has_its_remedy_as_a_string(text, remedy):
    with pytest.raises(KvjaxError, match=re.escape(remedy)):
        kvjax.parse(f"snapkv:budget={text}")
    assert kvjax.parse("snapkv:budget=25%") == methods.snapkv(budget="25%")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: methods.kivi(bits=4.0), "kivi: bits must be a whole number, got 4.0; use 2, the default"),
        (lambda: kvjax.parse("kivi:bits=4.0"), "parameter 'bits' of kivi is int, got '4.0' (default 2)"),
        (lambda: methods.kcache(n=1.5), "kcache: n must be a whole number, got 1.5; use 128, the default"),
        (lambda: methods.kcache(n="8"), "kcache: n must be a whole number, got '8'; use 128, the default"),
        (lambda: methods.pyramidkv(budget=0.25), "budget must be a whole number, got 0.25; use 1024, the default"),
        (
            lambda: methods.snapkv(sinks=True),
            "snapkv: sinks must be a whole number, got True; use 0, the default",
        ),
        (lambda: methods.kvzip(plus="no"), "kvzip: plus must be true or false, got 'no'; use False, the default"),
        (lambda: methods.keydiff(unit=3), "keydiff: unit must be a text, got 3; use 'token', the default"),
        (lambda: methods.ems(band="1"), "ems: band must be a number, got '1'; use 1.0, the default"),
    ],
)
def test_a_value_of_another_type_is_named_with_the_default(make, says):
    with pytest.raises(KvjaxError, match=re.escape(says)):
        make()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: methods.snapkv(buget=64),
            "snapkv has no parameter 'buget'; did you mean 'budget'? It has budget, window, kernel, pool, reduce, ",
        ),
        (lambda: methods.full(budget=64), "full has no parameter 'budget'; it has none"),
        (lambda: methods.kivi(budget=64), "kivi has no parameter 'budget'; it has bits, "),
        (lambda: methods.int8(1, 2, 3, 4), "int8: too many positional arguments; it has "),
    ],
)
def test_a_wrong_keyword_of_a_method_is_named_with_the_nearest_and_all(make, says):
    with pytest.raises(UnknownKeyword, match=re.escape(says)):
        make()


@pytest.mark.parametrize(
    "call",
    [
        "snapkv(budget=64)",
        "snapkv(budget='25%', window=16)",
        "snapkv()",
        "kvjax.methods.snapkv(budget=64)",
        "snapkv:budget=64 + snapkv(bits=4)",
        "snapkv(budget=64",
        "snapkv(64).traits",
        "snapkv(**a)",
    ],
)
def test_a_call_as_a_string_is_answered_with_the_syntax(call):
    with pytest.raises(KvjaxError, match="a method as a string is no call; write .* as in 'snapkv:budget=512'"):
        kvjax.parse(call)
    with pytest.raises(KvjaxError, match="unknown method 'snapk'; did you mean 'snapkv'"):
        kvjax.parse("snapk(budget=64)")


SHORT = {"bf16": "bfloat16", "f16": "float16", "fp16": "float16", "f32": "float32", "fp32": "float32"}


@pytest.mark.parametrize(("short", "name"), SHORT.items())
def test_a_dtype_has_short_names(short, name, tmp_path):
    model = toy_model(layers=1)
    assert float_type(short) == float_type(name) == jnp.dtype(name)
    assert kvjax.planned_bytes("full", model.config, 20, dtype=short).dtype == name
    assert kvjax.random_model(model.config, dtype=short).dtype == name
    with checkpoint.Writer(tmp_path / "out", model.config, short) as writer:
        for part, tree in model.params.items():
            writer.put(part, tree)
    assert checkpoint.read_manifest(tmp_path / "out").dtype == name
    assert kvjax.load(tmp_path / "out").dtype == name
    assert kvjax.load(tmp_path / "out", dtype=short).dtype == name
    other = "float32" if name == "float16" else "float16"
    with checkpoint.Writer(tmp_path / "other", model.config, other) as writer:
        for part, tree in model.params.items():
            writer.put(part, tree)
    assert kvjax.load(tmp_path / "other", dtype=short).dtype == name
    assert convert(ROOT / "llama3", tmp_path / "converted", short)
    assert checkpoint.read_manifest(tmp_path / "converted").dtype == name


def test_what_is_no_dtype_is_refused_with_all_names(tmp_path):
    for refused in ("int8", "bf17", "f64"):
        for give in (
            lambda dtype: kvjax.load("testbed", dtype=dtype),
            lambda dtype: convert(ROOT / "llama3", tmp_path / "out", dtype),
        ):
            says = f"dtype must be one of float32, bfloat16, float16, or f32, .*got '{refused}'"
            with pytest.raises(KvjaxError, match=says):
                give(refused)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("short", "name"), SHORT.items())
def test_a_dtype_has_short_names_on_the_command_line(short, name, capsys, tmp_path):
    parser = cli._parser()
    for words in ("generate --prompt a", "explore --text a", "calibrate bases testbed out", "eval"):
        assert parser.parse_args([*words.split(), "--dtype", short]).dtype == name
    dtype = convert_parser().parse_args(["convert", "a", "b", "--dtype", short]).dtype
    assert dtype == convert_parser().parse_args(["convert", "a", "b", "--dtype", name]).dtype == name
    with pytest.raises(SystemExit):
        parser.parse_args(["eval", "--dtype", "int8"])
    assert "invalid choice: 'int8'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["smolm2-135m", "SmolLM2-135M", "someone/SmolLM2-135M-Instruct"])
def test_a_misspelled_model_is_answered_with_the_names_and_how_to_get_others(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    says = (
        f"there is no checkpoint directory {name}, and no model of that name; did you mean 'smollm2-135m'? Models that "
        "go by a name: testbed, smollm2-135m, "
    )
    with pytest.raises(KvjaxError, match=re.escape(says)) as e:
        kvjax.load(name)
    assert "(`kvjax models`" in str(e.value) and "python -m checkpoints_convert convert SRC DST" in str(e.value)


def test_a_model_that_is_like_no_other_is_answered_with_the_names_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KvjaxError, match="and no model of that name; models that go by a name: testbed, ") as e:
        kvjax.load("nothing-like-it-at-all")
    assert "did you mean" not in str(e.value)


def test_a_misspelled_model_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("a text")
    for words in ("generate --prompt a", "explore --text text", "eval", "demo", "check snapkv", "calibrate bases"):
        option = ["smolm2-135m", "table"] if words.startswith("calibrate") else ["--model", "smolm2-135m"]
        assert cli.main([*words.split(), *option]) == 2
        out = capsys.readouterr()
        assert "did you mean 'smollm2-135m'" in out.err and "Traceback" not in out.err, words


@pytest.mark.parametrize(
    ("head_dim", "says"),
    [
        (
            24,
            "2-bit codes on a step are packed 16 channels to a word, .* size 24; use no step of fewer than 4 bits",
        ),
        (
            12,
            "4-bit codes on a step are packed 8 channels to a word, .* size 12; use no step of fewer than 8 bits",
        ),
        (
            6,
            "8-bit codes .* does not divide the head size 6; use `kivi`, which packs along the tokens",
        ),
    ],
)
def test_codes_of_saq_are_not_said_to_be_on_the_host(head_dim, says):
    config = toy_model(layers=1, head_dim=head_dim).config
    with pytest.raises(KvjaxError, match=says) as e:
        kvjax.planned_bytes(methods.saq(group=2, every=4), config, 24, dtype="bf16")
    assert "host" not in str(e.value)
    bits = {24: "8-4", 12: "8"}.get(head_dim)
    other = methods.saq(bits, group=2, every=4) if bits else methods.kivi(group=2, residual=4)
    assert kvjax.planned_bytes(other, config, 24, dtype="bf16").full > 0
