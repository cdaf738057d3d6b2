"""Which kind of engine answers at an address, by routes that each of them has."""

from __future__ import annotations

from stages.backends.actor import Actor
from stages.backends.http import Http
from stages.errors import EngineError

_SECONDS = 5.0
_OWNERS = ("vllm", "sglang", "lmdeploy")
# Seen in vLLM 0.32, SGLang 0.5.23 and LMDeploy 0.18; the first that answers, in this order.
_ROUTES = (("sglang", "/model_info"), ("vllm", "/version"), ("lmdeploy", "/is_sleeping"))


def kind_of(api: Http | Actor) -> str | None:
    """`vllm`, `sglang` or `lmdeploy`, as its list of models or its routes say; None where nothing tells, or answers."""
    try:
        models = api.raw("GET", "/v1/models", "identify", _SECONDS)
        if models.status_code == 200 and (owner := _owner(models.json())) in _OWNERS:
            return owner
        return next((k for k, route in _ROUTES if api.raw("GET", route, "identify", _SECONDS).status_code == 200), None)
    except (EngineError, ValueError):
        return None


def _owner(models: object) -> str | None:
    data = models.get("data") if isinstance(models, dict) else None
    first = data[0] if isinstance(data, list) and data else None
    owner = first.get("owned_by") if isinstance(first, dict) else None
    return owner if isinstance(owner, str) else None
