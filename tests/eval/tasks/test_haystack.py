"""A needle over depth and length, in both forms, and the haystack's text."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.eval.tasks import haystack, symbols
from kvjax.eval.tasks.case import Case, Spec
from kvjax.eval.tasks.essays import ESSAYS, HEAD
from kvjax.eval.tasks.haystack import NEEDLE, PHRASES, QUESTION, Essay, insert_needles
from kvjax.eval.tasks.suite import SYNTHETIC
from kvjax.models.model import Model
from kvjax.models.tokenizer import Tokenizer
from kvjax.testbed import vocab
from kvjax.testbed.vocab import PAIR
from tests.eval.tasks.test_ruler import BYTES, PIECES, text

OURS = Model(None, None, Tokenizer(vocab.tokenizer()))
SPEC = Spec(lengths=(600, 1500), contexts=2, depths=5)


def make_cases(model: Model, spec: Spec = SPEC) -> list[Case]:
    return list(SYNTHETIC["niah"](model, spec))


@pytest.mark.parametrize("model", (OURS, BYTES, PIECES), ids=("ours", "bytes", "pieces"))
def test_the_grid(model):
    cases = make_cases(model)
    grid = [(n, d, i) for n in SPEC.lengths for d in (0.0, 0.25, 0.5, 0.75, 1.0) for i in range(2)]
    assert [c.key for c in cases] == [f"niah/{n}/{d:.2f}/{i}" for n, d, i in grid]
    assert [(c.about["length"], c.about["depth"]) for c in cases] == [(n, d) for n, d, _ in grid]
    assert all(c.asks[0].about["depth"] == c.about["depth"] and len(c.asks) == 1 for c in cases)
    assert len({c.context.tobytes() for c in cases}) == len(cases)
    assert [c.context.tolist() for c in cases] == [c.context.tolist() for c in make_cases(model)]


@pytest.mark.parametrize("model", (BYTES, PIECES), ids=("bytes", "pieces"))
def test_text_needles_are_at_their_depth(model):
    for case in make_cases(model):
        context, (ask,) = text(model, case.context), case.asks
        length, depth = case.about["length"], case.about["depth"]
        assert length - 100 < len(case.context) + len(ask.prompt) <= length
        assert context.count(NEEDLE) == 1 and all(context.count(f) == 1 for f in PHRASES)
        assert context.endswith("\n\n") and text(model, ask.prompt) == QUESTION
        body = len(context) - len(NEEDLE)
        at = context.index(NEEDLE)
        assert depth * body - 250 < at <= depth * body + 5  # the end of a line before it
        assert at == 0 or context[at - 1] == "\n"
        assert (ask.metric, ask.references) == ("contains_all", PHRASES)
    last = text(model, make_cases(model)[-1].context)
    assert last.rstrip().endswith(NEEDLE)


def test_symbol_needles_are_at_their_depth():
    for case in make_cases(OURS):
        tokens, (ask,) = case.context.tolist(), case.asks
        length, depth = case.about["length"], case.about["depth"]
        at = tokens.index(PAIR)
        assert len(tokens) == length and tokens.count(PAIR) == 1
        assert at == round(depth * (length - 6))
        assert ask.prompt.tolist()[1] == tokens[at + 1]
        assert ask.references == (OURS.tokenizer.decode(tokens[at + 2 : at + 6], False),) and ask.metric == "exact"


def test_depths_and_lengths_that_do_not_work():
    for depths in (0, 102):
        with pytest.raises(KvjaxError, match=f"depths must be an integer from 1 to 101, got {depths}"):
            make_cases(OURS, Spec((600,), depths=depths))
    assert len({c.key for c in make_cases(OURS, Spec((600,), 1, depths=101))}) == 101
    with pytest.raises(KvjaxError, match="'niah' does not fit in 5 tokens; use a length of at least 6$"):
        make_cases(OURS, Spec((5,), 1))
    with pytest.raises(KvjaxError, match="'niah' does not fit in 100 tokens; use a length of at least 2"):
        make_cases(BYTES, Spec((100,), 1))


def essay(path, seed: int = 0) -> Essay:
    return Essay(Spec(text=path), np.random.default_rng(seed))


def test_an_essay_is_the_text_from_a_sentence_on_and_round_its_end(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("One two. Three four!\nFive six?  Seven")
    flat = "One two. Three four! Five six? Seven "
    first_words = set()
    for seed in range(30):
        e = essay(file, seed)
        whole = e.words(7)
        assert sorted(whole.split()) == sorted(flat.split())
        assert whole in flat + flat and whole.split()[0] in ("One", "Three", "Five", "Seven")
        assert [len(e.words(n).split()) for n in range(1, 20)] == list(range(1, 20))
        assert e.words(16) == whole * 2 + e.words(2)
        first_words.add(whole.split()[0])
    assert len(first_words) == 4


def test_code_keeps_its_lines():
    e = Essay(Spec(), np.random.default_rng(3))
    part = e.words(400)
    source = symbols.read_source(Spec())
    assert part in source + source and "\n    " in part


@pytest.mark.parametrize(
    ("depths", "expected"),
    [
        ([0.0], "N1 A b. C d. E"),
        ([0.5], "A b. N1 C d. E"),
        ([0.6, 1.0], "A b. N1 C d. E N2"),
        ([0.0, 0.4], "N1 N2 A b. C d. E"),
    ],
)
def test_needles_go_to_the_end_of_a_sentence_before(depths, expected):
    haystack_text, starts = insert_needles("A b. C d. E", ["N1", "N2"][: len(depths)], depths)
    assert haystack_text.strip() == expected
    code = "x = a. b\ny = 2\n"
    assert insert_needles(code, ["N1"], [0.6]) == ("x = a. b\nN1\ny = 2\n", [9])
    assert [haystack_text[s : s + 2] for s in starts] == ["N1", "N2"][: len(depths)]


CODE = "".join(f"def scale_{i}(value):\n    return value * {i}\n\n\n" for i in range(200))


@pytest.mark.parametrize(
    ("name", "whole"),
    (
        ("code on one line", CODE.replace("\n", " ")),
        ("a line of prose among short ones", "Note\n" + "It is so. " * 400 + "\nEnd\n"),
        ("minified", "".join(f"{{a:{i},b:[]}}," for i in range(600))),
        ("Chinese", "长城是中国古代的军事防御工程，始建于春秋战国时期。" * 200),
        ("Chinese without sentences", "长城是中国古代的军事防御工程始建于春秋战国时期" * 200),
    ),
)
def test_needles_are_at_their_depth_in_texts_without_lines_sentences_or_spaces(name, whole):
    depths = [0.1, 0.4, 0.6, 0.9]
    starts = insert_needles(whole, ["NEEDLE"] * 4, depths)[1]
    assert np.allclose(np.array(starts) / len(whole), depths, atol=0.04), name


def test_a_script_without_spaces_has_words_of_one_character(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("长城是GREAT wall。始建于", encoding="utf-8")
    e = essay(file)
    assert [e.whole[a:b] for a, b in itertools.pairwise([*e.starts, len(e.whole)])] == [
        *("长", "城", "是", "GREAT ", "wall", "。", "始", "建", "于 ")
    ]
    assert {essay(file, seed).words(1) for seed in range(20)} == {"长", "始"}


@pytest.mark.parametrize("name", ("code", "Chinese"))
def test_numbers_planted_in_ones_own_text_are_spread_over_it(name, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text(
        CODE if name == "code" else "长城是中国古代的军事防御工程，始建于春秋战国时期。" * 200, encoding="utf-8"
    )
    cases = list(ESSAYS["planted"](BYTES, Spec((4096,), 8, questions=4, text=file)))
    contexts = [text(BYTES, case.context) for case in cases]
    answers = [[ask.references[0] for ask in case.asks] for case in cases]
    places = np.array([[c.index(x) / len(c) for x in each] for c, each in zip(contexts, answers, strict=True)])
    assert 0.3 < np.ptp(places, axis=1).mean() < 0.9
    # Contexts begin at different places of the text, fill their length, and keep its lines.
    assert len({c[len(HEAD) : len(HEAD) + 400] for c in contexts}) == 8
    assert all(len(case.context) > 3900 for case in cases)
    assert name != "code" or all("):\n    return" in c for c in contexts)


def test_words_are_different():
    for words in (haystack.ADJECTIVES, haystack.NOUNS):
        assert len(set(words)) == len(words) and all(w.isalpha() and w.islower() for w in words)
