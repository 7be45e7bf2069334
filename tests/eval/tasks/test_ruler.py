"""RULER as text: an independent reader of the context finds the references, and nothing exceeds the length."""

from __future__ import annotations

import collections
import functools
import re

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from kvjax.errors import KvjaxError
from kvjax.eval.tasks import ruler, symbols
from kvjax.eval.tasks.case import Ask, Case, Spec
from kvjax.eval.tasks.suite import SYNTHETIC
from kvjax.models.model import Model
from kvjax.models.tokenizer import Tokenizer

NEEDLE = re.compile(r"One of the special magic (?:numbers|uuids) for (\S+) is: (\S+)\.")


def byte_model() -> Model:
    """Bytes as tokens, with <s> before a text and </s> after it."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = tokenizers.Tokenizer(models.BPE(vocab, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    around = [("<s>", 256), ("</s>", 257)]
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=around)
    return Model(None, None, Tokenizer(inner))


def piece_model() -> Model:
    """Pieces of words; a space is put before every text, <s> before a prompt."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    inner.decoder = decoders.ByteLevel()
    more = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=["<unk>", "<s>"], **more)
    inner.train_from_iterator([symbols.read_source(Spec())[:20_000], ruler.NOISE], trainer)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Model(None, None, Tokenizer(inner))


BYTES, PIECES = byte_model(), piece_model()
NAMES = list(ruler.TASKS)
SPEC = Spec(lengths=(2300,), contexts=2, questions=3)


@functools.cache
def make_cases(name: str, model: Model = BYTES, spec: Spec = SPEC) -> list[Case]:
    return list(SYNTHETIC[name](model, spec))


def text(model: Model, ids: np.ndarray) -> str:
    return model.tokenizer.decode(ids).removeprefix(" " * (model is PIECES))


def find_answers(name: str, context: str, question: str) -> set[str]:
    """Finds the answers by reading the context's text."""
    if name == "ruler.vt":
        body, value = context[context.rindex("Memorize and track") :], re.search(r"value (\d+)", question)[1]
        names = {value}
        for left, right in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", body):
            if right in names:
                names.add(left)
        return names - {value}
    if name == "ruler.cwe":
        body = context[context.rindex("Below is a numbered list") :]
        return {w for w, _ in collections.Counter(re.findall(r"\d+\. (\w+)", body)).most_common(10)}
    if name == "ruler.fwe":
        words = context[context.index("coded words. ") :].split()[2:]
        return {w for w, _ in collections.Counter(words).most_common(4)} - {"..."}
    keys = re.search(r"for (.*?) mentioned", question)[1].replace("and ", "").split(", ")
    return {value for key, value in NEEDLE.findall(context) if key in keys}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", (BYTES, PIECES), ids=("bytes", "pieces"))
def test_answers_are_in_the_context_and_lengths_are_kept(name, model):
    for case in make_cases(name, model):
        context, length = text(model, case.context), SPEC.lengths[0]
        longest = max(len(a.prompt) for a in case.asks)
        assert length - 120 < len(case.context) + longest <= length
        assert case.about == {"length": length} and case.task == name
        assert context.endswith("\n")
        for ask in case.asks:
            assert find_answers(name, context, text(model, ask.prompt)) == set(ask.references)
            assert len(set(ask.references)) == len(ask.references) and ask.metric == "contains_all"


@pytest.mark.parametrize("name", NAMES)
def test_the_same_instances_at_every_call_and_others_for_another_seed(name):
    def flat(cases: list[Case]) -> list:
        return [(c.key, c.context.tolist(), [(a.prompt.tolist(), a.references) for a in c.asks]) for c in cases]

    first = flat(make_cases(name))
    assert first == flat(list(SYNTHETIC[name](BYTES, SPEC)))
    assert [key for key, *_ in first] == [f"{name}/2300/0", f"{name}/2300/1"]
    assert first[0][1] != first[1][1]
    assert first[0][1] != flat(make_cases(name, spec=Spec((2300,), 1, 3, seed=1)))[0][1]
    alone = flat(make_cases(name, spec=Spec((2200, 2300), 1, 3)))  # instances do not depend on what else is asked for
    assert alone[1] == first[0]


