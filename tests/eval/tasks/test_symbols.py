"""Tasks in the shipped vocabulary: an independent reader of the context finds the references; seeds; lengths."""

from __future__ import annotations

import collections
import re

import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.eval.tasks import symbols
from kvjax.eval.tasks.case import Case, Spec
from kvjax.eval.tasks.suite import SYNTHETIC
from kvjax.eval.tasks.symbols import SYMBOL_TASKS
from kvjax.models.model import Model
from kvjax.models.tokenizer import Tokenizer
from kvjax.testbed import vocab
from kvjax.testbed.vocab import ASK, LET, PAIR, SYMBOLS

MODEL = Model(None, None, Tokenizer(vocab.tokenizer()))
SPEC = Spec(lengths=(700, 1000), contexts=3, questions=3)


def make_cases(name: str, spec: Spec = SPEC) -> list[Case]:
    return list(SYNTHETIC[name](MODEL, spec))


def decode(ids) -> str:
    return MODEL.tokenizer.decode(ids, skip_special_tokens=False)


def is_symbol(t: int) -> bool:
    return SYMBOLS[0] <= t <= SYMBOLS[-1]


def symbols_from(tokens: list[int], at: int) -> list[int]:
    """The run of symbols that begins at a place."""
    end = at
    while end < len(tokens) and is_symbol(tokens[end]):
        end += 1
    return tokens[at:end]


def find_answers(name: str, tokens: list[int], prompt: list[int]) -> list[list[int]]:
    """Finds all answers that the context allows, up to their order."""
    if name == "symbols.copying":
        at = next(i for i in range(len(tokens)) if tokens[i : i + 2] == prompt)
        return [symbols_from(tokens, at + 2)[:16]]
    counts = [s for s, _ in collections.Counter(filter(is_symbol, tokens)).most_common(3)]
    if name in ("ruler.cwe", "ruler.fwe"):
        return [counts]
    assert prompt[0] == ASK
    if name in ("ruler.vt", "symbols.variables"):
        places = (i for i, t in enumerate(tokens) if t == LET)
        value = {tokens[i + 1]: tokens[i + 2] for i in places}
        chain = [value[prompt[1]]]
        while chain[-1] in value:
            chain.append(value[chain[-1]])
        return [chain]
    facts = collections.defaultdict(list)
    for i, t in enumerate(tokens):
        if t == PAIR:
            key, *values = symbols_from(tokens, i + 1)
            facts[key].append(values)
    if name == "ruler.niah_multivalue":
        return [[v for values in facts[prompt[1]] for v in values]]
    assert all(len(facts[k]) == 1 for k in prompt[1:])
    return [[v for k in prompt[1:] for v in facts[k][0]]]


@pytest.mark.parametrize("name", SYMBOL_TASKS)
def test_answers_are_in_the_context(name):
    cases = make_cases(name)
    assert [c.key for c in cases] == [f"{name}/{n}/{i}" for n in SPEC.lengths for i in range(3)]
    for case, length in zip(cases, (700,) * 3 + (1000,) * 3, strict=True):
        assert len(case.context) == length == case.about["length"] and case.context.dtype == np.int32
        for ask in case.asks:
            (answer,) = find_answers(name, case.context.tolist(), ask.prompt.tolist())
            assert ask.new_tokens == len(answer)
            if ask.metric == "exact":
                assert ask.references == (decode(answer),)
            else:
                assert sorted(ask.references) == sorted(decode([t]) for t in answer)
                assert len(set(ask.references)) == len(answer)
            assert 0 <= ask.about["depth"] <= 1
        assert len({tuple(a.prompt) for a in case.asks}) == len(case.asks)


def test_the_number_of_questions():
    num_questions = {name: len(make_cases(name)[0].asks) for name in SYMBOL_TASKS}
    single = {n for n in SYMBOL_TASKS if "single" in n} | {"ruler.cwe", "ruler.fwe"}
    assert {n for n, asks in num_questions.items() if asks == 1} == single
    assert all(asks == 3 for n, asks in num_questions.items() if n not in single)
    assert len(make_cases("shared", Spec((700,), 1, 20))[0].asks) == 20


