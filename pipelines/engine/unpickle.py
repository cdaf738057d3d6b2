"""Payload pickles, read by an exact allow-list.

`find_class` never hands out a real function or class, only frozen stand-ins: nothing that a pickle can name may be
called with arguments we did not check, instantiated, or changed in place (`BUILD` on torch's own classes would change
them for the whole process).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing import reductions

# torch's own rebuild functions, which have no annotations
_utils: Any = torch._utils
_reductions: Any = reductions


class BlockedError(Exception):
    """The payload names something that is not on the list."""


class Metadata:
    """What a flattened bucket says about one tensor; stands for any of the classes that senders use for it."""

    __slots__ = ("dtype", "end_idx", "name", "numel", "shape", "start_idx")

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int

    def __setstate__(self, state: Any) -> None:
        fields = state[1] if isinstance(state, tuple) and len(state) == 2 and state[0] is None else state
        if not isinstance(fields, dict):
            raise BlockedError("tensor metadata must carry its fields as a dict")
        for key, value in fields.items():
            if key in self.__slots__:
                setattr(self, key, value)


class Token:
    """A frozen stand-in for a class that is only ever passed as an argument."""

    __slots__ = ("_target",)

    _target: Any

    def __init__(self, target: Any) -> None:
        object.__setattr__(self, "_target", target)

    def __setattr__(self, name: str, value: object) -> None:
        raise BlockedError("a payload may not change what it names")


class Call(Token):
    """A frozen stand-in for a function; its arguments are unwrapped when it is called."""

    __slots__ = ("name",)

    name: str

    def __init__(self, name: str, target: Callable[..., Any]) -> None:
        super().__init__(target)
        object.__setattr__(self, "name", name)

    def __call__(self, *args: Any) -> Any:
        return self._target(*(a._target if isinstance(a, Token) else a for a in args))


def _load_from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _encode(text: str, encoding: str) -> bytes:
    """How pickle protocol 2 writes bytes."""
    if encoding != "latin1":
        raise BlockedError(f"Blocked encoding {encoding!r} during pickle deserialization")
    return text.encode("latin1")


def _rebuild_tensor(cls: type, storage: Any, metadata: tuple[Any, ...]) -> Any:
    offset, size, stride, _requires_grad = metadata
    return _utils._rebuild_tensor(storage, offset, size, stride)


def _rebuild_tensor_v2(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Any:
    return _utils._rebuild_tensor(storage, offset, size, stride)


def _rebuild_tensor_v3(
    storage: Any, offset: int, size: Any, stride: Any, requires_grad: bool, hooks: Any, dtype: torch.dtype, *_: Any
) -> Any:
    return _utils._rebuild_tensor_v3(storage, offset, size, stride, False, {}, dtype)


def _rebuild_parameter(data: torch.Tensor, *_: Any) -> torch.Tensor:
    return data


def _rebuild_storage_filename(cls: type, manager: bytes, handle: bytes, size: int, dtype: Any = None) -> Any:
    if not (isinstance(manager, bytes) and isinstance(handle, bytes) and handle.startswith(b"/torch_")):
        raise BlockedError("shared memory handles must be those of torch's file_system sharing")
    return _reductions.rebuild_storage_filename(cls, manager, handle, size, dtype)


def _rebuild_cuda_tensor(*args: Any) -> Any:
    device = _device_index(args[6]) if isinstance(args[6], str) else args[6]
    return _reductions.rebuild_cuda_tensor(*args[:6], device, *args[7:10], False, *args[11:])


def _device_index(uuid: str) -> int:
    """SGLang's senders may name the GPU by its UUID, since the two sides may count devices differently."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise ValueError(f"no GPU here has the UUID {uuid}")


_MODULE = "torch.multiprocessing.reductions"
_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    (_MODULE, "rebuild_tensor"): _rebuild_tensor,
    (_MODULE, "rebuild_typed_storage"): _reductions.rebuild_typed_storage,
    (_MODULE, "rebuild_storage_filename"): _rebuild_storage_filename,
    (_MODULE, "rebuild_cuda_tensor"): _rebuild_cuda_tensor,
    ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"): _rebuild_cuda_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch.storage", "_load_from_bytes"): _load_from_bytes,
    ("torch", "Size"): torch.Size,
    ("_codecs", "encode"): _encode,
    ("collections", "OrderedDict"): dict,
}
_CLASSES: dict[tuple[str, str], type] = {
    ("torch", "Tensor"): torch.Tensor,
    ("torch.nn.parameter", "Parameter"): torch.Tensor,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
}
_METADATA = {
    ("types", "SimpleNamespace"),
    ("lmdeploy.utils", "FlattenedTensorMetadata"),
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        if key in _METADATA:
            return Metadata
        if key in _CALLS:
            return Call(name, _CALLS[key])
        if key in _CLASSES:
            return Token(_CLASSES[key])
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise BlockedError(f"Blocked unsafe global ({module}.{name}) during pickle deserialization")

    def persistent_load(self, pid: Any) -> Any:
        raise BlockedError("Blocked persistent id")


def loads(data: bytes) -> Any:
    """The unpickled payload. Raises BlockedError for a name off the list, anything else for a malformed payload."""
    return _Unpickler(io.BytesIO(data)).load()
