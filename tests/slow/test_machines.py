"""Runs over machines that share nothing but a network, each with a private directory for runs."""

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.helpers.machines import SETTINGS, Lab, Started, laboratory
from tests.helpers.trainer_helpers import group_rows, save_tiny_model, write_dataset
from tests.trainer.run.test_resume import lines_of

pytestmark = pytest.mark.slow
NIGHTLY = pytest.mark.nightly
WITHIN_S = 60


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with laboratory(tmp_path_factory.mktemp("lab"), 2) as opened:
        yield opened


Side = tuple[list[str], dict[str, str]]
"""Arguments and environment of the second machine."""


def setting(text: str) -> Callable[[Lab, list[str]], Side]:
    return lambda _, usual: ([*usual, text], {})


def other_data(
    change: Callable[[list[dict[str, Any]]], object],
) -> Callable[[Lab, list[str]], Side]:
    def side(lab: Lab, usual: list[str]) -> Side:
        rows = group_rows(8, (1.0, 0.0, 0.5))
        change(rows)
        shutil.rmtree(lab.folder / "other", ignore_errors=True)
        return [write_dataset(lab.folder / "other", rows), *usual[1:]], {}

    return side


def without(number: int) -> Callable[[Lab, list[str]], Side]:
    """The dataset (0) or the model (1) is missing."""

    def side(_: Lab, usual: list[str]) -> Side:
        return [f"{one}-missing" if i == number else one for i, one in enumerate(usual)], {}

    return side


def other_weights(lab: Lab, usual: list[str]) -> Side:
    model = save_tiny_model(lab.folder / "other-model", seed=1)
    return [*usual, f"--model={model}"], {}


def edited_product(lab: Lab, usual: list[str]) -> Side:
    copy = lab.folder / "edited"
    if not copy.exists():
        for package in ("schemas", "rollout_io", "pipelines", "trainer"):
            shutil.copytree(ROOT / package, copy / package)
        with (copy / "trainer" / "loss.py").open("a") as file:
            file.write("# edited\n")
    return usual, {"PYTHONPATH": str(copy)}


def existing_run(lab: Lab, usual: list[str]) -> Side:
    lab.machines[1].call("mkdir", "-p", str(lab.private / "run" / "checkpoints"))
    return usual, {}


def sharded(_: Lab, usual: list[str]) -> Side:
    return usual, {"FSDP_RESHARD_AFTER_FORWARD": "false"}


def flipped(rows: list[dict[str, Any]]) -> None:
    rows[0]["response_ids"] = rows[0]["response_ids"][::-1]


def swapped(rows: list[dict[str, Any]]) -> None:
    rows[:] = rows[len(rows) // 2 :] + rows[: len(rows) // 2]


DIFFERENCES: dict[str, tuple[Callable[[Lab, list[str]], Side], str, str]] = {
    "learning rate": (setting("--lr=1e-3"), "0.001", "machines_differ"),
    "algorithm": (setting("--algorithm=rloo"), '"rloo"', "machines_differ"),
    "micro-batches": (setting("--set=batch.tokens_per_micro_batch=9"), "9", "machines_differ"),
    "mini-batches": (setting("--set=batch.groups_per_mini_batch=2"), "2", "machines_differ"),
    "seed": (setting("--set=run.seed=7"), "7", "machines_differ"),
    "checkpoints": (setting("--set=run.save_every_updates=3"), "3", "machines_differ"),
    "records": (setting("--set=run.record_tokens=all"), '"all"', "machines_differ"),
    "divergence": (setting("--set=loss.kl_loss_coef=0.1"), "0.1", "machines_differ"),
    "precision": (setting("--set=model.dtype=bfloat16"), '"bfloat16"', "machines_differ"),
    "updates": (setting("--max-updates=3"), "3", "machines_differ"),
    "dry run": (setting("--dry-run"), "true", "machines_differ"),
    "directory": (setting("--out=elsewhere"), '"elsewhere"', "machines_differ"),
    "unknown key": (setting("--set=loss.nothing=1"), "loss.nothing", "config_key"),
    "bad value": (setting("--set=loss.eps_clip_low=-1"), "-1", "config_value"),
    "rewards": (
        other_data(lambda rows: rows[0].update(reward=0.25)),
        "data.dataset",
        "machines_differ",
    ),
    "tokens": (other_data(flipped), "data.dataset", "machines_differ"),
    "order": (other_data(swapped), "data.dataset", "machines_differ"),
    "fewer rows": (
        other_data(lambda rows: rows.__delitem__(slice(-6, None))),
        "data.dataset",
        "machines_differ",
    ),
    "no dataset": (without(0), "ds-missing", "dataset_exists"),
    "no model": (without(1), "model-missing", "model_directory"),
    "weights": (other_weights, "model.safetensors", "machines_differ"),
    "source code": (edited_product, "source code", "machines_differ"),
    "sharding": (sharded, "FSDP", "machines_differ"),
    "existing run": (existing_run, "already contains a run", "existing_run"),
}
OFTEN = ("learning rate", "tokens", "no dataset", "source code", "existing run")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else NIGHTLY) for name in DIFFERENCES]
)
def test_a_difference_is_one_sentence_with_machine_and_value_in_every_process(
    name: str, lab: Lab
) -> None:
    change, value, rule = DIFFERENCES[name]
    for machine in lab.machines:
        machine.call("sh", "-c", f"rm -rf {lab.private}/*")
    usual = lab.arguments("run")
    arguments, environment = change(lab, usual)
    before = [lab.files(rank) for rank in (0, 1)]
    started = [
        lab.start(0, "train", *usual),
        lab.start(1, "train", *arguments, **environment),
    ]
    codes = [process.wait(WITHIN_S * 2) for process in started]  # Python takes time to start
    outputs = [process.output() for process in started]
    assert codes == [1, 1], outputs
    for output in outputs:
        errors = [line for line in output.splitlines() if line.startswith("Error: ")]
        assert len(errors) == 1, output
        assert "rank 1 on machine1 (10.77.0.2)" in errors[0]
        assert value in errors[0]
        assert errors[0].endswith(f"[{rule}]")
        assert "Traceback" not in output
    assert [lab.files(rank) for rank in (0, 1)] == before


