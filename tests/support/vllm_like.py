"""A scripted vLLM: its update routes as 0.32 has them, with our receiver as its weight-transfer engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from stages.flow import TensorSpec
from stages.receiver import Receiver
from support.chains import raw
from support.httpd import Answer, Asked, Server


class VllmLike:
    """vLLM 0.32 as far as updates go, with our plug-in: an error in update_weights ends the session."""

    def __init__(self, server: Server, world: int = 1) -> None:
        self.server = server
        self.version = "default"
        self.active = self.paused = False
        self.receiver = Receiver(0)
        self.weights: dict[str, bytes] = {}
        self.loading: dict[str, bytes] = {}
        self.routes: dict[str, Any] = {
            "/health": Answer(200),
            "/v1/models": Answer(200, {"data": [{"id": "m", "root": "/nowhere"}]}),
            "/get_world_size": Answer(200, {"world_size": world}),
            "/weight_info": lambda a: Answer(200, {"weight_version": self.version}),
            "/init_weight_transfer_engine": self.init,
            "/shutdown_weight_transfer_engine": self.shutdown,
            "/pause": self.pause,
            "/is_paused": lambda a: Answer(200, {"is_paused": self.paused}),
            "/resume": self.resume,
            "/start_weight_update": self.start,
            "/update_weights": self.update,
            "/finish_weight_update": self.finish,
            "/collective_rpc": self.collective,
            "/update_weight_version": self.label,
        }
        server.answers = dict(self.routes)

    def init(self, asked: Asked) -> Answer:
        try:
            self.receiver.init(asked.body["init_info"])
        except Exception as error:
            return no(str(error))
        return Answer(200, {"message": "Weight transfer initialized"})

    def shutdown(self, asked: Asked) -> Answer:
        self.receiver.shutdown()
        return Answer(200, {"message": "Weight transfer shut down"})

    def pause(self, asked: Asked) -> Answer:
        self.paused = True
        return Answer(200, {"status": "paused"})

    def resume(self, asked: Asked) -> Answer:
        assert not self.active, "a forward pass between start and finish ends the engine"
        self.paused = False
        return Answer(200, {"status": "resumed"})

    def start(self, asked: Asked) -> Answer:
        if self.active:
            return no("Weight update already active: start_weight_update was called twice")
        assert self.paused
        self.receiver.start()
        self.active, self.loading = True, {}
        return Answer(200, {"message": "Weight update started"})

    def update(self, asked: Asked) -> Answer:
        if not self.active:
            return no("update_weights without start_weight_update")
        try:
            self.receiver.receive(asked.body["update_info"], self.sink)
        except Exception as error:
            self.active = False
            return no(f"Call to collective_rpc method failed: {error}")
        return Answer(200, {"message": "Weights updated"})

    def sink(self, spec: TensorSpec, start: int, memory: torch.Tensor) -> None:
        self.loading[spec.name] = self.loading.get(spec.name, b"") + raw(memory)

    def finish(self, asked: Asked) -> Answer:
        try:
            self.receiver.finish()
        except Exception as error:
            return no(str(error))
        self.active, self.weights = False, self.loading
        self.version = asked.body.get("weight_version") or self.version
        return Answer(200, {"message": "Weight update finished"})

    def collective(self, asked: Asked) -> Answer:
        assert asked.body["method"] == "reload_weights"
        for file in Path(asked.body["kwargs"]["weights_path"]).glob("*.safetensors"):
            self.weights |= {n: raw(t) for n, t in load_file(file).items()}
        return Answer(200, {"results": [None]})

    def label(self, asked: Asked) -> Answer:
        self.version = asked.body["new_version"]
        return Answer(200, {"success": True})

    def restart(self) -> None:
        self.receiver.shutdown()
        self.version, self.active, self.paused = "default", False, False


def no(words: str, status: int = 500) -> Answer:
    return Answer(status, {"error": {"message": words, "type": "InternalServerError", "code": status}})
