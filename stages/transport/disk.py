"""disk: each update is a folder that is a complete HF checkpoint, made visible by one atomic rename.

    <path>/<version>/model-00001-of-00007.safetensors ...   one file per bucket
    <path>/<version>/model.safetensors.index.json           built from what was written
    <path>/<version>/weightstream.json                      manifest: version, plan hash, size and xxh3-64 of each file's tensors
    <path>/<version>/config.json, tokenizer files ...       copied from the reference checkpoint

While it is written it is called `.tmp-<host>-<pid>-<random>`; what a dead process of this host left is removed. File format:
https://huggingface.co/docs/safetensors (8 bytes header size, little endian; JSON header; the tensors back to back).
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import struct
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch

from stages.digest import PIECE, RunningDigest
from stages.errors import ConfigError, TransportError
from stages.flow import Bucket, BucketLayout, Plan, Shipment
from stages.gather.checkpoint import SAFETENSORS_DTYPES
from stages.run import Run
from stages.threads import start
from stages.transport.base import Transport
from stages.transport.messages import DiskMessage

MANIFEST = "weightstream.json"
_SYNCS_AT_ONCE = 4
_DTYPES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


class Disk(Transport):
    """Version folders under `path`, the newest `keep` of them kept.

    `path_map` translates folder prefixes from the trainer's view to the engines' (`{"/mnt/a": "/data/a"}`); `fsync` makes a
    published version survive a crash of the host.
    """

    name = "disk"

    def __init__(self, path: str, keep: int = 2, fsync: bool = True, path_map: dict[str, str] | None = None) -> None:
        if keep < 1:
            raise ConfigError(f"transport.keep: {keep} must be at least 1, the version that engines serve")
        self.path = Path(path)
        self.keep, self.fsync = keep, fsync
        self.path_map = path_map or {}
        self._folder: Path | None = None  # being written
        self._published: Path | None = None  # visible, but not committed yet
        self._reference: Path | None = None
        self._files: dict[str, dict[str, Any]] = {}
        self._index: dict[str, str] = {}
        self._syncing: list[Future[None]] = []
        self._pruning: Future[None] | None = None

    def open(self, run: Run) -> None:
        if run.comm.is_head:
            with _explained(self.path):
                self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
                _remove_leftovers(self.path)

    def close(self) -> None:
        self._drop()
        self._pruned()

    def last_version(self) -> int:
        return max((int(p.name) for p in self.path.iterdir() if p.name.isdecimal()), default=0)

    def prepare(self, run: Run) -> None:
        if not run.comm.is_head:
            return
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", run.version):
            raise ConfigError(
                f"version {run.version!r} cannot be a folder name; use up to 200 letters, digits, '.', '_' and '-'"
            )
        if (self.path / run.version).exists():
            raise ConfigError(f"{self.path / run.version} exists: a version is never overwritten; give another version")
        self._pruned()
        with _explained(self.path):
            need, free = run.current_plan.nbytes, shutil.disk_usage(self.path).free
        if need > free:
            raise TransportError(
                f"{self.path}: {need} bytes needed, {free} free; free some or set transport.path elsewhere"
            )
        self._drop()
        self._files, self._index = {}, {}
        self._folder = self._hidden()
        with _explained(self._folder):
            self._folder.mkdir(mode=0o700)

    def ship(self, bucket: Bucket, run: Run) -> Shipment:
        if bucket.slot is None or self._folder is None:
            return Shipment(bucket, DiskMessage(""))
        name = f"model-{bucket.layout.seq + 1:05d}-of-{len(bucket.plan.buckets):05d}.safetensors"
        digest = _write_file(self._folder / name, header_of(bucket.layout), bucket.memory.cpu(), bucket.digest)
        if self.fsync:
            self._sync_behind(self._folder / name)
        self._files[name] = {"nbytes": bucket.layout.nbytes, "xxh3_64": f"{digest:016x}"}
        self._index.update({e.spec.name: name for e in bucket.layout.entries})
        return Shipment(bucket, DiskMessage(name))

    def publish(self, run: Run) -> None:
        if not run.comm.is_head or self._folder is None:
            return
        target = self.path / run.version
        self._reference = run.reference
        with _explained(target):
            self._write_metadata(run.current_plan, run)
            self._await_syncs()
            os.rename(self._folder, target)
            self._folder, self._published = None, target
            if self.fsync:
                _sync(self.path)
        run.folder = self._seen_by_engines(target)

    def committed(self, version: str) -> None:
        """Only now the older ones may go."""
        if self._published is not None:
            self._published = None
            self._pruning = start(self._prune, "prune")

    def discard(self, run: Run) -> None:
        """A version that was not committed goes again, so that the next attempt may have its name."""
        self._drop()
        published, self._published = self._published, None
        if published is not None:
            shutil.rmtree(published, ignore_errors=True)

    def _write_metadata(self, plan: Plan, run: Run) -> None:
        assert self._folder is not None
        if run.reference is not None:
            for source in run.reference.iterdir():
                text = source.suffix in (".json", ".txt", ".model", ".jinja")
                if text and source.is_file() and "index" not in source.name:
                    shutil.copyfile(source, self._folder / source.name)
        index = {"metadata": {"total_size": plan.nbytes}, "weight_map": self._index}
        manifest = {"version": run.version, "plan_hash": plan.hash, "tensors": len(self._index), "files": self._files}
        for name, content in (("model.safetensors.index.json", index), (MANIFEST, manifest)):
            (self._folder / name).write_text(json.dumps(content, indent=1))
        if self.fsync:
            for file in [path for path in self._folder.iterdir() if path.name not in self._files]:
                _sync(file)
            _sync(self._folder)

    def _sync_behind(self, file: Path) -> None:
        """While the next file is written; a few at a time."""
        if len(self._syncing) == _SYNCS_AT_ONCE:
            self._await_sync()
        self._syncing.append(start(partial(_sync, file), "fsync"))

    def _await_syncs(self) -> None:
        while self._syncing:
            self._await_sync()

    def _await_sync(self) -> None:
        with _explained(self.path):
            self._syncing.pop(0).result()

    def _pruned(self) -> None:
        """Older versions are removed behind the engines' backs; whoever looks at the folder waits for that."""
        if self._pruning is not None:
            wait([self._pruning])
            self._pruning = None

    def _seen_by_engines(self, folder: Path) -> str:
        text = str(folder.resolve())
        for here, there in self.path_map.items():
            if text == here or text.startswith(here.rstrip("/") + "/"):
                return there.rstrip("/") + text[len(here.rstrip("/")) :]
        return text

    def _prune(self) -> None:
        """Remove all but the newest `keep` published versions, and what config and tokenizer are copied from.

        Folders without our manifest are not ours.
        """
        ours = [p for p in self.path.iterdir() if not p.name.startswith(".") and (p / MANIFEST).is_file()]
        if self._reference is not None:
            ours = [p for p in ours if not p.samefile(self._reference)]
        for old in sorted(ours, key=lambda p: p.stat().st_mtime_ns, reverse=True)[self.keep :]:
            hidden = self._hidden()  # half removed, it must not look like a checkpoint
            os.rename(old, hidden)
            shutil.rmtree(hidden, ignore_errors=True)

    def _hidden(self) -> Path:
        return self.path / f".tmp-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"

    def _drop(self) -> None:
        folder, self._folder = self._folder, None
        wait(self._syncing)
        self._syncing = []
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def header_of(layout: BucketLayout) -> bytes:
    """The safetensors header of a bucket: 8 bytes size, then JSON padded with spaces to a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for e in layout.entries:
        if e.spec.dtype not in _DTYPES:
            raise TransportError(f"{e.spec}: safetensors has no name for this dtype")
        entries[e.spec.name] = {
            "dtype": _DTYPES[e.spec.dtype],
            "shape": list(e.spec.shape),
            "data_offsets": [e.offset, e.offset + e.nbytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_file(path: Path, header: bytes, memory: torch.Tensor, digest: int | None) -> int:
    """xxh3-64 over `memory`, unless it is known, taken piece by piece on the way out."""
    running = RunningDigest()
    with (
        _explained(path),
        open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file,
    ):
        _write(file, memoryview(header))
        view = memory.numpy().data
        for begin in range(0, len(view), PIECE):
            piece = view[begin : begin + PIECE]
            if digest is None:
                running.update(piece)
            _write(file, piece)
    return running.value() if digest is None else digest


def _write(file: RawIOBase, part: memoryview) -> None:
    while part:
        part = part[file.write(part) :]


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors of the file system as TransportErrors that name the path and the setting."""
    try:
        yield
    except OSError as error:
        hint = "; the disk is full" if error.errno == errno.ENOSPC else ""
        raise TransportError(f"cannot write {path}: {error.strerror}{hint}; see transport.path") from error


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_leftovers(root: Path) -> None:
    """Folders that a dead process of this host was still writing."""
    prefix = f".tmp-{socket.gethostname()}-"
    for folder in root.glob(f"{prefix}*"):
        pid = folder.name.removeprefix(prefix).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
