"""Cases asked of a toy model: every protocol against the public calls that it stands for, and the records."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.errors import KvjaxError
from kvjax.eval.run import harness
from kvjax.eval.run.cells import fingerprint, make_batches
from kvjax.eval.run.context_reader import ContextReader, padded_width
from kvjax.eval.run.evaluate import check_cases, check_records, evaluate
from kvjax.eval.tasks.case import Ask, Case
from kvjax.models.tokenizer import Tokenizer
from kvjax.registry.method_hash import method_hash
from kvjax.testbed import vocab
from kvjax.testing import toy_model

CAPACITY = 64  # tokens per sequence, as the harness chooses here, so that programs are shared
METHODS = ("full", "snapkv:budget=16,window=4", "specache:group=8,residual=8,topk=8")
RNG = np.random.default_rng(0)
MODEL = dataclasses.replace(
    toy_model(layers=1, vocab_size=vocab.SIZE, eos_ids=(vocab.END,)), tokenizer=Tokenizer(vocab.tokenizer())
)
READER = ContextReader(MODEL)


def draw(n):
    return RNG.integers(32, 127, n).astype(np.int32)


def ask(prompt, new=4, references=("<s1>a",), **more):
    return Ask(np.append(draw(prompt - 1), np.int32(ord("?"))), "exact", references, new, **more)


def case(key, context, prompts, **more):
    return Case("toy", key, draw(context), tuple(map(ask, prompts)), about={"length": 48}, **more)


CASES = [case("a", 40, (3, 5)), case("b", 44, (6, 3)), case("c", 37, (1, 2))]
TALKS = [dataclasses.replace(c, task="talk", turns=True) for c in CASES]
TEXTS = [
    Case("ppl", f"ppl/{i}", draw(30 + n), follows=draw(n), bytes=2 * n, about={"length": 48})
    for i, n in enumerate((9, 1, 12, 9))
]


class MemoryStore:
    """A store without a file."""

    def __init__(self):
        self.records = []

    def find(self, *what):
        return next((r for r in self.records if (r["method"], r["task"], r["key"]) == what), None)

    def append(self, records):
        self.records += [r for r in records if not self.find(r["method"], r["task"], r["key"])]


def decode_texts(tokens):
    ids = ([t for t in row if t != vocab.END] for row in tokens)
    return [MODEL.tokenizer.decode(row, skip_special_tokens=False) for row in ids]


def join_prompts(cases, i):
    return [np.concatenate([c.context, c.asks[i].prompt]) for c in cases]


@pytest.mark.parametrize("name", METHODS)
def test_a_question_is_asked_of_the_contexts_state(name):
    method = kvjax.parse(name)
    replies, size = harness.ask_shared_context(READER, method, CASES, 4)
    _, state = kvjax.prefill(MODEL, [c.context for c in CASES], method, capacity=CAPACITY)
    for i, question_replies in enumerate(replies):
        prompts = [c.asks[i].prompt for c in CASES]
        generated = kvjax.generate(MODEL, prompts, method, max_new_tokens=4, cache=state)
        assert question_replies == decode_texts(generated.tokens)
    assert size.held["device"] > 0 and (size.held["pinned_host"] > 0) == method.traits.host


@pytest.mark.parametrize("name", METHODS)
def test_a_seen_question_ends_the_prompt(name):
    method = kvjax.parse(name)
    replies, _ = harness.ask_question_aware(READER, method, CASES, 4)
    for i, question_replies in enumerate(replies):
        generated = kvjax.generate(MODEL, join_prompts(CASES, i), method, max_new_tokens=4)
        assert question_replies == decode_texts(generated.tokens)


def test_seeing_the_question_matters_where_a_method_evicts():
    method = kvjax.parse("snapkv:budget=16,window=4")
    assert (
        harness.ask_question_aware(READER, method, CASES, 4)[0]
        != harness.ask_shared_context(READER, method, CASES, 4)[0]
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_conversation_goes_on_with_the_reference_answer(name, monkeypatch):
    monkeypatch.setattr(harness, "answer_text", lambda model, tokens, ask: tokens.tolist())
    method, answer = kvjax.parse(name), [vocab.SYMBOLS[1], ord("a")]
    replies, _ = harness.ask_conversation(READER, method, TALKS, 4)
    assert replies[0] == kvjax.generate(MODEL, join_prompts(TALKS, 0), method, max_new_tokens=4).tokens
    assert all(reply[:2] != answer for reply in replies[0])
    fed = [np.concatenate([answer, c.asks[1].prompt]) for c in TALKS]
    _, state = kvjax.prefill(MODEL, join_prompts(TALKS, 0), method, capacity=CAPACITY)
    if not name.startswith("specache"):  # it would draft a token of its own after the last one
        assert replies[1] == kvjax.generate(MODEL, fed, method, max_new_tokens=4, cache=state).tokens
    decoded = [[True] * 2 + [False] * (len(row) - 2) for row in fed]
    logits, _ = kvjax.extend(MODEL, fed, state, method, decoded=decoded)
    likeliest = [int(x[len(row) - 1].argmax()) for x, row in zip(np.asarray(logits), fed, strict=True)]
    assert [reply[0] for reply in replies[1]] == likeliest


@pytest.mark.parametrize("name", METHODS)
def test_text_that_follows_is_scored_as_if_decoded(name):
    method = kvjax.parse(name)
    bits, likeliest, _ = harness.score_continuations(READER, method, TEXTS)
    logp = kvjax.score(MODEL, [c.context for c in TEXTS], [c.follows for c in TEXTS], method)
    assert list(map(len, bits)) == list(map(len, likeliest)) == [9, 1, 12, 9]
    for b, expected in zip(bits, logp, strict=True):
        np.testing.assert_allclose(b, -expected / np.log(2), rtol=1e-4)
    first = kvjax.prefill(MODEL, [c.context for c in TEXTS], method)[0]
    assert [x[0] for x in likeliest] == first.argmax(-1).tolist()


def test_an_answer_ends_at_its_stop_its_length_or_an_end_token():
    tokens = np.array([*b"ab\n", vocab.SYMBOLS[17], ord("."), vocab.END])
    assert harness.answer_text(MODEL, tokens, ask(1, 9)) == "ab\n<s17>."
    assert harness.answer_text(MODEL, tokens, ask(1, 4)) == "ab\n<s17>"
    assert harness.answer_text(MODEL, tokens, ask(1, 9, stop=("7>", "\n"))) == "ab"
    assert harness.answer_text(MODEL, tokens, ask(1, 9, stop=("?",))) == "ab\n<s17>."


def test_the_reference_that_is_fed_back():
    two = dataclasses.replace(ask(1, references=("<s3>", "b")), metric="contains_all")
    assert harness.reference_ids(MODEL, two).tolist() == [vocab.SYMBOLS[3], *b", b"]
    one = dataclasses.replace(two, metric="exact")
    assert harness.reference_ids(MODEL, one).tolist() == [vocab.SYMBOLS[3]]
    for end in "s:":
        spaced = dataclasses.replace(one, prompt=np.array([63, ord(end)]))
        assert harness.reference_ids(MODEL, spaced).tolist() == [ord(" "), vocab.SYMBOLS[3]]


@pytest.mark.parametrize("n", [1, 16, 17, 48, 100, 1000, 2048, 4500, 31_500])
def test_padded_widths_are_few_and_little_too_wide(n):
    assert n <= padded_width(n) <= max(n + 15, 1.04 * n)
    assert padded_width(padded_width(n)) == padded_width(n)


def test_batches_depend_on_the_cases_alone_and_are_cut_evenly():
    cases = [case(str(i), 40 - i, (2,)) for i in range(10)]
    cases += [case("two", 9, (2, 2)), case("talk", 9, (2,), turns=True)]
    batches = make_batches(cases + TEXTS, 8)
    keys = [[c.key for c in b.cases] for b in batches]
    assert keys[:2] == [list("98765"), list("43210")] and keys[2:4] == [["two"], ["talk"]]
    assert [b.batch_size for b in batches] == [5, 5, 1, 1, 4] and [b.max_new_tokens for b in batches] == [4, 4, 4, 4, 0]
    odd = make_batches(cases[:7], 4)
    assert [len(b.cases) for b in odd] == [4, 3] and [c.key for c in odd[1].padded_cases] == ["2", "1", "0", "0"]


def test_room_for_what_follows_is_counted_apart():
    contexts = [draw(64), draw(64)]
    a = MODEL.config.kind(0).attention
    for name, fraction in (("full", 1), ("snapkv:budget=16,window=4", 1 / 4)):
        roomy = kvjax.read(MODEL, contexts, name, headroom=192).bytes
        tight = kvjax.read(MODEL, contexts, name, headroom=64).bytes
        assert roomy.held == tight.held and roomy.reserved["device"] == 3 * tight.reserved["device"] > 0
        rows = 2 * MODEL.config.layers * a.kv_heads * 64 * fraction * 2 * a.head_dim * 4
        assert rows <= roomy.held["device"] <= 1.1 * rows  # keys, values, and their positions


def test_what_is_recorded():
    store = MemoryStore()
    right, _ = harness.ask_shared_context(READER, kvjax.parse("full"), CASES, 4)
    first = dataclasses.replace(CASES[0].asks[0], references=("no", right[0][0]), about={"depth": 0.5})
    case_with_depth = dataclasses.replace(CASES[0], asks=(first, CASES[0].asks[1]))
    evaluate(MODEL, ["full"], [case_with_depth, *CASES[1:], *TEXTS, *TALKS], store, batch=3)
    assert [r["key"] for r in store.records] == ["c", "a", "b", "ppl/1", "ppl/0", "ppl/3", "ppl/2", "c", "a", "b"]
    first = store.find("full", "toy", "a")
    size = kvjax.planned_bytes(kvjax.parse("full"), MODEL.config, 40, capacity=CAPACITY, dtype=MODEL.dtype)
    assert first == {
        "method": "full",
        "task": "toy",
        "key": "a",
        "case": fingerprint(case_with_depth),
        "about": {"length": 48},
        "tokens": 40,
        "turns": False,
        "metric": "exact",
        "scores": [1.0, 0.0],
        "asks": [{"turn": 0, "depth": 0.5}, {"turn": 1}],
        "predictions": [row[0] for row in right],
        "bytes": first["bytes"],
        "room": first["room"],
        "dtype": "float32",
        "bfloat16_bytes": kvjax.planned_bytes("full", MODEL.config, 44, dtype="bfloat16").held,  # of the longest
        "bfloat16_fraction": {"device": 1.0, "pinned_host": 0.0},
        "method_hash": method_hash(kvjax.parse("full")),
    }
    whole = first["bytes"]["device"] + first["room"]["device"]
    assert abs(whole - size.total["device"]) <= 16 and first["bytes"]["pinned_host"] == 0
    assert store.find("full", "talk", "a")["turns"] and store.find("full", "talk", "a")["tokens"] == 40
    text = store.find("full", "ppl", "ppl/2")
    assert text["scores"] == [] and len(text["likeliest"]) == 12 and text["bits"] > 0 and "predictions" not in text


@pytest.fixture
def batch_log(monkeypatch):
    """The keys of the batches that a stand-in ran, which answers nothing and fails at the key `failing_key`."""

    class BatchLog(list):
        failing_key = None

    def answer_with_keys(model, method, rows, new):
        if log.failing_key in [c.key for c in rows]:
            raise RuntimeError("RESOURCE_EXHAUSTED: 9 GB\nand a long trace")
        log.append([c.key for c in rows])
        size = kvjax.CacheBytes({"device": 10, "pinned_host": 0}, {"device": 2, "pinned_host": 0}, 10, "float32")
        return [[c.key for c in rows] for _ in rows[0].asks], size

    log = BatchLog()
    monkeypatch.setattr(harness, "ask_shared_context", answer_with_keys)
    return log


def test_a_run_goes_on_with_what_it_lacks(batch_log):
    store = MemoryStore()
    evaluate(MODEL, ["full"], CASES, store, batch=2)
    assert batch_log == [["c", "a"], ["b", "b"]]
    before = list(store.records)
    store.records.remove(store.find("full", "toy", "a"))
    evaluate(MODEL, ["full"], CASES, store, batch=2)
    assert batch_log[2:] == [["c", "a"]] and sorted(map(str, store.records)) == sorted(map(str, before))
    evaluate(MODEL, ["full"], CASES, store, batch=2)
    assert len(batch_log) == 3


def test_speed_is_measured_once_per_method_and_length(monkeypatch):
    store = MemoryStore()
    monkeypatch.setattr(harness, "SPEED_TOKENS", 4)
    evaluate(MODEL, ["full"], [], store, batch=3, speed=[44])
    (row,) = store.records
    assert (row["task"], row["key"], row["about"]) == ("speed", "speed/44", {"length": 44, "batch": 3})
    assert row["prefill_seconds"] > 0 and row["tokens_per_second"] > 0 and row["bytes"]["device"] > 0
    monkeypatch.setattr(harness, "measure_speed", None)
    evaluate(MODEL, ["full"], [], store, batch=3, speed=[44])
    assert store.records == [row]


def test_an_error_keeps_what_was_done(batch_log):
    store, batch_log.failing_key = MemoryStore(), "b"
    with pytest.raises(KvjaxError, match=r"full on toy failed \(RuntimeError: .*: 9 GB\).*smaller --batch"):
        evaluate(MODEL, ["full"], CASES, store, batch=2)
    assert [r["key"] for r in store.records] == ["c", "a"]


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("kcach", "did you mean 'kcache'"),
        ("kvcrush", "method 'kvcrush' cannot run on random: .*compose it with one"),
        ("kcache:device_layers=2", "the model has 1 layers"),
    ],
)
def test_a_method_that_cannot_run_says_so_before_anything_runs(method, says):
    store = MemoryStore()
    with pytest.raises(KvjaxError, match=says):
        evaluate(MODEL, ["full", method], CASES, store)
    assert store.records == []


def test_cases_are_checked_before_anything_runs():
    empty_case, odd = Case("toy", "x", draw(4)), dataclasses.replace(ask(1), metric="exakt")
    wrong_cases = {
        "either questions or": [empty_case, dataclasses.replace(CASES[0], follows=draw(2), bytes=2)],
        "0 bytes to follow": [dataclasses.replace(empty_case, follows=draw(2))],
        "metric 'exakt'; there are exact": [dataclasses.replace(empty_case, asks=(odd,))],
        "without prompt": [
            dataclasses.replace(empty_case, asks=(dataclasses.replace(ask(1), prompt=draw(0)),)),
            dataclasses.replace(empty_case, asks=(ask(1, 0),)),
        ],
    }
    for says, cases in wrong_cases.items():
        for c in cases:
            with pytest.raises(KvjaxError, match=says):
                check_cases([c])
    with pytest.raises(KvjaxError, match="case 'a' is made more than once; a key names one instance"):
        check_cases([*CASES, CASES[0]])


def test_a_case_that_changed_since_it_was_recorded_is_refused():
    record = {"method": "full", "task": "toy", "key": "a", "case": fingerprint(CASES[0])}
    check_records([record], {}, {("toy", "a"): fingerprint(CASES[0])})
    changed = [
        dataclasses.replace(CASES[0], context=draw(40)),
        dataclasses.replace(CASES[0], asks=CASES[0].asks[:1]),
        dataclasses.replace(CASES[0], turns=True),
    ]
    for c in changed:
        with pytest.raises(KvjaxError, match="case 'a' is not the one that was recorded"):
            check_records([record], {}, {("toy", "a"): fingerprint(c)})
