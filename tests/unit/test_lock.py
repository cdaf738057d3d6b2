"""One updater per engine on a host, whatever becomes of the other one."""

from __future__ import annotations

import errno
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from support.fakes import Toy, engines_of, settings_for, updater_for
from support.processes import Pool

from pipelines.lock import EngineLock
from pipelines.updater import WeightUpdater
from stages.errors import EngineBusy, WeightstreamError

URL = "http://locked:1"
HELD: list[EngineLock] = []  # in the other process


def hold(url: str) -> int:
    HELD.append(EngineLock(url))
    return os.getpid()


def let_go() -> None:
    HELD.pop().release()


def test_another_process_is_named_and_nothing_of_the_engine_is_touched(child: Pool) -> None:
    pid = child.call(hold, URL)
    with updater_for([URL]) as updater:
        with pytest.raises(EngineBusy, match=f"{URL}: probe: process {pid} updates this engine"):
            updater.update(Toy(1.0))
        assert engines_of(updater)[0].log == []
        assert updater.report.updates[-1].outcome == "refused"
        child.call(let_go)
        assert updater.update(Toy(1.0)).outcome == "committed"


def test_a_killed_holder_holds_nothing(victim: Pool) -> None:
    victim.call(hold, URL)
    victim.kill(0)
    EngineLock(URL).release()


def test_another_updater_of_this_process_is_refused_until_the_first_lets_go() -> None:
    with updater_for([URL]) as first, updater_for([URL]) as second:
        first.update(Toy(1.0))
        with pytest.raises(EngineBusy, match="another updater of this process"):
            second.update(Toy(2.0))
        assert first.update(Toy(3.0)).outcome == "committed"
        first.remove_engines([URL])
        assert second.update(Toy(4.0)).outcome == "committed"


def test_the_others_are_updated_where_that_is_allowed(child: Pool) -> None:
    child.call(hold, URL)
    settings = settings_for([URL, "http://free:1"])
    settings["engines"]["required"] = 1
    with WeightUpdater(settings) as updater:
        report = updater.update(Toy(1.0))
    assert {e.url: e.outcome for e in report.engines} == {URL: "refused", "http://free:1": "committed"}
    child.call(let_go)


@pytest.mark.parametrize("other", ["http://127.0.0.1:30000", "http://[::1]:30000", "https://localhost:30000"])
def test_an_engine_has_one_lock_under_all_its_loopback_names(other: str) -> None:
    held = EngineLock("http://localhost:30000")
    with pytest.raises(EngineBusy, match="another updater of this process"):
        EngineLock(other)
    EngineLock("http://localhost:30001").release()
    held.release()
    EngineLock(other).release()


def test_of_many_threads_one_gets_it() -> None:
    start, got = threading.Barrier(16), []

    def take() -> None:
        start.wait()
        with suppress(EngineBusy):
            got.append(EngineLock(URL))

    threads = [threading.Thread(target=take) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1


def test_a_lock_that_could_not_be_written_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        EngineLock(URL)
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.undo()
    EngineLock(URL).release()


def test_a_lock_that_nobody_refers_to_is_released() -> None:
    EngineLock(URL)
    EngineLock(URL)


def test_locks_are_for_their_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSTREAM_LOCKS", str(tmp_path))
    lock = EngineLock(URL)
    (folder,) = tmp_path.iterdir()
    (file,) = folder.iterdir()
    assert [stat.S_IMODE(p.stat().st_mode) for p in (folder, file)] == [0o700, 0o600]
    lock.release()
    folder.chmod(0o777)
    with pytest.raises(WeightstreamError, match="must be a folder that only this user can open"):
        EngineLock(URL)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeightstreamError, match="must be a folder"):
        EngineLock(URL)
