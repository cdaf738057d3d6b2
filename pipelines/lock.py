"""One updater per engine: a lock on this host that ends with its process, however that ends.

What an engine was told by one updater (slots, groups, plans, an open session) is of no use to another; two of them in turn
would each find the engine in a state that is not theirs. Trainers on other hosts are not seen.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from stages.errors import EngineBusy, WeightstreamError

_held: set[str] = set()  # URLs, in this process: POSIX locks do not keep out their own process


class EngineLock:
    """Holds one engine until `release`, or until nobody refers to it any more.

    Raises EngineBusy, which names the other process, and WeightstreamError where the lock's folder is not ours.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._fd: int | None = None
        if url in _held:
            raise EngineBusy(url, "another updater of this process")
        # Not flock: children that this process forks would hold it on.
        fd = os.open(_folder() / _name(url), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = os.pread(fd, 20, 0).decode(errors="replace").strip()
            os.close(fd)
            raise EngineBusy(url, f"process {pid}" if pid.isdigit() else "another process") from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd
        _held.add(url)

    def release(self) -> None:
        """Let others have it. The file stays: removing it would let two hold two files of one name."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
            _held.discard(self.url)

    def __del__(self) -> None:
        self.release()


def _name(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:32] + ".lock"


def _folder() -> Path:
    """A folder that only this user can write, on the file system of this host."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"weightstream-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise WeightstreamError(
            f"{folder} must be a folder that only this user can open; remove it, or set XDG_RUNTIME_DIR"
        )
    return folder
