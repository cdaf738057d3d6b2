"""Command line of the embedded engine.

Prints one JSON line when it listens: `{"url", "pid", "incarnation"}`. Keys come from the environment:
WEIGHTSTREAM_ENGINE_API_KEY and WEIGHTSTREAM_ENGINE_ADMIN_KEY.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys

from pipelines.engine.settings import Settings, check_exposure, is_loopback
from stages.errors import ConfigError

API_KEY = "WEIGHTSTREAM_ENGINE_API_KEY"
ADMIN_KEY = "WEIGHTSTREAM_ENGINE_ADMIN_KEY"


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
    parser.add_argument("--enable-scale-out", action="store_true", help="vllm: serve /inference/v1/generate")
    parser.add_argument("--exit-with-parent", action="store_true", help="exit when standard input is closed")
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse_arguments()
    try:
        settings = settings_of(arguments)
        listener = bind(arguments.host, arguments.port)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        # Where torchao is installed, transformers imports it: three seconds for formats that the engine does not serve.
        sys.modules.setdefault("torchao", None)  # type: ignore[arg-type]
        from pipelines.engine.serve import serve

        serve(settings, listener, exit_with_parent=arguments.exit_with_parent)
    except ConfigError as error:
        sys.exit(f"error: {error}")


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Checked settings; the keys are taken out of the environment, so that child processes do not get them."""
    settings = Settings(
        model=arguments.model,
        backend=arguments.backend,
        tp=arguments.tp,
        dtype=arguments.dtype,
        device=arguments.device,
        on_fatal=arguments.on_fatal,
        engine_version=arguments.engine_version,
        prefix_cache=arguments.prefix_cache,
        group_timeout=arguments.group_timeout,
        max_body_bytes=arguments.max_body_bytes,
        scale_out=arguments.enable_scale_out,
        exposed=not is_loopback(arguments.host),
        api_key=os.environ.pop(API_KEY, None) or None,
        admin_key=os.environ.pop(ADMIN_KEY, None) or None,
    )
    check_exposure(arguments.host, settings.api_key)
    return settings


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds its port from here on. Raises ConfigError where it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without the protocol, asyncio does not set TCP_NODELAY on its connections, and every answer comes 40 ms late.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"port: cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


if __name__ == "__main__":
    main()
