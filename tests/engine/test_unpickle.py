"""Payloads are read by an exact allow-list; nothing that they name can be called freely or changed."""

from __future__ import annotations

import os
import pickle
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipelines.engine.pickles import BlockedError, Metadata, PayloadError
from pipelines.engine.unpickle import loads

TENSOR = torch.arange(6.0, dtype=torch.bfloat16)


class Reduces:
    """Pickles as a call of our choice."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_tensors_by_value_are_read_in_every_protocol(protocol: int) -> None:
    named = loads(pickle.dumps([("a", TENSOR), ("b", torch.nn.Parameter(TENSOR.float()))], protocol))
    assert torch.equal(named[0][1], TENSOR)
    assert torch.equal(named[1][1], TENSOR.float())
    assert not named[1][1].requires_grad


def test_shared_memory_handles_are_read() -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    fp8 = torch.arange(4.0).to(torch.float8_e4m3fn)
    got = loads(bytes(ForkingPickler.dumps({"x": TENSOR.clone(), "y": fp8})))
    assert torch.equal(got["x"], TENSOR)
    assert torch.equal(got["y"].view(torch.uint8), fp8.view(torch.uint8))


def test_metadata_becomes_a_class_of_ours() -> None:
    sent = SimpleNamespace(name="w", shape=torch.Size([2, 3]), dtype=torch.int8, start_idx=0, end_idx=6, numel=6, x=1)
    got = loads(pickle.dumps(sent))
    assert type(got) is Metadata
    assert (got.name, got.shape, got.dtype, got.end_idx) == ("w", torch.Size([2, 3]), torch.int8, 6)
    assert not hasattr(got, "x")


def test_fp8_tensors_by_value_fail_as_they_do_in_sglang() -> None:
    with pytest.raises(PayloadError, match="AttributeError.*dtype"):
        loads(pickle.dumps([("w", torch.zeros(4).to(torch.float8_e4m3fn))]))


@pytest.mark.parametrize(
    "payload",
    [
        Reduces(os.system, "true"),
        Reduces(eval, "1"),
        Reduces(getattr, torch.Tensor, "tolist"),
        Reduces(__import__, "os"),
        Reduces(torch.load, "x"),
        Reduces(bytes.fromhex, "00"),
        os.path.join,
        [torch.nn.Linear],
    ],
)
def test_names_off_the_list_are_refused(payload: Any) -> None:
    with pytest.raises(BlockedError, match="Blocked unsafe global"):
        loads(pickle.dumps(payload))


@pytest.mark.parametrize(
    "name",
    [
        b"cbuiltins\ngetattr\n",
        b"ctorch.serialization\nload\n",
        b"ctorch\n_utils\n",
        b"ctorch._utils\n_rebuild_tensor_v2.__globals__\n",
        b"cpipelines.engine.unpickle\nloads\n",
        b"ctorch.hub\nload\n",
    ],
)
def test_dotted_and_private_ways_to_a_global_are_refused(name: bytes) -> None:
    with pytest.raises(BlockedError):
        loads(b"\x80\x04" + name + b".")


@pytest.mark.parametrize("state", [b"}S'x'\nI1\ns", b"(N}S'__code__'\nI1\nst", b"(N}S'x'\nI1\nst"])
@pytest.mark.parametrize(
    "name",
    [
        b"ctorch\nTensor\n",
        b"ctorch.storage\nUntypedStorage\n",
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ctypes\nSimpleNamespace\n",
        b"ctorch\nbfloat16\n",
        b"ccollections\nOrderedDict\n",
    ],
)
def test_nothing_that_a_payload_names_can_be_changed(name: bytes, state: bytes) -> None:
    with pytest.raises(PayloadError):
        loads(name + state + b"b.")
    assert not hasattr(torch.Tensor, "x")
    assert not hasattr(Metadata, "x")


def test_a_storage_that_carries_code_is_not_unpickled() -> None:
    inner = pickle.dumps(Reduces(os.system, "true"), 2)
    payload = Reduces(torch.storage._load_from_bytes, inner)
    with pytest.raises(PayloadError):
        loads(pickle.dumps(payload))


def test_a_handle_outside_torch_s_own_names_is_refused() -> None:
    rebuild = torch.multiprocessing.reductions.rebuild_storage_filename
    with pytest.raises(BlockedError, match="shared memory handles"):
        loads(pickle.dumps(Reduces(rebuild, torch.UntypedStorage, b"/tmp/m.sock", b"/psm_other", 16)))


def test_persistent_ids_are_refused() -> None:
    with pytest.raises(BlockedError):
        loads(b"Pabc\n.")


@pytest.mark.parametrize("data", [b"", b"not a pickle", b"\x80\x04.", b"\x80\x04K", b"(", b"h\x00."])
def test_malformed_payloads_raise(data: bytes) -> None:
    with pytest.raises(PayloadError):
        loads(data)