def test_names_of_ruler_mean_the_same_in_both_forms():
    from kvjax.eval.tasks import ruler

    assert {n for n in SYMBOL_TASKS if not n.startswith("symbols.")} == set(ruler.TASKS)
    assert {"niah", "ppl", "long_answer", "completion", "completion.exact", *SYMBOL_TASKS} == set(SYNTHETIC)
    assert all(maker.__doc__ for maker in SYNTHETIC.values())


def flat(cases: list[Case]) -> list:
    return [(c.context.tolist(), [(a.prompt.tolist(), a.references) for a in c.asks]) for c in cases]


@pytest.mark.parametrize("name", SYMBOL_TASKS)
def test_the_same_instances_at_every_call_and_others_for_another_seed(name):
    first = flat(make_cases(name))
    assert first == flat(make_cases(name))
    assert len({str(x) for x in first}) == len(first)
    assert first[3:4] == flat(make_cases(name, Spec((1000,), 1, 3)))  # whatever else is asked for
    assert first[0] != flat(make_cases(name, Spec((700,), 1, 3, seed=1)))[0]


def test_a_conversation_asks_what_the_shared_context_is_asked():
    turns, shared = make_cases("turns"), make_cases("shared")
    assert flat(turns) == flat(shared)
    assert all(c.turns for c in turns) and not any(c.turns for c in shared)
    assert [a.about["turn"] for a in turns[0].asks] == [0, 1, 2] and "turn" not in shared[0].asks[0].about


def test_seeds_are_no_training_seeds(monkeypatch):
    seeds = []
    monkeypatch.setattr(np.random, "default_rng", lambda seed: seeds.append(seed))
    for seed in range(50):
        symbols.instance_generator(Spec(seed=seed), "ruler.vt", 1024, 0)
    assert len(set(seeds)) == 50
    assert all(2**127 <= s < 2**128 for s in seeds)  # a training seed and its step take 64 bits


def test_fillers_are_code_noise_or_the_file(tmp_path):
    def body(case: Case) -> bytes:
        return bytes(t for t in case.context.tolist() if t < 256)

    assert b"    " in body(make_cases("ruler.niah_single_2")[0]) and b"    " not in body(
        make_cases("ruler.niah_single_1")[0]
    )
    file = tmp_path / "text.txt"
    file.write_text("na\u00efve words ", encoding="utf-8")
    case = make_cases("ruler.niah_single_2", Spec((700,), 1, text=file))[0]
    assert set(body(case)) == set(file.read_bytes()) and case.context.max() > 260


@pytest.mark.parametrize("name", SYMBOL_TASKS)
def test_the_error_names_the_shortest_length_that_works(name):
    with pytest.raises(KvjaxError, match=f"'{name}' does not fit in 2 tokens; use a length of at least") as e:
        make_cases(name, Spec((2,), 1))
    least = int(re.search(r"at least (\d+)", str(e.value))[1])
    assert len(make_cases(name, Spec((least,), 1))[0].context) == least
    with pytest.raises(KvjaxError):
        make_cases(name, Spec((least - 1,), 1))


def test_a_text_that_cannot_be_read(tmp_path):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, message in (("none", "cannot read --text"), ("binary", "UTF-8"), ("empty", "has no text")):
        with pytest.raises(KvjaxError, match=message):
            make_cases("ruler.niah_single_2", Spec((700,), 1, text=tmp_path / name))


def test_other_vocabularies_do_not_know_symbols():
    inner = vocab.tokenizer()
    inner.add_tokens(["<more>"])
    assert symbols.knows_symbols(MODEL)
    assert not symbols.knows_symbols(Model(None, None, Tokenizer(inner))) and not symbols.knows_symbols(
        Model(None, None)
    )
