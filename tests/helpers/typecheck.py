"""Type checks of the whole package, of the documents' code blocks, and of calls that pyright must accept or refuse.

`make check` runs `python -m tests.helpers.typecheck`, and so does continuous integration. The checker is basedpyright,
whose package needs no Node installation; in its mode basic it reports pyright's errors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.documents import code_blocks

ROOT = Path(__file__).parents[2]
ACCEPTED = """\
import dataclasses

import kvjax
from kvjax import methods
from kvjax.testing import check_method, toy_model

model = kvjax.load("testbed")
toy = kvjax.random_model(model.config.with_layers((0, 0)), dtype="bfloat16")
share, fixed = methods.snapkv(budget="25%", window=16), kvjax.methods.snapkv(budget=256)
both = kvjax.compose("snapkv:budget=256", methods.kivi(bits=4), kvjax.parse("offload"))
changed = dataclasses.replace(both, device_layers=1)
logits, cache = kvjax.prefill(model, [[1, 2, 3]], both, capacity=512)
logits, cache = kvjax.extend(model, [[1, 2]], cache)
out = kvjax.generate(model, ["a text", "another"], changed, max_new_tokens=8, temperature=0.7, top_p=0.9, seed=3)
print(out.text[0].strip(), len(out.tokens[0]), out.bytes.held["device"], out.bytes.fraction_of_full)
params = kvjax.SamplingParams(temperature=0.7, top_k=40)
out = kvjax.generate(model, [[1, 2, 3]], "full", sampling=params, stop="\\n")
out = kvjax.generate(model, "a", "full", repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=1, logprobs=5)
print(out.logprobs[0], out.top_logprobs[0][0][0].id)
context = kvjax.read(model, "a long text", share, headroom=64)
answers: list[kvjax.Result] = [context.ask(text, max_new_tokens=8, sampling=params) for text in ("one", "two")]
print(context.generate(max_new_tokens=3, eos_ids=()).text, context.bytes.reserved, context.kept_positions()[0][0][0])
for text in kvjax.stream_text(model, "a text", both, max_new_tokens=3, temperature=0.5, min_p=0.1):
    print(text.upper(), end="")
for column in context.stream(max_new_tokens=3, sampling=params):
    print([token for token in column if token is not None])
print(kvjax.chat(model, [{"role": "user", "content": "Hello"}], fixed, max_new_tokens=9, sampling=params).text[0])
print(kvjax.planned_bytes(both, model, 1000), kvjax.state_bytes(cache).total, kvjax.score(model, ["a"], ["b"], both))
print(kvjax.name_of(both), kvjax.cache_ops.take(cache, [0]).capacity, kvjax.__version__)
print(kvjax.speculative.speculate(model, ["a"], methods.quest(budget=64), "int4", sampling=params).acceptance)
print(kvjax.reuse.read_exactly(model, ["a text"]).compress(both, capacity=512).bytes)
print(check_method(methods.snapkv(budget=30), toy_model()).seconds)
"""
"""Right calls, which the checker must accept."""

REFUSED = """\
import kvjax
from kvjax import methods

model = kvjax.load("testbed")
context = kvjax.read(model, "a text", methods.snapkv(budget=64))
kvjax.methods.snapkv(buget=3)
methods.kivi(bits="four")
kvjax.methods.snapvk(budget=3)
kvjax.generate(model, "a text", methods.snapkv)
context.ask("a question", max_new_tokens=8, temperatur=1.0)
context.generate(repetition_penalty="1.2")
kvjax.chat(model, [{"role": "user", "content": "Hello"}], "full", max_tokens=9)
next(kvjax.stream_text(model, "a text", "full", samplng=kvjax.SamplingParams()))
kvjax.SamplingParams(top_p="0.9")
kvjax.read_exactly(model, ["a text"])
"""
"""Wrong calls, one a line after the first five; `kvjax.generate(.., methods.snapkv)` lacks the method's brackets."""

NUM_RIGHT_LINES = 5  # of REFUSED


class Finding(NamedTuple):
    """An error that the checker reports."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def pages() -> list[str]:
    """The hand-written documents, whose code blocks are checked."""
    return ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def code_of(page: str) -> str:
    """The Python blocks of a document, each on its own lines of it, so that errors name these lines."""
    lines = [""] * ((ROOT / page).read_text(encoding="utf-8").count("\n") + 1)
    for block in code_blocks(page):
        if block.language == "python":
            code = block.code.splitlines()
            lines[block.line : block.line + len(code)] = code
    return "\n".join(lines) + "\n"


def check() -> tuple[list[Finding], set[int]]:
    """Runs the checker once: (errors in modules and documents, the lines of REFUSED with an error)."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder).resolve()
        names = {work / "accepted.py": "ACCEPTED"}
        (work / "accepted.py").write_text(ACCEPTED)
        for page in pages():
            file = work / f"{Path(page).stem.replace('.', '_')}.py"
            file.write_text(code_of(page), encoding="utf-8")
            names[file] = page
        refused_file = work / "refused.py"
        refused_file.write_text(REFUSED)
        findings = [
            (Path(found["file"]), Finding(found["file"], found["range"]["start"]["line"] + 1, found["message"]))
            for found in _report(work, [refused_file, *names])
            if found["severity"] == "error"
        ]
    errors = [found._replace(file=names.get(path, found.file)) for path, found in findings if path != refused_file]
    return errors, {found.line for path, found in findings if path == refused_file}


def modules() -> list[Path]:
    """All modules of the folders that pyproject.toml includes."""
    return sorted(path for folder in _settings()["include"] for path in (ROOT / folder).rglob("*.py"))


def _settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]


def _report(work: Path, files: list[Path]) -> list[dict[str, Any]]:
    """The checker's diagnostics on the folders that pyproject.toml includes, and on these files."""
    settings = _settings()
    paths = [ROOT / folder for folder in settings["include"]] + files
    settings["include"] = [os.path.relpath(path, work) for path in paths]
    settings["extraPaths"] = [str(ROOT)]
    (work / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "-p", str(work), "--pythonpath", sys.executable, "--outputjson"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode in (0, 1), process.stdout + process.stderr  # any other status: it could not run
    report = json.loads(process.stdout)
    assert report["summary"]["filesAnalyzed"] >= len(modules()) + len(files), report["summary"]
    return report["generalDiagnostics"]


def main() -> int:
    """Prints all problems; the status is 1 if there is one."""
    errors, refused = check()
    for error in errors:
        print(error)
    missed = wrong_lines() - refused
    for line in sorted(missed):
        print(f"not refused: {REFUSED.splitlines()[line - 1]}")
    print(f"types: {len(errors)} errors, {len(missed)} wrong calls that pass")
    return int(bool(errors or missed or refused - wrong_lines()))


def wrong_lines() -> set[int]:
    """The lines of REFUSED that the checker must refuse."""
    return set(range(NUM_RIGHT_LINES + 1, REFUSED.count("\n") + 1))


if __name__ == "__main__":
    sys.exit(main())
