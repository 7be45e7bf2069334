"""The page in a real browser: steps and tokens by keys, pointer and selects, at the width of a phone too."""

from __future__ import annotations

import pytest

from kvjax.explore import explorer_page
from tests.explore.made_up import Words, make_exploration
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
    file.write_text(explorer_page.render(make_exploration(), Words(WORDS), "text.txt"), encoding="utf-8")
    return file


@pytest.fixture
def page(tab, file):
    tab.open(file)
    wait_until_drawn(tab)
    yield tab
    assert tab.complaints() == []


def wait_until_drawn(tab):
    tab.wait_until("document.documentElement.dataset.drawn > 0")


def inner_text(tab, selector):
    return tab.ask(f"document.querySelector({selector!r}).innerText")


def classes(tab, side, token):
    return set(tab.ask(f"document.getElementById('token-{side}-{token}').className").split())


def test_tokens_show_their_state(page):
    assert page.ask("document.querySelectorAll('.text').length") == 2
    assert page.ask("document.querySelector('.text').textContent.includes('</script><img src=x onerror=alert(1)>')")
    assert page.ask("document.images.length") == 0
    # Of the second method, A, all even tokens are on the host; of the third, B, every third stands for others.
    assert "host" in classes(page, 0, 4) and "gone" in classes(page, 0, 5)
    assert {"stands", "inexact"} <= classes(page, 1, 6) and "inexact" not in classes(page, 1, 29)
    assert "now" in classes(page, 0, 30) and "later" in classes(page, 0, 31)
    assert "part" in classes(page, 0, 4)  # a token without a text of its own can be pointed at


def test_arrow_keys_walk_through_the_steps(page):
    assert "Step 1 of 4" in inner_text(page, "#where") and page.ask("document.getElementById('back').disabled")
    page.press("ArrowRight")
    page.wait_until("document.getElementById('where').innerText.includes('Step 2 of 4')")
    assert "now" in classes(page, 0, 31) and "leaves" not in classes(page, 0, 27)
    assert page.ask("document.querySelector('[aria-current]').previousElementSibling !== null")
    for _ in range(5):
        page.press("ArrowRight")
    page.wait_until("document.getElementById('where').innerText.includes('Step 4 of 4')")
    assert page.ask("document.getElementById('forth').disabled")
    page.press("ArrowLeft")
    page.wait_until("document.getElementById('where').innerText.includes('Step 3 of 4')")


def test_a_token_tells_its_fate_by_pointer_and_by_key(page):
    page.point("#token-0-5")
    page.wait_until("document.getElementById('detail').innerText.includes('token 6 of the text')")
    detail = inner_text(page, "#detail")
    assert "a<b> gone since the text was read" in detail and "of the exact attention at step 1" in detail
    page.ask("document.querySelectorAll('.text')[1].focus()")
    page.press("ArrowDown")
    page.wait_until("document.getElementById('detail').innerText.includes('token 7 of the text')")
    detail = inner_text(page, "#detail")
    assert "a<b> held exactly; key and value on the host" in detail
    assert "c held inexactly, key off by about 1.6 %, value off by about 3.6 %; chosen to stand for others" in detail
    active = page.ask("document.activeElement.getAttribute('aria-activedescendant')")
    assert active == "token-1-6" and page.ask("document.getElementById('token-0-6').ariaSelected") == "true"
    page.press("End")
    page.wait_until("document.getElementById('detail').innerText.includes('not written yet')")
    page.press("Home")
    page.wait_until("document.getElementById('detail').innerText.includes('token 1 of the text')")


def test_when_a_token_leaves_is_told_before_and_after(page):
    page.point("#token-0-27", click=True)
    page.wait_until("document.getElementById('detail').innerText.includes('leaves after this step')")
    page.press("ArrowRight")
    page.wait_until("document.getElementById('detail').innerText.includes('gone: it left after step 1')")


def test_selects_change_layer_head_and_method(page):
    before = inner_text(page, ".lost .number")
    change = "(e, v) => { e.value = v; e.dispatchEvent(new Event('change')); }"
    head = page.ask("Number(document.getElementById('head').value)")
    page.ask(f"({change})(document.getElementById('head'), {(head + 1) % 3})")
    page.wait_until(f"document.querySelector('.lost .number').innerText !== {before!r}")
    page.ask(f"({change})(document.querySelector('.method select'), 0)")
    page.wait_until("document.querySelector('.counts').innerText.startsWith('31 of 31')")
    assert inner_text(page, ".lost .number").startswith("0 %") and "exact" not in classes(page, 0, 5)
    assert page.ask("document.querySelector('.heads .here').title").startswith("layer ")


def test_a_click_into_the_maps_goes_there(page):
    page.point(".heads button:nth-child(4)", click=True)
    page.wait_until("document.getElementById('layer').value === '1' && document.getElementById('head').value === '1'")
    page.point(".steps canvas", click=True)
    page.wait_until("document.getElementById('where').innerText.includes('Step 3 of 4')")
    assert "token 18 of the text" in inner_text(page, "#detail")


def test_everything_has_a_name(page):
    nameless = page.ask("""[...document.querySelectorAll("button, select, input, section, [role=listbox], [role=img]")]
      .filter((e) => !e.ariaLabel && !e.getAttribute("aria-labelledby") && !e.labels?.length && !e.textContent.trim())
      .map((e) => e.outerHTML)""")
    assert nameless == []


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_all_of_it_without_scrolling_sideways(tab, file, dark):
    tab.open(file, 390, 844, dark)
    wait_until_drawn(tab)
    assert tab.ask("document.documentElement.scrollWidth") == 390
    ground = tab.ask("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(23, 25, 28)" if dark else "rgb(253, 252, 250)")
    tab.point("#token-1-6", click=True)
    tab.wait_until("document.getElementById('detail').innerText.includes('token 7 of the text')")
    assert tab.complaints() == []
