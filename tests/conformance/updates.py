"""weightstream's own API and command line, pointed at a real engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import WeightUpdater

from .provision import PROJECT
from .servers import SHM, EngineServer

COMMAND_TIMEOUT = 240.0


def overrides(server: EngineServer, transport: str, workspace: Path, *more: str) -> list[str]:
    """Overrides as on the command line; `workspace` is where a disk transport publishes."""
    own = {"nccl": ["transport.port=0"], "disk": [f"transport.path={workspace}", "transport.fsync=false"]}
    target = ["engines=remote", f"engines.urls=[{server.url}]", f"engines.tp={server.tp}"]
    return [f"backend={server.name}", f"transport={transport}", *own.get(transport, []), *target, *more]


def updater(server: EngineServer, transport: str, workspace: Path, *more: str) -> WeightUpdater:
    """Not open yet; use it in a `with` block."""
    return WeightUpdater.from_config(overrides(server, transport, workspace, *more))


def segments() -> set[str]:
    """Shared memory that this process made through torch, as every transport of ours does."""
    return {name for name in os.listdir(SHM) if name.startswith(f"torch_{os.getpid()}_")}


def give_keys(server: EngineServer, environment: pytest.MonkeyPatch) -> None:
    """weightstream takes its keys from the environment only."""
    for name, key in (("WEIGHTSTREAM_API_KEY", server.api_key), ("WEIGHTSTREAM_ADMIN_KEY", server.admin_key)):
        if key:
            environment.setenv(name, key)


def command_line(
    workspace: Path, *arguments: str, timeout: float = COMMAND_TIMEOUT
) -> subprocess.CompletedProcess[str]:
    """`python run.py ...` in a folder of its own, as a user has it."""
    command = [sys.executable, str(PROJECT / "run.py"), *arguments, f"hydra.run.dir={workspace}/run"]
    # A file: the shared-memory manager of torch inherits stdout and would keep a pipe open.
    with (workspace / "output.txt").open("w+") as output:
        code = subprocess.run(
            command,
            cwd=workspace,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            env=os.environ | {"COLUMNS": "200"},
        ).returncode
        output.seek(0)
        return subprocess.CompletedProcess(command, code, stdout=output.read())
