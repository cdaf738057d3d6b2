"""Running the command line as a user does, and finding out what it left behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
MARK = "WEIGHTSTREAM_TEST_MARK"


def _as_from_a_terminal() -> None:
    """Background jobs of a shell inherit an ignored SIGINT; a user's command does not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Command:
    """`run.py` with `arguments` in `folder`, as a process with a mark that all of its descendants inherit."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("WEIGHTSTREAM_")}
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "run.py"), *arguments],
            cwd=folder,
            env=inherited | {MARK: self.mark, "TMPDIR": str(self.temporary)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_as_from_a_terminal,
        )
        self.out = self.err = ""

    def wait(self, seconds: float = 240.0) -> int:
        """The exit code; `out` and `err` hold what was said."""
        self.out, self.err = self.process.communicate(timeout=seconds)
        return self.process.returncode

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """As the terminal does: to the whole foreground process group."""
        os.killpg(self.process.pid, number)

    def descendants(self) -> list[psutil.Process]:
        """Every process that has the mark, ourselves aside."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.pid != self.process.pid:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def left_behind(self, seconds: float = 20.0) -> list[str]:
        """Processes, shared-memory segments and temporary files that are still there after a while. Should be none."""
        deadline = time.monotonic() + seconds
        while True:
            left = [f"process {p.pid}" for p in self.descendants()]
            left += [str(p) for p in Path("/dev/shm").iterdir() if f"_{self.process.pid}_" in p.name]
            left += [str(p) for p in self.temporary.rglob("*") if p.is_file()]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.2)


def run(folder: Path, *arguments: str, **environment: str) -> Command:
    """Run to the end."""
    command = Command(folder, *arguments, **environment)
    command.wait()
    return command
