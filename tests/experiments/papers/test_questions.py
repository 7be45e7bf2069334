"""Questions about a text for the papers' scripts: the prompts, the right answers, and the models that are asked."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from experiments.papers import eviction, questions
from kvjax import Model
from kvjax.eval.tasks.case import Spec
from kvjax.eval.tasks.chat_format import chat_format
from kvjax.testbed import tasks
from kvjax.testing import toy_model
from tests.eval.tasks.fake_packages import decode, install_packages, make_cases
from tests.eval.tasks.test_chat_format import CHATML, make_chat_model
from tests.eval.tasks.test_ruler import BYTES, PIECES

ARGS = argparse.Namespace(length=700, contexts=2, seed=3, text=Path("essays"))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Packages on the path that bring essays."""
    install_packages(tmp_path, monkeypatch)


@pytest.fixture
def chat_model() -> Model:
    """A random model of bytes with a chat template."""
    model = make_chat_model(CHATML)
    toy = toy_model(layers=1, vocab_size=model.tokenizer.inner.get_vocab_size(), max_positions=2048)
    return dataclasses.replace(toy, tokenizer=model.tokenizer, chat_template=model.chat_template, name="chat")


@pytest.mark.parametrize("model", (BYTES, PIECES, make_chat_model(CHATML)), ids=("bytes", "pieces", "chat"))
@pytest.mark.parametrize("task", questions.TASKS)
def test_the_answer_goes_on_where_the_question_ends(site, model, task):
    more = {"lengths": (700,), "questions": questions.QUESTIONS, "seed": 3, "text": ARGS.text}
    instances, cases = questions.in_text(ARGS, model, task), make_cases(task, model, **more)
    several = task == "shared" or task in questions.MULTIKEYS
    for instance, case in zip(instances, cases, strict=True):
        facts = dict(re.findall(r"for (\S+) is: (\S+)\.", decode(model, instance.context)))
        assert len(instance.questions) == (questions.QUESTIONS if several else 1) <= len(facts)
        assert instance.task == task and instance.context.tolist() == case.context.tolist()
        for q, ask in zip(instance.questions, case.asks, strict=True):
            whole = decode(model, np.concatenate([q.prompt, q.answer]))
            key, value = re.search(r"for (\S+) mentioned in the provided text is (\S+)$", whole).groups()
            assert facts[key] == value and q.prompt.tolist() == ask.prompt.tolist()
            assert q.right(q.answer) and q.depth == ask.about["depth"]
        assert decode(model, instance.between) == chat_format(model, Spec()).between


def shorten_answers(instance: tasks.Instance) -> tasks.Instance:
    """The same questions with the first four tokens of their answers."""
    short = (dataclasses.replace(q, answer=q.answer[:4]) for q in instance.questions)
    return dataclasses.replace(instance, questions=tuple(short))


def test_questions_follow_each_other_as_the_template_has_it(site, chat_model):
    """Prompts and answers of several lengths, and the tokens between two turns, against one dense pass."""
    one, other = questions.in_text(ARGS, chat_model, "shared")
    instances = [one, shorten_answers(other)]
    assert len({len(q.prompt) for i in instances for q in i.questions}) > 1 and len(one.between)
    outcomes, _ = eviction.QuestionPrompts(chat_model, instances).outcomes("full")
    for row, instance in enumerate(instances):
        first = instance.questions[0]
        for i, q in enumerate(instance.questions):
            before = [first.prompt, first.answer, instance.between] if i else []
            for when, column, earlier_tokens in (
                (("later", i - 1, before), ("unseen", i, [])) if i else (("first", 0, []),)
            ):
                ids = np.concatenate([instance.context, *earlier_tokens, q.prompt, q.answer])[None]
                logp = np.asarray(jax.nn.log_softmax(kvjax.logits(chat_model, ids)[0], -1))[-len(q.answer) - 1 : -1]
                nats = -logp[np.arange(len(q.answer)), q.answer].mean()
                np.testing.assert_allclose(outcomes[when].nats[row, column], nats, atol=1e-4)
