import pytest

from rollout_io.cli.output import shown_log


@pytest.fixture(autouse=True)
def log_on_stderr():
    """Show on stderr what a run logs, as the verbs do."""
    with shown_log():
        yield
