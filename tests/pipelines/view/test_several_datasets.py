"""Names that tell several datasets apart, and which two of them are compared."""

import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.view.paths import absolute, distinct_names
from rollout_io import RolloutWriter, scan
from tests.helpers.view_helpers import Asked

words = st.sampled_from(["a", "b", "merged"])
paths = st.lists(words, min_size=1, max_size=4).map("/".join)


@given(st.lists(paths, unique_by=absolute, max_size=5))
def test_names_are_the_shortest_ends_that_tell_paths_apart(given_paths):
    names = distinct_names(given_paths)
    assert len(set(names)) == len(names)
    for path, name in zip(given_paths, names, strict=True):
        assert f"{absolute(path)}/".endswith(f"/{name}/")
        shorter = name.partition("/")[2]
        same = [p for p in given_paths if f"{absolute(p)}/".endswith(f"/{shorter}/")]
        assert not shorter or len(same) > 1


@pytest.fixture(scope="module")
def folders(shop, tmp_path_factory):
    """Copies of the shop, whole and of one task each; `other` shares none with `b/merged`."""
    root = tmp_path_factory.mktemp("runs")
    shutil.copytree(shop, root / "a" / "merged")
    for name, task in (("b/merged", "shop-1"), ("other", "shop-2")):
        with RolloutWriter(root / name) as writer:
            writer.write(scan(shop).filter(instance_id=task).collect())
    return root


def described(ask):
    datasets = ask("/api/sources")["datasets"]
    return {one["id"]: (one["name"], one["shares_tasks_with"]) for one in datasets}


def test_datasets_with_the_same_last_name_get_longer_ones(folders):
    ask = Asked(folders / "a" / "merged", folders / "b" / "merged")
    assert described(ask) == {"d0": ("a/merged", "d1"), "d1": ("b/merged", "d0")}


def test_the_newest_two_datasets_that_share_tasks_are_compared(folders):
    a, b, other = folders / "a" / "merged", folders / "b" / "merged", folders / "other"
    ask = Asked(b, a, other)
    assert [pair for _, pair in described(ask).values()] == ["d1", "d2", "d1"]
    assert ask.sources.compared_pair() == ("d1", "d2")
    assert Asked(a, b).sources.compared_pair() == ("d0", "d1")
    assert Asked(b, other).sources.compared_pair() is None
    assert Asked(a).sources.compared_pair() is None
