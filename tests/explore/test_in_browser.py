"""The page in a real browser: steps and tokens by keys, pointer and selects, at the width of a phone too."""

from __future__ import annotations

import pytest

from kvjax.explore import explorer_page
from tests.explore.made_up import Words, record
from tests.helpers import browser

pytestmark = pytest.mark.skipif(browser.path() is None, reason="no Chromium; `make` brings one where npm is")
WORDS = ("the ", "cat\n", "</script><img src=x onerror=alert(1)>", "sat ", "", "“on” ", "a ")


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser.Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(explorer_page.render(record(), Words(WORDS), "text.txt"), encoding="utf-8")
    return file


@pytest.fixture
def shown(tab, file):
    tab.open(file)
    drawn(tab)
    yield tab
    assert tab.complaints() == []


def drawn(tab):
    tab.wait_until("document.documentElement.dataset.drawn > 0")


def said(tab, selector):
    return tab.ask(f"document.querySelector({selector!r}).innerText")


def classes(tab, side, token):
    return set(tab.ask(f"document.getElementById('token-{side}-{token}').className").split())


def test_tokens_show_their_state(shown):
    assert shown.ask("document.querySelectorAll('.text').length") == 2
    assert shown.ask("document.querySelector('.text').textContent.includes('</script><img src=x onerror=alert(1)>')")
    assert shown.ask("document.images.length") == 0
    # Of the second method, A, all even tokens are on the host; of the third, B, every third stands for others.
    assert "host" in classes(shown, 0, 4) and "gone" in classes(shown, 0, 5)
    assert {"stands", "inexact"} <= classes(shown, 1, 6) and "inexact" not in classes(shown, 1, 29)
    assert "now" in classes(shown, 0, 30) and "later" in classes(shown, 0, 31)
    assert "part" in classes(shown, 0, 4)  # a token without a text of its own can be pointed at


def test_arrow_keys_walk_through_the_steps(shown):
    assert "Step 1 of 4" in said(shown, "#where") and shown.ask("document.getElementById('back').disabled")
    shown.press("ArrowRight")
    shown.wait_until("document.getElementById('where').innerText.includes('Step 2 of 4')")
    assert "now" in classes(shown, 0, 31) and "leaves" not in classes(shown, 0, 27)
    assert shown.ask("document.querySelector('[aria-current]').previousElementSibling !== null")
    for _ in range(5):
        shown.press("ArrowRight")
    shown.wait_until("document.getElementById('where').innerText.includes('Step 4 of 4')")
    assert shown.ask("document.getElementById('forth').disabled")
    shown.press("ArrowLeft")
    shown.wait_until("document.getElementById('where').innerText.includes('Step 3 of 4')")


def test_a_token_tells_its_fate_by_pointer_and_by_key(shown):
    shown.point("#token-0-5")
    shown.wait_until("document.getElementById('detail').innerText.includes('token 6 of the text')")
    detail = said(shown, "#detail")
    assert "a<b> gone since the text was read" in detail and "of the exact attention at step 1" in detail
    shown.ask("document.querySelectorAll('.text')[1].focus()")
    shown.press("ArrowDown")
    shown.wait_until("document.getElementById('detail').innerText.includes('token 7 of the text')")
    detail = said(shown, "#detail")
    assert "a<b> held exactly; key and value on the host" in detail
    assert "c held inexactly, key off by about 1.6 %, value off by about 3.6 %; chosen to stand for others" in detail
    active = shown.ask("document.activeElement.getAttribute('aria-activedescendant')")
    assert active == "token-1-6" and shown.ask("document.getElementById('token-0-6').ariaSelected") == "true"
    shown.press("End")
    shown.wait_until("document.getElementById('detail').innerText.includes('not written yet')")
    shown.press("Home")
    shown.wait_until("document.getElementById('detail').innerText.includes('token 1 of the text')")


def test_when_a_token_leaves_is_told_before_and_after(shown):
    shown.point("#token-0-27", click=True)
    shown.wait_until("document.getElementById('detail').innerText.includes('leaves after this step')")
    shown.press("ArrowRight")
    shown.wait_until("document.getElementById('detail').innerText.includes('gone: it left after step 1')")


def test_selects_change_layer_head_and_method(shown):
    before = said(shown, ".lost .number")
    change = "(e, v) => { e.value = v; e.dispatchEvent(new Event('change')); }"
    head = shown.ask("Number(document.getElementById('head').value)")
    shown.ask(f"({change})(document.getElementById('head'), {(head + 1) % 3})")
    shown.wait_until(f"document.querySelector('.lost .number').innerText !== {before!r}")
    shown.ask(f"({change})(document.querySelector('.method select'), 0)")
    shown.wait_until("document.querySelector('.counts').innerText.startsWith('31 of 31')")
    assert said(shown, ".lost .number").startswith("0 %") and "exact" not in classes(shown, 0, 5)
    assert shown.ask("document.querySelector('.heads .here').title").startswith("layer ")


def test_a_click_into_the_maps_goes_there(shown):
    shown.point(".heads button:nth-child(4)", click=True)
    shown.wait_until("document.getElementById('layer').value === '1' && document.getElementById('head').value === '1'")
    shown.point(".steps canvas", click=True)
    shown.wait_until("document.getElementById('where').innerText.includes('Step 3 of 4')")
    assert "token 18 of the text" in said(shown, "#detail")


def test_everything_has_a_name(shown):
    found = shown.ask("""[...document.querySelectorAll("button, select, input, section, [role=listbox], [role=img]")]
      .filter((e) => !e.ariaLabel && !e.getAttribute("aria-labelledby") && !e.labels?.length && !e.textContent.trim())
      .map((e) => e.outerHTML)""")
    assert found == []


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_all_of_it_without_scrolling_sideways(tab, file, dark):
    tab.open(file, 390, 844, dark)
    drawn(tab)
    assert tab.ask("document.documentElement.scrollWidth") == 390
    ground = tab.ask("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(23, 25, 28)" if dark else "rgb(253, 252, 250)")
    tab.point("#token-1-6", click=True)
    tab.wait_until("document.getElementById('detail').innerText.includes('token 7 of the text')")
    assert tab.complaints() == []