def test_special_tokens_only_open_the_context():
    for model, bos, most in ((BYTES, 256, 255), (PIECES, 1, None)):
        case = make_cases("turns", model)[0]
        assert case.context[0] == bos and bos not in case.context[1:]
        assert all(bos not in a.prompt for a in case.asks)
        if most:
            assert case.context[1:].max() <= most and max(a.prompt.max() for a in case.asks) <= most


def test_no_space_is_put_before_a_question():
    case = make_cases("shared", PIECES)[0]
    both = PIECES.tokenizer.encode(PIECES.tokenizer.decode([*case.context, *case.asks[0].prompt])[1:])
    assert both == [*case.context.tolist(), *case.asks[0].prompt.tolist()]
    first = PIECES.tokenizer.inner.id_to_token(int(case.asks[0].prompt[0]))
    assert not first.startswith("Ġ") and "What".startswith(first)


COUNTS = {"niah_single_1": 1, "niah_single_2": 1, "niah_single_3": 1, "niah_multikey_1": 4, "niah_multivalue": 4}
COUNTS |= {"niah_multiquery": 4}


@pytest.mark.parametrize("name", COUNTS)
def test_needles_are_counted_and_each_stands_once(name):
    case = make_cases(f"ruler.{name}")[0]
    context = text(BYTES, case.context)
    needles = NEEDLE.findall(context)
    assert len(needles) == COUNTS[name]
    for key, value in needles:
        assert context.count(value) == 1
        assert context.count(key) == (4 if name == "niah_multivalue" else 1)
    places = [m.start() / len(context) for m in NEEDLE.finditer(context)]
    for ask in case.asks:
        answer_places = [p for p, (_, value) in zip(places, needles, strict=True) if value in ask.references]
        assert abs(min(answer_places) - ask.about["depth"]) < 0.01


@pytest.mark.parametrize("name", ("ruler.niah_multikey_2", "ruler.niah_multikey_3"))
def test_a_haystack_of_needles_has_no_key_twice(name):
    case = make_cases(name)[0]
    lines = text(BYTES, case.context).splitlines()[1:]
    keys = [NEEDLE.fullmatch(line)[1] for line in lines]
    assert len(keys) > 10 and len(set(keys)) == len(keys)


def prompts(case: Case) -> list[str]:
    return [text(BYTES, a.prompt) for a in case.asks]


def test_questions_differ_and_a_conversation_starts_lines():
    shared, turns = make_cases("shared")[0], make_cases("turns")[0]
    assert len(set(prompts(shared))) == 3 == len(turns.asks)
    assert turns.turns and not shared.turns
    assert prompts(turns) == [prompts(shared)[0], *("\n" + p for p in prompts(shared)[1:])]
    # A later prompt is longer by its line break, so the haystack may be a little smaller; the facts are the same.
    assert NEEDLE.findall(text(BYTES, turns.context)) == NEEDLE.findall(text(BYTES, shared.context))
    assert [a.about["turn"] for a in turns.asks] == [0, 1, 2]
    assert [len(make_cases(f"ruler.{n}")[0].asks) for n in ("niah_single_1", "niah_multikey_1", "niah_multiquery")] == [
        1,
        3,
        1,
    ]


