"""The page and a report show the pictures of a conversation, from the dataset's store alone."""

import base64
import struct
import zlib

import pytest

import rollout_io
from tests.browser.conftest import export, tab_at, viewer
from tests.helpers.conversion_helpers import write


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
