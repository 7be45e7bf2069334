"""The command line as a user meets it, on the shipped model."""

from __future__ import annotations

import importlib
import io
import json
import subprocess
import sys

import jax
import pytest

import kvjax
from kvjax import cli
from kvjax.registry import loading, registration


@pytest.fixture(autouse=True)
def keep_the_tests_cache(monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", jax.config.jax_compilation_cache_dir)


def test_generate_prints_text_and_json(tmp_path, capsys):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("def main():\n    import ")
    args = ["generate", "--method", "kcache:n=16", "--prompt-file", str(prompt), "--max-new-tokens", "8"]
    assert cli.main(args) == 0
    output = capsys.readouterr()
    assert "[length]" in output.out or "[stop]" in output.out
    assert "on the host (" in output.err and "tokens/s" in output.err
    assert cli.main([*args, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["method"] == "kcache:n=16" and result["text"][0] in output.out
    assert set(result["bytes"]["held"]) == {"device", "pinned_host"} and len(result["tokens"][0]) <= 8


@pytest.mark.parametrize("text", ["def main():\n    import ", "def main():\r\n    import ", "import \ufeffos"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_prompt_is_its_file_without_the_byte_order_mark(text, mark, tmp_path, monkeypatch, capsys):
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes((mark + text).encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((mark + text).encode())))
    args = ["generate", "--max-new-tokens", "4", "--json"]
    found = []
    for source in (["--prompt", text], ["--prompt-file", str(prompt)], ["--prompt-file", "-"]):
        with monkeypatch.context() as patch:
            patch.setattr(kvjax, "generate", lambda model, prompts, *args, **options: found.append(prompts))
            with pytest.raises(AttributeError):  # what stands in for `generate` has no result
                cli.main([*args, *source])
    assert found == [[text]] * 3


def test_a_prompt_file_lies_in_the_home_directory_or_says_which_bytes_are_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "prompt.txt").write_text("def f")
    args = ["generate", "--max-new-tokens", "1", "--prompt-file"]
    assert cli.main([*args, "~/prompt.txt"]) == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff")))
    assert cli.main([*args, "-"]) == 2
    assert "kvjax: cannot read --prompt-file - ('utf-8'" in capsys.readouterr().err


def test_methods_lists_every_method_with_source_and_defaults(capsys):
    assert cli.main(["methods", "--json"]) == 0
    methods = {m["name"]: m for m in json.loads(capsys.readouterr().out)}
    assert methods["kcache"]["parameters"]["n"] == {
        "type": "int",
        "default": 128,
        "meaning": "Values read per head and step (the paper: 32, 64, 128).",
    }
    assert cli.main(["methods", *methods]) == 0
    text = capsys.readouterr().out
    assert all(name in text and m["source"] in text for name, m in methods.items())


def test_methods_has_a_line_for_each_below_its_family(capsys, monkeypatch):
    assert cli.main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    members = [line.split()[0] for line in lines if line.startswith("  ")]
    assert sorted(members) == sorted(loading.load_all()) and len(lines) < len(members) + 40
    heads = [line.partition(":")[0] for line in lines if line and not line.startswith((" ", "`"))]
    assert heads == list(registration.FAMILIES)
    assert "kivi" in lines[lines.index(next(x for x in lines if x.startswith("quantization by channel"))) + 2]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main(["methods"]) == 0
    narrow_lines = capsys.readouterr().out.splitlines()
    assert max(map(len, narrow_lines[:-1])) == 60 and [x[:40] for x in narrow_lines] == [x[:40] for x in lines]


def test_methods_tells_all_of_the_named_ones_and_the_nearest_of_unknown_ones(capsys):
    assert cli.main(["methods", "kivi", "snapkv"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("kivi(bits: int = 2, ") and "\nsnapkv(budget: TokenBudget = 1024, " in text
    assert "    family: eviction after the prompt\n" in text and "quest" not in text
    assert cli.main(["methods", "--json", "kivi"]) == 0
    (kivi,) = json.loads(capsys.readouterr().out)
    assert kivi["family"] == "quantization by channel and group"
    assert cli.main(["methods", "kivi", "snapvk"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and "unknown method 'snapvk'; did you mean 'snapkv'?" in output.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--method", "kcach", "--prompt", "a"], "did you mean 'kcache'?"),
        (["--model", "no/such/directory", "--prompt", "a"], "there is no checkpoint directory"),
        (["--prompt-file", "no-such-file"], "no-such-file"),
        (["--prompt", ""], "prompt 0 is empty"),
        (["--prompt", "a", "--top-k", "3"], "need temperature > 0"),
        (["--prompt", "a", "--logprobs", "3"], "add --json"),
        (["--prompt", "a", "--json", "--logprobs", "-1"], "logprobs must be an integer from 0"),
        (["--prompt", "a", "--presence-penalty", "3"], "presence_penalty must be a number from -2 to 2"),
        (["--prompt", "a", "--temperature", "1", "--top-k", "99999999999"], "top_k must be an integer from 1"),
    ],
)
def test_wrong_input_ends_with_one_line_and_status_2(args, says, capsys):
    assert cli.main(["generate", *args]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("kvjax: ") and says in output.err
    assert len(output.err.strip().splitlines()) == 1


def test_generate_streams_what_json_holds_and_ends_at_a_stop_string(capsys):
    args = ["generate", "--prompt", "def main():\n    import ", "--max-new-tokens", "12"]
    assert cli.main([*args, "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"][0]
    assert cli.main(args) == 0
    assert capsys.readouterr().out.startswith(text + "\n[")
    stop = text[3:5]
    assert cli.main([*args, "--stop", stop]) == 0
    assert capsys.readouterr().out == text.split(stop)[0] + "\n[stop]\n"


def test_generate_takes_penalties_and_gives_log_probabilities(capsys):
    args = ["generate", "--prompt", "def main():", "--max-new-tokens", "6", "--json", "--logprobs", "2"]
    options = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    assert cli.main([*args, *(x for k, v in options.items() for x in (f"--{k.replace('_', '-')}", str(v)))]) == 0
    out = kvjax.generate(kvjax.load("testbed"), "def main():", "full", max_new_tokens=6, logprobs=2, **options)
    document = json.loads(capsys.readouterr().out)
    assert (document["tokens"], document["logprobs"]) == (out.tokens, out.logprobs)
    assert [[len(step) for step in row] for row in document["top_logprobs"]] == [[2] * 6]


def test_an_interrupt_ends_in_one_line(monkeypatch, capsys):
    def raise_interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvjax.generation.generate.start", raise_interrupt)
    assert cli.main(["generate", "--prompt", "a"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "kvjax: stopped"


def test_a_reader_that_has_enough_ends_it_quietly():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", "kvjax", "methods"], **pipes) as command:
        command.stdout.close()
        errors = command.stderr.read()
    assert errors == b"" and command.returncode == 141


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["demo", "--methods", ""], "no method in ''"),
        (["eval", "--budget-bytes", ""], "above 0 and at most 1, such as 1/4, several with commas, got ''"),
        (["explore", "--text", "{here}", "--out", "page.html"], "cannot read --text {here}"),
        (["explore", "--text", "{here}/empty", "--out", "page.html"], "--text {here}/empty has no text"),
        (["explore", "--text", "{here}/bytes", "--out", "page.html"], "give a UTF-8 text file"),
        (["explore", "--text", "{here}/text", "--out", "{here}"], "{here} is a folder; name a file in it"),
    ],
)
def test_what_cannot_be_used_is_told_before_anything_runs(args, says, tmp_path, capsys):
    for name, content in (("empty", b"\n"), ("bytes", b"\xff\xfe"), ("text", b"a text")):
        (tmp_path / name).write_bytes(content)
    assert cli.main([x.format(here=tmp_path) for x in args]) == 2
    assert says.format(here=tmp_path) in capsys.readouterr().err


def test_an_argument_that_is_no_utf_8_is_named():
    command = [sys.executable, "-m", "kvjax", "generate", "--max-new-tokens", "2", "--prompt"]
    done = subprocess.run([*command, b"caf\xe9"], capture_output=True)
    assert done.returncode == 2 and b"valid UTF-8" in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--batch", "0"], "--batch must be an integer from 1 to 2147483647, got 0"),
        (["--batch", "-1"], "--batch must be an integer from 1"),
        (["--context", "0"], "--context must be an integer from 1"),
        (["--context", "-5"], "--context must be an integer from 1"),
        (["--tokens", "-5"], "--tokens must be an integer from 1"),
    ],
)
def test_calibrate_names_the_number_that_cannot_be(args, says, tmp_path, capsys):
    assert cli.main(["calibrate", "bases", "testbed", str(tmp_path / "out"), "--text", __file__, *args]) == 2
    assert says in capsys.readouterr().err


def test_calibrate_refuses_a_parameter_of_thousands_of_digits(capsys):
    assert cli.main(["calibrate", f"joint_bases:heads={'9' * 5000}", "testbed", "out"]) == 2
    assert "is no kind of table" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["explore", "--out"], ["calibrate", "bases", "testbed"]])
@pytest.mark.parametrize("link", ["the same", "symlink", "hardlink"])
def test_what_is_read_is_not_written_over(command, link, tmp_path, capsys):
    text, out = tmp_path / "story.txt", tmp_path / "story.txt"
    text.write_text("a story")
    if link != "the same":
        out = tmp_path / "link"
        (out.symlink_to if link == "symlink" else out.hardlink_to)(text)
    assert cli.main([*command, str(out), "--text", str(text)]) == 2
    assert f"{out} is the file that --text reads" in capsys.readouterr().err and text.read_text() == "a story"


@pytest.mark.parametrize("option", ["--max-new-tokens", "--top-k", "--seed"])
@pytest.mark.parametrize("number", ["9" * 5000, "1.5", "1_0", ""])
def test_a_number_of_too_many_digits_is_named_with_its_option(option, number, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", "--prompt", "a", option, number])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and f"argument {option}: " in error and "is no whole number of" in error
    assert len(error) < 2000


def test_a_mistake_of_ours_is_not_hidden(monkeypatch):
    def raise_mistake(*args, **options):
        raise RuntimeError("a mistake")

    monkeypatch.setattr("kvjax.generation.generate.start", raise_mistake)
    with pytest.raises(RuntimeError, match="a mistake"):
        cli.main(["generate", "--prompt", "a"])


def test_python_may_leave_docstrings_out():
    command = [sys.executable, "-OO", "-m", "kvjax", "methods", "full", "kcache"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and "\nkcache(n: int = 128" in done.stdout


@pytest.mark.parametrize(
    ("module", "args"),
    [
        ("kvjax", ["generate", "--prompt", "a"]),
        ("kvjax", ["generate", "--chat", "--prompt", "a"]),
        ("kvjax", ["calibrate", "bases", "testbed", "table.npz"]),
        ("kvjax.eval.run.eval_command", ["eval"]),
        ("kvjax.eval.run.eval_command", ["demo"]),
        ("kvjax.explore.explore_command", ["explore"]),
    ],
)
def test_every_command_that_opens_a_model_asks_for_its_weights(module, args, tmp_path, monkeypatch):
    class Opened(Exception):
        pass

    def load(name, weights=None, **_):
        raise Opened(weights)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.import_module(module), "load", load)
    with pytest.raises(Opened, match="int4"):
        cli.main([*args, "--weights", "int4"])


def test_generate_holds_weights_in_codes(capsys):
    args = ["generate", "--prompt", "def main():", "--max-new-tokens", "4", "--json", "--method", "full"]
    assert cli.main([*args, "--weights", "int8"]) == 0
    expected = kvjax.generate(kvjax.load("testbed", weights="int8"), ["def main():"], "full", max_new_tokens=4)
    assert json.loads(capsys.readouterr().out)["tokens"] == expected.tokens
    with pytest.raises(SystemExit):
        cli.main([*args, "--weights", "int3"])
    assert "invalid choice: 'int3' (choose from" in capsys.readouterr().err
