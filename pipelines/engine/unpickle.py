"""Payload pickles, read by an exact allow-list of names.

`find_class` never hands out a real function or class, only frozen stand-ins: nothing that a pickle can name may be
called with arguments we did not check, instantiated, or changed in place (`BUILD` on torch's own classes would change
them for the whole process). `pipelines.engine.pickles` has the list of opcodes.
"""

from __future__ import annotations

import io
import re
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions

from pipelines.engine.pickles import BlockedError, Call, Metadata, PayloadError, Reader, Token, exactly
from stages.transport.cuda_ipc import check_handle_args
from stages.transport.shm import check_segment

# torch's own rebuild functions, which have no annotations
_reductions: Any = reductions


def _encode(text: str, encoding: str) -> bytes:
    """How pickle protocol 2 writes bytes."""
    if encoding != "latin1":
        raise BlockedError(f"Blocked encoding {encoding!r} during pickle deserialization")
    return text.encode("latin1")


def _empty_dict() -> dict[str, Any]:
    return {}


def _rebuild_tensor(cls: type, storage: Any, metadata: tuple[Any, ...]) -> Any:
    offset, size, stride, _requires_grad = metadata
    return _view(storage, offset, size, stride)


def _rebuild_tensor_v2(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Any:
    return _view(storage, offset, size, stride)


def _rebuild_tensor_v3(
    storage: Any, offset: int, size: Any, stride: Any, requires_grad: bool, hooks: Any, dtype: torch.dtype, *_: Any
) -> Any:
    return _view(storage, offset, size, stride, dtype)


def _view(storage: Any, offset: int, size: Any, stride: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor over a storage. torch would let the storage grow to whatever size the payload says."""
    if not isinstance(storage, torch.storage.TypedStorage):
        raise PayloadError(f"a tensor over a {type(storage).__name__}, not over a storage with a dtype")
    kind = dtype or storage.dtype
    if not isinstance(kind, torch.dtype):
        raise PayloadError("a tensor without a dtype")
    sizes, strides = [_index(n) for n in size], [_index(n) for n in stride]
    count, last = 1, _index(offset)
    for length, step in zip(sizes, strides, strict=True):
        count *= length
        last += (length - 1) * step
    room = storage._untyped_storage.nbytes() // kind.itemsize
    if count and max(count, last + 1) > room:
        raise PayloadError(f"a tensor of shape {sizes} and stride {strides} lies outside of its storage of {room}")
    return torch.empty(0, dtype=kind, device=storage._untyped_storage.device).set_(
        storage._untyped_storage, offset, sizes, strides
    )


def _index(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise PayloadError(f"a {type(value).__name__} where an index or a size belongs")
    return value


def _rebuild_parameter(data: torch.Tensor, *_: Any) -> torch.Tensor:
    return data


def _rebuild_typed_storage(storage: Any, dtype: torch.dtype) -> Any:
    if not isinstance(storage, torch.UntypedStorage) or not isinstance(dtype, torch.dtype):
        raise PayloadError("a typed storage of something else than a storage and a dtype")
    return _reductions.rebuild_typed_storage(storage, dtype)


_MANAGER = re.compile(r"/[^\0]*/torch-shm-dir-[A-Za-z0-9]{6}/manager\.sock")


def _rebuild_storage_filename(cls: type, manager: bytes, handle: bytes, size: int, dtype: Any = None) -> Any:
    """torch connects to any socket and grows any segment that a payload names: both must be what torch's sender makes."""
    if not (isinstance(manager, bytes) and isinstance(handle, bytes) and handle.startswith(b"/torch_")):
        raise BlockedError("shared memory handles must be those of torch's file_system sharing")
    if cls not in (torch.UntypedStorage, torch.storage.TypedStorage):
        raise BlockedError("shared memory handles must be those of a storage")
    if not isinstance(dtype, torch.dtype | None):
        raise PayloadError("a storage of something that is no dtype")
    socket = manager.decode("utf-8", "surrogateescape")
    if _MANAGER.fullmatch(socket) is None or not _is_socket(socket):
        raise BlockedError("shared memory handles must name the manager that torch's sender runs")
    nbytes = _index(size) * (dtype.itemsize if dtype is not None else 1)
    check_segment(handle[1:].decode("utf-8", "surrogateescape"), nbytes)
    return _reductions.rebuild_storage_filename(cls, manager, handle, size, dtype)


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(Path(path).lstat().st_mode)
    except OSError:
        return False


def _rebuild_cuda_tensor(*args: Any) -> Any:
    values = [*args]
    check_handle_args(values)
    if isinstance(values[6], str):
        values[6] = _device_index(values[6])
    values[10] = False
    return _reductions.rebuild_cuda_tensor(*values)


def _device_index(uuid: str) -> int:
    """SGLang's senders may name the GPU by its UUID, since the two sides may count devices differently."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise PayloadError(f"no GPU here has the UUID {uuid}")


# -- tensors by value -------------------------------------------------------------------------------------------------

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}


class _StorageReader(Reader):
    """The one object of a storage's fourth pickle."""

    found: tuple[torch.dtype, str, int] | None = None

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("torch.storage", "UntypedStorage"):
            raise PayloadError("AttributeError: type object 'UntypedStorage' has no attribute 'dtype'")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _location, numel, view = exactly(tuple, pid)
        if kind != "storage" or not isinstance(dtype, torch.dtype) or view is not None or self.found is not None:
            raise BlockedError("Blocked persistent id")
        self.found = dtype, exactly(str, key), _index(numel)
        return self.found


def _load_from_bytes(data: bytes) -> Any:
    """A storage that carries its bytes: torch's format from before zip files, which is itself a row of five pickles.

    Read here, as what it is for a storage and nothing else: `torch.load` takes many more names even with weights_only, and
    code of other packages may add to them.
    """
    file = io.BytesIO(data)
    if Reader(file).load() != _MAGIC or Reader(file).load() != _PROTOCOL:
        raise PayloadError("a storage that torch did not write")
    Reader(file).load()  # byte order and sizes of the sender's C types
    reader = _StorageReader(file)
    if reader.load() is not reader.found or reader.found is None:
        raise PayloadError("a storage that is none")
    dtype, key, numel = reader.found
    if Reader(file).load() != [key]:
        raise PayloadError("a storage without its key")
    (count,) = struct.unpack("<q", file.read(8))
    content = bytearray(file.read())
    if count != numel or len(content) != numel * dtype.itemsize:
        raise PayloadError(f"a storage of {numel} elements with {len(content)} bytes")
    memory = torch.frombuffer(content, dtype=torch.uint8).untyped_storage() if content else torch.UntypedStorage(0)
    return torch.storage.TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)


_MODULE = "torch.multiprocessing.reductions"
_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    (_MODULE, "rebuild_tensor"): _rebuild_tensor,
    (_MODULE, "rebuild_typed_storage"): _rebuild_typed_storage,
    (_MODULE, "rebuild_storage_filename"): _rebuild_storage_filename,
    (_MODULE, "rebuild_cuda_tensor"): _rebuild_cuda_tensor,
    ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"): _rebuild_cuda_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch.storage", "_load_from_bytes"): _load_from_bytes,
    ("torch", "Size"): lambda sizes=(): torch.Size([_index(n) for n in sizes]),
    ("_codecs", "encode"): _encode,
    ("collections", "OrderedDict"): _empty_dict,
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


class _PayloadReader(Reader):
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
        return super().find_class(module, name)


def loads(data: bytes) -> Any:
    """The unpickled payload. Raises BlockedError for what is off the list, PayloadError for a malformed payload."""
    try:
        return _PayloadReader(io.BytesIO(data)).load()
    except PayloadError:
        raise
    except Exception as error:
        raise PayloadError(f"{type(error).__name__}: {error}") from error
