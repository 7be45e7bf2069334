"""Runs the code blocks of a document as a reader would: from top to bottom, in one namespace and one folder."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import doctest
import functools
import importlib
import importlib.util
import io
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import kvjax
from kvjax import cli
from kvjax.models.chat_template import ChatTemplate
from kvjax.models.model import Model
from kvjax.testing import toy_model

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^(?P<indent>[ \t]*)```(?P<language>\w*)(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=indent)```[ \t]*$", re.M | re.S
)
"""A fenced block; within a list or a note it is indented, and so is its end."""
MODULES = ("experiments", "kvjax", "checkpoints_convert", "tests")
"""Packages of this repository whose modules documents run with `python -m`."""

INLINE = re.compile(r"`(kvjax (?:models|methods|[a-z]+ [^`]+|--[^`]+)|(?:python -m|make) [^`]+)`")
"""Commands in the text of a page; a name alone, such as that of `kvjax eval`, is none."""
PLACEHOLDER = re.compile(r"\b(DIR|DST|FILE|KIND|MODEL|NAME|OUT|SRC)\b|[$]|[.][.]")
"""In a command that holds one of these, a reader puts something else; it is parsed as it stands."""

ONLY_PARSED = {
    "kvjax demo": "it compares methods for minutes; tests/package/test_demo.py runs it",
    "kvjax eval": "it takes minutes at the sizes of the pages; those with an output below are run",
    "kvjax explore": "it takes minutes; tests/explore/test_explore_command.py runs it",
    "kvjax calibrate": "it reads texts that only the reader has; tests/package/test_cli.py runs it",
    "kvjax report": "it needs the folder of an evaluation that is not run",
    "kvjax generate --model smollm2-135m": "it needs packages from the network",
    "python -m": "benchmarks, papers and conversions take minutes, or need checkpoints",
    "make": "it installs packages, or runs these tests",
}
"""The beginnings of commands that are parsed and not run, each with the reason."""

READERS_FILES = {"prompt.txt": "def main():\n    return"}
"""Files that commands of the pages read and that no page writes."""

real_load = kvjax.load


@dataclasses.dataclass(frozen=True)
class CodeBlock:
    """A fenced block: its language, the file that its title names, its code, and the output printed directly below."""

    language: str
    file: str | None
    code: str
    output: str | None
    line: int


def code_blocks(page: str) -> list[CodeBlock]:
    """The fenced blocks of a page, each with the ```text block directly below it as its output."""
    text = (ROOT / page).read_text(encoding="utf-8")
    matches = list(FENCE.finditer(text))
    blocks = []
    for i, match in enumerate(matches):
        below = matches[i + 1] if i + 1 < len(matches) else None
        output = None
        if below and below["language"] == "text" and not text[match.end() : below.start()].strip():
            output = dedent_block(below)
        title = re.search(r'title="([^"]+)"', match["info"])
        line = text[: match.start()].count("\n") + 1
        blocks.append(CodeBlock(match["language"], title[1] if title else None, dedent_block(match), output, line))
    return blocks


def dedent_block(match: re.Match[str]) -> str:
    """Returns the code of a fenced block without the indentation of its fence."""
    return re.sub(f"^{match['indent']}", "", match["code"], flags=re.M)


def python_code(page: str) -> list[str]:
    """The code of a page's Python blocks."""
    return [block.code for block in code_blocks(page) if block.language == "python"]


def commands(code: str) -> list[list[str]]:
    """The commands of a shell block, as words; a backslash continues a command, and a comment ends it."""
    joined = code.replace("\\\n", " ")
    commands = []
    for line in joined.splitlines():
        for part in line.split(" && "):
            if words := shlex.split(part, comments=True):
                commands.append(words)
    return commands


def kvjax_arguments(words: list[str]) -> list[str] | None:
    """The arguments of a command of kvjax, or None for another command."""
    if words[0] == "kvjax":
        return words[1:]
    return words[3:] if words[:3] == ["python", "-m", "kvjax"] else None


def inline_commands(page: str) -> list[list[str]]:
    """The commands of kvjax, Python and make that stand in the text of a page, as words."""
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    return [words for code in INLINE.findall(" ".join(text.split())) for words in commands(code)]


def page_commands(page: str) -> list[list[str]]:
    """All commands of a page, those of its blocks and those of its text."""
    blocks = [block.code for block in code_blocks(page) if block.language == "sh"]
    return [words for code in blocks for words in commands(code)] + inline_commands(page)


def reason_not_to_run(words: list[str]) -> str:
    """The beginning in `ONLY_PARSED` with which a command begins, or its placeholder; "" for one that is run."""
    text = shlex.join(words)
    if kvjax_arguments(words) == ["eval", "--list"]:
        return ""
    beginning = next((beginning for beginning in ONLY_PARSED if f"{text} ".startswith(f"{beginning} ")), "")
    placeholder = PLACEHOLDER.search(text)
    return beginning or (placeholder[0] if placeholder else "")


def check_command(words: list[str]) -> None:
    """Fails for a command that cannot work: a wrong argument, a missing module, an unknown target of make."""
    arguments = kvjax_arguments(words)
    if arguments is not None:
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                args = cli._parser().parse_args(arguments)
        except SystemExit:
            pytest.fail(f"{shlex.join(words)}: {errors.getvalue()}")
        for name in ("method", "methods"):
            value = getattr(args, name, None)
            if isinstance(value, str) and not args.load and not PLACEHOLDER.search(value):
                for text in value.split(";"):
                    kvjax.parse(text.strip())
    elif words[:2] == ["python", "-m"] and words[2].partition(".")[0] in MODULES:
        assert importlib.util.find_spec(words[2]), f"there is no module {words[2]}"
        if words[2] != "kvjax.eval.lm_harness":  # whose parser is lm_eval's
            parse_module_arguments(words[2], words[3:])
    elif words[0] == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        assert {word for word in words[1:] if "=" not in word} <= set(targets), shlex.join(words)


class _Parsed(BaseException):
    """Ends a module's `main` when its arguments are parsed."""


def parse_module_arguments(name: str, arguments: list[str]) -> None:
    """Runs the `main` of a module until its own parser has accepted the arguments; fails where it refuses them."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        parse_args(parser, args, namespace)
        raise _Parsed

    spec = importlib.util.find_spec(name)
    is_package = spec is not None and spec.submodule_search_locations is not None
    module = importlib.import_module(f"{name}.__main__" if is_package else name)
    errors = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(errors):
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        patch.setattr(sys, "argv", [name, *arguments])
        try:
            module.main()
        except _Parsed:
            return
        except SystemExit:
            pytest.fail(f"python -m {name} {shlex.join(arguments)}: {errors.getvalue()}")
    pytest.fail(f"{name} parses no arguments")


def run_command(words: list[str], where: str) -> None:
    """Runs a command of kvjax in this process; fails unless it ends well."""
    errors = io.StringIO()
    for file, text in READERS_FILES.items():
        if file in words and not Path(file).exists():
            Path(file).write_text(text, encoding="utf-8")
    with contextlib.redirect_stderr(errors):
        status = cli.main(kvjax_arguments(words))
    assert status == 0, f"{where}: {shlex.join(words)}: {errors.getvalue()}"


@functools.cache
def make_toy_model() -> Model:
    """A toy model with the shipped tokenizer and a chat template, for pages without outputs."""
    shipped = real_load("testbed")
    toy = toy_model(layers=4, head_dim=32, vocab_size=shipped.config.vocab_size)
    template = ChatTemplate("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}")
    return dataclasses.replace(toy, tokenizer=shipped.tokenizer, chat_template=template)


@functools.cache
def named_model(name: str, dtype: Any = None, mesh: Any = None, weights: str | None = None) -> Model:
    """The model of this name, loaded once for all pages."""
    return real_load(name, dtype=dtype, mesh=mesh, weights=weights)


def run_page(page: str, monkeypatch: pytest.MonkeyPatch, folder: Path, **values: Any) -> dict[str, Any]:
    """Runs a page's Python blocks and its commands of kvjax, and parses the commands that are not to be run.

    A block with a title is saved as that file. Outputs are compared as in doctest: "..." matches anything. A command
    that stands in the text runs last, when all files of the page are there.

    Returns:
      the names that the blocks have defined.
    """
    blocks = code_blocks(page)
    shows_output = any(block.output for block in blocks if block.language in ("python", "sh"))
    monkeypatch.setattr(
        kvjax,
        "load",
        named_model if shows_output else lambda name, dtype=None, mesh=None, weights=None: make_toy_model(),
    )
    monkeypatch.chdir(folder)
    values = {"__name__": "document", **values}
    for block in blocks:
        where, printed = f"{page}, line {block.line}", io.StringIO()
        if block.file:
            Path(block.file).write_text(block.code, encoding="utf-8")
        elif block.language == "python":
            # Blank lines before the code make the line of an error that of the page.
            code = compile("\n" * block.line + block.code, str(ROOT / page), "exec", dont_inherit=True)
            with contextlib.redirect_stdout(printed):
                exec(code, values)
        elif block.language == "sh":
            for words in commands(block.code):
                check_command(words)
                if kvjax_arguments(words) is not None and (block.output or not reason_not_to_run(words)):
                    with contextlib.redirect_stdout(printed):
                        run_command(words, where)
        else:
            continue
        if block.output is not None:
            compare_output(block.output, printed.getvalue(), where)
    for words in inline_commands(page):
        check_command(words)
        if kvjax_arguments(words) is not None and not reason_not_to_run(words):
            with contextlib.redirect_stdout(io.StringIO()):
                run_command(words, page)
    return values


def compare_output(expected: str, printed: str, where: str) -> None:
    """Fails if the printed output differs from the page's; spaces at the end of lines do not count."""
    expected, printed = (re.sub(r"[ ]+$", "", text, flags=re.M).strip("\n") + "\n" for text in (expected, printed))
    same = doctest.OutputChecker().check_output(without_scores(expected), without_scores(printed), doctest.ELLIPSIS)
    assert same, f"{where} prints\n{printed}\nand the page shows\n{expected}"


def without_scores(text: str) -> str:
    """Removes the scores from a table of `kvjax eval`: they depend on the last bits of sums, and so on JAX and the CPU.

    Methods, bytes and the caption stay. Scores decide the widths of columns, so spaces and line ends do not count in a
    text with such a table; any other text is returned unchanged.
    """
    header = next((cells for line in text.splitlines() if "of full" in (cells := _cells(line))), None)
    if header is None:
        return text
    device_column = header.index("device")  # the scores' columns stand before it
    rows = [_cells(line.replace("─", " ")) for line in text.splitlines()]
    shortened = [row[:1] + row[device_column:] if len(row) == len(header) and row != header else row for row in rows]
    return " ".join(" ".join(row) for row in shortened if row) + "\n"


def _cells(line: str) -> list[str]:
    """Splits a line of a table at two or more spaces."""
    return [cell for cell in re.split(r"\s{2,}", line.strip()) if cell]