def test_prompts_are_rulers():
    one = make_cases("ruler.niah_single_1")[0]
    context, (question,) = text(BYTES, one.context), prompts(one)
    key = re.search(r"for (\S+) is:", context)[1]
    assert re.fullmatch("[a-z]+-[a-z]+", key) and re.fullmatch(r"[1-9]\d{6}", one.asks[0].references[0])
    head = "A special magic number is hidden within the following text. Make sure to memorize it. "
    assert context.startswith(
        head + "I will quiz you about the number afterwards.\nThe grass is green. The sky is blue."
    )
    assert question == (
        f"What is the special magic number for {key} mentioned in the provided text?"
        f" The special magic number for {key} mentioned in the provided text is"
    )
    several = text(BYTES, make_cases("ruler.niah_multivalue")[0].asks[0].prompt)
    assert several.startswith("What are all the special magic numbers for") and several.endswith("provided text are")
    assert re.search(r"for \S+, \S+, \S+, and \S+ mentioned", prompts(make_cases("ruler.niah_multiquery")[0])[0])
    assert [make_cases(f"ruler.{n}")[0].asks[0].new_tokens for n in ("niah_single_1", "vt", "cwe", "fwe")] == [
        128,
        30,
        120,
        50,
    ]


def test_variables_have_one_chain_and_an_example_of_another():
    case = make_cases("ruler.vt")[0]
    context, (question,) = text(BYTES, case.context), prompts(case)
    example, body = context.split("\n\nMemorize")[0], context[context.rindex("Memorize") :]
    assert context.count("Memorize and track") == 2 and len(re.findall("VAR \\w+ = VAR", body)) == 4
    assert example.endswith("they are:  " + " ".join(re.findall(r"VAR (\w+) =", example)))
    value = re.search(r"value (\d{5})", question)[1]
    assert body.count(value) == 1 and value not in example
    assert question.endswith(f" 5 variables are assigned the value {value}, they are: ")


@pytest.mark.parametrize(("length", "often", "seldom"), ((3000, 6, 1), (6000, 30, 3)))
def test_common_words_are_repeated_as_in_ruler(length, often, seldom):
    context = text(PIECES, make_cases("ruler.cwe", PIECES, Spec((length,), 1))[0].context)
    body = context[context.rindex("Below is") :]
    assert sorted(set(collections.Counter(re.findall(r"\d+\. (\w+)", body)).values())) == [seldom, often]
    assert re.findall(r"(\d+)\. ", body) == [str(i + 1) for i in range(body.count(". ") - 2)]


def test_frequent_words_follow_the_law():
    words = text(BYTES, make_cases("ruler.fwe", spec=Spec((6000,), 1))[0].context).split("coded words. ")[1].split()
    counts = [n for _, n in collections.Counter(words).most_common(5)]
    assert all(abs(n - counts[0] / (rank + 1) ** 2) <= 1 for rank, n in enumerate(counts))
    assert len(set(counts)) == 5


@pytest.mark.parametrize("name", [n for n in NAMES if n != "shared"])
def test_the_error_names_the_shortest_length_that_works(name):
    with pytest.raises(KvjaxError, match=rf"task '{name}' does not fit in 40 tokens; use a length of at least") as e:
        make_cases(name, spec=Spec((40,), 1))
    least = int(re.search(r"at least (\d+)", str(e.value))[1])
    if name != "ruler.cwe":  # there a longer context shows a longer example
        assert make_cases(name, spec=Spec((least,), 1))


def test_symbols_need_their_model():
    with pytest.raises(KvjaxError, match="use 'ruler.vt' instead"):
        make_cases("symbols.variables")


def test_drawn_strings_avoid_the_haystack(tmp_path):
    rng = np.random.default_rng(0)
    first = next(ruler.STRING_KINDS["numbers"](np.random.default_rng(0)))
    assert first not in ruler.DistinctStrings(ruler.STRING_KINDS["numbers"](rng), f"a {first} b").first(5)
    words = ruler.DistinctStrings(ruler.STRING_KINDS["words"](rng)).first(20_000)
    assert len(set(words)) == 20_000
    file = tmp_path / "essay.txt"
    file.write_text("One  sentence here.\nAnother\none there! " * 300)
    case: Case = make_cases("ruler.niah_single_2", spec=Spec((2000,), 1, text=file))[0]
    ask: Ask = case.asks[0]
    body = text(BYTES, case.context).split("\n")[1]
    assert "One sentence here. Another one there! " in body  # white space as in RULER
    assert f"for {re.search('for (.*?) mentioned', text(BYTES, ask.prompt))[1]} is: {ask.references[0]}. " in body
