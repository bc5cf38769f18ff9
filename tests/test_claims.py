"""Claims of a folder: one process at a time, and another one after a death."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from pseudoloss import claims
from pseudoloss.errors import BusyError, TrainingError
from pseudoloss.runs import RunFolder

HOLD = """
import sys, time
from pathlib import Path
from pseudoloss import claims
with claims.take(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
RACE = """
import sys, time
from pathlib import Path
from pseudoloss import claims
from pseudoloss.errors import BusyError
folder, log = Path(sys.argv[1]), Path(sys.argv[1]) / "log"
done = 0
while done < 30:
    try:
        with claims.take(folder):
            with log.open("a") as file:
                file.write("in ")
                file.flush()
                time.sleep(0.001)
                file.write("out\\n")
            done += 1
    except BusyError:
        time.sleep(0.0005)
"""


def files(folder):
    return sorted(path.name for path in (folder / ".lock").iterdir())


def elsewhere(folder, seconds, **changes):
    """Make the last claim one of a process on another machine, renewed some seconds ago."""
    path = folder / ".lock" / files(folder)[-1]
    content = json.loads(path.read_text()) | {"host": "node7", "boot": "b", "token": "t"} | changes
    path.write_text(json.dumps(content))
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_a_claim_excludes_others_until_it_is_released(tmp_path):
    assert claims.holder(tmp_path) is None
    for number in ("1", "2", "3"):
        with claims.take(tmp_path):
            assert claims.holder(tmp_path).pid == os.getpid()
            assert claims.holder(tmp_path).is_here
            with pytest.raises(BusyError, match=f"process {os.getpid()} on this machine"):
                claims.take(tmp_path)
            assert files(tmp_path) == [number]
        assert claims.holder(tmp_path) is None
        assert files(tmp_path) == [number]  # so that no number is used twice
    assert not claims._held


def test_what_a_claim_says(tmp_path):
    with claims.take(tmp_path):
        found = json.loads((tmp_path / ".lock" / "1").read_text())
    assert (found["host"], found["pid"]) == (socket.gethostname(), os.getpid())
    assert (
        abs(time.time() - time.mktime(time.strptime(found["time"][:19], "%Y-%m-%dT%H:%M:%S")))
        < 86401
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_claim_ends_at_once_with_its_process_on_this_machine(tmp_path, number):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(BusyError, match=f"process {process.pid} on this machine"):
            claims.take(tmp_path)
        process.send_signal(number)
        # Not waited for: a zombie is dead too.
        deadline = time.monotonic() + 10
        while claims.holder(tmp_path) is not None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with claims.take(tmp_path):
            assert files(tmp_path) == ["2"]
    finally:
        process.kill()
        process.communicate()


def test_a_pid_that_is_used_again_is_another_process(tmp_path):
    claims.take(tmp_path).ended.set()
    path = tmp_path / ".lock" / "1"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"pid": os.getppid(), "started": 1}))
    assert claims.holder(tmp_path) is None
    path.write_text(
        json.dumps(content | {"pid": os.getppid(), "started": claims._started(os.getppid())})
    )
    assert claims.holder(tmp_path).pid == os.getppid()
    path.write_text(json.dumps(content | {"boot": "before the last start", "pid": 1}))
    assert claims.holder(tmp_path) is None
    claims._held.clear()


def test_a_claim_on_another_machine_ends_after_some_minutes_of_silence(tmp_path):
    claims.take(tmp_path).ended.set()
    claims._held.clear()
    elsewhere(tmp_path, 100)
    found = claims.holder(tmp_path)
    assert (found.host, found.is_here, found.is_late) == ("node7", False, True)
    with pytest.raises(BusyError, match=r"on node7, last seen 100 seconds ago; .* ends in 80 sec"):
        claims.take(tmp_path)
    elsewhere(tmp_path, claims.EXPIRED_SECONDS + 1)
    assert claims.holder(tmp_path) is None
    with claims.take(tmp_path):
        assert files(tmp_path) == ["2"]
    # Another container of this machine counts its processes itself.
    elsewhere(
        tmp_path, 10, host=socket.gethostname(), boot=claims._this_process()["boot"], space="x"
    )
    (tmp_path / ".lock" / "2").write_text((tmp_path / ".lock" / "2").read_text())
    damaged = tmp_path / "damaged"
    claims.take(damaged).ended.set()
    claims._held.clear()
    for text in ("", "{", "[]", "{}"):
        (damaged / ".lock" / "1").write_text(text)
        assert claims.holder(damaged).host == "another machine"
    os.utime(damaged / ".lock" / "1", (1, 1))
    assert claims.holder(damaged) is None


def test_the_clock_of_the_file_system_decides(tmp_path, monkeypatch):
    """The clocks of two machines may differ by more than a claim lasts."""
    claims.take(tmp_path).ended.set()
    claims._held.clear()
    elsewhere(tmp_path, 10)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 10_000)
    with pytest.raises(BusyError):
        claims.take(tmp_path)


def test_a_claim_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "RENEW_SECONDS", 0.01)
    with claims.take(tmp_path):
        path = tmp_path / ".lock" / "1"
        os.utime(path, (1, 1))
        deadline = time.monotonic() + 10
        while path.stat().st_mtime < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_process_that_was_taken_for_dead_writes_nothing_more(tmp_path):
    """It was stopped for minutes; another machine has gone on."""
    folder = RunFolder(tmp_path)
    with folder.lock():
        with folder.writing():
            pass
        (tmp_path / ".lock" / "2").write_text("{}")  # of the other machine
        (tmp_path / ".lock" / "1").unlink()
        with pytest.raises(TrainingError, match="another process has taken over"), folder.writing():
            raise AssertionError
    assert files(tmp_path) == ["2"]
    assert (tmp_path / ".lock" / "2").read_text() == "{}"


def test_a_claimer_with_an_old_list_does_not_get_a_folder_that_is_taken(tmp_path, monkeypatch):
    """It saw the end of claim 1; meanwhile others had 2, and 3 is held."""
    place = tmp_path / ".lock"
    with claims.take(tmp_path):
        pass
    real, looked = claims._latest, []

    def slow(path):
        found = real(path)
        if not looked:
            looked.append(found)
            (place / "3").write_text(json.dumps(claims._this_process() | {"pid": 1, "token": "x"}))
            elsewhere(tmp_path, 0)
            (place / "1").unlink()
        return found

    monkeypatch.setattr(claims, "_latest", slow)
    with pytest.raises(BusyError, match="node7"):
        claims.take(tmp_path)
    assert files(tmp_path) == ["3"]


def test_threads_and_processes_never_have_a_folder_together(tmp_path):
    arguments = [sys.executable, "-c", RACE, str(tmp_path)]
    processes = [subprocess.Popen(arguments) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "in out\n" * 90
    assert len(files(tmp_path)) == 1
    inside, most, taken = [], [], []

    def work():
        while len(taken) < 40:
            try:
                with claims.take(tmp_path):
                    inside.append(1)
                    most.append(len(inside))
                    taken.append(1)
                    inside.pop()
            except BusyError:
                time.sleep(0.0005)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}


def test_a_lock_of_an_older_version_is_replaced(tmp_path):
    (tmp_path / ".lock").touch()
    assert claims.holder(tmp_path) is None
    with claims.take(tmp_path):
        assert files(tmp_path) == ["1"]
