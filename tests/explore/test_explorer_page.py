"""The page: one file that loads nothing, in which no text is code, and which stays small."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib

import numpy as np
import pytest

from kvjax.explore import explorer_page, token_codes
from kvjax.explore.token_texts import token_texts
from kvjax.models.model import load
from tests.eval.page.test_report import Page
from tests.explore.made_up import HOSTILE, Words, make_exploration


@pytest.fixture(scope="module")
def exploration():
    return make_exploration()


@pytest.fixture(scope="module")
def text(exploration):
    return explorer_page.render(exploration, Words(), 'a</title>"<b>.txt')


def page_data(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def unpack_array(packed, shape, dtype=np.uint8):
    return np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype).reshape(shape)


def test_nothing_is_loaded(text):
    parsed = Page(text)
    assert not any(a.get("src") or a.get("srcset") or a.get("href") for _, a in parsed.elements)
    assert not parsed.all("link") and not parsed.all("img") and not parsed.all("iframe")
    code = text.replace(re.search(r'id="data">(.*?)</script>', text, re.S)[1], "")
    assert not re.findall(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|innerHTML|document\.write|eval\(", code)


def test_the_policy_allows_this_script_and_this_style_alone(text):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    for name, inside in (("script", re.search(r"<script>(.*?)</script>", text, re.S)[1]), ("style", None)):
        inside = inside or re.search(r"<style>(.*?)</style>", text, re.S)[1]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy


def test_hostile_texts_stay_texts(text, exploration):
    assert [tag for tag, _ in Page(text).elements].count("script") == 2 and "<b>" not in text
    assert "a&lt;/title&gt;&quot;&lt;b&gt;.txt" in text
    data = page_data(text)
    read = [*exploration.prompt, *exploration.answer]
    assert "".join(data["tokens"]) == Words().decode(read)
    assert data["methods"][1]["name"] == "a<b>" and "a <b>model</b>" in data["about"]
    inside = re.search(r'id="data">(.*?)</script>', text, re.S)[1]
    assert not set("<>&\u2028\u2029") & set(inside)
    assert HOSTILE[5] in data["tokens"]


def test_what_is_packed_is_what_was_recorded(text, exploration):
    data, shape = page_data(text), exploration.attention.shape[1:]
    for layer in range(2):
        shares = (unpack_array(data["attention"][layer], shape) / 255.0) ** 4
        np.testing.assert_allclose(shares, exploration.attention[layer], rtol=0.03, atol=2e-5)
        for method, trace in zip(data["methods"], exploration.methods, strict=True):
            assert np.array_equal(unpack_array(method["held"][layer], shape), trace.status_codes[layer])
            assert np.array_equal(unpack_array(method["off"][layer], shape), trace.error_codes[layer])
    lost_attention = unpack_array(data["methods"][2]["lost"], exploration.attention.shape[:3], "<u2") / 65535
    np.testing.assert_allclose(lost_attention, exploration.methods[2].lost_attention, atol=1e-5)


def test_it_begins_with_two_methods_where_they_lose_the_most(text, exploration):
    first = page_data(text)["first"]
    assert first["sides"] == [1, 2]
    lost_attention = exploration.methods[1].lost_attention.mean(2) + exploration.methods[2].lost_attention.mean(2)
    assert lost_attention[first["layer"], first["head"]] == lost_attention.max()
    assert explorer_page.first_view(make_exploration(methods=("full",)))["sides"] == [0]


def test_own_answers_are_divided_where_they_part(text, exploration):
    own = page_data(text)["methods"][1]["own"]
    assert own == [HOSTILE[0], HOSTILE[2] * 2]  # of tokens 0, 2, 2, where the answer is 0, 1, 2, 3


def test_bits_of_scripts_are_those_of_the_record():
    script = (explorer_page.WEB / "data.js").read_text()
    script_bits = dict(re.findall(r"([A-Z_]+) = (\d+)", script))
    assert {name: int(bit) for name, bit in script_bits.items()} == {
        name: getattr(token_codes, name) for name in script_bits
    }
    assert len(script_bits) == 7


def test_a_long_text_on_many_heads_stays_below_ten_megabytes():
    large = make_exploration(1000, 32, 30, 9, ("a", "b", "c"))
    assert len(explorer_page.render(large, None, "text")) < 10e6


def test_pieces_are_the_text():
    tokenizer = load("testbed").tokenizer
    source_text = "naïve 日本 🙂\n  x = 1"
    ids = tokenizer.encode(source_text)
    pieces = token_texts(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False) and len(pieces) == len(ids)
    assert "🙂" in pieces and "\ufffd" not in "".join(pieces)
    assert token_texts(tokenizer, tokenizer.encode("🙂")[:1]) == ["\ufffd"]
    assert token_texts(None, [3, 4]) == ["#3 ", "#4 "]
