"""Real engines on CPU: one virtual environment per engine, made from exact pins and kept in a cache folder.

    python tests/conformance/provision.py [vllm] [sglang] [lmdeploy]

The cache is `$WEIGHTSTREAM_ENGINES_HOME` (default `~/.cache/weightstream/engines`), the one folder that a CI needs to
keep. Needs Linux on x86-64 and Python 3.11. pip must find the wheel `torch==2.13.0+cpu`: where its index lacks it, name
an index or folder in PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS. Standard library only, so that it runs before anything is
installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ENGINES = ("vllm", "sglang", "lmdeploy")
HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
WITH_PROJECT = ("vllm",)  # loads our receiver through the entry point group vllm.general_plugins
PYTHON = (3, 11)  # what the pins were resolved for
PIP_TIMEOUT = 1800.0


class ProvisionError(Exception):
    """An engine could not be installed; the message ends with pip's own words."""


def home() -> Path:
    return Path(os.environ.get("WEIGHTSTREAM_ENGINES_HOME") or "~/.cache/weightstream/engines").expanduser().resolve()


def python_of(name: str) -> Path:
    return home() / name / "bin" / "python"


def version_of(name: str) -> str:
    """The pinned release of the engine itself: the first pin of its requirements."""
    pin = re.search(r"^[\w.-]+==(\S+)$", _requirements(name).read_text(), re.MULTILINE)
    assert pin is not None
    return pin[1]


def provision(name: str) -> Path:
    """The engine's interpreter. Builds the environment if it is missing or if what decides its content has changed."""
    if name not in ENGINES:
        raise ProvisionError(f"unknown engine {name!r}: expected one of {', '.join(ENGINES)}")
    folder = home() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        if _read(folder / ".stamp") != (stamp := _fingerprint(name)):
            _build(name, folder)
            (folder / ".stamp").write_text(stamp)  # last: an interrupted build is done again
        if name in WITH_PROJECT and _read(folder / ".project") != (stamp := _project_fingerprint()):
            _pip(name, "--no-deps", "--editable", str(PROJECT))
            (folder / ".project").write_text(stamp)
    return python_of(name)


def _build(name: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _run(name, [_base_python(), "-m", "venv", str(folder)])
    _pip(name, "--no-deps", "--requirement", str(_requirements(name)))
    if (standin := HERE / "standin" / name).is_dir():
        # Copied, so that a cached environment stands without this checkout.
        packages = folder / "lib" / "python{}.{}".format(*PYTHON) / "site-packages"
        shutil.copytree(standin, packages, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


def _pip(name: str, *args: str) -> None:
    pip = [str(python_of(name)), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--quiet"]
    _run(name, [*pip, *args])


def _run(name: str, command: list[str]) -> None:
    """Output goes to a file next to the environment: a failed install in CI must leave its reason behind."""
    log = home() / f"{name}.log"
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    with log.open("w") as out:
        try:
            code = subprocess.run(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=clean, timeout=PIP_TIMEOUT
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ProvisionError(f"{name}: {' '.join(command)}: {error}") from error
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise ProvisionError(f"{name}: {' '.join(command)} ended with {code} (log: {log}):\n{tail}")


def _base_python() -> str:
    if sys.version_info[:2] == PYTHON:
        return sys.executable
    name = "python{}.{}".format(*PYTHON)
    found = shutil.which(name)
    if found is None:
        this = sys.version.split()[0]
        raise ProvisionError(f"the engines' pins are for {name}, which is not on PATH; this is {this}")
    return found


def _requirements(name: str) -> Path:
    return HERE / "requirements" / f"{name}.txt"


def _fingerprint(name: str) -> str:
    """Hash of all that decides what ends up in the environment."""
    digest = hashlib.sha256(repr(PYTHON).encode())
    standin = HERE / "standin" / name
    for path in [_requirements(name), *sorted(p for p in standin.rglob("*.p*") if p.suffix in (".py", ".pth"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _project_fingerprint() -> str:
    """Of the project's metadata only: an editable install follows the code by itself."""
    metadata = PROJECT / "pyproject.toml"
    if not metadata.exists():
        raise ProvisionError(f"{metadata} is missing: the plug-in cannot be installed")
    return hashlib.sha256(f"{PROJECT}\0{metadata.read_text()}".encode()).hexdigest()


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two test runs may want the same engine at once; the second waits and finds it there."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    names = sys.argv[1:] or list(ENGINES)
    for name in names:
        began = time.monotonic()
        try:
            python = provision(name)
        except ProvisionError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"{name} {version_of(name)}: {python} ({time.monotonic() - began:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
