import os
import signal
import subprocess
import sys
import threading

import pytest

from rollout_io.dataset.locking import lock

HOLD = """
import sys, time
from pathlib import Path
from rollout_io.dataset.locking import lock
held = lock(Path(sys.argv[1]))
print("held" if held else "taken", flush=True)
time.sleep(60)
"""


def test_a_lock_is_one_holders_until_it_is_released_by_any_thread(tmp_path):
    path = tmp_path / "new" / "lock"
    held = lock(path)
    assert held is not None
    assert lock(path) is None
    assert lock(path, wait_s=0.2) is None
    thread = threading.Thread(target=held.release)
    thread.start()
    thread.join()
    again = lock(path)
    assert again is not None
    again.release()


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path):
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        assert lock(path) is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        held = lock(path)
        assert held is not None
        held.release()


def test_a_lock_whose_file_was_removed_holds_off_nobody(tmp_path):
    path = tmp_path / "lock"
    held = lock(path)
    path.unlink()
    other = lock(path)
    assert other is not None
    held.release()
    assert lock(path) is None
    other.release()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_lock_that_cannot_be_written_is_an_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        lock(tmp_path / "lock")


def test_a_lock_below_a_file_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        lock(tmp_path / "file" / "lock")
