"""A recommendation: texts, budgets, the ranking, and the whole of it on the shipped model."""

import json
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax.cli import main
from kvjax.errors import KvjaxError, KvjaxWarning
from kvjax.eval.page.paired_difference import RecordedRun
from kvjax.eval.run.comparison import Comparison
from kvjax.eval.tasks import suite
from kvjax.eval.tasks.case import Case, Spec, TooShort
from kvjax.generation.memory_plan import planned_bytes
from kvjax.planning import recommend as recommend_module
from kvjax.planning.recommend import (
    CANDIDATES,
    choose_share,
    describe,
    describe_excess,
    fit_candidates,
    make_setting,
    parse_budget,
    plan_rounds,
    rank,
    read_texts,
    recommend,
    select_records,
    try_methods,
)

CODE = "".join(f"def scale_{i}(value):\n    return value * {i} + {i % 7}\n\n\n" for i in range(400))
TRIED = "kivi:residual=32; snapkv + int4"


@pytest.fixture(scope="module")
def model():
    return kvjax.load("testbed")


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    (folder / "b.py").write_text(CODE, encoding="utf-8")
    (folder / "more" / "a.md").write_text("# Notes\n", encoding="utf-8")
    (folder / "empty.txt").write_text(" \n")
    (folder / "picture.bin").write_bytes(b"\xff\xfe\x00\x80")
    (folder / ".hidden").write_text("hidden")
    return folder


def test_a_folders_texts_are_read_in_order_without_what_is_no_text(texts):
    out = texts.parent / "out"
    assert read_texts(texts, out) == (CODE.strip() + "\n\n# Notes\n", 2, ["picture.bin"])
    assert read_texts(texts / "b.py", out) == (CODE.strip() + "\n", 1, [])
    for path, words in ((texts / "picture.bin", "no UTF-8"), (texts / "none", "there are no texts")):
        with pytest.raises(KvjaxError, match=words):
            read_texts(path, out)
    with pytest.raises(KvjaxError, match="holds no UTF-8 file with a text"):
        read_texts(texts / "empty.txt", out)


def test_what_recommendations_write_is_none_of_the_texts_that_they_stand_among(texts, monkeypatch):
    expected = (CODE.strip() + "\n\n# Notes\n", 2, ["picture.bin"])
    for name in ("out/recommend", "out/other"):
        (texts / name).mkdir(parents=True)
        (texts / name / "texts.txt").write_text(CODE)
        (texts / name / "records.jsonl").write_text("{}")
    assert read_texts(texts, texts.parent / "out") == expected
    (texts / "out" / "other" / "records.jsonl").unlink()  # stopped before it had an answer
    assert read_texts(texts, texts / "out" / "other") == expected
    monkeypatch.chdir(texts)
    assert read_texts(".", Path("out/other")) == expected


@pytest.mark.parametrize(
    ("budget", "share"),
    (
        ("25%", Fraction(1, 4)),
        ("12.5 %", Fraction(1, 8)),
        ("1/3", Fraction(1, 3)),
        ("0.25", Fraction(1, 4)),
        ("2GB", Fraction(2)),
        ("256mib", Fraction(2**28, 10**9)),
        ("500 KB", Fraction(1, 2000)),
        ("1TB", Fraction(1000)),
    ),
)
def test_a_budget_is_a_fraction_or_bytes(budget, share):
    assert parse_budget(budget, 10**9) == share


@pytest.mark.parametrize(
    "budget", ("", "0%", "120%", "-1GB", "2", "much", "1/4,1/8", "9" * 50 + "GB", "1e9GB", "1/0", "nan", 0.25)
)
def test_a_budget_that_is_none_is_refused(budget):
    with pytest.raises(KvjaxError, match="budget"):
        parse_budget(budget, 10**9)


def record(method, task, key, score=None, bits=None):
    return {"method": method, "task": task, "key": key, "scores": [] if score is None else [score], "bits": bits}


