"""weightstream's command line: compose a config, run it, print the report. `python run.py --help` shows how."""

from __future__ import annotations

import sys


def main() -> None:
    """Run what the arguments ask for and exit with its code; see pipelines/cli/app.py."""
    try:
        from pipelines.cli.app import App

        code = App().main(sys.argv[1:])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
