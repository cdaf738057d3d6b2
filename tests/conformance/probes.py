"""What a real engine holds and says: stock calls to prove an update by, and independent computations to compare with.

Nothing in here uses weightstream.
"""

from __future__ import annotations

import base64
import hashlib
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import load_file

from .servers import MODEL, EngineServer, direct_session

PROMPT = (5, 17, 42, 99, 7, 300, 211, 64, 5, 17)
LONG_PROMPT = tuple(
    4 + i * 37 % 500 for i in range(220)
)  # longer than a block of vLLM's prefix cache (128 tokens on CPU)
TIMEOUT = 120.0


@dataclass(frozen=True)
class Spoken:
    """Greedy tokens and the log probability of each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    def close_to(self, other: Spoken, tolerance: float) -> bool:
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return self.tokens == other.tokens and max(abs(a - b) for a, b in pairs) <= tolerance


def call(
    server: EngineServer, method: str, path: str, body: Any = None, *, control: bool = True, **kwargs: Any
) -> requests.Response:
    """One request with the right key. `control` calls take SGLang's admin key where there is one."""
    key = (server.admin_key if control else None) or server.api_key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with direct_session() as session:
        return session.request(method, server.url + path, json=body, headers=headers, timeout=TIMEOUT, **kwargs)


def ask(server: EngineServer, method: str, path: str, body: Any = None, *, control: bool = True, **kwargs: Any) -> Any:
    """The same; anything but 200 is an error. Returns the JSON body, or the text."""
    response = call(server, method, path, body, control=control, **kwargs)
    if response.status_code != 200:
        raise AssertionError(f"{method} {path}: HTTP {response.status_code}: {response.text[:500]}")
    return response.json() if response.text and "json" in response.headers.get("content-type", "") else response.text


def speak(server: EngineServer, prompt: Sequence[int] = PROMPT, count: int = 12) -> Spoken:
    """Greedy continuation of a prompt of token ids; vLLM and SGLang only."""
    body: dict[str, Any]
    if server.name == "vllm":
        wanted = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
        body = {"model": MODEL, "prompt": list(prompt)} | wanted
        choice = ask(server, "POST", "/v1/completions", body, control=False)["choices"][0]
        return Spoken(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True}
    meta = ask(server, "POST", "/generate", body, control=False)["meta_info"]
    said = meta["output_token_logprobs"]
    return Spoken(tuple(token for _, token, *_ in said), tuple(logprob for logprob, *_ in said))


