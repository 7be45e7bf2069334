"""Values show one short line in a shell or a notebook, and no arrays."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax import KvjaxError, cli
from kvjax.testing import toy_model


def test_values_show_themselves_in_one_line():
    model = toy_model()
    context = kvjax.read(model, [[1, 2, 3], [4]], "snapkv:budget=2,window=1,kernel=1")
    assert repr(model).startswith("Model(random: ")
    assert repr(model).endswith(" parameters in float32, 3 layers, width 32, 4 heads on 2 of 8)")
    size = context.bytes
    sentence = f"{size.held['device']:,} bytes held ({size.fraction_of_full:.1%} of the exact float32 cache)"
    assert repr(context).startswith("Context('snapkv:budget=2,window=1,kernel=1'; sequences of 3, 1 tokens; ")
    assert sentence in repr(context)
    assert repr(context.cache) == f"Cache(2 sequences, 3 layers, capacity {context.cache.capacity} tokens a sequence)"


def test_a_method_shows_the_slots_that_it_fills():
    assert repr(kvjax.parse("full")) == "Method()"
    text = repr(kvjax.parse("snapkv:budget=25% + int4"))
    assert text.startswith("Method(select=Selection(") and "k=" in text and "decode" not in text
    kcache = dataclasses.replace(kvjax.parse("kcache:n=4"), device_layers=2)
    assert kvjax.name_of(kcache) == repr(kcache)


def test_results_are_tables_in_a_notebook():
    model = toy_model()
    out = kvjax.generate(model, [[1, 2, 3], [4]], "full", max_new_tokens=4, eos_ids=())
    assert repr(out).startswith(
        "Result(4 ids [length] and 1 more; "
    ) and " bytes held (100.0% of the exact float32 cache), " in repr(out)
    assert out._repr_html_().count("<tr>") == 3
    with_text = dataclasses.replace(out, text=["<b>&" * 40, "b"])
    assert "…" in repr(with_text) and len(repr(with_text)) < 250
    assert "&lt;b&gt;&amp;" in with_text._repr_html_() and "<b>" not in with_text._repr_html_()


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"kvjax {kvjax.__version__}\n" and kvjax.__version__[0].isdigit()


def test_what_a_hugging_face_tokenizer_returns_is_not_read_as_text():
    with pytest.raises(KvjaxError, match="got a mapping with \\['input_ids', 'attention_mask'\\]; give its"):
        kvjax.generate(toy_model(), {"input_ids": [[1, 2]], "attention_mask": [[1, 1]]}, "full")


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), -1.0])
def test_a_temperature_that_is_no_number_is_refused(temperature):
    with pytest.raises(KvjaxError, match="temperature must be a number .*; 0 is greedy"):
        kvjax.generate(toy_model(), [np.array([1, 2])], "full", temperature=temperature)


def test_a_context_that_was_used_up_says_so():
    context = kvjax.read(toy_model(), [[1, 2, 3]], "full")
    context.ask([[4]], max_new_tokens=2)
    assert "sequences of 3 tokens" in repr(context)
    context.generate(max_new_tokens=2, donate=True)
    assert repr(context) == "Context('full'; used up)"
    reading = (
        context.kept_positions,
        lambda: context.save("nowhere"),
        lambda: context.crop(1),
        lambda: context.take([0]),
    )
    for call in (*reading, lambda: context.ask([[4]]), context.generate, lambda: context.join(context)):
        with pytest.raises(KvjaxError, match="used up by an answer that did not copy it; read the prompts again"):
            call()
