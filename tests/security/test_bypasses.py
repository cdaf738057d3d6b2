"""Known ways around allow-lists of pickles, replayed against every place that reads handles.

Each was a hole of some engine or library: what is allowed leads to what is not (sgl-project/sglang#11909, CVE-2025-10164;
torch CVE-2025-32434; picklescan and fickling reports).
"""

from __future__ import annotations

import base64
import contextlib
import copyreg
import gc
import os
import pickle
import pickletools
import socket
import struct
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from pipelines.engine.pickles import BlockedError, Metadata, PayloadError, Token
from pipelines.engine.unpickle import loads
from stages.errors import TransportError
from stages.transport import cuda_ipc
from stages.transport.shm import Segment, handle_pickle
from tests.engine.client import LocalEngine
from tests.engine.conftest import Start


class Reduces:
    def __init__(self, function: Any, arguments: Any = (), *state: Any) -> None:
        self._reduced = function, arguments if isinstance(arguments, tuple) else (arguments,), *state

    def __reduce__(self) -> Any:
        return self._reduced


def op(*parts: bytes | str) -> bytes:
    """A pickle of these opcodes and arguments."""
    return b"\x80\x04" + b"".join(p.encode() if isinstance(p, str) else p for p in parts) + b"."


def word(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def named(module: str, name: str) -> bytes:
    return word(module) + word(name) + b"\x93"


def call(module: str, name: str, *arguments: bytes) -> bytes:
    return named(module, name) + b"(" + b"".join(arguments) + b"tR"


TOUCH = word("touch /tmp/never")
CHAINS = {
    "getattr": call("builtins", "getattr", named("torch", "Tensor"), word("__class__")),
    "getattr of a module": call("builtins", "getattr", named("torch", "storage"), word("os")),
    "a dotted name": named("torch.storage", "os.system"),
    "a dotted name under an allowed one": named("torch._utils", "_rebuild_tensor_v2.__globals__"),
    "a dotted module": named("torch.storage.os", "system"),
    "an attribute of an allowed module": named("torch.storage", "os"),
    "a private function beside an allowed one": named("torch.multiprocessing.reductions", "rebuild_storage_fd"),
    "a class beside an allowed one": named("torch.multiprocessing.reductions", "DupFd"),
    "methodcaller": call("operator", "methodcaller", word("system"), TOUCH),
    "attrgetter": call("operator", "attrgetter", word("__globals__")),
    "partial": call("functools", "partial", named("builtins", "eval")),
    "reduce": call("functools", "reduce", named("builtins", "exec")),
    "map": call("builtins", "map", named("os", "system"), word("true")),
    "eval": call("builtins", "eval", word("1")),
    "exec": call("builtins", "exec", word("1")),
    "__import__": call("builtins", "__import__", word("os")),
    "open": call("builtins", "open", word("/tmp/never"), word("w")),
    "breakpoint": call("builtins", "breakpoint"),
    "compile": call("builtins", "compile", word("1"), word("x"), word("eval")),
    "python 2's builtins": call("__builtin__", "eval", word("1")),
    "os": call("os", "system", TOUCH),
    "posix": call("posix", "system", TOUCH),
    "nt": call("nt", "system", TOUCH),
    "subprocess": call("subprocess", "check_output", word("true")),
    "pty": call("pty", "spawn", word("true")),
    "runpy": call("runpy", "run_path", word("/tmp/x")),
    "importlib": call("importlib", "import_module", word("os")),
    "pip": call("pip", "main"),
    "timeit": call("timeit", "timeit", word("1")),
    "code": call("code", "interact"),
    "bdb": call("bdb", "Bdb"),
    "marshal": call("marshal", "loads", b"C\x00"),
    "a pickle within": call("pickle", "loads", b"C\x00"),
    "_pickle": call("_pickle", "loads", b"C\x00"),
    "cloudpickle": call("cloudpickle.cloudpickle", "_make_function"),
    "dill": call("dill._dill", "_create_function"),
    "copyreg's constructor": call(
        "copyreg", "_reconstructor", named("torch", "Tensor"), named("builtins", "object"), b"N"
    ),
    "copyreg's extensions": call("copyreg", "add_extension", word("os"), word("system"), b"K\x01"),
    "torch.load": call("torch", "load", word("/tmp/x")),
    "torch.serialization.load": call("torch.serialization", "load", word("/tmp/x")),
    "torch.hub": call("torch.hub", "load", word("x"), word("y")),
    "torch.jit": call("torch.jit", "load", word("/tmp/x")),
    "torch's package importer": call("torch.package", "PackageImporter", word("/tmp/x")),
    "torch's compiled extensions": call("torch.utils.cpp_extension", "load", word("x")),
    "torch's function registry": call("torch._dynamo.guards", "GuardBuilder"),
    "torch's subclasses": call("torch._tensor", "_rebuild_from_type_v2", named("os", "system"), b"N", b")", b"N"),
    "numpy": call("numpy.testing._private.utils", "runstring", word("1"), b"}"),
    "numpy's arrays": call("numpy.core.multiarray", "_reconstruct"),
    "a class with __setstate__": call("logging.config", "ValidateConfig"),
    "this module": named("pipelines.engine.unpickle", "loads"),
    "a stand-in's own class": named("pipelines.engine.pickles", "Call"),
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_no_name_leads_off_the_list(chain: bytes) -> None:
    with pytest.raises(BlockedError, match="Blocked unsafe global"):
        loads(op(chain))


ALLOWED = [
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch.storage", "_load_from_bytes"),
    ("torch.storage", "UntypedStorage"),
    ("torch", "Tensor"),
    ("torch", "Size"),
    ("torch", "bfloat16"),
    ("collections", "OrderedDict"),
    ("types", "SimpleNamespace"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
]
FORBIDDEN = {
    "instantiated by NEWOBJ": b")\x81",
    "instantiated by NEWOBJ with arguments": word("x") + b"\x85\x81",
    "instantiated by NEWOBJ_EX": b")}\x92",
    "given attributes": b"}" + word("__globals__") + b"Ns" + b"b",
    "given slots": b"N}" + word("__code__") + b"Ns\x86" + b"b",
    "given items": word("x") + b"Ns",
    "given many items": b"(" + word("x") + b"Nu",
    "appended to": b"Na",
    "extended": b"(Ne",
    "added to": b"(N\x90",
}


@pytest.mark.parametrize("what", FORBIDDEN.values(), ids=FORBIDDEN)
@pytest.mark.parametrize("name", ALLOWED, ids=lambda name: name[1])
def test_an_allowed_name_can_be_called_and_nothing_else(name: tuple[str, str], what: bytes) -> None:
    if name == ("types", "SimpleNamespace") and what == FORBIDDEN["instantiated by NEWOBJ"]:
        assert type(loads(op(named(*name), what))) is Metadata
        return
    with pytest.raises(PayloadError):
        loads(op(named(*name), what))


@pytest.mark.parametrize(
    "change",
    [b"}" + word("data") + b"Ns" + b"b", b"N}" + word("data") + b"Ns\x86b", word("x") + b"Ns", b"(NNNtb", b"}b"],
)
def test_what_a_payload_made_cannot_be_changed_by_it(change: bytes) -> None:
    """torch.Tensor has a __setstate__, storages take any attribute."""
    tensor = pickle.dumps(torch.arange(4.0))[:-1]
    storage = pickle.dumps(torch.arange(4.0).untyped_storage())[:-1]
    assert isinstance(loads(tensor + b"."), torch.Tensor)
    for made in (tensor, storage, op(named("torch", "Size") + b")R")[:-1]):
        with pytest.raises(PayloadError):
            loads(made + change + b".")


def test_a_stand_in_is_no_way_to_what_it_stands_for() -> None:
    token = loads(op(named("torch", "Tensor")))
    assert type(token) is Token
    for attempt in (
        b"\x80\x02ctorch\nTensor\n(i__init__\n.",  # INST under a name on the stack
        b"\x80\x02(ctorch\nTensor\no.",  # OBJ
        op(named("torch", "Tensor") + b")R"),
        op(named("torch", "Tensor") + named("torch", "Tensor") + b"\x85R"),
        op(named("torch._utils", "_rebuild_tensor_v2") + b"]R"),
        op(word("system") + b")R"),
    ):
        with pytest.raises(PayloadError):
            loads(attempt)


def test_extension_codes_are_not_looked_up() -> None:
    """Code of other packages in the same process may have registered anything under a number."""
    copyreg.add_extension("os", "system", 0xF1)
    try:
        for code in (b"\x82\xf1", b"\x83\xf1\x00", b"\x84\xf1\x00\x00\x00"):
            with pytest.raises(BlockedError, match="Blocked opcode"):
                loads(op(code))
    finally:
        copyreg.remove_extension("os", "system", 0xF1)


@pytest.mark.parametrize("data", [b"P1\n.", op(b"NQ"), op(word("storage") + b"\x85Q")])
def test_persistent_ids_are_refused(data: bytes) -> None:
    with pytest.raises(BlockedError):
        loads(data)


def test_reduces_are_not_nested_out_of_sight() -> None:
    """A call that is the argument, the state or an item of an allowed one is still a call."""
    evil = Reduces(os.system, "touch /tmp/never")
    for payload in (
        Reduces(torch.Size, (evil,)),
        Reduces(torch._utils._rebuild_parameter, (evil, True, {})),
        Reduces(SimpleNamespace, (), {"shape": evil}),
        Reduces(torch._utils._rebuild_tensor_v2, (evil, 0, (1,), (1,), False, {})),
        [("w", {"x": (evil,)})],
        Reduces(dict, ((evil, 1),)),
        Reduces(torch.storage._load_from_bytes, (evil,)),
    ):
        with pytest.raises(PayloadError):
            loads(pickle.dumps(payload))
    with pytest.raises(PayloadError):
        loads(op(call("os", "system", TOUCH), b")R"))
    assert not Path("/tmp/never").exists()


# -- storages that carry their bytes ----------------------------------------------------------------------------------


def storage(data: bytes) -> bytes:
    return call("torch.storage", "_load_from_bytes", b"B" + struct.pack("<I", len(data)) + data)


def carried(tensor: torch.Tensor) -> bytes:
    """What torch writes for the storage of a tensor by value."""
    content: bytes = tensor._typed_storage().__reduce__()[1][0]
    return content


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(0,), (3,), (2, 3), ()])
def test_a_tensor_by_value_is_what_torch_wrote(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = torch.arange(6)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    got = loads(pickle.dumps(sent))
    assert got.dtype == dtype
    assert torch.equal(got, sent)


def test_views_arrive_as_views() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    a, b = loads(pickle.dumps([base.t(), base[1:, ::2]]))
    assert torch.equal(a, base.t())
    assert torch.equal(b, base[1:, ::2])


@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("evil", [Reduces(os.system, "touch /tmp/never"), Reduces(eval, "1"), torch.nn.Linear])
def test_none_of_the_pickles_within_a_storage_names_anything(part: int, evil: Any) -> None:
    """torch.load reads five in a row; with weights_only=True it takes more names than ours, and others may add to them."""
    whole = carried(torch.arange(4.0))
    cuts = [0]
    for _ in range(5):
        cuts.append(cuts[-1] + next(p for o, _, p in pickletools.genops(whole[cuts[-1] :]) if o.name == "STOP") + 1)
    forged = whole[: cuts[part]] + pickle.dumps(evil, 2) + whole[cuts[part + 1] :]
    with pytest.raises(PayloadError):
        loads(op(storage(forged)))
    assert not Path("/tmp/never").exists()


def test_names_that_others_made_safe_for_torch_are_not_safe_for_us() -> None:
    torch.serialization.add_safe_globals([os.system])
    try:
        data = carried(torch.arange(4.0)).replace(b"ctorch\nFloatStorage\n", b"cposix\nsystem\n")
        with pytest.raises(BlockedError, match="posix.system"):
            loads(op(storage(data)))
    finally:
        torch.serialization.clear_safe_globals()


@pytest.mark.parametrize("kind", ["zip", "jit", "tar", "empty", "short", "long", "count", "view", "module"])
def test_a_storage_in_any_other_form_is_refused(kind: str) -> None:
    whole = carried(torch.arange(4.0))
    data = {
        "zip": b"PK\x03\x04" + bytes(100),
        "jit": b"PK\x03\x04constants.pkl" + bytes(100),
        "tar": b"sys_info".ljust(257, b"\0") + b"ustar\x00" + bytes(1000),
        "empty": b"",
        "short": whole[:-1],
        "long": whole + b"\0",
        "count": whole[:-24] + struct.pack("<q", 1 << 40) + whole[-16:],
        "view": whole.replace(b"K\x04Nt", b"K\x04K\x04t"),
        "module": whole.replace(b"X\x07\x00\x00\x00storage", b"X\x06\x00\x00\x00module"),
    }[kind]
    with pytest.raises(PayloadError):
        loads(op(storage(data)))


def test_a_storage_that_claims_to_be_large_allocates_nothing() -> None:
    whole = carried(torch.arange(4.0)).replace(b"K\x04Nt", b"\x8a\x06" + (1 << 42).to_bytes(6, "little") + b"Nt")
    with pytest.raises(PayloadError, match="elements with 16 bytes"):
        loads(op(storage(whole)))


@pytest.mark.parametrize(
    "offset, size, stride",
    [(0, (5,), (1,)), (1, (4,), (1,)), (0, (2,), (4,)), (0, (1 << 40,), (0,)), (-1, (1,), (1,)), (0, (-1,), (1,)),
     (0, (1 << 63,), (1,)), (0, (2, 2), (1,)), (0, ("a",), (1,)), (0, 4, 1), (True, (1,), (1,))],
)  # fmt: skip
def test_a_tensor_does_not_reach_out_of_its_storage(offset: Any, size: Any, stride: Any) -> None:
    """torch grows a storage to whatever is asked for, and a clone of a stride-0 tensor fills memory."""
    holder = torch.arange(4.0)._typed_storage()
    with pytest.raises(PayloadError):
        loads(pickle.dumps(Reduces(torch._utils._rebuild_tensor_v2, (holder, offset, size, stride, False, {}))))


# -- shared memory ----------------------------------------------------------------------------------------------------


def shared() -> tuple[Segment, bytes]:
    segment = Segment(64)
    return segment, handle_pickle({"w": segment.memory})


def test_a_handle_names_a_segment_of_torch_and_torch_s_own_manager() -> None:
    segment, data = shared()
    try:
        assert torch.equal(loads(data)["w"], segment.memory)
        manager = segment.memory.untyped_storage()._share_filename_cpu_()[0]
        name = f"/{segment.name}".encode()
        rebuild = reductions.rebuild_storage_filename
        for arguments in (
            (torch.UntypedStorage, b"/run/docker.sock", name, 64),
            (torch.UntypedStorage, manager + b"x", name, 64),
            (torch.UntypedStorage, manager, b"/../etc/passwd", 64),
            (torch.UntypedStorage, manager, b"/torch_../../x", 64),
            (torch.UntypedStorage, manager, b"/psm_1234", 64),
            (torch.UntypedStorage, manager, b"/torch_none_such", 64),
            (torch.UntypedStorage, manager, name, 65),
            (torch.UntypedStorage, manager, name, 1 << 50),
            (torch.UntypedStorage, manager, name, -1),
            (torch.UntypedStorage, manager, name, True),
            (torch.UntypedStorage, manager, name, 64, torch.float32),
            (torch.Tensor, manager, name, 64),
            ({}, manager, name, 64),
            (torch.UntypedStorage, manager.decode(), name, 64),
        ):
            with pytest.raises((PayloadError, TransportError)):
                loads(pickle.dumps(Reduces(rebuild, arguments)))
        assert (Path("/dev/shm") / segment.name).stat().st_size == 64 + 64  # nobody made it grow
    finally:
        segment.unlink()


def test_a_socket_that_only_looks_like_the_manager_is_not_connected_to(tmp_path: Path) -> None:
    folder = tmp_path / "torch-shm-dir-abcdef"
    folder.mkdir()
    segment = Segment(64)
    try:
        target = tmp_path / "real.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(target))
            listener.listen()
            listener.settimeout(0.2)
            (folder / "manager.sock").symlink_to(target)
            handle = (torch.UntypedStorage, str(folder / "manager.sock").encode(), f"/{segment.name}".encode(), 64)
            with pytest.raises(BlockedError, match="manager"):
                loads(pickle.dumps(Reduces(reductions.rebuild_storage_filename, handle)))
            with pytest.raises(TimeoutError):
                listener.accept()
    finally:
        segment.unlink()


def test_handles_leave_nothing_behind(tmp_path: Path) -> None:
    """Refused or read, a payload keeps no descriptor."""
    segment, data = shared()
    try:
        loads(data)
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            loads(data)
            with pytest.raises(PayloadError):
                loads(data[:-10])
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        segment.unlink()


CUDA = (torch.Tensor, (4,), (1,), 0, torch.UntypedStorage, torch.float32, 0, b"h" * 64, 16, 0, False)
CUDA += (b"/torch_1_2_3", 0, b"e" * 64, True)


@pytest.mark.parametrize(
    "place, value",
    [(0, torch.nn.Linear), (0, "x"), (1, "4"), (1, (-1,)), (3, -1), (4, torch.Tensor), (5, "float32"), (7, "handle"),
     (8, 1 << 70), (9, -1), (11, b"/psm_other"), (11, b"/torch_../x"), (11, None), (12, -8), (13, 5), (14, "yes")],
)  # fmt: skip
def test_a_cuda_handle_is_checked_before_torch_sees_it(place: int, value: Any) -> None:
    """torch decrements a counter in the shared memory that a handle names."""
    arguments = [*CUDA]
    cuda_ipc.check_handle_args(arguments)
    arguments[place] = value
    with pytest.raises(TransportError, match="malformed arguments"):
        cuda_ipc.check_handle_args(arguments)


@pytest.mark.parametrize("arguments", [CUDA[:-1], (*CUDA, 1), ()])
def test_a_cuda_handle_has_all_its_arguments(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TransportError):
        cuda_ipc.check_handle_args([*arguments])
    with pytest.raises(PayloadError):
        loads(pickle.dumps(Reduces(reductions.rebuild_cuda_tensor, arguments)))


# -- filling memory and time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        op(b"Nr\xff\xff\xff\x7f"),  # the C unpickler allocates and fills its memo up to this index
        op(b"\x96" + struct.pack("<Q", 1 << 40)),  # BYTEARRAY8
        op(b"\x8e" + struct.pack("<Q", 1 << 40)),  # BINBYTES8
        op(b"\x8b" + struct.pack("<i", (1 << 31) - 1)),  # LONG4
        op(b"\x95" + struct.pack("<Q", 1 << 40)),  # FRAME
        op(call("torch", "Size", b"(" + b"K\xff" * 100 + b"t")),
    ],
)
def test_a_short_payload_takes_no_memory(data: bytes) -> None:
    before = _peak()
    with contextlib.suppress(PayloadError):
        loads(data)
    assert _peak() - before < 64 << 20


