"""A remote directory converts to what the same local directory converts to."""

import gzip
import json
import shutil

import fsspec
import pytest

import rollout_io
from rollout_io import convert, read_log
from rollout_io.cli.main import run
from tests.helpers.conversion_helpers import call, write
from tests.helpers.harbor_helpers import GOLDEN
from tests.helpers.verifiers_helpers import call as made
from tests.helpers.verifiers_helpers import row

pytestmark = pytest.mark.model


@pytest.fixture
def remote(tmp_path):
    """Copies a local directory to a remote one, and returns its URL."""

    def copied(folder):
        fs = fsspec.filesystem("memory")
        for path in (path for path in folder.rglob("*") if path.is_file()):
            fs.pipe(f"/{tmp_path.name}/{path.relative_to(folder.parent)}", path.read_bytes())
        return f"memory://{tmp_path.name}/{folder.name}"

    return copied


def check_same(folder, url, tmp_path, **choices):
    """The same rows and history, with URLs instead of paths."""
    for name, given in (("local", folder), ("remote", url)):
        convert(given, tmp_path / name, **choices)
    local, found = (rollout_io.read(tmp_path / name) for name in ("local", "remote"))
    assert json.loads(json.dumps(found.to_pylist()).replace(url, str(folder))) == local.to_pylist()
    assert all(text.startswith(url) for text in found["source"].to_pylist())
    ours, theirs = (rollout_io.read_metadata(tmp_path / name) for name in ("local", "remote"))
    made = json.dumps(theirs.made_by[0])
    assert json.loads(made.replace(url, str(folder))) == json.loads(json.dumps(ours.made_by[0]))
    assert convert(url, tmp_path / "remote", **choices).was_done
    return found


@pytest.mark.slow
def test_the_group_size_of_a_remote_run_is_that_of_its_metadata(
    harness_logs, smollm2_dir, remote, tmp_path
):
    name = "h4y9hb6fjom4xfbclitb2938"
    folder = tmp_path / "logs" / name
    shutil.copytree(harness_logs / "prime_hosted_rl" / name, folder)
    choices = {"tokenizer": str(smollm2_dir), "chat_template": "chatml_tools_thinking"}
    check_same(folder, remote(folder), tmp_path, **choices)


def test_runs_of_a_remote_folder_keep_their_metadata(remote, tmp_path):
    folder = tmp_path / "evals"
    for number, env in enumerate(("one", "two")):
        record = row(example_id=number, trajectory=[made([1, 2], [3])])
        write(folder / env / "results.jsonl", record)
        metadata = {"env_id": env, "model": "m", "sampling_args": {"temperature": 0.5}}
        (folder / env / "metadata.json").write_text(json.dumps(metadata))
    table = check_same(folder, remote(folder), tmp_path)
    assert table["temperature"].to_pylist() == [0.5, 0.5]


def test_a_remote_folder_of_linked_trajectories_is_one_run(golden, remote, tmp_path):
    folder = tmp_path / "jobs" / "monday"
    folder.mkdir(parents=True)
    for path in golden.glob(f"{GOLDEN}*.json"):
        shutil.copy(path, folder)
    table = check_same(folder, remote(folder), tmp_path)
    assert len(set(table["trajectory_id"].to_pylist())) == 1
    assert table.num_rows > 1


def test_packed_and_foreign_files_of_a_remote_folder(remote, tmp_path):
    folder = tmp_path / "logs"
    write(folder / "deep" / "a.jsonl", call("a/0"))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps(call("b/0")).encode()))
    (folder / "notes.md").write_text("# Notes")
    (folder / ".hidden.jsonl").write_text("{")
    url = remote(folder)
    check_same(folder, url, tmp_path)
    assert convert(url, tmp_path / "again").left == [f"{url}/notes.md"]
    sources = {f"{url}/b.jsonl.gz:1", f"{url}/deep/a.jsonl:1"}
    assert set(read_log(url)["source"].to_pylist()) == sources


def test_errors_and_rejected_records_name_the_url(remote, tmp_path, capsys):
    folder = tmp_path / "logs"
    write(folder / "a" / "good.jsonl", call("a/0"))
    write(folder / "a" / "bad.jsonl", call("b/0", 1), b'{"session": "c/0", "request": {}}')
    url = remote(folder)
    out = tmp_path / "ds"
    assert run(["convert", url, "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert f"{url}/a/bad.jsonl:2" in said
    assert ".converting" not in said
    assert run(["convert", url, "--out", str(out), "--on-error", "skip"]) == 0
    lines = (tmp_path / "ds.rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["source"] for line in lines] == [f"{url}/a/bad.jsonl:2"]
    assert ".converting" not in "".join(lines)
