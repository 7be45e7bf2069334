"""Rows of a run: means over contexts, errors, first and later questions, agreement, the terminal's table."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
from rich.console import Console

from kvjax.eval.page import summary
from tests.eval import fake_run


def line(method="full", key="a", scores=(1.0,), task="recall", length=512, **more):
    size = {"device": 2048, "pinned_host": 1024}
    base = {"method": method, "task": task, "key": key, "about": {"length": length}, "scores": list(scores)}
    return base | {"asks": [{}] * len(scores), "metric": "exact", "turns": False, "bytes": size} | more


def test_contexts_count_once_whatever_they_ask():
    (row,) = summary.rows([line(key="a", scores=[1.0, 1.0, 1.0, 0.0]), line(key="b", scores=[0.0])])
    assert row["score"] == 0.375  # not 3 of 5
    assert row["score_error"] == pytest.approx(np.std([0.75, 0], ddof=1) / np.sqrt(2))
    assert (row["contexts"], row["questions"], row["device_kib"], row["host_kib"]) == (2, 5, 2, 1)
    assert (row["bits"], row["agreement"], row["tokens_per_second"]) == (None, None, None)


def test_the_table_shows_kib_and_percent_in_bfloat16_and_no_bytes_of_another_dtype():
    """5,557 KiB in float32 beside 37.6% in bfloat16 would read as a mistake."""
    fields = {"dtype": "float32", "bytes": {"device": 5557 * 1024, "pinned_host": 4444 * 1024}}
    fields |= {"bfloat16_bytes": {"device": 4130 * 1024, "pinned_host": 2222 * 1024}}
    rows = summary.rows([line(**fields, bfloat16_fraction={"device": 0.376, "pinned_host": 0.2})])
    (row,) = rows
    assert (row["device_kib"], row["device_bfloat16_kib"], row["host_bfloat16_kib"]) == (5557, 4130, 2222)
    console = Console(width=112, record=True, file=io.StringIO())
    console.print(summary.table(rows))
    text = console.export_text()
    assert "4,130" in text and "37.6" in text and "2,222" in text and "5,557" not in text and "4,444" not in text
    assert "all in bfloat16; computed in float32" in " ".join(text.split())


def test_records_without_bytes_in_bfloat16_show_none_rather_than_those_of_another_dtype():
    rows = summary.rows([line(dtype="float32", bfloat16_fraction={"device": 0.5, "pinned_host": 0.0})])
    assert rows[0]["device_bfloat16_kib"] is None and rows[0]["device_percent"] == 50
    assert [list(column.cells) for column in summary.table(rows).columns[-4:]] == [["-"], ["50.0"], ["-"], ["-"]]


def test_every_measure_has_an_interval_and_contexts_that_all_agree_too():
    records = [line(key=str(i), scores=[1.0, 1.0], turns=True, asks=[{"turn": 0}, {"turn": 1}]) for i in range(20)]
    (row,) = summary.rows(records)
    for measure in ("score", "first", "later"):
        assert (row[measure], row[f"{measure}_error"]) == (1, 0)
        assert summary.interval_of(row, measure) == pytest.approx((0.8389, 1.0), abs=1e-4)
    assert summary.interval_of(row, "bits") is None and summary.format_interval(row, "bits") == ""
    assert summary.format_interval(row, "score") == "(84–100)"
    (cell,) = list(summary.table([row]).columns[1].cells)
    assert cell == "100.0 (84–100)"


@pytest.mark.parametrize(
    ("records", "explained", "absent"),
    [
        ({"scores": [1.0]}, ["percent right; (..): 95% intervals over contexts; device"], ["bits", "±", "+ and -"]),
        ({"scores": [], "bits": [1.5]}, ["bits per byte (b); device"], ["percent right", "±", "(..)", "intervals"]),
        (
            {"scores": [], "bits": [1.5, 1.6]},
            ["bits per byte (b); ±: 95% intervals over contexts; device"],
            ["percent right", "(..)"],
        ),
    ],
)
def test_the_caption_explains_what_stands_in_the_table_alone(records, explained, absent):
    """Also where a single context has no interval."""
    bits = records.get("bits", [None])
    fields = [{} if x is None else {"bits": x, "key": str(i)} for i, x in enumerate(bits)]
    rows = summary.rows([line("int8", scores=records["scores"], **more) for more in fields])
    caption = str(summary.table(rows).caption)
    assert all(text in caption for text in explained) and not any(text in caption for text in absent), caption
    assert summary.describe_row(rows[0]).endswith(f", {len(bits)} context{'s' * (len(bits) > 1)}")


def test_bits_are_compared_with_full_on_the_same_texts():
    def text(method, key, bits):
        return line(method, key, scores=[], bits=bits, likeliest=[int(10 * bits)])

    full = [text("full", str(i), x) for i, x in enumerate([1.0, 2.0, 4.0])]
    kivi = [text("kivi", str(i), x) for i, x in enumerate([1.1, 2.2, 4.3])]
    exact, row = summary.rows([*full, *kivi, text("kivi", "3", 9.0)])
    assert row["bits_above_full"] == pytest.approx(0.2) and row["bits"] == pytest.approx(16.6 / 4)
    reach = 4.302653 * 0.1 / np.sqrt(3)
    assert summary.interval_of(row, "bits_above_full") == pytest.approx((0.2 - reach, 0.2 + reach), abs=1e-6)
    cells = list(summary.table([exact, row]).columns[1].cells)
    assert cells == ["2.333b", f"4.150b +0.200 ±{reach:.3f}"]
    (alone,) = summary.rows(kivi)
    assert alone["bits_above_full"] is None and summary.format_uncertainty(alone, "bits").startswith("±")


def test_one_context_has_no_error_and_the_last_repetition_wins():
    (row,) = summary.rows([line(scores=[0.0]), line(scores=[1.0])])
    assert (row["score"], row["score_error"], row["contexts"]) == (1, None, 1)


def test_the_same_key_in_two_tasks_is_two_cases():
    assert len(summary.rows([line(task="a"), line(task="b")])) == 2


def test_first_and_later_follow_the_turns():
    asks = [{"turn": 1}, {"turn": 0}, {"turn": 2}]
    (row,) = summary.rows([line(scores=[0.0, 1.0, 0.5], asks=asks, turns=True)])
    assert (row["first"], row["later"], row["turns"]) == (1, 0.25, True)
    (single,) = summary.rows([line()])
    assert (single["first"], single["later"]) == (None, None)


def test_agreement_is_with_full_on_the_same_case():
    text = {"scores": [], "bits": 1.5}
    records = [
        line("kivi", "a", likeliest=[1, 2, 3, 4], **text),
        line("full", "b", likeliest=[9, 9, 9, 9], **text),
        line("full", "a", likeliest=[1, 2, 0, 0], **text),
    ]
    kivi, full = summary.rows(records)
    assert (kivi["agreement"], kivi["bits"], kivi["score"]) == (0.5, 1.5, None)
    assert full["agreement"] == 1


def test_speed_joins_rows_of_its_method_and_length():
    records = [line(length=512), line(key="b", length=1024), line("b", length=512), fake_run.speed("full", 512)]
    speeds = {(r["method"], r["task"], r["length"]): r["tokens_per_second"] for r in summary.rows(records)}
    assert speeds["full", "recall", 512] == 900
    assert speeds["full", "recall", 1024] is speeds["b", "recall", 512] is None


def test_a_family_is_the_mean_of_its_tasks_with_their_errors():
    rows = summary.rows(
        [
            line(task=f"r.{t}", key=k, scores=[s])
            for t, k, s in (("a", 1, 1.0), ("a", 2, 0.0), ("b", 1, 1.0), ("b", 2, 1.0))
        ]
    )
    (merged,) = summary.by_family(rows)
    assert (merged["task"], merged["score"], merged["score_error"]) == ("r", 0.75, 0.25)
    a, b = (summary.interval_of(row, "score") for row in rows)
    low = 0.75 - np.hypot(0.5 - a.low, 1 - b.low) / 2
    assert merged["score_low"] == pytest.approx(low) and 0 < low < 0.75 < merged["score_high"] < 1
    assert summary.by_family([*rows, {**rows[0], "method": "other"}]) == [merged]  # lacks r.b


def test_csv_has_every_field(tmp_path):
    rows = summary.rows(fake_run.records(cases=2, lengths=[512]))
    with summary.write_csv(rows, tmp_path / "summary.csv").open(newline="") as f:
        csv_rows = list(csv.DictReader(f))
    assert len(csv_rows) == len(rows) and list(csv_rows[0]) == list(summary.FIELDS)
    assert csv_rows[1]["method"] == rows[1]["method"] and float(csv_rows[1]["device_kib"]) == rows[1]["device_kib"]


@pytest.mark.parametrize("tasks", [fake_run.TASKS[:2], fake_run.TASKS, [f"{x}{i}" for x in "abcde" for i in range(4)]])
def test_the_table_fits_100_columns(tasks):
    rows = summary.rows(fake_run.records(cases=2, tasks=tasks))
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(summary.table(rows))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 100 and "…" not in text
    assert "2,048" in text and "512-token" not in text
    assert all(method.split(":")[0] in text for method in fake_run.METHODS)
