"""Prompts through the model's chat template: context, question and turns are what the template writes."""

from __future__ import annotations

import dataclasses
from datetime import datetime

import numpy as np
import pytest

from kvjax import cli
from kvjax.errors import KvjaxError
from kvjax.eval.run import cells, eval_command, harness
from kvjax.eval.tasks import ruler
from kvjax.eval.tasks.case import Spec
from kvjax.eval.tasks.chat_format import NOW, chat_format
from kvjax.models.chat_template import ChatTemplate
from kvjax.models.model import Model
from kvjax.models.tokenizer import Tokenizer
from kvjax.testbed import vocab
from tests.eval.tasks.fake_packages import decode, install_packages, make_cases
from tests.eval.tasks.test_ruler import BYTES, byte_model

CHATML = (
    "{% for m in messages %}{% if loop.first %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (  # trims what it is given, and opens an answer without a space
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + (m['content'] | trim) + ' [/INST]' }}{% else %}{{ ' ' + (m['content'] | trim) + eos_token }}"
    "{% endif %}{% endfor %}"
)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Packages on the path that bring ESSAYS and PROBLEMS."""
    install_packages(tmp_path, monkeypatch)


def make_chat_model(source: str) -> Model:
    """Bytes as tokens and a chat template, whose special tokens are tokens."""
    model = byte_model()
    model.tokenizer.inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    template = ChatTemplate(source, (("bos_token", "<s>"), ("eos_token", "</s>")))
    return dataclasses.replace(model, chat_template=template)


@pytest.mark.parametrize("source", (CHATML, INST), ids=("chatml", "inst"))
@pytest.mark.parametrize("name", ("niah", "niah.essays", "turns.essays", "turns", "ruler.niah_multiquery", "ruler.cwe"))
def test_prompts_are_what_the_template_writes(site, name, source):
    model = make_chat_model(source)
    case, plain = (make_cases(name, model, depths=1, lengths=(2500,), chat=chat)[0] for chat in (None, False))
    assert case.turns == plain.turns and len(case.asks) == len(plain.asks)
    assert len(case.context) + max(len(a.prompt) for a in case.asks) <= 2500
    head, tail = chat_format(model, Spec()).head, chat_format(model, Spec()).tail
    user = decode(model, case.context).removeprefix(head)
    assert user.endswith("\n") and case.context.tolist() == model.tokenizer.encode(head + user, special_tokens=False)
    ids, talk = [*case.context], []
    for turn, ask in enumerate(case.asks):
        question, _, opening = decode(model, ask.prompt).partition(tail)
        question = question.rpartition("<|im_start|>user\n" if source is CHATML else "[INST] ")[2]
        before, _, last = decode(model, plain.asks[turn].prompt).lstrip("\n").partition(question)
        assert before == "" and last.lstrip() == opening.lstrip() and opening
        talk += [{"role": "user", "content": (user if not talk else "") + question}]
        written = model.chat_template.render([talk], NOW)[0] + opening
        if not case.turns:
            assert decode(model, np.append(case.context, ask.prompt)) == written
            continue
        ids += [*ask.prompt]
        assert decode(model, np.array(ids)) == written
        assert ids == model.tokenizer.encode(written, special_tokens=False)
        ids += [*harness.reference_ids(model, ask)]
        talk += [{"role": "assistant", "content": f"{opening} {ask.references[0]}"}]


@pytest.mark.parametrize("name", ruler.TASKS)
def test_every_family_keeps_its_length_and_its_answers_in_a_chat(site, name):
    model = make_chat_model(CHATML)
    for case in make_cases(name, model, contexts=1, lengths=(2300,)):
        assert 2100 < len(case.context) + max(len(a.prompt) for a in case.asks) <= 2300
        assert decode(model, case.context).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
        assert case.context.tolist().count(model.tokenizer.token_id("<|im_start|>")) == 2
        assert 256 not in case.context  # the template writes no <s>, and none is added
        assert all(r in decode(model, case.context) for a in case.asks for r in a.references)
        assert all("<|im_end|>\n<|im_start|>assistant\n" in decode(model, a.prompt) for a in case.asks)


def test_a_template_is_used_where_there_is_one_unless_it_is_refused(site):
    def fingerprints(name: str, model: Model, chat: bool | None) -> list[str]:
        return [cells.fingerprint(c) for c in make_cases(name, model, chat=chat)]

    model = make_chat_model(CHATML)
    for name in ("niah", "turns.essays"):
        assert fingerprints(name, model, None) == fingerprints(name, model, True) != fingerprints(name, model, False)
        assert fingerprints(name, model, False) == fingerprints(name, BYTES, None)
        with pytest.raises(KvjaxError, match="no chat template, which --chat asks for"):
            make_cases(name, chat=True)
    for name in ("humaneval.bits", "humaneval.body", "ppl", "completion"):
        assert fingerprints(name, model, None) == fingerprints(name, BYTES, None)  # a text that goes on is no question
    ours = Model(None, None, Tokenizer(vocab.tokenizer()), chat_template=model.chat_template)
    assert fingerprints("turns", ours, None) == fingerprints(
        "turns", dataclasses.replace(ours, chat_template=None), None
    )


def test_cases_are_the_same_on_every_day(site):
    dated = make_chat_model("{{ strftime_now('%d %b %Y') }}\n" + CHATML)
    assert decode(dated, make_cases("niah", dated)[0].context).startswith("01 Jan 2025\n<|im_start|>system")
    assert datetime.now() != NOW


@pytest.mark.parametrize(
    "source",
    ("{{ messages[-1]['content'][5:] }}", "{{ messages[0]['content'] }}", CHATML + "{{ messages | length }}"),
    ids=("cut", "first only", "other endings"),
)
def test_a_template_that_hides_messages_is_told(site, source):
    with pytest.raises(KvjaxError, match="evaluate in plain text with --no-chat"):
        make_cases("turns.essays", make_chat_model(source))
    assert make_cases("turns.essays", make_chat_model(source), chat=False)


def test_the_command_says_at_once_that_there_is_no_template(monkeypatch, capsys):
    monkeypatch.setattr(eval_command, "load", lambda *_, **__: BYTES)
    assert cli.main(["eval", "--chat", "--tasks", "niah"]) == 2
    assert "this model has no chat template, which --chat asks for" in capsys.readouterr().err
