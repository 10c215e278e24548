"""`rollouts rl` whose trainers are on two machines that share nothing but a network."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.machines import Lab, laboratory
from tests.helpers.rl_helpers import as_toml, config_of, lines_of, save_model
from trainer import rl

pytestmark = pytest.mark.slow
SAME = "loss", "grad_norm", "return_mean", "policy_entropy", "num_trained_tokens"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with laboratory(tmp_path_factory.mktemp("lab"), 2) as opened:
        yield opened


def test_rl_on_two_machines_without_a_shared_disk_is_that_of_one_and_resumes(
    lab: Lab, tokenizer: Any, tmp_path: Path
) -> None:
    config = config_of(
        lab.folder,
        save_model(lab.folder / "policy", tokenizer),
        num_iterations=3,
        generate={"max_concurrency": 1},
    )
    toml = lab.folder / "c.toml"
    toml.write_text(as_toml(config))
    out = lab.private / "rl"
    begun = ["rl", str(toml), f"--out={out}", "--set=loop.num_iterations=2"]
    rest = ["rl", f"--resume={out}", "--set=loop.num_iterations=3"]
    for arguments in (begun, rest):
        started = [lab.start(rank, *arguments) for rank in (0, 1)]
        for process in started:
            assert process.wait() == 0, process.output()
    section = dataclasses.replace(config.run, out=str(tmp_path / "alone"))
    rl.run(dataclasses.replace(config, run=section))
    lines = lines_of(lab.machines[0].path(out))
    wanted = lines_of(tmp_path / "alone")
    assert len(lines) == len(wanted) == 6
    for line, other in zip(lines, wanted, strict=True):
        for key in SAME:
            assert line[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), key
    assert lab.files(1, "rl") == []
