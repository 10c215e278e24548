"""The page and a report show pictures where they are, from the dataset's store alone."""

import base64
import struct
import zlib

import pytest

import rollout_io
from tests.browser.conftest import export, tab_at, viewer
from tests.helpers.conversion_helpers import write
from tests.helpers.picture_rows import MISSING, SECOND, SIZE, WAYS, write_steps


def png(width, height):
    """A grey picture that a browser can decode."""

    def chunk(kind, content):
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    rows = zlib.compress((b"\x00" + b"\x80" * width) * height)
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


SIZES = [(3, 2), (7, 5), (3, 2)]
URL = "https://example.com/a.png"
FRAGMENT = "conversation?task=a&trajectory=a_0"
SHOWN = """() => [...document.querySelectorAll('main img.picture')].map(
    one => [one.naturalWidth, one.naturalHeight])"""
LOADED = """() => [...document.querySelectorAll('main img.picture')].filter(
    one => one.complete && one.naturalWidth > 0).length === 3"""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A call with a picture of the user, one of a tool, the first again, and one with only a URL."""
    folder = tmp_path_factory.mktemp("pictures")
    urls = [f"data:image/png;base64,{base64.b64encode(png(*size)).decode()}" for size in SIZES]
    one, two, three, web = (
        {"type": "image_url", "image_url": {"url": url}} for url in (*urls, URL)
    )
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Compare."}, one]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "Got:"}, two]},
        {"role": "user", "content": [three, web]},
    ]
    message = {"role": "assistant", "content": "The second is larger."}
    choice = {"index": 0, "token_ids": [2], "message": message}
    line = {
        "session": "a/0",
        "request": {"messages": messages},
        "response": {"prompt_token_ids": [1], "choices": [choice]},
    }
    rollout_io.convert([write(folder / "a.calls.jsonl", line)], folder / "ds")
    return folder / "ds"


def check(tab):
    tab.open(FRAGMENT)
    tab.page.wait_for_function(LOADED)
    assert tab.page.evaluate(SHOWN) == [[*size] for size in SIZES]
    text = tab.text()
    assert URL in text, "a picture of another host is named, not fetched"
    assert "The second is larger." in text


def test_the_page_shows_each_picture_in_its_place(browser, pictures):
    with viewer(pictures) as address, tab_at(browser, address) as tab:
        check(tab)


def test_a_report_shows_them_without_a_server(browser, pictures, tmp_path):
    out = export(tmp_path / "report.html", pictures)
    with tab_at(browser, out.as_uri(), offline=True) as tab:
        check(tab)


PLACES = """() => [...document.querySelectorAll('figure.token-picture')].map(one => one.dataset.tokens)"""
SIZES_OF = """() => [...document.querySelectorAll('figure.token-picture img')].map(
    one => [one.naturalWidth, one.naturalHeight])"""


def check_tokens(tab, way):
    """Walk over the tokens of the last step with the keyboard, and point at them with the mouse."""
    row = "tokens?task=a&trajectory=a_0" + ("" if way == "merged" else "&step=1")
    tab.open(f"{row}&at=1")
    tab.page.wait_for_selector("figure.token-picture img")
    assert tab.page.evaluate(PLACES) == ["2 60", f"{MISSING['start']} {MISSING['length']}"]
    assert tab.page.evaluate(SIZES_OF) == [[*SIZE]]
    assert "does not have this picture" in tab.text("figure.token-picture >> nth=1")
    assert "60 tokens, 2 to 61, sha256:" in tab.text("figure.token-picture >> nth=0")

    ids = [*SECOND, 12, 13]
    missing_end = MISSING["start"] + MISSING["length"]
    walk = [1, 2, *range(62, MISSING["start"] + 1), *range(missing_end, len(ids))]
    for at in walk[1:]:
        tab.press("ArrowRight")
        tab.page.wait_for_selector(f'aside[data-token="{at}"]')
        shown = tab.page.get_attribute("aside [data-name=id]", "data-value")
        assert int(shown) == ids[at]
    for at in walk[-2::-1]:
        tab.press("ArrowLeft")
        tab.page.wait_for_selector(f'aside[data-token="{at}"]')

    box = tab.page.locator("figure.token-picture >> nth=0").bounding_box()
    for y, at in ((-12, 0), (box["height"] / 2, 2), (box["height"] + 12, 62)):
        tab.page.mouse.move(box["x"] + 2, box["y"] + y)
        tab.page.wait_for_selector(f'aside[data-token="{at}"]')


@pytest.mark.parametrize("way", WAYS)
def test_a_picture_stands_at_its_tokens_and_the_others_keep_their_positions(way, browser, tmp_path):
    write_steps(tmp_path / "ds", way)
    with viewer(tmp_path / "ds") as address, tab_at(browser, address) as tab:
        check_tokens(tab, way)


def test_a_report_shows_pictures_at_tokens_too(browser, tmp_path):
    write_steps(tmp_path / "ds", "merged")
    out = export(tmp_path / "report.html", tmp_path / "ds")
    with tab_at(browser, out.as_uri(), offline=True) as tab:
        check_tokens(tab, "merged")


@pytest.mark.parametrize("opens", ["click", "key", "focus"])
def test_a_picture_opens_in_its_full_size(opens, browser, tmp_path):
    write_steps(tmp_path / "ds", "full")
    with viewer(tmp_path / "ds") as address, tab_at(browser, address) as tab:
        tab.open("tokens?task=a&trajectory=a_0&at=2")
        tab.page.wait_for_selector("figure.token-picture img")
        if opens == "click":
            tab.page.click("figure.token-picture img")
        elif opens == "focus":
            tab.page.focus("figure.token-picture button")
        if opens != "click":
            tab.press("Enter")
        size = tab.page.locator("dialog[open] img").bounding_box()
        assert [size["width"], size["height"]] == [*SIZE]
        tab.press("Escape")
        tab.page.wait_for_selector("dialog", state="detached")
        assert tab.page.get_attribute("aside.details", "data-token") == "2"
