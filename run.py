"""weightstream's command line: compose a config, run it, print the report. `python run.py --help` shows how."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def main() -> None:
    """Run what the arguments ask for and exit with its code; see pipelines/cli/app.py."""
    try:
        _no_other_packages()
        from pipelines.cli.app import App

        code = App().main(sys.argv[1:])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


def _no_other_packages() -> None:
    """Our package names are common words: say so when Python finds those of somebody else."""
    for name in ("pipelines", "stages"):
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if found != Path(__file__).resolve().parent / name:
            print(f"weightstream: Python finds another package {name!r}: {found}", file=sys.stderr)
            print("  uninstall that, or take it out of PYTHONPATH", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main()
