"""Command line of the embedded engine.

Prints one JSON line when it listens: `{"url", "pid", "incarnation"}`. Keys come from the environment:
WEIGHTSTREAM_ENGINE_API_KEY and WEIGHTSTREAM_ENGINE_ADMIN_KEY.
"""

from __future__ import annotations

import argparse
import os
import sys


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pipelines.engine", description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face checkpoint folder")
    parser.add_argument("--backend", required=True, choices=("lmdeploy", "sglang", "vllm"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes any free port")
    parser.add_argument("--tp", type=int, default=1, help="ranks, each a process with a full replica of the weights")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--on-fatal",
        default="answer",
        choices=("answer", "exit"),
        help="where the real engine's process ends: answer 500 and count as dead, or really exit",
    )
    parser.add_argument("--engine-version", default="", help="emulate another release than the default one")
    parser.add_argument("--prefix-cache", default="auto", choices=("auto", "on", "off"))
    parser.add_argument("--group-timeout", type=float, default=1800.0, help="seconds that a process group waits")
    parser.add_argument("--max-body-bytes", type=int, default=1 << 30)
    parser.add_argument("--exit-with-parent", action="store_true", help="exit when standard input is closed")
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse_arguments()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from pipelines.engine.serve import serve
    from stages.errors import ConfigError

    try:
        serve(arguments)
    except ConfigError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
