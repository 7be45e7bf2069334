"""What a value shows of itself in a shell or a notebook: one short line, and no arrays."""

from __future__ import annotations

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
    held = f"{context.bytes['device']:,} bytes in device"
    assert repr(context).startswith("Context('snapkv:budget=2,window=1,kernel=1'; rows of 3, 1 tokens; ")
    assert held in repr(context)
    assert repr(context.cache) == f"Cache(2 rows, 3 layers, capacity {context.cache.capacity} tokens a row)"


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"kvjax {kvjax.__version__}\n" and kvjax.__version__[0].isdigit()


def test_what_a_hugging_face_tokenizer_returns_is_not_read_as_text():
    with pytest.raises(KvjaxError, match="got a mapping with \\['input_ids', 'attention_mask'\\]; give its"):
        kvjax.generate(toy_model(), {"input_ids": [[1, 2]], "attention_mask": [[1, 1]]}, "full")


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), -1.0])
def test_a_temperature_that_is_no_number_is_refused(temperature):
    with pytest.raises(KvjaxError, match="temperature must be 0"):
        kvjax.generate(toy_model(), [np.array([1, 2])], "full", temperature=temperature)
