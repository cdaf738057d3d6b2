"""One updater per engine: a lock on this host that ends with its process, however that ends.

What an engine was told by one updater (slots, groups, plans, an open session) is of no use to another; two of them in turn
would each find the engine in a state that is not theirs. Trainers on other hosts are not seen, nor are those in containers with a
/tmp of their own: WEIGHTSTREAM_LOCKS names a folder that they share.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import os
import stat
import threading
from pathlib import Path
from urllib.parse import urlsplit

from stages.errors import EngineBusy, WeightstreamError

_held: set[str] = set()  # files, in this process: POSIX locks do not keep out their own process
_guard = threading.Lock()


class EngineLock:
    """Holds one engine until `release`, or until nobody refers to it any more.

    Raises EngineBusy, which names the other process, and WeightstreamError where the lock's folder is not ours.
    """

    def __init__(self, url: str) -> None:
        self._fd: int | None = None
        self._file = _name(url)
        with _guard:
            if self._file in _held:
                raise EngineBusy(url, "another updater of this process")
            self._fd = _take(_folder() / self._file, url)
            _held.add(self._file)

    def release(self) -> None:
        """Let others have it. The file stays: removing it would let two hold two files of one name."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
            _held.discard(self._file)

    def __del__(self) -> None:
        self.release()


def _take(file: Path, url: str) -> int:
    # Not flock: children that this process forks would hold it on.
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = os.pread(fd, 20, 0).decode(errors="replace").strip()
            raise EngineBusy(url, f"process {pid}" if pid.isdigit() else "another process") from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _name(url: str) -> str:
    """The same for all names that this host has for its loopback interface."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    with contextlib.suppress(ValueError):
        host = "localhost" if ipaddress.ip_address(host).is_loopback else host
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return hashlib.sha256(f"{host}:{port}{parts.path}".encode()).hexdigest()[:32] + ".lock"


def _folder() -> Path:
    """A folder that only this user can write, on the file system of this host."""
    base = os.environ.get("WEIGHTSTREAM_LOCKS") or "/tmp"  # not TMPDIR, which differs from login to login
    folder = Path(base) / f"weightstream-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise WeightstreamError(
            f"{folder} must be a folder that only this user can open; remove it, or set WEIGHTSTREAM_LOCKS"
        )
    return folder
