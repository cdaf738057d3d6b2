"""Coverage-guided fuzzing of everything that reads bytes from outside; not part of the test run.

    pip install atheris
    PYTHONPATH=.:tests python tests/security/fuzz_atheris.py payload [-runs=1000000] [libFuzzer's own flags]

The reader's name is one of READERS. Ends at the first error that is not one of ours.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

try:
    import atheris
except ImportError:
    sys.exit("atheris is not installed, so nothing was fuzzed: pip install atheris")

with atheris.instrument_imports(include=["pipelines", "stages", "pickle"]):
    from pipelines.engine.checkpoint import Checkpoint as EngineCheckpoint
    from pipelines.engine.unpickle import loads
    from pipelines.report import read_report
    from stages.errors import WeightstreamError
    from stages.flow import plan_from_json
    from stages.gather.checkpoint import INDEX, Checkpoint, read_header
    from stages.quantize.scheme import scheme_of
    from stages.transport.cuda_ipc import check_handle_args, from_json


def _json(read: Callable[[object], object]) -> Callable[[bytes, Path], object]:
    def reader(data: bytes, folder: Path) -> None:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(data)
            read(value)

    return reader


def _file(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    def reader(data: bytes, folder: Path) -> None:
        (folder / name).write_bytes(data)
        read(folder / name if name.endswith((".safetensors", "report.json")) else folder)

    return reader


READERS: dict[str, Callable[[bytes, Path], object]] = {
    "payload": lambda data, folder: loads(data),
    "plan": _json(plan_from_json),
    "handle": _json(lambda value: check_handle_args(from_json(value)) if isinstance(value, list) else None),
    "header": _file("x.safetensors", read_header),
    "index": _file(INDEX, Checkpoint),
    "quantization": _file("config.json", scheme_of),
    "engine": _file("config.json", lambda folder: EngineCheckpoint(folder).block_fp8),
    "report": _file("report.json", read_report),
}


def main() -> None:
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in READERS:
        sys.exit(f"which reader? one of {', '.join(READERS)}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "x.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")

        def one(data: bytes) -> None:
            with contextlib.suppress(WeightstreamError):
                READERS[name](data, Path(folder))

        atheris.Setup(sys.argv, one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
