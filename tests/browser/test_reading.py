"""Reading long conversations, and following logs while they are written."""

import json

import pytest

from tests.browser.conftest import tab_at, viewer

TEXT = """# Plan

- [x] look at `door`
- <img src=x onerror=alert(1)> and [here](javascript:alert(1))

| step | done |
|---|---|
| one | **yes** |

```python
print("\u202eopen")
```
"""
TURNS = 30


def chat(num_turns):
    turns = [{"role": "user", "content": "Is the door open?"}]
    for number in range(num_turns):
        call = {"name": f"tool_{number}", "arguments": "{}"}
        calls = [{"id": f"c{number}", "type": "function", "function": call}]
        turns.append({"role": "assistant", "content": TEXT, "tool_calls": calls})
        turns.append({"role": "tool", "tool_call_id": f"c{number}", "content": "shut"})
    return [*turns, {"role": "assistant", "content": "It is open."}]


def write(folder, name, num_turns):
    line = json.dumps({"messages": chat(num_turns), "task": name})
    (folder / f"{name}.jsonl").write_text(f"{line}\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("long")
    write(root, "door", TURNS)
    return root


@pytest.fixture(scope="module")
def tab(browser, folder):
    with viewer(folder, "--no-browser") as address, tab_at(browser, address) as opened:
        yield opened


def scrolled(tab):
    return tab.page.evaluate("document.querySelector('main').scrollTop")


def wait_until_scrolled(tab):
    """The page forbids the evaluation of text, which Playwright's own wait does."""
    tab.page.evaluate(
        """() => new Promise(end => {
            const look = () => document.querySelector('main').scrollTop > 100
                ? end() : requestAnimationFrame(look)
            look()
        })"""
    )


def test_a_tab_opens_the_first_trajectory(tab):
    tab.open("conversation")
    tab.page.wait_for_selector("article.turn")
    assert "trajectory=door_0" in tab.page.evaluate("location.hash")


def test_page_keys_scroll_before_the_first_click(tab):
    tab.open("conversation?trajectory=door_0")
    tab.press("PageDown")
    wait_until_scrolled(tab)


def test_the_outline_names_all_turns_follows_the_page_and_goes_to_a_turn(tab):
    tab.open("conversation?trajectory=door_0")
    lines = tab.page.eval_on_selector_all(
        ".outline li", "all => all.map(e => e.innerText.replace(/\\s+/g, ' ').trim())"
    )
    assert lines[:3] == ["1 user Is the door open?", "2 assistant tool_0", "3 tool tool_0"]
    assert len(lines) == 2 * TURNS + 2
    tab.page.click(".outline li:nth-child(42) button")
    tab.page.wait_for_selector(".outline li:nth-child(42) button[aria-current=true]")
    assert "turn 42 of 62" in tab.text(".outline")
    assert scrolled(tab) > 1000


def test_markdown_is_a_switch_and_never_runs_or_hides_what_the_text_holds(tab):
    tab.open("conversation?trajectory=door_0")
    assert "# Plan" in tab.text("article.turn.assistant")
    tab.press("t")
    tab.page.wait_for_selector(".markdown .fence")
    turn = tab.text("article.turn.assistant")
    assert "# Plan" not in turn
    for text in ("<img src=x onerror=alert(1)>", "[here](javascript:alert(1))", "\\u202eopen"):
        assert text in turn
    assert tab.page.query_selector_all(".markdown img, .markdown a, .markdown script") == []
    assert tab.text(".markdown table").split() == ["step", "done", "one", "yes"]
    tab.press("t")
    tab.page.wait_for_selector(".markdown", state="detached")


def test_a_log_that_grows_is_followed_where_the_reader_is(tab, folder):
    tab.open("conversation?trajectory=door_0")
    tab.page.evaluate("document.querySelector('main').scrollTop = 2000")
    write(folder, "door", TURNS + 1)
    tab.page.wait_for_selector(f"text=turn >> text=of {2 * TURNS + 4}")
    assert scrolled(tab) == 2000
    write(folder, "window", 1)
    tab.go("table")
    tab.page.wait_for_selector("td button.link >> text=window_0")


def test_a_filter_without_a_match_says_so(tab):
    tab.open("tokens?where=num_turns%20%3E%20999")
    tab.page.wait_for_selector("text=No trajectory matches the filter.")
    tab.page.click("text=Clear the filter")
    tab.page.wait_for_selector("article.turn")
