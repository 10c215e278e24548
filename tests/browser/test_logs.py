"""Logs in the page, without a conversion: the table, the conversation, what is not shown, the command."""

import json

import pytest

from tests.browser.conftest import tab_at, viewer

CHAT = [
    {"role": "user", "content": "Is the <b>door</b> open?"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "<img src=x onerror=alert(1)>"},
    {"role": "assistant", "content": "It is open."},
]


@pytest.fixture(scope="module")
def tab(browser, tmp_path_factory):
    """A page with two attempts at a task, a broken record and a file that is no log."""
    root = tmp_path_factory.mktemp("logs")
    other = [*CHAT[:-1], {"role": "assistant", "content": "It is shut."}]
    lines = [json.dumps({"messages": chat, "task": "door"}) for chat in (CHAT, other)]
    (root / "door.jsonl").write_text("\n".join(lines) + "\n")
    (root / "broken.jsonl").write_text(f'{lines[0]}\n{{"messages": [\n')
    (root / "notes.md").write_text("# Notes\n")
    with viewer(root, "--no-browser") as address, tab_at(browser, address) as found:
        yield found


def test_the_table_counts_text_and_the_row_opens_its_conversation(tab):
    tab.open("table")
    tab.page.wait_for_selector("text=Logs, not converted")
    assert "rejected record" in tab.text(".log-line")
    assert "1 skipped file" in tab.text(".log-line")
    tab.page.click("td button.link >> nth=0")
    tab.settle()
    assert tab.page.inner_text("nav a[aria-current=page]").endswith("Conversation")
    assert "Is the <b>door</b> open?" in tab.text()
    assert "tokens of step" not in tab.text()


def test_the_tab_of_tokens_is_grey_and_says_why(tab):
    tab.open("table")
    reason = tab.page.get_attribute("nav a:has-text('Tokens')", "title")
    assert "no token ids" in reason
    tab.go("tokens")
    assert tab.page.inner_text("nav a[aria-current=page]").endswith("Conversation")


def test_attempts_diverge_in_an_answer(tab):
    tab.open("table")
    task = (
        tab.page.evaluate("() => document.querySelector('nav') && null")
        or tab.page.get_attribute("tbody tr", "data-row").rpartition("_")[0]
    )
    tab.go(f"group?task={task}")
    assert "answer" in tab.text()
    marks = tab.page.eval_on_selector_all(".partings mark", "all => all.map(e => e.textContent)")
    assert marks[:2] in (["open.", "shut."], ["shut.", "open."])


def test_search_finds_text_and_opens_the_conversation(tab):
    tab.open("table")
    tab.page.fill("input[type=search]", "It is shut")
    tab.press("Enter")
    tab.page.wait_for_selector(".hits ol li")
    tab.page.click(".hits ol button")
    tab.settle()
    assert "It is shut." in tab.text("article.turn.found")


def test_the_command_that_converts_is_shown(tab):
    tab.open("table")
    tab.page.click("text=Convert to a dataset")
    assert "rollouts convert" in tab.text(".convert pre")
