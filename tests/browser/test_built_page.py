"""The page is committed as it is built, so that users need no node."""

import subprocess

from pipelines.view.app import FOLDER
from tests.conftest import ROOT


def files_in(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_the_committed_page_is_what_the_sources_build(tmp_path):
    """Two builds of the same sources are equal: otherwise run `make view` and commit."""
    out = tmp_path / "bundle"
    done = subprocess.run(
        ["make", "view", f"BUNDLE={out}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    built, committed = files_in(out), files_in(FOLDER)
    assert built.keys() == committed.keys()
    assert [name for name, content in built.items() if content != committed[name]] == []
    assert sum(map(len, committed.values())) < 500_000
