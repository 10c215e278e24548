"""No record of a directory, remote or with links, is lost without a word."""

import json
import resource

import fsspec
import pytest

import rollout_io
from rollout_io import convert
from rollout_io.conversion.plan import Keywords
from tests.helpers.conversion_helpers import OUTPUT, call, refusal, rejected_in, write
from tests.helpers.harbor_helpers import agent_step, atif, failure, write_trial


@pytest.fixture
def url(tmp_path):
    return f"memory://{tmp_path.name}"


def put(url, name, content):
    fsspec.filesystem("memory").pipe(f"/{url.partition('://')[2]}/{name}", content)


def line(session):
    return json.dumps(call(session)).encode() + b"\n"


def instances(dataset):
    return sorted(rollout_io.read(dataset)["instance_id"].to_pylist())


@pytest.mark.parametrize(
    ("first", "second"),
    [("a/x.jsonl", "a//x.jsonl"), ("a", "a/x.jsonl"), ("a", "a/b/x.jsonl")],
)
def test_objects_with_the_same_local_path_are_refused(first, second, url, tmp_path):
    put(url, second, line("b/0"))
    put(url, first, line("a/0"))
    found = fsspec.filesystem("memory").find(f"/{tmp_path.name}")
    if found != sorted(f"/{tmp_path.name}/{name}" for name in (first, second)):
        pytest.skip(f"fsspec {fsspec.__version__} does not list both objects in its memory")
    error = refusal(url, tmp_path / "ds")
    assert error.rule == "input_file"
    assert error.where in {f"{url}/{first}", f"{url}/{second}"}
    assert "same path" in error.got
    assert not (tmp_path / "ds").exists()


@pytest.mark.parametrize("choices", [{"strict": True}, {"format": "calls"}, {}])
def test_rewards_and_the_dataset_inside_a_remote_directory_are_no_logs(choices, url, tmp_path):
    put(url, "logs/a.jsonl", line("a/0"))
    put(url, "rewards.jsonl", b'{"session": "a/0", "reward": 0.5}')
    chosen = Keywords(rewards=f"{url}/rewards.jsonl", **choices)
    done = convert(url, tmp_path / "ds", **chosen)
    assert rollout_io.read(tmp_path / "ds")["reward"].to_pylist() == [0.5]
    assert list(done.left) == []
    convert(url, f"{url}/ds", **chosen)
    assert convert(url, f"{url}/ds", **chosen).was_done


def test_an_error_of_a_remote_trial_names_the_url(url, tmp_path, trial):
    record = trial("a", exception_info=failure("Broken"), verifier_result=None)
    record["agent_result"]["rollout_details"] = []
    folder = write_trial(tmp_path / "job", record, atif(agent_step(1, [], [], metrics=None)))
    for path in (path for path in folder.rglob("*") if path.is_file()):
        put(url, str(path.relative_to(tmp_path)), path.read_bytes())
    convert(f"{url}/job", tmp_path / "ds")
    [error] = rollout_io.read(tmp_path / "ds")["error"].to_pylist()
    assert f"{url}/job/{folder.name}/agent/trajectory.json: " in error
    assert "converting" not in error


def test_the_source_of_a_local_directory_given_as_a_url_keeps_its_slash(tmp_path):
    write(tmp_path / "logs" / "a.jsonl", call("a/0"))
    write(tmp_path / "logs" / "rewards.jsonl", {"session": "a/0", "reward": 1.0})
    rewards = str(tmp_path / "logs" / "rewards.jsonl")
    convert(f"file://{tmp_path}/logs/", tmp_path / "ds", rewards=rewards, strict=True)
    sources = rollout_io.read(tmp_path / "ds")["source"].to_pylist()
    assert sources == [f"file://{tmp_path}/logs/a.jsonl:1"]


def test_a_full_local_disk_is_no_error_of_the_url(url, tmp_path):
    put(url, "a.jsonl", line("a/0"))
    put(url, "notes.md", b"#" * 100_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        error = refusal(url, tmp_path / "ds")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.rule == "output_file"
    assert "free some space" in error.hint


def test_links_into_parts_that_are_not_searched_are_left(tmp_path):
    logs, out = tmp_path / "in", tmp_path / "in" / "ds"
    write(logs / ".store" / "r1" / "x.jsonl", call("a/0"))
    write(out / ".old" / "z.jsonl", call("c/0"))
    write(logs / "deep" / "y.jsonl", call("b/0"))
    for name, target in (("run1", ".store/r1"), ("run2", "ds/.old"), ("same", "deep")):
        (logs / name).symlink_to(target)
    (logs / "latest").symlink_to("ds")
    done = convert(logs, out)
    assert list(done.left) == [f"{logs}/run1", f"{logs}/run2"]
    assert instances(out) == ["b"]
    assert refusal(logs, tmp_path / "strict", strict=True).where == f"{logs}/run1"
    convert([logs, logs / ".store"], tmp_path / "both", format="calls", on_error="skip")
    assert "a" in instances(tmp_path / "both")


def test_a_link_to_itself_is_left(tmp_path, trial):
    for logs in (tmp_path / "calls", tmp_path / "harbor"):
        (logs / "sub").mkdir(parents=True)
        (logs / "loop").symlink_to("loop")
        (logs / "sub" / "loop.jsonl").symlink_to("loop.jsonl")
    write(tmp_path / "calls" / "a.jsonl", call("a/0"))
    done = convert(tmp_path / "calls", tmp_path / "ds")
    assert list(done.left) == [f"{tmp_path}/calls/{name}" for name in ("loop", "sub/loop.jsonl")]
    write_trial(tmp_path / "harbor", trial("a"))
    assert convert(tmp_path / "harbor", tmp_path / "trials").summary.num_rows == 1
    assert refusal(tmp_path / "calls" / "loop", tmp_path / "no").rule == "input_file"


@pytest.mark.model
@pytest.mark.filterwarnings("ignore:GeneratorOutput fields without a matching column")
@pytest.mark.parametrize("is_repeated", [True, False])
def test_a_rejected_document_does_not_reject_later_ones(is_repeated, smollm2_dir, tmp_path):
    """Neither by the types of its columns, nor by the names of its trajectories."""
    bad = ("t", 7, "s") if is_repeated else ("u", 1 << 30, "s")
    logs = []
    for number, (instance, ids, foo) in enumerate((("t", 7, None), bad, ("u", 7, 3))):
        trajectories = [{"instance_id": instance, "repetition_id": 0}]
        fields = {"trajectory_ids": trajectories, "response_ids": [[ids]]}
        fields |= {"foo": [foo]} if foo else {}
        logs.append(tmp_path / f"{number}.json")
        logs[-1].write_text(json.dumps(OUTPUT | fields))
    choices = Keywords(on_error="skip", other_fields="keep", tokenizer=str(smollm2_dir))
    convert(logs, tmp_path / "ds", **choices)
    assert instances(tmp_path / "ds") == ["t", "u"]
    [rejected] = rejected_in(tmp_path / "ds")
    assert rejected["source"] == str(logs[1])
    assert rejected["rule"] == ("unique_trajectory" if is_repeated else "token_range")