@cache
def expected_speech(folder: Path, prompt: tuple[int, ...] = PROMPT, count: int = 12) -> Spoken:
    """The same from transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = list(prompt)
    logprobs = []
    with torch.inference_mode():
        for _ in range(count):
            last = torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1], dim=-1)
            tokens.append(int(last.argmax()))
            logprobs.append(float(last.max()))
    return Spoken(tuple(tokens[len(prompt) :]), tuple(logprobs))


def sglang_checksum(server: EngineServer) -> str:
    """Over every parameter on every rank."""
    answer = ask(server, "POST", "/weights_checker", {"action": "checksum"})
    assert len(answer["ranks"]) == server.tp, answer
    return str(answer["per_engine_checksum"])


def lmdeploy_params(server: EngineServer) -> list[dict[str, str]]:
    """Per rank: parameter -> sha256 of its bytes."""
    return [{name: p["sha256"] for name, p in rank.items()} for rank in ask(server, "GET", "/_debug/params")]


def version_of(server: EngineServer) -> str:
    """The label that the engine gives to its weights; LMDeploy has none."""
    if server.name == "vllm":
        return str(ask(server, "GET", "/weight_info")["weight_version"])
    return str(ask(server, "GET", "/model_info", control=False)["weight_version"])


def fingerprint(server: EngineServer) -> Any:
    """Something that differs whenever the weights do: equal before and after means untouched."""
    if server.name == "sglang":
        return sglang_checksum(server)
    return lmdeploy_params(server) if server.name == "lmdeploy" else speak(server).tokens


def stock_update(server: EngineServer, folder: Path) -> None:
    """A whole update by the engine's simplest own route."""
    if server.name == "sglang":
        # Paused, because a request is answered a moment before its scheduler is idle, and only then can it flush.
        ask(server, "POST", "/pause_generation", {"mode": "retract"})
        ask(server, "POST", "/update_weights_from_disk", {"model_path": str(folder), "keep_pause": True})
        ask(server, "POST", "/continue_generation", {})
    elif server.name == "vllm":
        ask(server, "POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        ask(server, "POST", "/reset_prefix_cache")  # an update does not invalidate it
    else:
        # (name, (rebuild, its arguments)): the bytes by value where a trainer on the same GPU sends a CUDA handle. As
        # uint8, because an fp8 storage does not pickle by value.
        state = load_file(folder / "model.safetensors")
        items = [(name, (torch.Tensor.view, (t.view(torch.uint8), t.dtype))) for name, t in state.items()]
        payload = base64.b64encode(pickle.dumps(items)).decode()
        ask(server, "POST", "/update_weights", {"serialized_named_tensors": [payload] * server.tp, "finished": True})


def expected_lmdeploy_params(folder: Path, names: Sequence[str], rank: int, tp: int, ep: int = 1) -> dict[str, str]:
    """What `lmdeploy_params` must say of a rank that holds this checkpoint, computed from the file.

    With `ep` > 1 it holds everything but the experts whole, and of these its share.
    """
    state = load_file(folder / "model.safetensors")
    whole = {name: _lmdeploy_param(name, state, 0 if ep > 1 else rank, tp) for name in names}
    return {name: _sha256(t.chunk(ep)[rank] if ep > 1 and ".experts." in name else t) for name, t in whole.items()}


# How LMDeploy 0.18.0 lays out its parameters: q/k/v and gate/up fused along rows and split by rows within each of them,
# o and down split by columns, experts stacked, all else whole on every rank. Scales of fp8 blocks go the way of their
# weights.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_BY_COLUMNS = ("o_proj", "down_proj")


def _lmdeploy_param(name: str, state: dict[str, torch.Tensor], rank: int, tp: int) -> torch.Tensor:
    if expert := re.fullmatch(r"(.+\.experts\.)(gate_up|down)\.weight", name):
        count = len({n for n in state if n.startswith(expert[1]) and n.endswith(".down_proj.weight")})
        each = (f"{expert[1]}{i}.{expert[2]}_proj.weight" for i in range(count))
        return torch.stack([_lmdeploy_param(one, state, rank, tp) for one in each])
    module, kind = re.fullmatch(r"(.+?)\.(weight\w*)", name).groups()  # type: ignore[union-attr]
    parent, _, leaf = module.rpartition(".")
    if leaf in _FUSED:
        parts = (state[f"{parent}.{part}.{kind}"] for part in _FUSED[leaf])
        return torch.cat([part.chunk(tp, dim=0)[rank] for part in parts])
    if name == "lm_head.weight" and name not in state:
        name = "model.embed_tokens.weight"  # tied
    return state[name].chunk(tp, dim=1)[rank] if leaf in _BY_COLUMNS else state[name]


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def assert_lmdeploy_holds(server: EngineServer, folder: Path, ep: int = 1, ep_rank: int = 0) -> None:
    """Assert that LMDeploy holds exactly this checkpoint, parameter by parameter, on every rank of this server."""
    for rank, found in enumerate(lmdeploy_params(server), start=ep_rank):
        expected = expected_lmdeploy_params(folder, list(found), rank, server.tp, ep)
        wrong = [name for name in found if found[name] != expected[name]]
        assert not wrong, f"rank {rank}: {len(wrong)} of {len(found)} parameters differ from {folder.name}: {wrong[:5]}"
