import random
import shutil

import pytest

from tests.helpers.kill_helpers import (
    Undisturbed,
    python_named,
    python_names,
    stop_and_finish,
    undisturbed,
    unmounted,
    write_log,
)

NUM_STOPS = 20
KINDS = ["SIGTERM", "SIGINT", "killed worker", "full disk"]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = write_log(tmp_path_factory.mktemp("log") / "random.calls.jsonl")
    yield path
    path.unlink()


@pytest.fixture(scope="module", params=python_names())
def python(request):
    path, reason = python_named(request.param)
    if path is None:
        pytest.skip(f"{reason}; ROLLOUTS_TEST_PYTHONS names the interpreters to use")
    return path


@pytest.fixture(scope="module")
def wanted(python, log, tmp_path_factory) -> Undisturbed:
    return undisturbed(python, log, tmp_path_factory.mktemp("undisturbed") / "ds")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_a_large_conversion_that_is_stopped_ends_within_seconds_and_can_be_finished(
    kind, python, log, wanted, tmp_path
):
    for seed in range(NUM_STOPS):
        out = tmp_path / str(seed)
        with unmounted(out):
            stop_and_finish(kind, python, log, out, wanted, random.Random(f"{kind} {seed}"))
        shutil.rmtree(out)
