"""Seconds to read a text and to answer the first question: cold, with another text, and with compiled programs on disk.

python -m experiments.bench.first_answers [--model smollm2-135m] [--tokens 1024,4096] [--methods "full;snapkv"]

Texts are the pages of `docs/`, one after the other. The first is read with an empty folder of compiled programs, two
more of the same length follow in the same process, and the first once more after the process has dropped its programs
and reads them from the folder. Figures are seconds of `kvjax.read`, and of `Context.ask` with 16 new tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvjax
from experiments.bench import measuring
from experiments.bench.compile import new_program_folder
from kvjax.core import compile_cache
from kvjax.eval.run.machine import machine

METHODS = "full;snapkv:budget=25%;turned_queries:budget=25%;kvzip:budget=19% + int4"
QUESTION, NEW_TOKENS = "\nWhat is this page about?", 16
DOCS = Path(__file__).resolve().parents[2] / "docs"


def split_pages(model: kvjax.Model, tokens: int, count: int) -> list[list[int]]:
    """Splits the hand-written pages into texts of `tokens` tokens each."""
    text = "\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
    ids = model.text_tokenizer().encode(text, special_tokens=False)
    return [ids[i * tokens : (i + 1) * tokens] for i in range(count)]


def time_text(model: kvjax.Model, ids: Sequence[int], method: str) -> dict[str, Any]:
    """Reads a text and asks one question: seconds of both, and the bytes of the context."""
    start = time.perf_counter()
    context = kvjax.read(model, [ids], method)
    read = time.perf_counter()
    context.ask([QUESTION], max_new_tokens=NEW_TOKENS, eos_ids=())
    return {"read": read - start, "answer": time.perf_counter() - read, "bytes": context.bytes.to_json()}


def measure(model: kvjax.Model, tokens: int, method: str) -> dict[str, Any]:
    """Times three texts in one process, and the first again with its programs on disk."""
    texts = split_pages(model, tokens, 3)
    with new_program_folder():
        compile_cache.clear_compiled()
        runs = {
            name: time_text(model, ids, method) for name, ids in zip(("cold", "second", "third"), texts, strict=True)
        }
        compile_cache.clear_compiled()
        runs["disk"] = time_text(model, texts[0], method)
    return {"method": method, "tokens": tokens, **runs}


COLUMNS = ("method", "tokens", "cold", "another text", "a third", "programs on disk", "held, MB", "reserved, MB")


def row(cell: dict[str, Any]) -> list[Any]:
    """Formats the results of one method and length: seconds to read / to answer, and the first text's bytes."""
    seconds = [f"{cell[name]['read']:.1f} / {cell[name]['answer']:.1f}" for name in ("cold", "second", "third", "disk")]
    size = cell["cold"]["bytes"]
    held, reserved = (f"{size[kind]['device'] / 1e6:.1f}" for kind in ("held", "reserved"))
    return [cell["method"], f"{cell['tokens']:,}", *seconds, held, reserved]


def main(argv: Sequence[str] | None = None) -> None:
    p = measuring.make_parser(__doc__)
    p.add_argument("--model", default="smollm2-135m", help="a checkpoint with a tokenizer")
    p.add_argument("--methods", default=METHODS, help='separated by ";"')
    p.add_argument("--tokens", type=measuring.parse_integers, default=[1024], help="of a text")
    args = p.parse_args(argv)
    before, cells, model = machine(), [], kvjax.load(args.model)
    kvjax.generate(model, [[1, 2, 3]], "full", max_new_tokens=2)  # pays the costs of a process's first call
    for tokens in args.tokens:
        for method in args.methods.split(";"):
            measuring.log_progress(f"{method}, {tokens} tokens")
            cells.append(measure(model, tokens, method.strip()))
    title = f"reading and answering on {args.model}, {model.dtype}, seconds to read / to answer"
    notes = [
        f"An answer is a question and {NEW_TOKENS} new tokens. Bytes are of the first text, with room for 512 tokens."
    ]
    measuring.report("first_answers", before, [measuring.table(title, COLUMNS, map(row, cells))], notes, cells)


if __name__ == "__main__":
    main()
