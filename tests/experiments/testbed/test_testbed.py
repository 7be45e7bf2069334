"""The shipped model's tasks, data, training and baseline."""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest

from experiments.testbed import plot, train
from kvjax.models import Config, checkpoint
from kvjax.testbed import corpus, tasks, vocab

LENGTH = 300


def make(task: str, seed: int = 0, **options) -> tasks.Instance:
    return tasks.TASKS[task](np.random.default_rng(seed), LENGTH, tasks.noise, **options)


def follow(context: list[int], marker: int, name: int) -> list[int]:
    """The context after `marker name`, which occurs once."""
    at = [i for i in range(len(context) - 1) if context[i : i + 2] == [marker, name]]
    assert len(at) == 1
    return context[at[0] + 2 :]


def solve(task: str, context: list[int], prompt: list[int], n: int) -> list[int]:
    """The answer to a question, found by reading the context: written from the tasks' descriptions."""
    if task in ("recall", "needle"):
        return follow(context, vocab.PAIR, prompt[1])[:n]
    if task == "copying":
        (at,) = (i for i in range(len(context)) if context[i : i + 2] == prompt)
        return context[at + 2 : at + 2 + n]
    if task in ("common", "frequent"):
        counts = Counter(t for t in context if t in vocab.SYMBOLS).most_common()
        assert counts[n - 1][1] > counts[n][1]
        return [t for t, _ in counts[:n]]
    if task == "multivalue":
        pairs = zip(context, context[1:], context[2:], strict=False)
        return [value for marker, key, value in pairs if (marker, key) == (vocab.PAIR, prompt[1])]
    if task == "multiquery":
        return [follow(context, vocab.PAIR, key)[0] for key in prompt[1:]]
    name, chain = prompt[1], []
    while name in {b for a, b in itertools.pairwise(context) if a == vocab.LET}:
        name = follow(context, vocab.LET, name)[0]
        chain.append(name)
    return chain


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("seed", range(3))
def test_answers_follow_from_the_context(task, seed):
    instance = make(task, seed)
    assert instance.context.shape == (LENGTH,) and instance.context.dtype == np.int32
    for q in instance.questions:
        answer = solve(task, instance.context.tolist(), q.prompt.tolist(), len(q.answer))
        assert q.right(answer) and (not q.is_ordered or answer == q.answer.tolist()) and not q.right([0, *answer])
        assert q.right(answer[::-1]) == (not q.is_ordered or len(answer) == 1)
        assert np.isin(q.answer, vocab.SYMBOLS).all() and 0 <= q.depth <= 1


def test_questions_are_about_different_facts_at_the_depths_they_state():
    instance = make("recall", pairs=20, questions=20)
    assert len({int(q.prompt[1]) for q in instance.questions}) == 20
    for q in instance.questions:
        at = round(q.depth * LENGTH)
        assert instance.context[at : at + 3].tolist() == [vocab.PAIR, q.prompt[1], q.answer[0]]


def test_no_held_out_file_is_trained_on():
    a, b = corpus.load("train"), corpus.load("held_out")
    assert a.names and b.names and not set(a.names) & set(b.names)
    assert set(a.names) | set(b.names) == {p.as_posix() for p in corpus.files()}
    assert all(map(corpus.is_held_out, b.names)) and not any(map(corpus.is_held_out, a.names))
    assert np.count_nonzero(b.tokens == vocab.END) == len(b.names)
    assert 0.03 < len(b.tokens) / len(a.tokens) < 0.2


def test_the_split_is_that_of_the_shipped_model():
    """Files that its training never saw must stay held out, whatever the Python version."""
    names = ("abc.py", "bz2.py", "heapq.py", "json/decoder.py", "json/encoder.py", "token.py", "zoneinfo/_zoneinfo.py")
    assert [n for n in names if corpus.is_held_out(n)] == [
        "bz2.py",
        "json/encoder.py",
        "token.py",
        "zoneinfo/_zoneinfo.py",
    ]


def test_training_exports_a_model_that_loads(tmp_path, monkeypatch):
    tiny = Config.llama(vocab.SIZE, 8, 1, 2, 1, 4, 8, tie_embeddings=True)
    monkeypatch.setattr(train, "MODEL", tiny)
    words = ["--out", str(tmp_path), "--lengths", "32", "--tokens", "256", "--steps", "3", "--save-every", "2"]
    train.main([*words, "--minutes", "0"])
    train.main(words)
    config, params = checkpoint.restore(tmp_path / "model")
    assert config == dataclasses.replace(tiny, max_positions=32) and params["embedding"].shape == (vocab.SIZE, 8)
    assert (tmp_path / "model" / "tokenizer.json").is_file() and (tmp_path / "curve.png").stat().st_size > 1000
    assert [r["step"] for r in plot.read_log(tmp_path / "log.jsonl")] == [0, 1, 2]
