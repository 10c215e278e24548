"""The documentation site that `make site` builds."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from rollout_io.cli.main import rollouts

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built with every warning an error."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", out]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return out


def test_every_page_is_in_the_site_and_in_its_search(site):
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    built = {str(page.relative_to(site)) for page in site.rglob("*.html")} - {"404.html"}
    assert built == {page.removesuffix("md") + "html" for page in pages}
    searched = (site / "search" / "search_index.json").read_text()
    assert all(f'"location":"{page}"' in searched for page in built)


def test_no_page_asks_another_host_for_anything(site):
    loads = r'<(?:script|img|link|iframe)[^>]+(?:src|href)="((?:https?:)?//[^"]+)"'
    found = {url for page in site.rglob("*.html") for url in re.findall(loads, page.read_text())}
    remote = r"url\(['\"]?((?:https?:)?//[^)]+)|@import ['\"]((?:https?:)?//[^'\"]+)"
    styles = {url for page in site.rglob("*.css") for url in re.findall(remote, page.read_text())}
    assert not found | styles


def test_the_api_reference_has_every_public_name(site):
    import pipelines
    import rollout_io
    import schemas
    import trainer

    for package in (pipelines, rollout_io, schemas, trainer):
        page = (site / "api" / f"{package.__name__}.html").read_text()
        headings = {re.sub(r".*\.", "", i) for i in re.findall(r'<h[23] id="([\w.]+)"', page)}
        assert headings >= set(package.__all__)


def test_guides_rank_above_the_list_of_errors(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    boosts = {doc["location"]: doc.get("boost", 1) for doc in index["docs"]}
    assert boosts["guides/diff.html"] > boosts["view.html"] > boosts["errors.html"]


def test_the_reference_of_the_command_line_has_every_option(site):
    page = html.unescape((site / "cli.html").read_text())
    context = click.Context(rollouts, info_name="rollouts")
    for name in rollouts.list_commands(context):
        command = rollouts.get_command(context, name)
        assert f'id="{name}"' in page
        for option in command.params:
            assert option.opts[-1] in page or not isinstance(option, click.Option)
