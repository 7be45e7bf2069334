"""The shipped model's tasks, data, training and baseline."""

import dataclasses
import itertools
from collections import Counter

import jax
import numpy as np
import pytest

from experiments.testbed import attention, batches, ngram, plot, precision, train, trainer
from experiments.testbed.curriculum import Curriculum
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


def toy_corpus() -> corpus.Corpus:
    return corpus.Corpus(("toy",), np.random.default_rng(5).integers(97, 101, 4000).astype(np.uint16))


@pytest.mark.parametrize("length", [32, 256])
def test_batches_are_a_function_of_their_generator(length):
    def make_one(seed: int) -> batches.Batch:
        mixture = dict.fromkeys(batches.KINDS, 1)
        return batches.make(np.random.default_rng(seed), 24, length, mixture, 4 * length, toy_corpus())

    a, b = make_one(3), make_one(3)
    for x, y in zip(dataclasses.astuple(a), dataclasses.astuple(b), strict=True):
        assert np.array_equal(x, y)
    assert not np.array_equal(a.tokens, make_one(4).tokens)
    assert len(set(a.kind)) == len(batches.KINDS)
    assert np.allclose(a.weight.sum(1), 1, atol=1e-5) and (a.weight[:, 0] == 0).all()
    assert (np.diff(a.pos) >= 1).all() and a.pos.max() < 4 * length and a.pos.max() >= length
    assert a.tokens.min() >= 0 and a.tokens.max() < vocab.SIZE


def test_repeats_weigh_only_what_the_past_determines():
    for seed in range(8):
        tokens, target = batches.make_repeats(np.random.default_rng(seed), 128)
        first = int(np.argmax(target))
        period = next(
            p for p in range(1, first + 1) if np.array_equal(tokens[first:], tokens[first - p : len(tokens) - p])
        )
        assert target[first:].all() and 8 <= period <= 64


def dense_attention(q, k, v):
    """Softmax attention with an explicit mask, in NumPy."""
    s = np.einsum("bkgth,bksh->bkgts", q, k) / np.sqrt(q.shape[-1])
    s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bkgts,bksh->bkgth", p / p.sum(-1, keepdims=True), v)


def test_blocked_attention_is_exact():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(2, 2, 3, 21, 4)), rng.normal(size=(2, 2, 21, 4)), rng.normal(size=(2, 2, 21, 4))
    out = attention.causal(*(x.astype(np.float32) for x in (q, k, v)), block=8)
    np.testing.assert_allclose(out, dense_attention(q, k, v), atol=1e-5)


def test_mixed_precision_gradients():
    rng = np.random.default_rng(0)
    x, y, g = rng.normal(size=(5, 7)), rng.normal(size=(7, 3)), rng.normal(size=(5, 3))
    x, y, g = (np.asarray(a.astype("bfloat16"), np.float32) for a in map(jax.numpy.asarray, (x, y, g)))
    out, pull = jax.vjp(lambda x, y: precision.einsum("ti,io->to", x, y), x, y)
    for value, expected in zip((out, *pull(g)), (x @ y, g @ y.T, x.T @ g), strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-5)


def toy_run() -> trainer.Run:
    config = Config.llama(vocab.SIZE, 16, 2, 2, 1, 8, 16, max_positions=64, tie_embeddings=True)
    curriculum = Curriculum(((32, 4), (64, 2)), bar=0.0, stay=2)
    return trainer.Run(trainer.Recipe(config, curriculum, seed=7, steps=8, warmup=2), toy_corpus())


def test_a_resumed_run_equals_an_unbroken_one(tmp_path):
    whole, first = toy_run(), toy_run()
    records = [whole.step() for _ in range(6)]
    assert Counter(r["length"] for r in records)[64] and all(np.isfinite(r.get("loss/recall", 0)) for r in records)
    begun = [first.step() for _ in range(3)]
    with trainer.open_manager(tmp_path) as manager:
        assert not toy_run().restore(manager)
        first.save(manager)
        second = toy_run()
        assert second.restore(manager)
    assert begun + [second.step() for _ in range(3)] == records
    assert second.progress == whole.progress
    jax.tree.map(np.testing.assert_array_equal, second.params, whole.params)


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


def test_kneser_ney_counts_contexts_not_occurrences():
    """Chen & Goodman (1999), equation 26, written out for a bigram model of a small text."""
    text = np.array([1, 2, 1, 2, 1, 2, 1, 3, 4, 3, 5, 3, 1, 1, 2, 2])
    model = ngram.KneserNey.fit(text, 2)
    bigrams = Counter(itertools.pairwise(text.tolist()))
    left = Counter(b for _, b in bigrams)

    def after(h):
        return {b: n for (a, b), n in bigrams.items() if a == h}

    def rates(counts):
        n1, n2, n3, n4 = (max(1, list(counts.values()).count(c)) for c in (1, 2, 3, 4))
        y = n1 / (n1 + 2 * n2)
        discounts = [1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]
        return [0, *(min(max(discount, 0), i) for i, discount in enumerate(discounts, 1))]

    def level(w, counts, rate, lower):
        count = counts.get(w, 0)
        left_over = sum(rate[min(c, 3)] for c in counts.values())
        return (count - rate[min(count, 3)] + left_over * lower) / sum(counts.values())

    for h, w in [(1, 2), (1, 3), (2, 2), (3, 5), (3, 9)]:
        unigram = level(w, left, rates(left), 1 / (vocab.END + 1))
        assert model.probabilities(np.array([h, w]))[-1] == pytest.approx(level(w, after(h), rates(bigrams), unigram))
