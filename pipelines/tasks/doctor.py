"""task=doctor: looks at this machine and at the engines of the config, and says what to mend. Changes nothing.

Each check yields findings; `fail` is what a run with this config would stumble over, `warn` what may slow or surprise.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

import torch
from rich.table import Table
from rich.text import Text

from pipelines.compose import compose_backend, compose_timeouts
from pipelines.lock import EngineLock
from pipelines.report_view import table_console
from pipelines.tasks import room
from stages.backends.base import Backend, Engine, Keys
from stages.backends.kinds import kind_of
from stages.bucket import parse_size
from stages.errors import ConfigError, EngineBusy, EngineError, WeightstreamError
from stages.transport.ipc import refuse_expandable_segments

OK, WARN, FAIL = "ok", "warn", "fail"
_STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}
_ENGINES = ("vllm", "sglang", "lmdeploy")
_FEW_FILES = 1024

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: its state, what was looked at, what was found, and what to do unless that is fine."""

    state: str
    what: str
    found: str
    mend: str = ""


def run(settings: Settings) -> int:
    """Print a line per finding; 1 when one of them is a failure."""
    findings = examine(settings)
    table = Table(title="doctor", show_header=False, show_lines=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for finding in findings:
        text = Text(finding.found)
        if finding.mend:
            text.append(f"\n-> {finding.mend}", _STYLES[finding.state])
        table.add_row(Text(finding.state, _STYLES[finding.state]), finding.what, text)
    console = table_console()
    console.print(table)
    count = {state: sum(f.state == state for f in findings) for state in (FAIL, WARN)}
    console.print(f"{count[FAIL]} to mend, {count[WARN]} to know about, of {len(findings)}")
    return int(count[FAIL] > 0)


def examine(settings: Settings) -> list[Finding]:
    """All findings. A check that breaks is a failure itself."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += check(settings)
        except (WeightstreamError, OSError) as error:
            first, _, rest = str(error).partition("\n")
            findings.append(Finding(FAIL, check.__name__.strip("_"), first, rest.strip()))
    return findings


def _python(settings: Settings) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield Finding(OK if good else FAIL, "python", version, "" if good else "use Python 3.11 or newer")


def _libraries(settings: Settings) -> Iterator[Finding]:
    from packaging.requirements import Requirement  # comes with hydra-core

    extras = [""]
    if settings["engines"]["kind"] == "embedded":
        extras.append("engine")
    if "ray" in (settings["engines"]["kind"], settings["launcher"]["kind"]):
        extras.append("ray")
    good = []
    for text in _requirements():
        wanted = Requirement(text)
        if wanted.marker is not None and not any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(FAIL, wanted.name, "not installed", f"pip install '{wanted.name}{wanted.specifier}'")
            continue
        if wanted.specifier.contains(version, prereleases=True):
            good.append(f"{wanted.name} {version}")
        else:
            yield Finding(FAIL, wanted.name, version, f"pip install '{wanted.name}{wanted.specifier}'")
    yield Finding(OK, "libraries", ", ".join(good))


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("weightstream") or []
    except importlib.metadata.PackageNotFoundError:  # run from its folder, not installed
        return ["torch", "hydra-core", "omegaconf", "rich", "safetensors", "xxhash", "numpy"]


def _engine_packages(settings: Settings) -> Iterator[Finding]:
    found = []
    for name in _ENGINES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    yield Finding(
        OK, "engines here", ", ".join(found) or "none installed in this environment; none is needed for a trainer"
    )


def _shared_memory(settings: Settings) -> Iterator[Finding]:
    used = settings["transport"]["_target_"].endswith(".Ipc")
    bad = FAIL if used else WARN
    free = room.shared_free()
    if free is None:
        yield Finding(
            bad, room.SHARED, "not there, or not writable", "start the container with --ipc=host or --shm-size"
        )
        return
    need = settings["bucket"].get("slots", 2) * parse_size(settings["bucket"].get("capacity", 0)) if used else 0
    text = f"{room.size(free)} free" + (
        f", the buckets take {room.size(need)} (task=plan knows better)" if need else ""
    )
    enough = free > need
    mend = "start the container with --ipc=host or --shm-size, or lower bucket.capacity"
    yield Finding(OK if enough else bad, room.SHARED, text, "" if enough else mend)


def _files(settings: Settings) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = 64 + 16 * len(room.ranks_of(settings["engines"]))
    state = FAIL if soft < need else WARN if soft < _FEW_FILES else OK
    mend = "" if state == OK else f"ulimit -n {min(65536, hard) if hard > 0 else 65536}"
    yield Finding(state, "open files", f"up to {soft:,}, {need} needed for these engines at most", mend)


def _port(settings: Settings) -> Iterator[Finding]:
    node = settings["transport"]
    if not node["_target_"].endswith(".Nccl"):
        return
    address, port = node["address"], node["port"]
    what = f"{address}:{port}"
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except socket.gaierror as error:
        yield Finding(FAIL, "port", f"{what}: {error.strerror}", "set transport.address to an address of this host")
    except OSError as error:
        mend = (
            "set transport.port to a free one, or 0"
            if error.errno == 98
            else "set transport.address to an address of this host"
        )
        yield Finding(FAIL, "port", f"{what}: {os.strerror(error.errno or 0)}", mend)
    else:
        yield Finding(OK, "port", f"{what} is free" if port else f"{address}: the system chooses a port")
    away = [url for url in settings["engines"].get("urls", []) if not _on_loopback(url)]
    if away and address in ("127.0.0.1", "localhost", "::1"):
        yield Finding(
            FAIL,
            "address",
            f"{away[0]} cannot reach {address}",
            "set transport.address to this host's, as engines see it",
        )


def _on_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _same_host(settings: Settings) -> Iterator[Finding]:
    if settings["transport"]["_target_"].endswith(".Ipc"):
        here = {socket.gethostname(), socket.getfqdn()}
        for url in settings["engines"].get("urls", []):
            if not _on_loopback(url) and urlsplit(url).hostname not in here:
                yield Finding(
                    WARN, "host", f"{url}: transport=ipc needs it on this host", "else choose transport=nccl or disk"
                )


def _proxies(settings: Settings) -> Iterator[Finding]:
    names = sorted(f"{name}_proxy" for name in getproxies_environment() if name != "no")
    yield Finding(
        OK, "proxies", f"{', '.join(names)} set; engines are asked directly all the same" if names else "none set"
    )


def _gpus(settings: Settings) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding(OK, "GPU", "none that torch sees: ipc is shared memory, nccl is gloo")
        return
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(i) for i in range(count)})
    yield Finding(OK, "GPU", f"{count} x {', '.join(names)}, CUDA {torch.version.cuda}")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    without = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if without:
        a, b = without[0]
        mend = "NCCL then goes over host memory; see nvidia-smi topo -m"
        yield Finding(WARN, "peer access", f"{len(without)} of {len(pairs)} pairs lack it, first {a} -> {b}", mend)
    elif pairs:
        yield Finding(OK, "peer access", f"between all {count} GPUs")
    try:
        refuse_expandable_segments(os.environ)
    except ConfigError as error:
        yield Finding(WARN, "allocator", str(error), "unset it where transport=ipc is used with GPUs")


def _variables(settings: Settings) -> Iterator[Finding]:
    found = sorted(name for name in os.environ if re.match(r"(NCCL|GLOO|UCX|TP)_", name))
    interfaces = {name for _, name in socket.if_nameindex()}
    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(name, "")
        words = [w for w in value.lstrip("^=").split(",") if w]
        nccl = name.startswith("NCCL")
        if value.startswith("^"):
            continue
        missing = [w for w in words if not (any(i.startswith(w) for i in interfaces) if nccl else w in interfaces)]
        if missing:
            mend = f"choose among {', '.join(sorted(interfaces))}, or unset it"
            yield Finding(FAIL, name, f"there is no interface {missing[0]!r} here", mend)
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"):
        if os.environ.get(name, "0") not in ("0", ""):
            yield Finding(WARN, name, "set: broadcasts take the slower way", "unset it unless this machine needs it")
    if settings["transport"]["_target_"].endswith(".Nccl") and "GLOO_SOCKET_IFNAME" not in os.environ:
        try:
            socket.getaddrinfo(socket.gethostname(), None)
        except OSError:
            mend = "set GLOO_SOCKET_IFNAME to the interface that engines reach, or put the name into /etc/hosts"
            yield Finding(FAIL, "host name", f"{socket.gethostname()} does not resolve, which gloo needs", mend)
    shown = ", ".join(f"{name}={os.environ[name]}" for name in found)
    yield Finding(OK, "variables", shown or "no NCCL_*, GLOO_* set; give trainer and engines the same ones")


def _keys(settings: Settings) -> Iterator[Finding]:
    Keys.from_environment()  # raises for one that no header can carry
    for name in ("WEIGHTSTREAM_API_KEY", "WEIGHTSTREAM_ADMIN_KEY"):
        yield Finding(OK, name, "set" if os.environ.get(name) else "not set")


def _folders(settings: Settings) -> Iterator[Finding]:
    wanted = {"temporary": Path(tempfile.gettempdir())}
    if settings["transport"]["_target_"].endswith(".Disk"):
        wanted["transport.path"] = Path(settings["transport"]["path"])
    if settings["trainer"]["_target_"].endswith(".ToyTrainer"):
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        wanted["cache"] = Path(cache)
    for what, folder in wanted.items():
        there = next(p for p in (folder, *folder.parents) if p.exists())
        if os.access(there, os.W_OK | os.X_OK):
            yield Finding(OK, what, f"{folder}: {room.size(room.disk_free(folder))} free")
        else:
            yield Finding(FAIL, what, f"{there} is not writable", "choose another folder")


def _engines(settings: Settings) -> Iterator[Finding]:
    node = settings["engines"]
    if node["kind"] != "remote":
        yield Finding(OK, "engines", f"engines={node['kind']}: there is none to ask before the run")
        return
    backend = compose_backend(settings)
    timeouts = compose_timeouts(settings)
    for url, tp in zip(node["urls"], room.ranks_of(node), strict=True):
        engine = backend.engine(url, tp, Keys.from_environment(), timeouts)
        try:
            yield _engine(engine, backend)
        finally:
            engine.close()


def _engine(engine: Engine, backend: Backend) -> Finding:
    from pipelines.cli.advice import advice

    try:
        lock = EngineLock(engine.identity)
    except EngineBusy as error:
        return Finding(FAIL, engine.url, str(error))
    try:
        engine.probe()
        version = engine.software()
        path = engine.model_path()
    except WeightstreamError as error:
        kind = kind_of(engine.api) if isinstance(error, EngineError) and error.status else None
        mend = f"set backend={kind}" if kind not in (None, backend.name) else advice(error) or ""
        return Finding(FAIL, engine.url, str(error).removeprefix(f"{engine.url}: "), mend)
    finally:
        lock.release()
    text = (
        f"{backend.name} {version or '(says no version)'}, tp={engine.tp}, serves {path or 'a model it does not name'}"
    )
    if version is not None and _number(version) < _number(backend.seen):
        return Finding(WARN, engine.url, text, f"older than {backend.seen}, the version that was tried; upgrade it")
    return Finding(OK, engine.url, text)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


CHECKS: tuple[Callable[[Settings], Iterator[Finding]], ...] = (
    _python,
    _libraries,
    _engine_packages,
    _shared_memory,
    _files,
    _port,
    _same_host,
    _proxies,
    _gpus,
    _variables,
    _keys,
    _folders,
    _engines,
)
