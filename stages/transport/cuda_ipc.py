"""CUDA IPC handles as data: exported once per slot, opened by device UUID, JSON on our own wire and pickle only on vLLM's.

A handle is what `torch.multiprocessing.reductions.reduce_tensor` gives for a CUDA tensor, arguments of `rebuild_cuda_tensor`
(15 of them, torch 2.4 to 2.14); the exporting process must keep the tensor alive as long as anybody has it open.
"""

from __future__ import annotations

import base64
import pickle
from typing import Any

import torch
from torch.multiprocessing import reductions

from stages.errors import TransportError

DEVICE_ARG = 6  # index of the device among the arguments: the receiver puts its own there
_TYPES: dict[str, Any] = {
    "Tensor": torch.Tensor,
    "UntypedStorage": torch.UntypedStorage,
    "TypedStorage": torch.storage.TypedStorage,
}


def device_uuid(device: torch.device) -> str:
    """The UUID of a CUDA device, the same in every process whatever CUDA_VISIBLE_DEVICES says."""
    return str(torch.cuda.get_device_properties(device).uuid)


def export(tensor: torch.Tensor) -> dict[str, Any]:
    """A JSON-able handle: `{"uuid": device UUID, "args": [...]}`."""
    _, args = reductions.reduce_tensor(tensor)
    return {"uuid": device_uuid(tensor.device), "args": to_json(args)}


def open_handle(handles: list[dict[str, Any]], device: torch.device) -> torch.Tensor:
    """The tensor behind the one of `handles` (one per exporting GPU) that lives on our own device.

    Raises TransportError listing both sides' UUIDs when there is none.
    """
    mine = device_uuid(device)
    found = next((h for h in handles if h["uuid"] == mine), None)
    if found is None:
        raise TransportError(
            f"no CUDA IPC handle for this GPU {mine}: the trainer exported {[h['uuid'] for h in handles]}. Each engine rank "
            f"must share its GPU with a trainer rank; check CUDA_VISIBLE_DEVICES on both sides"
        )
    args = from_json(found["args"])
    args[DEVICE_ARG] = device.index
    tensor: torch.Tensor = reductions.rebuild_cuda_tensor(*args)
    return tensor


def pickle_for_vllm(handles: list[dict[str, Any]]) -> str:
    """vLLM's `ipc_handles_pickled` of one packed buffer: base64 of `{uuid: arguments}` over all exporting GPUs."""
    merged = {h["uuid"]: tuple(from_json(h["args"])) for h in handles}
    return base64.b64encode(pickle.dumps(merged)).decode()


def to_json(args: tuple[Any, ...]) -> list[Any]:
    """Each argument as itself or as `{"type" | "dtype" | "size" | "bytes": ...}`. Raises TransportError for others."""
    return [_encode(a) for a in args]


def from_json(args: list[Any]) -> list[Any]:
    """Inverse of `to_json`. Only the listed kinds can come out, whatever the sender wrote."""
    return [_decode(a) for a in args]


def _encode(arg: Any) -> Any:
    if arg is None or isinstance(arg, bool | int | str):
        return arg
    if isinstance(arg, bytes):
        return {"bytes": base64.b64encode(arg).decode()}
    if isinstance(arg, torch.dtype):
        return {"dtype": str(arg).removeprefix("torch.")}
    if isinstance(arg, tuple):  # torch.Size too
        return {"size": list(arg)}
    for name, kind in _TYPES.items():
        if arg is kind:
            return {"type": name}
    raise TransportError(f"CUDA IPC handle: this torch has an argument of type {type(arg).__name__} in it")


def _decode(arg: Any) -> Any:
    if not isinstance(arg, dict):
        return arg
    try:
        ((kind, value),) = arg.items()
        match kind:
            case "bytes":
                return base64.b64decode(value, validate=True)
            case "dtype":
                dtype = getattr(torch, value)
                if isinstance(dtype, torch.dtype):
                    return dtype
            case "size":
                return torch.Size(value)
            case "type":
                return _TYPES[value]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TransportError(f"CUDA IPC handle: malformed argument {arg!r}") from error
    raise TransportError(f"CUDA IPC handle: malformed argument {arg!r}")
