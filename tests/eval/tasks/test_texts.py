"""Perplexity windows, lines to complete, and how texts become tokens."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.eval.tasks import symbols
from kvjax.eval.tasks.case import Case, Spec, TooShort
from kvjax.eval.tasks.encoding import context_ids, find_largest, prompt_ids
from kvjax.eval.tasks.suite import SYNTHETIC
from kvjax.eval.tasks.texts import COMPLETE, NEXT
from kvjax.models.model import Model
from kvjax.models.tokenizer import Tokenizer
from kvjax.testbed import corpus, vocab
from tests.eval.tasks.test_ruler import BYTES, PIECES, text

OURS = Model(None, None, Tokenizer(vocab.tokenizer()))
SPEC = Spec(lengths=(200, 600), contexts=3)
ALL = pytest.mark.parametrize("model", (OURS, BYTES, PIECES), ids=("ours", "bytes", "pieces"))


def make_cases(name: str, model: Model, spec: Spec = SPEC) -> list[Case]:
    return list(SYNTHETIC[name](model, spec))


def body(model: Model, ids: np.ndarray) -> str:
    """The decoded text, without the space that the tokenizer puts first and without <end>."""
    return model.tokenizer.decode(ids[ids != vocab.END] if model is OURS else ids)


@ALL
def test_windows_of_text(model):
    cases = make_cases("ppl", model)
    assert [c.key.rpartition("/")[0] for c in cases] == [f"ppl/{n}" for n in (200, 600) for _ in range(3)]
    source = symbols.read_source(Spec())
    places = []
    for case in cases:
        length = case.about["length"]
        assert len(case.context) == length and len(case.follows) == min(256, length) and not case.asks
        follows = body(model, case.follows)
        assert case.bytes == len(follows.encode())
        whole = body(model, np.concatenate([case.context, case.follows]))
        places.append(source.index(whole.removeprefix(" " * (model is PIECES))))
    assert places[:3] == sorted(places[:3]) and places[2] - places[0] > len(source) // 2
    assert [c.follows.tolist() for c in cases] == [c.follows.tolist() for c in make_cases("ppl", model)]
    if model is not OURS:
        bos = 256 if model is BYTES else 1
        assert all(c.context[0] == bos and bos not in c.follows for c in cases)


@ALL
@pytest.mark.parametrize("end", ("\n", " "), ids=("lines", "one_line"))
def test_a_key_names_one_window_however_many_there_are(model, end, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(f"x = {i}{end}" for i in range(2000)))
    few, more = ({c.key: c for c in make_cases("ppl", model, Spec((200,), n, text=file))} for n in (3, 5))
    assert (len(few), len(more)) == (3, 5)
    shared = few.keys() & more.keys()
    assert len(shared) >= 2  # the first and the last
    assert all(np.array_equal(few[key].follows, more[key].follows) for key in shared)
    assert len({c.context.tobytes() for c in more.values()}) == 5


@ALL
def test_a_long_answer_is_the_second_half_of_a_window(model, tmp_path):
    cases = make_cases("long_answer", model, Spec((200, 301), 3))
    assert [c.key.rpartition("/")[0] for c in cases] == [f"long_answer/{n}" for n in (200, 301) for _ in range(3)]
    assert [(len(c.context), len(c.follows)) for c in cases[::3]] == [(100, 100), (150, 151)]
    assert all(c.bytes == len(body(model, c.follows).encode()) for c in cases)
    file = tmp_path / "text.txt"
    file.write_text("x = 1\n" * 100)
    with pytest.raises(KvjaxError, match=r"too few for a context of 2,500 with 2500 to predict") as e:
        make_cases("long_answer", model, Spec((5000,), 1, text=file))
    most = int(str(e.value).split("at most ")[1].split(",")[0])
    (case,) = make_cases("long_answer", model, Spec((most,), 1, text=file))
    assert len(case.context) + len(case.follows) == most
    with pytest.raises(TooShort):
        make_cases("long_answer", model, Spec((15,), 1))


@ALL
def test_windows_of_a_file_do_not_overlap(model, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {i} of na\u00efve text\n" for i in range(60)), encoding="utf-8")
    source = file.read_text(encoding="utf-8")
    cases = make_cases("ppl", model, Spec((200,), 8, text=file))
    assert 1 <= len(cases) <= len(source.encode()) // 400 + 3
    last = -1
    for case in cases:
        whole = body(model, np.concatenate([case.context, case.follows])).removeprefix(" " * (model is PIECES))
        whole = whole.strip("\ufffd")
        at = source.index(whole)
        assert at > last
        last = at + len(whole) - 1
        assert abs(case.bytes - len(body(model, case.follows).strip("\ufffd").encode())) <= 2


@ALL
def test_a_text_that_is_too_short(model, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("x = 1\n" * 100)
    with pytest.raises(KvjaxError, match=r"tokens, too few for a context of 5,000 with 256 to predict") as e:
        make_cases("ppl", model, Spec((5000,), 1, text=file))
    most = int(str(e.value).split("at most ")[1].split(",")[0])
    assert len(make_cases("ppl", model, Spec((most,), 1, text=file))) == 1
    with pytest.raises(KvjaxError, match="too few for a context of 5,000; use a length of at most"):
        file.write_text("value = compute(1)\n" * 30)
        make_cases("completion", model, Spec((5000,), 1, text=file))


@ALL
def test_the_next_line(model):
    source = symbols.read_source(Spec())
    cases, strict = make_cases("completion", model), make_cases("completion.exact", model)
    for case, other in zip(cases, strict, strict=True):
        length, (ask,) = case.about["length"], case.asks
        context, prompt = body(model, case.context), body(model, ask.prompt)
        if model is OURS:
            assert len(case.context) == length
            before = context.strip("\ufffd") + prompt
            assert prompt.endswith("\n") and prompt.count("\n") == 1
        else:
            assert len(case.context) + len(ask.prompt) <= length
            context = context.removeprefix(" " * (model is PIECES))
            assert context.startswith(COMPLETE) and context.endswith("\n") and prompt == NEXT
            before = context.removeprefix(COMPLETE)
        (reference,) = ask.references
        assert before + reference + "\n" in source + source
        assert 12 <= len(reference.strip()) <= 80 and not reference.strip().startswith("#")
        assert (ask.metric, ask.stop) == ("edit_similarity", ())
        assert (other.asks[0].metric, other.asks[0].stop) == ("exact", ("\n",))
        assert other.asks[0].references == (reference.strip(),) and other.key == case.key.replace("ion/", "ion.exact/")
        assert other.context.tolist() == case.context.tolist()
    assert len({c.asks[0].references for c in cases}) > 3


def test_text_without_code(tmp_path):
    file = tmp_path / "prose.txt"
    file.write_text("only words here\n" * 50)
    with pytest.raises(KvjaxError, match="has no line of code to complete"):
        make_cases("completion", BYTES, Spec((100,), 1, text=file))
    with pytest.raises(KvjaxError, match="'completion' does not fit in 20 tokens; use a length of at least 1"):
        make_cases("completion", BYTES, Spec((20,), 1))


def test_contexts_open_and_questions_do_not():
    prompt = BYTES.tokenizer.encode_prompt("ab")
    assert context_ids(BYTES.tokenizer, "ab").tolist() == prompt == BYTES.tokenizer.encode("ab")[:-1]  # without </s>
    for model in (BYTES, PIECES, OURS):
        for question in ("What is", "\nWhat is", " is", "x"):
            ids = prompt_ids(model.tokenizer, question)
            assert text(model, ids).lstrip() == question.lstrip() or model is PIECES and question.startswith("\n")
            assert len(ids) and ids.dtype == np.int32
    assert PIECES.tokenizer.inner.id_to_token(int(PIECES.tokenizer.encode("What", False)[0])).startswith("\u0120")
    assert not PIECES.tokenizer.inner.id_to_token(int(prompt_ids(PIECES.tokenizer, "What")[0])).startswith("\u0120")


@pytest.mark.parametrize(
    "cost", (lambda n: 3 * n + 5, lambda n: n * n, lambda n: 10 * n + 7 * (n % 3), lambda n: n // 9)
)
def test_the_largest_that_fits(cost):
    for limit in (0, 1, 30, 199, 1000, 54321):
        calls: list[int] = []
        if cost(1) > limit:
            with pytest.raises(TooShort, match=f"task 'x' does not fit in {limit} tokens"):
                find_largest("x", cost, limit, 1, 50_000)
            continue
        largest = find_largest("x", lambda n, c=calls: c.append(n) or cost(n), limit, 1, 50_000)
        near = limit - cost(largest) <= limit // 200
        assert cost(largest) <= limit and (largest == 50_000 or near or cost(largest + 1) > limit)
        assert len(calls) < 40


def test_special_tokens_in_a_text_are_text():
    for model in (BYTES, PIECES):
        ids = context_ids(model.tokenizer, "(?P<s>x)").tolist()
        assert model.tokenizer.decode(ids).strip() == "(?P<s>x)" and ids.count(ids[0]) == 1
        assert not model.tokenizer.inner.encode_special_tokens
        assert model.tokenizer.decode(prompt_ids(model.tokenizer, "a <s>")).strip() == "a <s>"


def test_held_out_text_is_held_out():
    train = corpus.load("train").tokens
    context = make_cases("completion", OURS)[-1].context
    assert train.astype(np.uint16).tobytes().find(context[-200:].astype(np.uint16).tobytes()) == -1
