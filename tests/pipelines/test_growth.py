"""How the time of verbs grows with steps, trajectories and columns: four times as many, not 8x."""

import json
import time

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from benchmarks.synthetic import short_trajectories
from pipelines.filtering import judge, keep
from pipelines.filters import best_of_group
from rollout_io import RolloutWriter, scan
from rollout_io.cli.main import run
from schemas import check
from schemas.columns import arrow_schema
from schemas.ragged import Ragged, offsets_of
from trainer.batches.forest import chain_forests, chain_lengths
from trainer.batches.tree import make_trie, tree_forests

pytestmark = pytest.mark.nightly

FEW, MANY = 2_500, 10_000
SHAPES = ("star", "caterpillar", "same prompt", "forks")
VERBS = {
    "convert": ["convert", "LOG"],
    "validate": ["validate", "DS"],
    "inspect": ["inspect", "DS"],
    "stats": ["stats", "DS"],
    "drift": ["drift", "DS"],
    "filter": ["filter", "DS", "--keep-rows", "step_index % 2 = 1"],
    "merge": ["merge", "DS"],
    "merge by the consecutive rule": ["merge", "DS", "--rule", "consecutive"],
    "merge --undo": ["merge", "--undo", "MERGED"],
    "stats of merged rows": ["stats", "MERGED"],
    "drift of merged rows": ["drift", "MERGED"],
    **{f"export as {name}": ["export", "DS", "--format", name] for name in ("skyrl", "trl", "hf")},
}
WRITE = {"convert", "filter", "merge", "export"}


def steps_of(shape, num_steps):
    """Prompts and responses of one trajectory, about 220 tokens a step."""
    rng = np.random.default_rng(0)
    spine = rng.integers(0, 40_000, 400).tolist()
    chat = list(spine[:200])
    for step in range(num_steps):
        new = rng.integers(0, 40_000, 20).tolist()
        if shape == "star":
            yield [*spine[:200], *new[:10]], new[10:]
        elif shape == "caterpillar":
            yield [*spine[: 1 + step * 7919 % 400], *new[:10]], new[10:]
        elif shape == "same prompt":
            yield spine[:200], new[:10]
        elif step % 2:
            yield [*chat, *new[:5]], new[5:10]
        else:
            yield list(chat), new[:1]
            chat = [*chat, new[0]][:400]


def write_log(path, shape, num_steps):
    with path.open("w") as file:
        for index, (prompt, response) in enumerate(steps_of(shape, num_steps)):
            content = [{"token": "x", "logprob": -0.5}] * len(response)
            choice = {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "x"},
                "token_ids": response,
                "logprobs": {"content": content},
            }
            call = {
                "session": "a/0",
                "time": float(index),
                "request": {"model": "m", "messages": [{"role": "user", "content": "q"}]},
                "response": {"prompt_token_ids": prompt, "choices": [choice]},
            }
            if index == num_steps - 1:
                call |= {"final": True, "reward": 1.0}
            file.write(json.dumps(call) + "\n")


@pytest.fixture(scope="module", params=SHAPES)
def folders(request, tmp_path_factory):
    """For few and many steps: a log, its dataset, and the same merged."""
    found = []
    for num_steps in (FEW, MANY):
        folder = tmp_path_factory.mktemp("growth")
        write_log(folder / "LOG", request.param, num_steps)
        assert run(["convert", str(folder / "LOG"), "--out", str(folder / "DS")]) == 0
        assert run(["merge", str(folder / "DS"), "--out", str(folder / "MERGED")]) == 0
        found.append(folder)
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_four_times_the_steps_take_a_verb_less_than_eight_times_the_cpu_time(
    folders, verb, tmp_path, capsys
):
    seconds = []
    for number, folder in enumerate([folders[0], *folders]):  # the first time imports
        arguments = [str(folder / a) if (folder / a).exists() else a for a in VERBS[verb]]
        if VERBS[verb][0] in WRITE:
            arguments += ["--out", str(tmp_path / f"{number}.parquet")]
        begin = time.process_time()
        assert run(arguments) == 0
        seconds.append(time.process_time() - begin)
        capsys.readouterr()
    assert seconds[2] < 8 * seconds[1]


