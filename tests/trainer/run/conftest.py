import pytest

from tests.helpers.trainer_helpers import save_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A tiny Llama of random weights, as a directory."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))
