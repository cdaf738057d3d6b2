"""What proves that an engine has a checkpoint's weights, all of them: a changed output proves nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from . import probes
from .servers import EngineServer

FP32_TOLERANCE = 1e-3  # in log-probability; another version of the weights is off by more than 1
SAME_ENGINE_TOLERANCE = 0.02  # of one engine in 16 bits with itself: batches and caches change the order of sums


@dataclass(frozen=True)
class Learned:
    """What the engine showed after it loaded the checkpoint by its own stock route."""

    checksum: str | None
    spoken: probes.Spoken


def learn(server: EngineServer, folder: Path) -> Learned | None:
    """Load by the stock route and look; None where nothing is to be learned by it. It has these weights then."""
    if server.name == "lmdeploy" or (server.name == "vllm" and _config(folder)["tie_word_embeddings"]):
        # LMDeploy tells its parameters. A stock reload of a tied checkpoint leaves vLLM's old head in place on CPU.
        return None
    probes.stock_update(server, folder)
    return Learned(probes.sglang_checksum(server) if server.name == "sglang" else None, probes.speak(server))


def assert_serves(server: EngineServer, folder: Path, learned: Learned | None) -> None:
    """LMDeploy: every parameter on every rank. The others: what was learned; and where the arithmetic is float32, the
    tokens and log-probabilities of transformers, also after a prompt that lay in the prefix cache."""
    if server.name == "lmdeploy":
        probes.assert_lmdeploy_holds(server, folder)
        assert probes.ask(server, "GET", "/is_sleeping") == {"is_sleeping": False}
        return
    spoken = probes.speak(server)
    if learned is not None:
        assert spoken.close_to(learned.spoken, SAME_ENGINE_TOLERANCE), f"{spoken} is not {learned.spoken}"
        if learned.checksum is not None:
            assert probes.sglang_checksum(server) == learned.checksum
    if _config(folder)["torch_dtype"] == "float32":
        for prompt in (probes.PROMPT, probes.LONG_PROMPT):
            spoken, expected = probes.speak(server, prompt), probes.expected_speech(folder, prompt)
            assert spoken.close_to(expected, FP32_TOLERANCE), f"{spoken} is not {expected}"


def fill_prefix_cache(server: EngineServer) -> None:
    """So that an update which forgets to flush is found out."""
    if server.name != "lmdeploy":
        for _ in range(2):
            probes.speak(server, probes.LONG_PROMPT)


def _config(folder: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((folder / "config.json").read_text())
    return config
