"""What the demo asks: of the shipped model's vocabulary symbols, of any other real text."""

from __future__ import annotations

import dataclasses

import numpy as np
import tokenizers

from kvjax.eval import exam as exams
from kvjax.eval.tasks import packaged
from kvjax.eval.tasks.case import Spec
from kvjax.models.tokenizer import Tokenizer
from kvjax.testing import toy_model


def test_a_model_without_the_symbols_is_asked_about_text(monkeypatch):
    names = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bytes_only = tokenizers.Tokenizer(tokenizers.models.BPE({name: i for i, name in enumerate(sorted(names))}, []))
    bytes_only.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = tokenizers.decoders.ByteLevel()
    model = dataclasses.replace(toy_model(layers=1, vocab_size=256), tokenizer=Tokenizer(bytes_only))
    monkeypatch.setattr(packaged, "ESSAYS", packaged.ESSAYS._replace(package="not_there"))
    monkeypatch.setattr(exams.Text, "spec", Spec(lengths=(512,), contexts=1, depths=2))
    asked = exams.exam(model, 1)
    assert isinstance(asked, exams.Text) and asked.questions == "needles in source code" and len(asked.contexts) == 2
    found = asked.quality("full")
    assert found.right == 0.0 and found.bits > 4  # it has learned nothing
    assert found.likeliest.dtype == np.int32 and found.bytes.total["device"] > 0
