import asyncio
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.generation.config import GenerateConfig, identity
from pipelines.generation.processes import Watch
from pipelines.generation.tasks import Task
from pipelines.harness.commands import (
    fields_in,
    filled,
    is_function,
    run_command,
    secrets_in,
    shown,
    words_of,
)
from pipelines.harness.launchers import Endpoint, find_harness, outcome_of, parse_result
from schemas.errors import RolloutError

OWN = {"tasks": "t.jsonl", "model": "m", "out": "ds"}
TASK = Task(instance_id="a", repetition_id=0, prompt=[{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("harness", "is_one"),
    [("a:b", True), ("a.b_c:d", True), ("./a", False), ("solve", False), ("a:b {base_url}", False)],
)
def test_a_harness_is_a_function_or_a_command_line(harness, is_one):
    assert is_function(harness) == is_one


@given(st.text().filter(lambda text: "\0" not in text))
def test_a_value_is_one_word_whatever_is_in_it(value):
    words = words_of("solve --task {prompt} 'a b' x={prompt}")
    found = filled(words, {"prompt": value})
    assert found == ["solve", "--task", value, "a b", f"x={value}"]


def test_a_field_that_no_task_has_is_refused_before_anything_runs():
    harness = find_harness("solve {base_url} {path}")
    with pytest.raises(RolloutError, match=r"\{path\}"):
        harness.check([TASK])
    harness.check([Task(instance_id="a", repetition_id=0, prompt=[], extras={"path": "x"})])
    assert fields_in("""solve '{"a": {}}' {base_url}""") == {"base_url"}


@pytest.mark.parametrize(
    "command",
    [
        "sh -c 'solve {prompt}'",
        "env A=b /bin/bash -lc 'solve --id {instance_id}'",
        "docker run image bash -e -o pipefail -c 'solve {path} {base_url}'",
        "python3.11 -c 'print(\"{prompt}\")'",
    ],
)
def test_a_task_puts_no_code_into_a_script(command):
    with pytest.raises(RolloutError, match="the task's text as code"):
        find_harness(command)


@pytest.mark.parametrize(
    "command",
    [
        "sh -c 'solve {base_url} {task_file} >&2; cat {reward_file}'",
        "sh -c 'solve \"$1\"' sh {prompt}",
        "bash solve.sh -c {prompt}",
        "solve -c {path}",
    ],
)
def test_a_field_that_is_a_word_or_no_text_of_a_task_is_taken(command):
    find_harness(command)


@pytest.mark.parametrize(
    "command",
    [
        "solve --api-key SECRET {base_url}",
        "solve --api-key=SECRET --retries 3",
        "env OPENAI_API_KEY=SECRET solve",
        "solve --token 'SECRET'",
        "solve --git https://me:SECRET@host/x",
    ],
)
def test_a_credential_in_a_command_is_written_nowhere(command):
    config = GenerateConfig(**OWN, harness=command)
    assert "SECRET" not in str(identity(config))
    assert "SECRET" not in shown(command)
    assert any("SECRET" in found for found in secrets_in(command))
    assert words_of(shown(command))[0] == words_of(command)[0]


@pytest.mark.parametrize(
    "command", ["a.b:c", "mini --model m -t {prompt}", "solve --api-key {api_key} --max-tokens 5"]
)
def test_a_command_without_credentials_is_written_as_it_is(command):
    assert shown(command) == command


@pytest.mark.parametrize(
    ("settings", "got"),
    [
        ({"agent": "a:b"}, "agent and harness"),
        ({"environment": "gsm8k"}, "environment and harness"),
        ({"history": "step_wise"}, "harness"),
        ({"requests_per_s": 1.0, "engine": "vllm", "urls": ("http://h",)}, "requests_per_s"),
    ],
)
def test_keys_that_a_harness_leaves_no_meaning_are_refused(settings, got):
    with pytest.raises(RolloutError, match=got):
        GenerateConfig(**OWN, harness="solve {base_url}", **settings)


@pytest.mark.parametrize("harness", ["", "  ", "solve 'a", "tests.helpers.harness_helpers:none"])
def test_what_is_no_harness_is_refused(harness):
    with pytest.raises(RolloutError, match="harness"):
        find_harness(harness)


@pytest.mark.parametrize(
    ("words", "url"), [("{base_url}", "https://judge"), ("", "http://policy/v1")]
)
async def test_a_command_that_is_told_its_base_url_keeps_the_address_of_its_judge(
    words, url, monkeypatch
):
    monkeypatch.setenv("OPENAI_BASE_URL", "https://judge")
    monkeypatch.setenv("OPENAI_API_KEY", "judge's key")
    says = 'echo "{\\"reward\\": 1, \\"error\\": \\"$OPENAI_BASE_URL $OPENAI_API_KEY\\"}"'
    with Watch() as watch:
        harness = find_harness(f"sh -c '{says}' {words}")
        endpoint = Endpoint(base_url="http://policy/v1", model="m")
        assert (await harness.run(endpoint, TASK, 60.0, watch)).error == f"{url} judge's key"


def test_a_credential_that_a_command_prints_is_not_in_the_error():
    async def main():
        with Watch() as watch:
            harness = find_harness("sh -c 'echo \"not taken: $1\" >&2; exit 1' --token SECRET")
            await harness.run(Endpoint(base_url="http://policy/v1", model="m"), TASK, 60.0, watch)

    with pytest.raises(RolloutError, match="exit status 1: not taken: ") as error:
        asyncio.run(main())
    assert "SECRET" not in str(error.value)


@pytest.mark.parametrize(
    ("result", "reward", "metrics"),
    [
        (1, 1.0, {}),
        (True, 1.0, {}),
        (np.float32(0.5), 0.5, {}),
        ({"reward": 2}, 2.0, {}),
        ({"reward": 0.0, "metrics": {"turns": 3}}, 0.0, {"turns": 3.0}),
    ],
)
def test_a_result_is_a_number_or_an_object(result, reward, metrics):
    outcome = outcome_of(result, "t")
    assert (outcome.reward, outcome.metrics, outcome.error) == (reward, metrics, None)


def test_a_harness_can_say_that_it_failed():
    outcome = parse_result('{"error": "no sandbox", "metrics": {"turns": 1}}', "t")
    assert (outcome.reward, outcome.error, outcome.metrics) == (None, "no sandbox", {"turns": 1.0})


@pytest.mark.parametrize(
    "text",
    [
        *("", "NaN", "Infinity", "one", "null", "[1]", '"1"', "{}", '{"reward": null}'),
        *('{"reward": 1, "stop_reason": 3}', '{"reward": 1, "stop_reason": "\\ud800"}'),
        *('{"reward": 1, "turns": 2}', '{"reward": 1, "metrics": {"style": "a"}}', "[" * 9999),
        *(
            '{"reward": 1, "metrics": {"\\ud800": 2}}',
            '{"error": "e", "metrics": {"\\ud800": "a"}}',
        ),
        *('{"reward": 1, "metrics": {"": 2}}', '{"reward": "1"}', '{"reward": 1, "metrics": 2}'),
    ],
)
def test_any_other_result_is_refused(text):
    with pytest.raises(RolloutError) as error:
        parse_result(text, "t")
    assert error.value.rule == "harness_reward"


def test_a_watch_kills_the_groups_of_a_process_that_is_killed_and_removes_its_folder(tmp_path):
    folder = tmp_path / "calls"
    (folder / "00000").mkdir(parents=True)
    code = (
        "import subprocess, sys, time\n"
        "from pipelines.generation.processes import Watch\n"
        "quiet = {'stdout': subprocess.DEVNULL, 'start_new_session': True}\n"
        "made = [subprocess.Popen(['sleep', '60'], **quiet) for _ in range(2)]\n"
        "watch = Watch(sys.argv[1])\n"
        "for one in made: watch.add(one.pid)\n"
        "watch.remove(made[1].pid)\n"
        "print(*(one.pid for one in made), flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    first, second = (int(pid) for pid in process.stdout.readline().split())
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while (folder.exists() or is_running(first)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not folder.exists()
    assert not is_running(first)
    assert is_running(second)
    subprocess.run(["kill", str(second)], check=True)


def is_running(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def test_a_command_that_is_cancelled_ends_with_all_of_its_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.harness.commands._STOP_S", 0.5)
    script = "sleep 60 & echo $! > pids; trap '' TERM; echo $$ >> pids; wait; sleep 60"
    pids = tmp_path / "pids"

    with Watch() as watch:
        words = ["sh", "-c", f"cd {tmp_path}; {script}"]
        given = {"folder": tmp_path, "timeout_s": 60, "watch": watch, "where": "t"}
        running = asyncio.create_task(run_command(words, {}, **given))
        while not pids.exists() or len(pids.read_text().split()) < 2:
            await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.wait({running})
    deadline = time.monotonic() + 20
    found = [int(pid) for pid in pids.read_text().split()]
    while any(map(is_running, found)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, found))


def test_a_watch_that_is_closed_has_left_what_was_removed():
    with Watch() as watch:
        watch.add(2**30)
        watch.remove(2**30)


def test_a_prompt_that_is_too_long_for_a_command_line_is_told_where_it_fits():
    async def main():
        with Watch() as watch:
            task = replace(TASK, prompt=[{"role": "user", "content": "word " * 100_000}])
            endpoint = Endpoint(base_url="http://policy/v1", model="m")
            await find_harness("echo {prompt}").run(endpoint, task, 60.0, watch)

    with pytest.raises(RolloutError, match="argument list too long") as error:
        asyncio.run(main())
    assert error.value.rule == "harness_start"
    assert "{task_file}" in error.value.hint
