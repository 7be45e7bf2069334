"""`kvjax explore` as a user meets it, on the shipped model."""

from __future__ import annotations

import json
import re
import warnings

import pytest

from kvjax import cli
from kvjax.errors import KvjaxError
from kvjax.explore import explore_command
from kvjax.models.model import load

TEXT = 'def main():\n    """</script><b>naïve</b>"""\n    import '


def test_a_watched_cache_does_not_say_that_it_saves_nothing(tmp_path):
    (tmp_path / "text.py").write_text("x = 1\n" * 60)
    command = ["explore", "--text", str(tmp_path / "text.py"), "--out", str(tmp_path / "page.html"), "--steps", "1"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explore_command.run(cli._parser().parse_args([*command, "--methods", "snapkv:budget=24,window=8"]))


@pytest.fixture
def explore(tmp_path):
    (tmp_path / "text.py").write_text(TEXT, encoding="utf-8")
    command = ["explore", "--text", str(tmp_path / "text.py"), "--out", str(tmp_path / "new" / "page.html")]
    return lambda *args: explore_command.run(cli._parser().parse_args([*command, *args]))


def test_it_writes_a_page_and_says_how_large_it_is(explore, tmp_path, capsys):
    explore("--methods", "full; snapkv:budget=40", "--steps", "3")
    written = tmp_path / "new" / "page.html"
    output = capsys.readouterr()
    tokens = len(load("testbed").tokenizer.encode(TEXT))
    assert re.search(rf"wrote .*page\.html, 0\.\d MB: {tokens} tokens, 3 steps, 2 methods\n", output.out)
    assert "reading under snapkv:budget=40" in output.err
    data = json.loads(re.search(r'id="data">(.*?)</script>', written.read_text(encoding="utf-8"), re.S)[1])
    assert "".join(data["tokens"]).startswith(TEXT) and [m["name"] for m in data["methods"]] == [
        "full",
        "snapkv:budget=40",
    ]


def test_without_a_text_it_reads_one_that_kvjax_brings(tmp_path, capsys):
    out = tmp_path / "page.html"
    command = ["explore", "--out", str(out), "--methods", "full", "--steps", "1", "--tokens", "40"]
    explore_command.run(cli._parser().parse_args(command))
    output = capsys.readouterr()
    assert "40 tokens, 1 steps, 1 methods" in output.out and "--text FILE takes your own" in output.err
    assert '"tokens"' in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--steps", "0"], "--steps must be an integer from 1"),
        (["--tokens", "-3"], "--tokens must be an integer from 1"),
        (["--methods", "snapk"], "did you mean 'snapkv'"),
        (["--chat", "--tokens", "3"], "--tokens would cut the end of a conversation off"),
        (["--chat"], "this model has no chat template"),
    ],
)
def test_what_cannot_be_done_is_said_with_what_can(explore, args, says):
    with pytest.raises(KvjaxError, match=says):
        explore(*args)


def test_a_text_that_no_page_could_show_is_refused(explore, tmp_path):
    (tmp_path / "text.py").write_text("x = 1\n" * explore_command.MOST_TOKENS, encoding="utf-8")
    with pytest.raises(
        KvjaxError,
        match=f"a page shows at most {explore_command.MOST_TOKENS}; use --tokens {explore_command.MOST_TOKENS}",
    ):
        explore()
