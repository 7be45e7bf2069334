"""docs/coming_from.md: every press and cache class has a row, every string is a method, and the code runs."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

import kvjax
from kvjax.testing import toy_model
from tests.helpers.documents import run_page
from tests.methods.test_public_eviction import METHODS

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")
ROWS = [row for row in re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.M) if "`" in row[0]]
CODE = re.compile(r"`([^`]+)`")

COMPARED = {
    "AdaKVPress": "adakv",
    "BlockPress": "block_keydiff",
    "CURPress": "cur",
    "CapPress": "cap",
    "ChunkKVPress": "chunkkv",
    "ChunkPress": "chunk_keydiff",
    "CompactorPress": "compactor",
    "ComposedPress": "composed",
    "CompressionRatioDecodingPress": "decoding_of_text_keydiff",
    "CriticalAdaKVPress": "criticaladakv",
    "CriticalKVPress": "criticalkv",
    "DMSPress": "dms",
    "DecodingPress": "decoding_keydiff",
    "DuoAttentionPress": "duo",
    "EntropyGatedChunkKVPress": "entropy",
    "ExpectedAttentionPress": "expected",
    "ExpectedAttentionStatsPress": "stats",
    "FastKVzipPress": "fastkvzip",
    "KVzapPress": "kvzap",
    "KVComposePress": "kvcompose",
    "KVgradPress": "kvgrad",
    "KVzipPress": "kvzip_model",
    "FinchPress": "finch",
    "KeyDiffPress": "keydiff",
    "KeyRerotationPress": "rerotated_snapkv",
    "KnormPress": "knorm",
    "LUKVPress": "lukv",
    "LagKVPress": "lagkv",
    "LeverageScorePress": "leverage",
    "MergingPress": "merging",
    "NonCausalAttnPress": "noncausal",
    "ObservedAttentionPress": "observed",
    "PrefillDecodingPress": "decoding_keydiff",
    "PyramidKVPress": "pyramidkv",
    "QFilterPress": "qfilters",
    "SimLayerKVPress": "simlayer",
    "SnapKVPress": "snapkv",
    "StreamingLLMPress": "streaming",
    "TOVAPress": "tova",
    "ThinKPress": "think75",
}
"""The presses that tests/methods/test_public_eviction.py compares with ours, and the names of their cases there."""

OTHERS = """
BasePress CAMPress KVPressTextGenerationPipeline
PerLayerCompressionPress RandomPress RestoreKVPress ScorerPress
""".split()
"""All other names in `__all__` of kvpress 0.5.5."""

CACHES = """
DynamicCache EncoderDecoderCache MambaCache PagedAttentionCache QuantizedCache StaticCache dynamic
dynamic_full hybrid hybrid_chunked offloaded offloaded_hybrid offloaded_hybrid_chunked offloaded_static paged
quantized sliding_window static
""".split()
"""The cache classes of transformers 5.2 and all that its `cache_implementation` may be."""


def names(cell: str) -> list[str]:
    """The classes and words in a row's first cell, without their arguments."""
    return [re.split(r"[(]", code.strip('"'))[0] for code in CODE.findall(cell)]


def test_every_press_has_one_row():
    rows = [name for first, *_ in ROWS for name in names(first)[:1] if name.startswith("KV") or "Press" in name]
    assert sorted(rows) == sorted([*COMPARED, *OTHERS])


def test_every_cache_of_transformers_has_a_row():
    assert {name for first, *_ in ROWS for name in names(first)} >= set(CACHES)


def test_a_row_says_same_where_tests_compare_it():
    assert {names(first)[0] for first, _, says in ROWS if says.startswith("Same")} == set(COMPARED)
    assert {f"kvpress_{case}" for case in COMPARED.values()} <= METHODS.keys()


def test_the_counts_are_those_of_the_tables():
    def count(heading: str) -> tuple[int, int]:
        section = PAGE.split(f"\n## {heading}")[1].split("\n## ")[0]
        rows = [here for _, here, _ in re.findall(r"^\| (`.+?|\"?`.+?) \| (.+?) \| (.+?) \|$", section, re.M)]
        return sum(here != "not here" for here in rows), len(rows)

    presses, caches, velox = (count(x) for x in ("The presses", "The caches", "VeloxQuant-MLX"))
    assert "{} of the {} names of kvpress".format(*presses) in PAGE
    assert "{} of {} rows of transformers' caches".format(*caches) in " ".join(PAGE.split())
    assert "{} of its {} methods".format(*velox) in PAGE


@pytest.mark.parametrize(("first", "here", "says"), ROWS, ids=[row[0] for row in ROWS])
def test_what_a_row_names_is_here(first, here, says):
    assert (here == "not here") == (CODE.findall(here) == [])
    for text in CODE.findall(here) + re.findall(r"Nearest: `([^`]+)`", says):
        if text.startswith("kvjax."):
            pkgutil.resolve_name(text)
        else:
            kvjax.parse(text)


def test_what_a_window_hides_is_dropped():
    model, prompts = toy_model(layers=2, windows=(6, 6)), [list(range(1, 90)), [5, 6, 7]]
    exact, dropped = (
        kvjax.generate(model, prompts, method, max_new_tokens=8) for method in ("full + in_windows", "full")
    )
    assert dropped.tokens == exact.tokens and dropped.bytes.total["device"] < exact.bytes.total["device"]


def test_the_code_runs_from_top_to_bottom(monkeypatch, tmp_path, clean_registry):
    """A toy model with a chat template stands in for the models that the page loads."""
    values = run_page("docs/coming_from.md", monkeypatch, tmp_path)
    length = int(values["context"].cache.length[0])
    num_kept = [[len(heads[0]) for heads in layer] for layer in values["quarter"].kept_positions()]
    assert num_kept == [[length // 4]] * 4
    assert [len(layer[0][0]) for layer in values["layers"].kept_positions()] == [96, 96, 48, 48]
    assert {row["method"] for row in values["rows"]} == {"full", "snapkv:budget=128", "kivi:bits=2"}
    assert values["answer"].text and values["own"].num_sequences == 1
