import pytest

from tests.helpers.fake_engine import FakeEngine, running


@pytest.fixture(scope="module")
def engine():
    """An engine that answers as vLLM does, with its `url`."""
    app = FakeEngine()
    with running(app) as app.url:
        yield app
