"""The wheel as users have it: installed elsewhere, it serves the page of the viewer."""

import os
import re
import shutil
import signal
import subprocess
import sys

import httpx2
import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow
SOURCES = (
    "schemas",
    "rollout_io",
    "pipelines",
    "trainer",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what the wheel of a clone installs."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-z", *SOURCES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.rstrip("\0").split("\0"):  # what a clone has
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    isolated = ["--no-deps", "--no-index", "--no-build-isolation"]
    made = folder / "dist"
    subprocess.run([*pip, "wheel", *isolated, "--wheel-dir", made, source], check=True)
    (wheel,) = made.glob("*.whl")
    target = folder / "installed"
    subprocess.run([*pip, "install", *isolated[:2], "--target", target, wheel], check=True)
    return target


def command(installed, *arguments):
    """The installed `rollouts`, in a folder that is not the checkout."""
    environment = os.environ | {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, installed / "bin" / "rollouts", *map(str, arguments)],
        cwd=installed.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_wheel_serves_the_page(installed, shop_dataset):
    assert not (installed / "pipelines" / "view" / "page").exists()
    code = "import pipelines.view, rollout_io; print(pipelines.view.__file__, rollout_io.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=installed.parent,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(path.startswith(str(installed)) for path in done.stdout.split())
    with command(installed, "view", shop_dataset, "--no-browser") as server:
        address = server.stdout.readline().strip()
        url, _, token = address.partition("/?token=")
        assert url, server.stderr.read()
        page = httpx2.get(address)
        assert page.status_code == 200
        files = re.findall(r'(?:src|href)="\./(assets/[^"]+)"', page.text)
        assert {name.rpartition(".")[2] for name in files} == {"js", "css"}
        for name in files:
            content = httpx2.get(f"{url}/{name}")
            assert content.status_code == 200
            built = ROOT / "pipelines" / "view" / "bundle" / name
            assert content.content == built.read_bytes()
        answer = httpx2.get(f"{url}/api/sources", headers={"X-Rollouts-Token": token})
        assert answer.json()["datasets"][0]["num_trajectories"] == 48
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    assert server.returncode == 0


def test_the_wheel_writes_reports(installed, shop_dataset, tmp_path):
    out = tmp_path / "report.html"
    where = "instance_id = 'shop-1'"
    with command(installed, "view", shop_dataset, "--where", where, "--out", out) as done:
        _, said = done.communicate(timeout=100)
    assert done.returncode == 0, said
    assert "wrote" in said
    assert '<script id="answers"' in out.read_text()
