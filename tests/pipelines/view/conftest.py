import pytest

from pipelines import merge
from rollout_io import RolloutWriter, read_metadata, scan
from tests.helpers.view_helpers import Asked


@pytest.fixture(scope="session")
def shop(shop_dataset):
    """The shop example as a dataset."""
    return shop_dataset


@pytest.fixture(scope="session")
def merged_shop(shop, tmp_path_factory):
    """The shop example with its steps merged."""
    out = tmp_path_factory.mktemp("merged") / "shop"
    with RolloutWriter(out, metadata=read_metadata(shop), row_group_rows=20) as writer:
        writer.write(merge(scan(shop)).collect())
    return out


@pytest.fixture(scope="session")
def ask(shop, merged_shop, smollm2_dir):
    """Asks about the shop (d0) and its merged copy (d1), decoded by SmolLM2's tokenizer."""
    return Asked(shop, merged_shop, tokenizer=str(smollm2_dir))
