"""Content that would run, hide or break: it is shown as text, in every view and in a report."""

import json
from urllib.parse import quote

import pyarrow as pa
import pytest

import rollout_io
from schemas.columns import arrow_schema
from schemas.metadata import DatasetMetadata
from tests.browser.conftest import export, tab_at, viewer
from tests.helpers.trainer_helpers import step

HOSTILE = "".join(
    (
        "<script>window.ran=1;alert(1)</script>",
        "<img src=x onerror=\"window.ran=1;alert(2)\"><svg/onload=alert(3)>",
        "<a href=\"javascript:window.ran=1\">go</a><iframe src=https://example.com></iframe>",
        "<link rel=stylesheet href=https://example.com/x.css></style></textarea></script><!--",
        "\x1b[31mred\x1b]8;;https://example.com\x07link\x07 \x00 \u202eright to left\u202c \u200b",
        "{{constructor.constructor('alert(4)')()}} ${alert(5)} '\"`\\ \u2028 \ufeff \U000e0041",
    )
)  # fmt: skip
NAME = "<img src=x onerror=alert(0)>\u202e\x1b[31m\x00<script>window.ran=1</script>'\"/../%41"
LONE = '"\\ud800 half \\udc00"'
VIEWS = ("table", "group", "tree", "conversation", "tokens", "diff", "run", "update")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Hostile text in every column of text, half surrogates and 10 MB in a message."""
    out, rows = tmp_path_factory.mktemp("hostile") / "h", []
    for repetition in range(3):
        row = step(NAME, repetition, 0, [1, 2], [3, 4, 5], reward=1.0, is_last_step=True)
        long = json.dumps("x" * 10_000_000) if repetition == 2 else '"ok"'
        messages = (
            '[{"role": %s, "content": %s}, {"role": "user", "content": %s}, '
            '{"role": "assistant", "content": %s, "tool_calls": [{"id": "1", "type": "function", '
            '"function": {"name": %s, "arguments": %s}}]}, {"role": "tool", "content": %s}]'
        ) % ((json.dumps(HOSTILE), LONE, long) + (json.dumps(HOSTILE),) * 4)
        texts = dict.fromkeys(("stop_reason", "agent", "response_text", "source"), NAME + HOSTILE)
        error = {"error": HOSTILE, "reward": None} if repetition == 1 else {}
        rows.append(row | texts | {"messages": messages} | error)
    names = tuple({name for row in rows for name in row})
    table = pa.Table.from_pylist(rows, schema=arrow_schema(names))
    table = table.append_column("<b onclick=alert(6)>own</b>", pa.array([HOSTILE] * 3))
    with rollout_io.RolloutWriter(out, metadata=DatasetMetadata()) as writer:
        writer.write(table)
    return out


def check(tab, fragment):
    tab.open(fragment)
    if fragment.startswith("conversation"):
        tab.press("e", "h")
        tab.page.wait_for_timeout(100)
    page = tab.page
    assert page.evaluate("window.ran") is None
    assert (
        page.evaluate("document.querySelectorAll('main script, main img, main iframe').length") == 0
    )
    assert page.evaluate(
        "[...document.querySelectorAll('a')].every(a => a.protocol !== 'javascript:')"
    )
    assert page.evaluate(
        "[...document.querySelectorAll('*')].every(one => "
        "[...one.attributes].every(attribute => !attribute.name.startsWith('on')))"
    )
    shown = page.evaluate("document.body.textContent")
    assert not any(bad in shown for bad in "\x00\x1b\x07\u202e\u200b\u2028\ufeff\ud800\U000e0041")
    return shown


def places():
    """Return the addresses of all views of the first trajectory."""
    task = quote(NAME)
    chosen = f"task={task}&trajectory={task}_0"
    return [f"{view}?{chosen}" for view in VIEWS] + [
        f"conversation?task={task}&trajectory={task}_{n}" for n in (1, 2)
    ]


def test_hostile_content_runs_nothing_and_breaks_no_view(browser, hostile):
    with viewer(hostile) as address, tab_at(browser, address) as tab:
        for place in places():
            assert "\\u202e" in check(tab, place)
        assert "half" in check(tab, places()[3])


def test_a_report_of_hostile_content_runs_nothing(browser, hostile, tmp_path):
    out = export(tmp_path / "report.html", hostile)
    with tab_at(browser, out.as_uri(), offline=True) as tab:
        for place in places():
            check(tab, place)
