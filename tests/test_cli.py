"""The command line as a user meets it, on the shipped model."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import pytest

from kvjax import cli


@pytest.fixture(autouse=True)
def keep_the_tests_cache(monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", jax.config.jax_compilation_cache_dir)


def test_generate_prints_text_and_json(tmp_path, capsys):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("def main():\n    import ")
    args = ["generate", "--method", "kcache:n=16", "--prompt-file", str(prompt), "--max-new-tokens", "8"]
    assert cli.main(args) == 0
    shown = capsys.readouterr()
    assert "[length]" in shown.out or "[stop]" in shown.out
    assert "bytes in pinned_host" in shown.err and "tokens/s" in shown.err
    assert cli.main([*args, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["method"] == "kcache:n=16" and result["text"][0] in shown.out
    assert set(result["bytes"]) == {"device", "pinned_host"} and len(result["tokens"][0]) <= 8


def test_methods_lists_every_recipe_with_source_and_defaults(capsys):
    assert cli.main(["methods", "--json"]) == 0
    methods = {m["name"]: m for m in json.loads(capsys.readouterr().out)}
    assert methods["kcache"]["parameters"]["n"] == {"type": "int", "default": 128}
    assert cli.main(["methods"]) == 0
    text = capsys.readouterr().out
    assert all(name in text and m["source"] in text for name, m in methods.items())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--method", "kcach", "--prompt", "a"], "did you mean 'kcache'?"),
        (["--model", "no/such/directory", "--prompt", "a"], "there is no checkpoint directory"),
        (["--prompt-file", "no-such-file"], "no-such-file"),
        (["--prompt", ""], "prompt 0 is empty"),
        (["--prompt", "a", "--top-k", "3"], "need temperature > 0"),
        (["--prompt", "a", "--temperature", "1", "--top-k", "99999999999"], "top_k must be an integer from 1"),
    ],
)
def test_wrong_input_ends_with_one_line_and_status_2(args, says, capsys):
    assert cli.main(["generate", *args]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("kvjax: ") and says in shown.err
    assert len(shown.err.strip().splitlines()) == 1


def test_generate_streams_what_json_holds_and_ends_at_a_stop_string(capsys):
    args = ["generate", "--prompt", "def main():\n    import ", "--max-new-tokens", "12"]
    assert cli.main([*args, "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"][0]
    assert cli.main(args) == 0
    assert capsys.readouterr().out.startswith(text + "\n[")
    stop = text[3:5]
    assert cli.main([*args, "--stop", stop]) == 0
    assert capsys.readouterr().out == text.split(stop)[0] + "\n[stop]\n"


def test_an_interrupt_ends_in_one_line(monkeypatch, capsys):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvjax.run.generate.start", interrupted)
    assert cli.main(["generate", "--prompt", "a"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "kvjax: stopped"


def test_a_reader_that_has_enough_ends_it_quietly():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", "kvjax", "methods"], **pipes) as command:
        command.stdout.close()
        said = command.stderr.read()
    assert said == b"" and command.returncode == 141


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["demo", "--methods", ""], "no method in ''"),
        (["eval", "--budget-bytes", ""], "above 0 and at most 1, such as 1/4, got ''"),
        (["explore", "--text", "{here}", "--out", "page.html"], "cannot read --text {here}"),
        (["explore", "--text", "{here}/empty", "--out", "page.html"], "--text {here}/empty has no text"),
        (["explore", "--text", "{here}/bytes", "--out", "page.html"], "give a UTF-8 text file"),
        (["explore", "--text", "{here}/text", "--out", "{here}"], "--out {here} is a folder"),
    ],
)
def test_what_cannot_be_used_is_told_before_anything_runs(args, says, tmp_path, capsys):
    for name, content in (("empty", b"\n"), ("bytes", b"\xff\xfe"), ("text", b"a text")):
        (tmp_path / name).write_bytes(content)
    assert cli.main([x.format(here=tmp_path) for x in args]) == 2
    assert says.format(here=tmp_path) in capsys.readouterr().err


def test_an_ascii_terminal_and_an_argument_that_is_no_utf_8():
    command = [sys.executable, "-m", "kvjax.cli", "generate", "--max-new-tokens", "2", "--prompt"]
    ascii_only = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([*command, "naïve → 日本".encode()], env=ascii_only, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    done = subprocess.run([*command, b"caf\xe9"], env=ascii_only, capture_output=True)
    assert done.returncode == 2 and b"valid UTF-8" in done.stderr and b"Traceback" not in done.stderr
