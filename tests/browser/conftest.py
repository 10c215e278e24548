"""A real Chromium, and real viewers of the shop example and of a run that was trained on it."""

import os
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from filelock import FileLock

import pipelines
import rollout_io
from rollout_io import convert
from rollout_io.conversion.plan import Keywords
from tests.conftest import EXAMPLES
from tests.helpers.browser_helpers import chromium, run_view, viewing
from tests.helpers.configs import train_config


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)


NEXT_FRAMES = "() => new Promise(end => requestAnimationFrame(() => requestAnimationFrame(end)))"


@dataclass
class Tab:
    """A page of the browser, and what must not happen in it.

    Attributes:
        page: Playwright's page.
        address: Where the viewer is, without a fragment.
        problems: Errors, dialogs and requests to other hosts.
    """

    page: object
    address: str
    problems: list[str] = field(default_factory=list)

    def open(self, fragment):
        """Open a view, and wait until its answers are shown."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}#/{fragment}")
        self.settle()

    def go(self, fragment):
        """Open a view without loading the page again."""
        self.page.evaluate("fragment => { location.hash = fragment }", f"#/{fragment}")
        self.settle()

    def settle(self):
        """Wait until answers are shown."""
        self.page.wait_for_selector("h1")
        self.page.evaluate(NEXT_FRAMES)  # what a view asks for is asked after its heading is drawn
        self.page.wait_for_selector(".waiting, [aria-busy=true], td.pending", state="detached")

    def text(self, selector="main"):
        return self.page.inner_text(selector)

    def values(self, selector):
        """Return what the elements hold at full precision."""
        return self.page.eval_on_selector_all(
            selector, "found => found.map(one => one.dataset.value)"
        )

    def table(self, label):
        """Return the numbers of a table's rows in sight: {row: {name: number}}."""
        return self.page.eval_on_selector_all(
            f'table[aria-label="{label}"] tbody tr',
            """rows => Object.fromEntries(rows.map(row => [row.dataset.row, Object.fromEntries(
                [...row.querySelectorAll('[data-name]')].map(cell =>
                    [cell.dataset.name, cell.dataset.value ?? cell.textContent])) ]))""",
        )

    def token(self, fragment, at):
        """Return the numbers of a token of the row that is open: {name: number}."""
        self.page.evaluate("fragment => { location.hash = fragment }", f"#/{fragment}")
        self.page.wait_for_selector(f'aside[data-token="{at}"]')
        return self.page.eval_on_selector_all(
            "aside .facts [data-name]",
            "found => Object.fromEntries(found.map(one => [one.dataset.name, one.dataset.value]))",
        )

    def press(self, *keys):
        for key in keys:
            self.page.keyboard.press(key)


def number(text):
    """Read what the page holds."""
    words = {"null": None, "true": True, "false": False}
    return words[text] if text in words else float(text)


@pytest.fixture(scope="module")
def browser():
    """One browser for the tests of a file: Playwright's loop must not outlive them."""
    with chromium() as found:
        yield found


@contextmanager
def tab_at(browser, address, **settings):
    context = browser.new_context(viewport={"width": 1400, "height": 900}, **settings)
    if settings.get("offline"):
        context.route(re.compile("^(?!file:|about:|data:|blob:)"), lambda route: route.abort())
    page = context.new_page()
    page.set_default_timeout(60_000)
    tab = Tab(page, address)

    def request(asked):
        if not asked.url.startswith((address.split("?")[0], "about:", "data:", "blob:")):
            tab.problems.append(f"request: {asked.url}")

    def dialog(shown):
        tab.problems.append(f"dialog: {shown.message}")
        shown.dismiss()

    def console(message):
        if message.type in ("error", "warning"):
            tab.problems.append(f"console: {message.text}")

    page.on("request", request)
    page.on("dialog", dialog)
    page.on("console", console)
    page.on("pageerror", lambda error: tab.problems.append(f"error: {error}"))
    yield tab
    context.close()
    assert tab.problems == []


@contextmanager
def viewer(*arguments):
    """Serve datasets and runs; yields the address."""
    with viewing(*arguments) as (address, _):
        yield address


def export(out, *arguments):
    """Write a report."""
    written = run_view(*arguments, "--out", out)
    text, _ = written.communicate(timeout=120)
    assert written.returncode == 0, text
    return out


def made_once(tmp_path_factory, name, make):
    """Return a folder that one worker of the session makes and all read."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    out, done = base / "browser" / name, base / "browser" / f"{name}.done"
    out.parent.mkdir(exist_ok=True)
    with FileLock(f"{out}.lock"):
        if not done.exists():
            make(out)
            done.touch()
    return out


@pytest.fixture(scope="session")
def shop(tmp_path_factory):
    """The shop example, converted."""
    choices = Keywords(rewards=str(EXAMPLES / "shop.rewards.jsonl"))
    return made_once(
        tmp_path_factory, "shop", lambda out: convert(EXAMPLES / "shop.calls.jsonl", out, **choices)
    )


@pytest.fixture(scope="session")
def merged(shop, tmp_path_factory):
    """The same, merged."""

    def make(out):
        with rollout_io.RolloutWriter(out) as writer:
            writer.write(pipelines.merge(rollout_io.scan(shop)).collect())

    return made_once(tmp_path_factory, "merged", make)


@pytest.fixture(scope="session")
def run(shop, narrow_smollm2, tmp_path_factory):
    """Two updates of a small model, the second off policy."""
    import trainer

    def make(out):
        trainer.train(
            train_config(
                dataset=str(shop),
                model=str(narrow_smollm2),
                out=str(out),
                record_tokens="all",
                drop_zero_variance_groups=True,
                groups_per_batch=2,
                groups_per_mini_batch=1,
                max_updates=2,
                learning_rate=5e-4,
                tokens_per_micro_batch=4096,
                tis_ratio_type="token",
                token_mask_is_threshold_low=1e-4,
                token_mask_is_threshold_high=1e4,
                kl_loss_coef=0.01,
            )
        )

    return made_once(tmp_path_factory, "run", make)
