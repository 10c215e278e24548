import pytest

from rollout_io import Choices, convert
from tests.conftest import EXAMPLES


@pytest.fixture(scope="session")
def shop(tmp_path_factory):
    """The shop example as a dataset."""
    out = tmp_path_factory.mktemp("view") / "shop"
    rewards = str(EXAMPLES / "shop.rewards.jsonl")
    convert(EXAMPLES / "shop.calls.jsonl", out, Choices(rewards=rewards))
    return out