def test_most_right_answers_win_then_fewest_bits():
    scores = {"full": 1.0, "good": 1.0, "worse": 1.0, "bad": 0.0}
    bits = {"full": 1.0, "good": 1.01, "worse": 1.5, "bad": 1.0}
    records = [record(m, "planted", f"p{i}", score=scores[m]) for m in scores for i in range(12)]
    records += [record(m, "ppl", f"t{i}", bits=bits[m] + 0.01 * i) for m in bits for i in range(3)]
    run = RecordedRun(records)
    assert rank(run, ["worse", "bad", "good"]) == ("good", ("worse",), ("bad",))
    # As many answers, and more bits in every text.
    notes = describe(run, Comparison(()), "good", ("worse",), 512, 512)
    assert "these contexts do not tell its answers apart from those of worse: more contexts may" in notes
    assert "of these, worse take more bits per byte, with 95% confidence" in notes
    assert not any("of these" in note for note in describe(run, Comparison(()), "worse", ("good",), 512, 512))


def test_a_share_is_what_the_device_leaves(model):
    setting = make_setting(model, "rtx-4090")
    with pytest.raises(KvjaxError, match="use full, or give a longer context"):
        choose_share(model, None, 2048, setting)
    with pytest.raises(KvjaxError, match="use full"):
        choose_share(model, "2GB", 2048, None)
    with pytest.raises(KvjaxError, match="no more than the budget of 100%: use full"):
        choose_share(model, "100%", 2048, None)
    assert choose_share(model, None, 2048, None) == Fraction(1, 4)
    full = planned_bytes("full", model.config, 2048, dtype="bfloat16").held["device"]
    assert choose_share(model, f"{full // 2}B", 2048, setting) == Fraction(full // 2, full)
    assert describe_excess(setting, "full", 2048) == ""


def test_what_does_not_fit_is_left_out_with_the_reason(model):
    fitted, left_out = fit_candidates(model, ["kivi:residual=32", "int8", "snapkv"], Fraction(1, 4), 4096, 512, None)
    assert [final.asked for final, _ in fitted] == ["kivi:residual=32", "snapkv"]
    assert left_out == ["int8 is left out: at its smallest it takes more than 25.0%"]
    final, trial = fitted[1]
    assert 0.24 < final.bytes / planned_bytes("full", model.config, 4096, dtype="bfloat16").held["device"] <= 0.25
    assert 0.24 < trial.bytes / planned_bytes("full", model.config, 512, dtype="bfloat16").held["device"] <= 0.25
    several = fit_candidates(model, ["int8", "full", "int4"], Fraction(1, 2), 512, 512, None)[1]
    assert several == ["int8; full are left out: at their smallest they take more than 50.0%"]
    # The tokens that it holds exactly are most of a short context.
    _, (line,) = fit_candidates(model, ["kivi:residual=128", "int4"], Fraction(2, 5), 4096, 256, None)
    assert (
        line == "kivi:residual=128 is left out: at its smallest it takes more than 40.0% of 256 tokens, as they are "
        "tried (--length)"
    )
    with pytest.raises(KvjaxError, match="no candidate takes at most 1.0%: int8") as error:
        fit_candidates(model, ["int8", "int4"], Fraction(1, 100), 4096, 512, None)
    enough = re.search(r"Give a larger budget \(at least ([0-9.]+)%\)", str(error.value))
    fitted, _ = fit_candidates(model, ["int8", "int4"], Fraction(enough[1]) / 100, 4096, 4096, None)
    assert [final.method for final, _ in fitted] == ["int4"]
    with pytest.raises(KvjaxError, match=r"at most 0.0001%: int8 .* than 0.0001%. Give a larger budget \(at least"):
        fit_candidates(model, ["int8"], Fraction(1, 10**6), 4096, 512, None)


def test_a_selection_that_keeps_every_token_is_not_tried_beside_its_codec(model):
    names, sizes = ["keydiff + int4", "int4", "snapkv + int8"], (Fraction(1, 2), 512, 512, None)
    fitted, left_out = fit_candidates(model, names, *sizes)
    assert [final.method for final, _ in fitted][:1] == ["int4"] and len(fitted) == 2
    assert left_out == ["keydiff:budget=512 + int4 is left out: it keeps every token, as int4 does in no more bytes"]
    ((final, _),), none = fit_candidates(model, names[:1], *sizes)  # nothing else holds these codes
    assert final.method == "keydiff:budget=512 + int4" and not none


def test_the_candidates_are_methods_of_many_sizes(model):
    fitted, left_out = fit_candidates(model, CANDIDATES, Fraction(1, 4), 1024, 1024, None)
    assert len(fitted) >= 8, left_out


def test_a_winner_on_ones_own_texts(model, texts, tmp_path, capsys):
    lines, options = [], {"length": 256, "contexts": 2, "candidates": TRIED, "out": tmp_path / "out", "context": 10_240}
    found = recommend(model, texts, "30%", **options, speed=False, announce=lines.append)
    assert {row.method for row in found.rows} == {"full", *("kivi:residual=32,bits=1", "snapkv:budget=226 + int4")}
    assert {row.task for row in found.rows} == {"shared", "ppl"}
    assert found.tried in {row.method for row in found.rows} - {"full"}
    assert found.method.split(":")[0] == found.tried.split(":")[0]
    held = planned_bytes(found.method, model.config, 10_240, dtype="bfloat16").fraction_of_full
    assert held <= 0.3
    assert lines[0].startswith("2 files; 30.0% of the exact cache's bytes at 10,240 tokens")
    assert sum("shared" in line for line in lines) == 3
    said = ("contexts of 256 tokens were tried, not of 10,240", "no UTF-8 texts, and not read: picture.bin")
    said += ("10,240 tokens are beyond the 8,192 positions that testbed was made for",)
    assert all(any(words in note for note in found.notes) for words in said)
    assert repr(found).endswith(f"recommended for contexts of 10,240 tokens: {found.method}")
    assert any(
        re.search(r"those of full [+-]0\.\d+ \([+-]\d.* to [+-]\d.* with 95% confidence\)", n) for n in found.notes
    )
    kept = json.loads((tmp_path / "out" / "recommendation.json").read_text())
    assert kept["method"] == found.method and len(kept["rows"]) == 6
    # The same answers serve the command line, which prints the same.
    words = f"recommend testbed --texts {texts} --budget 30% --length 256 --contexts 2 --context 10k --no-speed"
    assert main([*words.split(), "--candidates", TRIED, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert (
        f"recommended for contexts of 10,240 tokens: {found.method}" in printed.out
        and "recommendation.png" in printed.out
    )
    assert (tmp_path / "out" / "recommendation.png").stat().st_size > 10_000
    assert "already holds" in printed.err


def test_texts_that_are_too_short_name_a_length_that_is_not(model, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("a few words of text. " * 20)
    with pytest.raises(KvjaxError, match=r"has 420 tokens, .* length=210"):
        recommend(model, short, out=tmp_path / "out")
    short.write_text("hi")
    with pytest.raises(KvjaxError, match="has 3 tokens, .*; give more text$"):
        recommend(model, short, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "says"),
    (
        ("--length 0", "--length '0' is no number of tokens; write 65536 or 64k"),
        ("--context 2k,4k", "--context '2k,4k' is no number of tokens; write 65536 or 64k"),
        ("--hardware nonsense", "unknown hardware 'nonsense'"),
        ("--candidates nope", "unknown method 'nope'"),
        ("--out {0}/b.py", "cannot write into --out {0}/b.py (there is a file of that name)"),
        ("--questions {0}/none.jsonl", "there are no questions at {0}/none.jsonl; give a file of lines"),
        ("--questions {0}", "there are no questions at {0}/questions.jsonl; give a file of lines"),
        ("--questions {0}/b.py", "b.py, line 1 is not JSON"),
        ("--questions {0}/empty.txt", "empty.txt has no question; each line is"),
    ),
)
def test_an_option_that_cannot_be_is_named_before_a_model_is_loaded(words, says, texts, tmp_path, capsys):
    words = words.format(texts)
    command = f"recommend not-looked-at --texts {texts} {'' if '--out' in words else f'--out {tmp_path}/out'} {words}"
    assert main(command.split()) == 2
    assert capsys.readouterr().err.startswith(("kvjax: " + says.format(texts), f"kvjax: {texts}/{says}"))


def test_a_folder_with_answers_about_other_texts_is_refused_before_it_is_changed(model, texts, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "records.jsonl").write_text("")
    (out / "texts.txt").write_text("others")
    with pytest.raises(KvjaxError, match="keeps answers about other texts .* choose another folder"):
        recommend(model, texts, length=256, out=out)
    assert (out / "texts.txt").read_text() == "others"


def test_questions_that_fit_no_length_are_not_left_out(model, texts, tmp_path):
    row = {"text": "texts/b.py", "question": "How?", "answer": "so"}
    options = {"questions": write_questions(tmp_path, row), "length": 256, "out": tmp_path / "out", "candidates": TRIED}
    with pytest.raises(TooShort, match="none of the 1 text .* fits in 256 tokens"):
        recommend(model, texts, **options)


def test_questions_are_read_before_candidates_are_sized(model, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(recommend_module, "fit_candidates", None)
    questions = write_questions(tmp_path, {"text": "none.txt", "question": "How?", "answer": "so"})
    with pytest.raises(KvjaxError, match="cannot read the text"):
        recommend(model, texts, questions=questions, length=256, out=tmp_path / "out", candidates=TRIED)


def test_contexts_that_share_a_short_text_are_told(model, tmp_path):
    short = tmp_path / "short.py"
    short.write_text(CODE[:1600])
    options = {"length": 256, "context": 256, "candidates": "streaming_llm", "speed": False}
    found = recommend(model, short, "50%", contexts=4, out=tmp_path / "out", **options)
    assert any(note.startswith("the texts have room for 3 contexts of 256 tokens") for note in found.notes)
    more = recommend(model, short, "50%", contexts=3, out=tmp_path / "out", **options)
    assert not any("have room" in note for note in more.notes)


def test_a_candidate_that_fails_is_left_out_and_the_others_go_on(monkeypatch):
    def compare(model, methods, tasks, spec, out, **options):
        for method in methods:
            if method in ("bad", broken):
                raise ValueError(f"{method} is broken")
        return methods

    monkeypatch.setattr(recommend_module, "compare", compare)
    broken, arguments = "", ([], None, None)
    assert try_methods(None, ["full", "good"], *arguments) == {}
    failed = {"bad": "it fails with ValueError: bad is broken"}
    assert try_methods(None, ["full", "bad", "good"], *arguments) == failed
    with pytest.raises(KvjaxError, match="no candidate runs to its end; give others .* bad: it fails with ValueError"):
        try_methods(None, ["full", "bad"], *arguments)
    broken = "full"  # what fails for the exact cache is no fault of a candidate
    with pytest.raises(ValueError, match="full is broken"):
        try_methods(None, ["full", "good"], *arguments)


def test_a_candidate_whose_bytes_cannot_be_counted_is_left_out(model, monkeypatch):
    def fit_methods(names, *settings):
        if names == ["bad"]:
            raise ValueError("boom")
        return fit(names, *settings)

    fit = recommend_module.fit_methods
    monkeypatch.setattr(recommend_module, "fit_methods", fit_methods)
    fitted, left_out = fit_candidates(model, ["bad", "int4"], Fraction(1, 2), 512, 512, None)
    assert len(fitted) == 1 and left_out == ["bad is left out: it fails with ValueError: boom"]


def test_answers_about_other_contexts_lengths_and_methods_are_left_out():
    def record(method, length, i, task="planted"):
        return {"method": method, "task": task, "key": f"{task}/{length}/{i}", "about": {"length": length}}

    records = [record(m, n, i) for m in ("full", "int4", "kivi") for n in (256, 512) for i in range(4)]
    records += [record("full", n, 0, "speed") for n in (256, 512)]
    cases = [Case("planted", f"planted/256/{i}", None, about={"length": 256}) for i in range(3)]
    selected = [(r["method"], r["key"]) for r in select_records(records, ["full", "int4"], cases)]
    assert selected == [*((m, f"planted/256/{i}") for m in ("full", "int4") for i in range(3)), ("full", "speed/256/0")]


@pytest.mark.parametrize(
    ("contexts", "batch", "rounds"),
    ((16, 4, [4, 8, 16]), (64, 8, [8, 16, 32, 64]), (20, 1, [4, 8, 16, 20]), (8, 3, [6, 8]), (2, 4, [2])),
)
def test_rounds_are_of_whole_batches(contexts, batch, rounds):
    assert plan_rounds(contexts, batch) == rounds


def test_candidates_that_fall_behind_leave_and_more_contexts_go_on(model, texts, tmp_path):
    options = {"length": 256, "context": 256, "candidates": "kvzip; snapkv + int4; streaming_llm", "speed": False}

    def run(contexts, out):
        lines = []
        found = recommend(model, texts, "30%", **options, contexts=contexts, out=tmp_path / out, announce=lines.append)
        rows = {(row.method.partition(":")[0], row.task): row for row in found.rows}
        return found, rows, lines

    _, rows, _ = run(4, "out")
    assert {row.contexts for row in rows.values()} == {4}
    found, rows, lines = run(6, "out")
    assert rows["streaming_llm", "shared"].contexts == 4 and rows["kvzip", "shared"].contexts == 6
    assert rows["full", "ppl"].contexts == 6 and rows["kvzip", "ppl"].contexts == 6  # not those of the four before
    assert any(re.match(r"streaming_llm:recent=\d+: fewer right answers than .* in 4 contexts", x) for x in found.notes)
    assert sum("already holds" in line for line in lines) == 1
    assert any(line.endswith("is first; 2 candidates to be asked further") for line in lines)
    again, rows_again, _ = run(6, "anew")
    assert again.method == found.method and again.notes == found.notes
    for key in (("full", "ppl"), ("kvzip", "ppl")):  # in batches of other windows
        assert rows_again[key].bits == pytest.approx(rows[key].bits, abs=1e-6)


def test_texts_alone_let_nothing_fall_behind():
    run = RecordedRun(
        record(m, "ppl", str(i), bits=b) for i in range(8) for m, b in (("full", 1.0), ("a", 1.1), ("b", 2.0))
    )
    assert rank(run, ["b", "a"]) == ("a", (), ())


def write_questions(folder, *rows):
    path = folder / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_questions_of_ones_own_share_the_context_of_their_text(model, tmp_path):
    (tmp_path / "a.txt").write_text("The sky is green.\n")
    (tmp_path / "b.txt").write_text("A long text. " * 40)
    rows = [{"text": "a.txt", "question": q, "answer": a} for q, a in (("Color?", "green"), ("What?", ["sky", "air"]))]
    path = write_questions(tmp_path, *rows, {"text": "b.txt", "question": "How?", "answer": "long"})
    with pytest.warns(KvjaxWarning, match="1 of 2 texts of .* are longer than 128 tokens.* a length of 5"):
        (case,) = suite.cases(model, ["questions"], Spec((128,), data=path))
    decode = model.text_tokenizer().decode
    assert decode(case.context) == "The sky is green.\n\n"
    assert [decode(ask.prompt) for ask in case.asks] == ["Question: Color?\nAnswer:", "Question: What?\nAnswer:"]
    assert [ask.references for ask in case.asks] == [("green",), ("sky", "air")]
    assert len(suite.cases(model, ["questions"], Spec((1024,), data=tmp_path))) == 2
    with pytest.raises(TooShort, match="none of the 2 texts .* fits in 24 tokens .* at least 43"):
        suite.cases(model, ["questions"], Spec((24,), data=path))


@pytest.mark.parametrize(
    ("row", "words"),
    (
        ({"text": "a.txt", "question": "Color?"}, "needs an answer"),
        ({"text": "a.txt", "question": "Color?", "answer": [""]}, "needs an answer"),
        ({"text": "none.txt", "question": "Color?", "answer": "green"}, "cannot read the text"),
        ({"text": "empty.txt", "question": "Color?", "answer": "green"}, "is empty"),
        ({"question": "Color?", "answer": "green"}, "has no field 'text'"),
    ),
)
def test_a_question_that_cannot_be_asked_is_named(row, words, model, tmp_path):
    (tmp_path / "a.txt").write_text("The sky is green.\n")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(KvjaxError, match=words):
        suite.cases(model, ["questions"], Spec((128,), data=write_questions(tmp_path, row)))


def test_planted_numbers_stand_in_the_users_text(tmp_path):
    model = kvjax.load("testbed")
    (tmp_path / "text.txt").write_text(CODE)
    (case,) = suite.cases(model, ["planted"], Spec((1024,), contexts=1, questions=2, text=tmp_path / "text.txt"))
    text = model.text_tokenizer().decode(np.asarray(case.context))
    assert "def scale_" in text and all(ask.references[0] in text for ask in case.asks) and len(case.asks) == 2