def test_a_payload_that_doubles_itself_takes_no_time() -> None:
    """Hashing, comparing or printing t = (t, t) takes 2^depth steps."""
    doubling = b"N\x94" + b"".join(b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86\x94" for n in range(60))
    began = time.monotonic()
    for use in (
        b"}" + doubling + b"Ns",
        b"(" + doubling + b"\x91",
        doubling + b"\x8f",
        doubling + b")R",
        doubling + b"\x85R",
    ):
        with pytest.raises(PayloadError):
            loads(op(use))
    assert time.monotonic() - began < 5


def _peak() -> int:
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) << 10


# -- through the front door -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", ["getattr", "os", "torch.load", "a dotted name", "python 2's builtins"])
@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_an_engine_that_is_sent_one_executes_nothing_and_stays_whole(
    start: Start, chain: str, load_format: str | None
) -> None:
    payload = base64.b64encode(op(CHAINS[chain])).decode()
    sglang, lmdeploy = start("sglang"), start("lmdeploy")
    before = [e.digest()["digest"] for e in (sglang, lmdeploy)]
    sglang.post("/begin_weight_update", {})
    body = {"serialized_named_tensors": [payload], "load_format": load_format}
    answer = sglang.post("/update_weights_from_tensor", body)
    assert answer.status_code == 500
    assert "Blocked unsafe global" in answer.text
    assert "process tree ends" in answer.text
    answer = lmdeploy.post("/update_weights", body)
    assert answer.status_code == 500
    assert "executes the payload" in answer.headers["x-weightstream-real-engine"]
    assert not Path("/tmp/never").exists()
    assert [e.digest()["digest"] for e in (sglang, lmdeploy)] == before


@pytest.mark.parametrize("name", [None, 5, ("a", "b"), b"lm_head.weight", ["x"]])
def test_a_tensor_whose_name_is_no_text_is_refused(start: Start, name: Any) -> None:
    payload = base64.b64encode(ForkingPickler.dumps([(name, torch.zeros(1))])).decode()
    engine: LocalEngine = start("sglang")
    engine.post("/begin_weight_update", {})
    answer = engine.post("/update_weights_from_tensor", {"serialized_named_tensors": [payload]})
    assert answer.status_code == 500
    assert engine.state()["half_loaded"] is None
