"""CUDA IPC handles as data: exported once per slot, opened by device UUID, JSON on our own wire and pickle only on vLLM's.

A handle is what `torch.multiprocessing.reductions.reduce_tensor` gives for a CUDA tensor, arguments of `rebuild_cuda_tensor`
(15 of them, torch 2.4 to 2.14); the exporting process must keep the tensor alive as long as anybody has it open.
"""

from __future__ import annotations

import base64
import pickle
import re
from typing import Any

import torch
from torch.multiprocessing import reductions

from stages.errors import TransportError

DEVICE_ARG = 6  # index of the device among the arguments: the receiver puts its own there
# Of the arguments of rebuild_cuda_tensor: class, size, stride, offset, storage class, dtype, device, handle, its size and
# offset in bytes, requires_grad, shared memory that counts the holders and where in it, event, whether to wait for it.
_KINDS: tuple[Any, ...] = (
    *(type, tuple, tuple, int, type, torch.dtype, int | str | None, bytes | None, int, int, bool),
    *(bytes, int, bytes, bool),
)
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
    if device.type != "cuda":
        raise TransportError(
            f"CUDA IPC handles cannot be opened on {device}; the trainer and the engine must both run on GPU"
        )
    mine = device_uuid(device)
    uuids = [h.get("uuid") if isinstance(h, dict) else None for h in _listed(handles)]
    if mine not in uuids:
        raise TransportError(
            f"no CUDA IPC handle for this GPU {mine}: the trainer exported {uuids}. Each engine rank "
            f"must share its GPU with a trainer rank; check CUDA_VISIBLE_DEVICES on both sides"
        )
    args = from_json(_listed(handles[uuids.index(mine)].get("args")))
    check_handle_args(args)
    args[DEVICE_ARG] = device.index
    try:
        tensor: torch.Tensor = reductions.rebuild_cuda_tensor(*args)
    except RuntimeError as error:
        raise TransportError(f"the CUDA IPC handle for GPU {mine} cannot be opened: {error}") from error
    return tensor


def check_handle_args(args: list[Any]) -> None:
    """Raise TransportError unless these are what torch's sender hands over, as types and as names of shared memory.

    torch decrements a counter in whatever shared memory the handle names.
    """
    fits = len(args) == len(_KINDS) and all(isinstance(a, k) for a, k in zip(args, _KINDS, strict=True))
    if fits:
        numbers = [*args[1], *args[2], args[3], args[8], args[9], args[12]]
        fits = args[0] is torch.Tensor and args[4] in (torch.UntypedStorage, torch.storage.TypedStorage)
        fits = fits and all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
        fits = fits and re.fullmatch(rb"/torch_[A-Za-z0-9_-]{1,200}", args[11]) is not None
    if not fits:
        raise TransportError(f"CUDA IPC handle: malformed arguments {[type(a).__name__ for a in args]}")


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TransportError(f"CUDA IPC handle: a {type(value).__name__} where a list belongs")
    return value


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