def test_a_run_that_the_main_machine_lacks_is_not_resumed_and_the_hint_says_where_it_must_be(
    lab: Lab,
) -> None:
    arguments = lab.arguments("there")
    lab.train(arguments, arguments)
    here, there = (machine.path(lab.private / "there") for machine in lab.machines)
    shutil.copytree(here, there)
    shutil.rmtree(here)
    before = lab.files(1, "there")
    started = [lab.start(rank, "train", f"--resume={lab.private / 'there'}") for rank in (0, 1)]
    codes = [process.wait(WITHIN_S * 2) for process in started]
    outputs = [process.output() for process in started]
    assert codes == [1, 1], outputs
    for output in outputs:
        assert "rank 0 on machine0" in output
        assert "start rank 0 on the machine that has the run" in output
    assert (lab.files(0, "there"), lab.files(1, "there")) == ([], before)


NUM_UPDATES = 60


@pytest.fixture(scope="module")
def long_run(lab: Lab) -> list[str]:
    """Arguments of a run of many updates, without `--out`."""
    dataset = write_dataset(lab.folder / "long", group_rows(NUM_UPDATES, (1.0, 0.0, 0.5)))
    return [dataset, f"--model={lab.model}", *SETTINGS, "--set=run.save_every_updates=7"]


@pytest.fixture(scope="module")
def undisturbed(lab: Lab, long_run: list[str]) -> Path:
    arguments = [*long_run, f"--out={lab.private / 'undisturbed'}"]
    lab.train(arguments, arguments)
    return lab.machines[0].path(lab.private / "undisturbed")


def kill(lab: Lab, started: list[Started], rank: int) -> None:
    del lab
    for process in reversed(started[rank].processes()):
        process.kill()


def cut(lab: Lab, started: list[Started], rank: int) -> None:
    del started
    lab.machines[rank].cut()


def stop(lab: Lab, started: list[Started], rank: int) -> None:
    """One SIGTERM to all processes, in whatever order."""
    del lab
    for process in started[rank:] + started[:rank]:
        for one in process.processes():
            one.terminate()


def stop_twice(lab: Lab, started: list[Started], rank: int) -> None:
    """As a batch system and a launcher send it together."""
    stop(lab, started, rank)
    stop(lab, started, 1 - rank)


BREAKS = kill, cut, stop, stop_twice


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed < 4 else NIGHTLY) for seed in range(20)]
)
def test_a_break_at_a_random_moment_ends_all_and_resume_equals_an_undisturbed_run(
    seed: int, lab: Lab, long_run: list[str], undisturbed: Path
) -> None:
    rng, name, breaks = random.Random(seed), f"broken{seed}", BREAKS[seed % 4]
    arguments = [*long_run, f"--out={lab.private / name}"]
    out = lab.machines[0].path(lab.private / name)
    started = [lab.start(rank, "train", *arguments) for rank in (0, 1)]
    until = time.monotonic() + 120
    while num_lines(out) < 2 and time.monotonic() < until:
        time.sleep(0.005)
    time.sleep(rng.random())
    num_before = num_lines(out)
    breaks(lab, started, rng.randrange(2))
    begun_s = time.monotonic()
    codes = [process.wait(2 * WITHIN_S) for process in started]
    seconds = time.monotonic() - begun_s
    lab.machines[0].join()
    lab.machines[1].join()
    outputs = [process.output() for process in started]
    assert seconds < WITHIN_S, outputs
    assert 0 < num_before < NUM_UPDATES, outputs
    if breaks in (stop, stop_twice):
        latest = (out / "checkpoints" / "latest").read_text().strip()
        assert (codes, latest) == ([143, 143], f"global_step_{num_lines(out)}"), outputs
    else:
        lost = [output for output in outputs if "[process_lost]" in output]
        assert len(lost) >= (1 if breaks is kill else 2), outputs
        assert all("Error: rank " in output and "Traceback" not in output for output in lost)
    resume = [f"--resume={lab.private / name}"]
    lab.train(resume, resume)
    assert lines_of(out) == lines_of(undisturbed)
    last = [run / "checkpoints" / f"global_step_{NUM_UPDATES}" for run in (out, undisturbed)]
    digests = [json.loads((path / "state" / "files.json").read_text()) for path in last]
    assert digests[0] == digests[1]
    assert lab.files(1, name) == []


def num_lines(out: Path) -> int:
    file = out / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0
