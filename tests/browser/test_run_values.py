"""The Run view with values and names that a chart can stumble over, and with a single update."""

import json

from tests.browser.conftest import tab_at, viewer


def write_run(folder, shop, lines):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"data": {"dataset": str(shop)}}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_nearly_constant_metrics_and_names_of_methods_are_drawn(browser, shop, tmp_path):
    names = ("constructor", "__proto__", "toString")
    lines = [
        {"global_step": step, "loss": 1.0 + step * 2.3e-16, "tiny": 5e-324 * step}
        | dict.fromkeys(names, step)
        for step in range(1, 6)
    ]
    with (
        viewer(write_run(tmp_path / "run", shop, lines)) as address,
        tab_at(browser, address) as tab,
    ):
        tab.open("run")
        for name in ("loss", "tiny", *names):
            tab.page.locator(f"figure[data-metric='{name}'] canvas").wait_for()


def test_one_update_shows_eight_metrics_with_their_meaning_and_folds_the_rest(
    browser, shop, tmp_path
):
    line = {"global_step": 1, "loss": 0.5, "grad_norm": 1.0, "return_mean": 0.25}
    line |= {f"other_{n}": n for n in range(20)}
    with (
        viewer(write_run(tmp_path / "run", shop, [line])) as address,
        tab_at(browser, address) as tab,
    ):
        tab.open("run")
        first = tab.page.get_by_role("table", name="Last values")
        first.wait_for()
        assert first.locator("tbody tr").count() == 8
        meaning = first.locator("tr[data-row='grad_norm'] td.meaning").inner_text()
        assert "gradient" in meaning
        assert not tab.page.get_by_role("table", name="More values").is_visible()
        tab.page.get_by_text("15 more metrics").click()
        assert tab.page.get_by_role("table", name="More values").is_visible()
