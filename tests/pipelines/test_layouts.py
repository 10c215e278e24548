import pytest

from rollout_io import read, read_metadata
from rollout_io.cli.main import run
from rollout_io.dataset.reader import read_layout


@pytest.fixture(params=["prefix", "full"])
def dataset(request, shop_dataset, tmp_path):
    out = tmp_path / request.param
    where = ["--where", "step_index >= 0", "--layout", request.param]
    assert run(["filter", str(shop_dataset), *where, "--out", str(out)]) == 0
    assert read_layout(out) == request.param
    return out


@pytest.mark.slow
def test_verbs_keep_the_layout_of_their_input_unless_they_are_given_one(dataset, tmp_path):
    verbs = {"filter": ["--drop-failed"], "merge": [], "merge --undo": []}
    for name, options in verbs.items():
        kept, other = tmp_path / name, tmp_path / f"{name}_other"
        verb, *more = name.split()
        options = [*more, *options]
        assert run([verb, str(dataset), *options, "--out", str(kept)]) == 0
        assert read_layout(kept) == read_layout(dataset)
        layout = {"prefix": "full", "full": "prefix"}[read_layout(dataset)]
        assert run([verb, str(dataset), *options, "--out", str(other), "--layout", layout]) == 0
        assert read_layout(other) == layout
        assert read(other).equals(read(kept))
        assert read_metadata(other).outcome == read_metadata(kept).outcome
