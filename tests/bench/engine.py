"""An engine without a model: real routes, real bytes, applied into parameters of its own. One process, one port.

Speaks what the adapters need of vLLM (our own receiver), SGLang and LMDeploy (torch handles), and nothing else.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import json
import pickle
import socketserver
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from stages.digest import tensor_digest
from stages.flow import TensorSpec
from stages.receiver import Receiver
from stages.transport.group import BroadcastGroup
from stages.transport.messages import GroupInit
from tests.bench.models import MODELS, arena


class Sink:
    """Parameters that arriving bytes are copied into."""

    def __init__(self, model: str) -> None:
        _, self.params = arena(MODELS[model]())
        self._address = {n: p.data_ptr() for n, p in self.params.items()}
        self._bytes = {n: p.view(-1).view(torch.uint8).numpy().data for n, p in self.params.items()}

    def __call__(self, spec: TensorSpec, start: int, memory: torch.Tensor) -> None:
        ctypes.memmove(self._address[spec.name] + start, memory.data_ptr(), memory.numel())

    def read(self, folder: Path) -> None:
        """Straight from the files to where they belong."""
        for file in sorted(folder.glob("*.safetensors")):
            with file.open("rb", buffering=0) as raw:
                (size,) = struct.unpack("<Q", raw.read(8))
                header = json.loads(raw.read(size))
                for name, entry in header.items():
                    if name != "__metadata__":
                        raw.seek(8 + size + entry["data_offsets"][0])
                        raw.readinto(self._bytes[name])

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        torch._foreach_copy_([self.params[n] for n, _ in weights], [t for _, t in weights])


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, model: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.sink = Sink(model)
        self.receiver = Receiver(0)
        self.group: BroadcastGroup | None = None
        self.version = "default"
        self.asleep = False
        self.paused = False

    def answer(self, path: str, query: str, body: dict[str, Any]) -> Any:
        match path:
            case "/init_weight_transfer_engine":
                self.receiver.init(body["init_info"])
            case "/start_weight_update":
                self.receiver.start()
            case "/update_weights" if "update_info" in body:
                self.receiver.receive(body["update_info"], self.sink)
            case "/update_weights" | "/update_weights_from_tensor":
                self._handles(body["serialized_named_tensors"][0], elements=path == "/update_weights")
                return {"success": True} if path != "/update_weights" else None
            case "/finish_weight_update":
                self.receiver.finish()
                self.version = body.get("weight_version", self.version)
            case "/init_weights_update_group":
                self.group = BroadcastGroup.join(GroupInit(**body, timeout=60.0), body["rank_offset"])
            case "/update_weights_from_distributed":
                self._broadcast(body)
            case "/update_weights_from_disk":
                self.sink.read(Path(body["model_path"]))
                self.version = body["weight_version"]
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/sleep" | "/wakeup":
                self.asleep = path == "/sleep" or "kv_cache" not in query
            case "/pause" | "/resume":
                self.paused = path == "/pause"
        return {"success": True}

    def state(self, path: str) -> Any:
        match path:
            case "/is_sleeping":
                return {"is_sleeping": self.asleep}
            case "/is_paused":
                return {"is_paused": self.paused}
            case "/get_world_size":
                return {"world_size": 1}
            case "/weight_info" | "/model_info":
                return {"weight_version": self.version}
            case "/weightstream/digest":
                return {"tensors": {n: tensor_digest(p) for n, p in self.sink.params.items()}}
        return {}

    def _handles(self, payload: str, elements: bool) -> None:
        # The sender is this benchmark itself, so plain pickle it is, as in the real engine.
        state = pickle.loads(base64.b64decode(payload))
        if not state["metadata"]:
            return
        flat = state["flattened_tensor"]
        if isinstance(flat, tuple):
            flat = flat[0](*flat[1])
        parts = [(m.name, flat[m.start_idx : m.end_idx], m) for m in state["metadata"]]
        self.sink.load([(n, (p if elements else p.view(m.dtype)).view(m.shape)) for n, p, m in parts])

    def _broadcast(self, body: dict[str, Any]) -> None:
        if not body["names"]:
            return
        assert self.group is not None
        sizes = [torch.Size(s).numel() for s in body["shapes"]]
        flat = torch.empty(sum(sizes), dtype=torch.bfloat16)
        self.group.broadcast(flat.view(torch.uint8))
        parts = flat.split(sizes)
        self.sink.load([(n, p.view(s)) for n, p, s in zip(body["names"], parts, body["shapes"], strict=True)])


class Handler(socketserver.StreamRequestHandler):
    """HTTP as our adapters speak it, over kept connections, at little cost of its own."""

    disable_nagle_algorithm = True
    server: Server

    def handle(self) -> None:
        while line := self.rfile.readline():
            method, target, _ = line.decode().split(" ")
            length = 0
            while (header := self.rfile.readline()) != b"\r\n":
                name, _, value = header.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            raw = self.rfile.read(length)
            path, _, query = target.partition("?")
            if method == "GET":
                answer = self.server.state(path)
            else:
                answer = self.server.answer(path, query, json.loads(raw) if raw else {})
            self._send(answer)

    def _send(self, value: Any) -> None:
        data = json.dumps(value).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self.wfile.write(head.encode() + data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    torch.set_num_threads(1)
    server = Server(parser.parse_args().model)
    print(json.dumps({"url": f"http://127.0.0.1:{server.server_address[1]}"}), flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()  # ends when whoever started this process does


if __name__ == "__main__":
    main()
