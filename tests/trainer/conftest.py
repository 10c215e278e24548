import pytest

from rollout_io.cli.output import shown_log


@pytest.fixture(autouse=True)
def log_on_stderr():
    """Show on stderr what a run logs, as the verbs do."""
    with shown_log():
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Starts runs in several processes."""
    from tests.helpers.process_client import Server

    server = Server(tmp_path_factory.mktemp("server"))
    with server.process:
        yield server