@pytest.mark.parametrize("verb", ["filter", "merge", "merge --undo"])
def test_four_times_the_own_columns_take_a_verb_less_than_eight_times_the_cpu_time(verb, tmp_path):
    def writing(num_columns):
        folder = tmp_path / str(num_columns)
        rows = pl.from_arrow(short_trajectories(0, 400))
        own = {f"own_{n}": pl.lit(float(n)) for n in range(num_columns)}
        with RolloutWriter(folder / "DS") as writer:
            writer.write(rows.with_columns(**own))
        dataset = folder / "DS"
        if verb == "merge --undo":
            dataset = folder / "MERGED"
            assert run(["merge", str(folder / "DS"), "--out", str(dataset)]) == 0
        options = ["--best", "2"] if verb == "filter" else []
        out = str(folder / "OUT")
        return lambda: run([*verb.split(), str(dataset), *options, "--out", out])

    few, many = (cpu_of(1, writing(num)) for num in (2_000, 8_000))
    assert many < 8 * few


def test_four_times_the_trajectories_take_a_selection_less_than_eight_times_the_cpu_time(tmp_path):
    def selecting(num):
        with RolloutWriter(tmp_path / str(num), checked=True) as writer:
            for first in range(0, num, 20_000):
                writer.write(short_trajectories(first, 20_000))
        rows = scan(tmp_path / str(num))
        verdicts = judge(rows, [best_of_group(2)])
        return lambda: [*keep(rows, verdicts).collect_batches(engine="streaming")]

    few, many = (cpu_of(1, selecting(num)) for num in (100_000, 400_000))
    assert many < 8 * few


def cpu_of(runs, action):
    """Seconds of CPU of the cheapest of several runs."""
    seconds = []
    for _ in range(runs):
        begin = time.process_time()
        action()
        seconds.append(time.process_time() - begin)
    return min(seconds)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["chains", "trees"])
def test_four_times_the_steps_take_batching_less_than_eight_times_the_cpu_time(shape, layout):
    few, many = (cpu_of(3, batching(shape, layout, n)) for n in (FEW, MANY))
    assert many < 8 * few


def test_four_times_the_answers_in_their_prompts_take_a_check_less_than_eight_times_the_cpu_time():
    few, many = (cpu_of(3, checking(n)) for n in (25_000, 100_000))
    assert many < 8 * few


def checking(num_rows):
    """Naming every row of a table, each with its answer in its prompt."""
    answer, header = list(range(100, 120)), [7, 8]
    columns = {
        "instance_id": [f"a{row}" for row in range(num_rows)],
        "repetition_id": [0] * num_rows,
        "trajectory_id": [f"a{row}_0" for row in range(num_rows)],
        "step_index": [0] * num_rows,
        "is_last_step": [True] * num_rows,
        "prompt_token_ids": [[1, *header, *answer, 4, *header]] * num_rows,
        "response_ids": [answer] * num_rows,
        "loss_mask": [[True] * len(answer)] * num_rows,
        "token_source": ["engine"] * num_rows,
    }
    table = pa.table(columns, arrow_schema(()))

    def work():
        assert len(check(table)) == num_rows

    return work


def batching(shape, layout, num_steps):
    """Cutting one trajectory's steps into micro-batches."""
    prompts, responses = map(ragged, zip(*steps_of(shape, num_steps), strict=True))
    trains, rows = np.ones(len(responses.values), np.bool_), np.arange(num_steps)

    def trees():
        lengths = chain_lengths(prompts, responses, trains)
        trie = make_trie(prompts, responses, lengths, np.zeros(num_steps, np.int64), rows)
        return tree_forests(trie, prompts, responses, trains, 4_096)

    def chains():
        return chain_forests(prompts, responses, trains, rows, 4_096)

    return trees if layout == "trees" else chains


def ragged(rows):
    values = np.array([token for row in rows for token in row], np.int32)
    offsets = offsets_of(np.array([len(row) for row in rows], np.int64))
    return Ragged(values, offsets, np.ones(len(rows), np.bool_))
