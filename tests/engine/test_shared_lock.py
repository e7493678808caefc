"""A lock that processes, pods and nodes share: one holder, and no dead one for long."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from kvoy_engine import shared_lock
from kvoy_engine.shared_lock import LockLost, Timing, hold

FAST = Timing(beat_s=0.02, stale_s=0.5, poll_s=0.01)
NEVER = Timing(beat_s=0.02, stale_s=1e6, poll_s=0.01)
DEADLINE_S = 60.0


def silent(owner: str) -> None:
    pass


def write_holder(path: Path, number: int, **fields: object) -> None:
    """The file of a holder that says nothing more."""
    state: dict[str, object] = {"machine": "another", "has_flock": True, "owner": "pod-b"}
    state |= {"beat": 7, "is_released": False} | fields
    path.with_name(f"{path.name}.{number}").write_text(json.dumps(state))


def test_a_released_lock_is_taken_at_once(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for _ in range(3):
        with hold(path, silent, NEVER) as lock:
            lock.check()

    assert [entry.name for entry in tmp_path.iterdir()] == ["lock.3"]


def test_two_threads_never_hold_it_together(tmp_path: Path) -> None:
    inside, most, counter = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal inside, most
        for _ in range(10):
            with hold(tmp_path / "lock", silent, NEVER):
                with counter:
                    inside += 1
                    most = max(most, inside)
                with counter:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)

    assert most == 1
    assert not any(thread.is_alive() for thread in threads)


def _hold_until_killed(path: Path, is_held: Event) -> None:
    with hold(path, silent, NEVER):
        is_held.set()
        signal.pause()


@pytest.mark.slow
def test_a_killed_holder_on_this_machine_is_succeeded_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    is_held = context.Event()
    holder = context.Process(target=_hold_until_killed, args=(tmp_path / "lock", is_held))
    holder.start()
    assert is_held.wait(DEADLINE_S)
    assert holder.pid is not None
    told: list[str] = []

    def kill(owner: str) -> None:
        told.append(owner)
        os.kill(holder.pid or 0, signal.SIGKILL)

    with hold(tmp_path / "lock", kill, NEVER) as lock:
        lock.check()

    holder.join(DEADLINE_S)
    assert told == [f"process {holder.pid} on {os.uname().nodename}"]


def test_a_holder_on_another_machine_is_succeeded_once_it_is_silent(tmp_path: Path) -> None:
    write_holder(tmp_path / "lock", 4)
    told: list[str] = []

    with hold(tmp_path / "lock", told.append, FAST):
        names = [entry.name for entry in tmp_path.iterdir()]

    assert told == ["pod-b"]
    assert names == ["lock.5"]


def test_a_holder_on_another_machine_that_still_speaks_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    write_holder(path, 1)
    now_s, beats = 0.0, 0

    def clock() -> float:
        """Each look comes half a minute after the last; the holder beats ten times meanwhile."""
        nonlocal now_s, beats
        now_s, beats = now_s + 30.0, beats + 1
        if beats <= 10:
            write_holder(path, 1, beat=beats)
        else:
            write_holder(path, 1, is_released=True)
        return now_s

    with hold(path, silent, Timing(stale_s=60.0, poll_s=0.0), clock):
        pass

    assert beats > 10


def test_a_holder_without_flocks_is_watched_by_its_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_lock, "_flock", lambda fd, kind: False)
    path = tmp_path / "lock"
    with hold(path, silent, NEVER):
        state = json.loads((tmp_path / "lock.1").read_text())
    assert not state["has_flock"]
    write_holder(path, 1, machine=shared_lock._machine(), has_flock=False)

    with hold(path, silent, FAST):
        assert (tmp_path / "lock.2").exists()


def test_a_holder_that_was_passed_over_learns_it(tmp_path: Path) -> None:
    with hold(tmp_path / "lock", silent, NEVER) as lock:
        write_holder(tmp_path / "lock", 2)

        with pytest.raises(LockLost):
            lock.check()


def test_whoever_makes_a_number_that_has_been_passed_does_not_hold_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    write_holder(path, 9)

    assert shared_lock._try_create(path, 3, NEVER) is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["lock.9"]
