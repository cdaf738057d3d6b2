"""Many engines that do nothing: one asyncio process, one port each, every answer after a delay of its own.

    python -m tests.bench.fleet --count 64 --delay 0.02

Speaks what `backend=vllm transport=ipc` needs to pause, notify and resume; no bytes are read. POST /extra
{"/update_weights": s} makes one engine slower at a path from then on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any


class Stub:
    """One engine. `delay` seconds before every answer, `extra` on top of it by path."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.extra: dict[str, float] = {}
        self.version = "default"
        self.paused = False

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        match path:
            case "/extra":
                self.extra = body
            case "/pause" | "/resume":
                self.paused = path == "/pause"
            case "/finish_weight_update":
                self.version = body.get("weight_version", self.version)
        return {"is_paused": self.paused, "world_size": 1, "weight_version": self.version, "success": True}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                length = 0
                while (header := await reader.readline()) != b"\r\n":
                    name, _, value = header.partition(b":")
                    if name.lower() == b"content-length":
                        length = int(value)
                raw = await reader.readexactly(length)
                path = line.split(b" ")[1].partition(b"?")[0].decode()
                await asyncio.sleep(self.delay + self.extra.get(path, 0.0))
                data = json.dumps(self.answer(path, json.loads(raw) if raw else {})).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data)
                    + data
                )
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def run(count: int, delay: float) -> None:
    servers = [await asyncio.start_server(Stub(delay).serve, "127.0.0.1", 0, backlog=64) for _ in range(count)]
    print(json.dumps([f"http://127.0.0.1:{s.sockets[0].getsockname()[1]}" for s in servers]), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # ends when whoever started this process does
    for server in servers:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--delay", type=float, default=0.02)
    options = parser.parse_args()
    asyncio.run(run(options.count, options.delay))


if __name__ == "__main__":
    main()
