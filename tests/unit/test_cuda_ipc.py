"""CUDA IPC handles as data, as far as that needs no GPU: what travels, what is refused, which one is opened."""

from __future__ import annotations

import base64
import json
import pickle
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from stages.errors import TransportError
from stages.transport import cuda_ipc
from stages.transport.cuda_ipc import DEVICE_ARG, from_json, open_handle, pickle_for_vllm, to_json

# What torch 2.13 gives for a CUDA tensor: arguments of rebuild_cuda_tensor.
ARGS: tuple[Any, ...] = (
    torch.Tensor,
    torch.Size((1024,)),
    (1,),
    0,
    torch.storage.TypedStorage,
    torch.uint8,
    3,
    b"\x00\x01handle\xff" * 8,
    2048,
    512,
    False,
    b"/torch_4711_1804289383_0",
    7,
    b"\x03event",
    True,
)


def test_every_argument_survives_json() -> None:
    back = from_json(json.loads(json.dumps(to_json(ARGS))))
    assert back == list(ARGS)
    assert [type(a) for a in back] == [type(a) if not isinstance(a, tuple) else torch.Size for a in ARGS]


def test_an_argument_of_another_kind_is_refused_by_name() -> None:
    """A torch that has something new in its handles."""
    with pytest.raises(TransportError, match="argument of type Future"):
        to_json((*ARGS, torch.futures.Future()))


@pytest.mark.parametrize(
    "argument",
    [
        {},
        {"type": "Tensor", "dtype": "uint8"},
        {"type": "builtins.getattr"},
        {"type": "Module"},
        {"type": ["Tensor"]},
        {"dtype": "load"},
        {"dtype": "nn"},
        {"dtype": 3},
        {"bytes": "not base64!"},
        {"bytes": None},
        {"size": ["a"]},
        {"size": None},
        {"call": "os.system"},
        {"__reduce__": ["os.system", ["true"]]},
    ],
    ids=str,
)
def test_nothing_else_comes_out_whatever_a_sender_wrote(argument: dict[str, Any]) -> None:
    """A list of what is forbidden is bypassed through what is allowed (sgl-project/sglang#11909): here, few kinds exist."""
    with pytest.raises(TransportError, match="malformed argument"):
        from_json([argument])


def handles(*uuids: str) -> list[dict[str, Any]]:
    return [{"uuid": uuid, "args": to_json((*ARGS[:3], index, *ARGS[4:]))} for index, uuid in enumerate(uuids)]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def rebuild(*args: Any) -> torch.Tensor:
        calls.append(args)
        return torch.zeros(1)

    monkeypatch.setattr(cuda_ipc, "device_uuid", lambda device: f"GPU-{device.index}")
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    return calls


@pytest.mark.parametrize("mine", [0, 2])
def test_a_receiver_opens_the_handle_of_its_own_gpu_on_its_own_device(opened: list[tuple[Any, ...]], mine: int) -> None:
    """Rebuilt on cuda:0 by every rank: illegal memory access (sgl-project/sglang#12664)."""
    open_handle(handles("GPU-0", "GPU-1", "GPU-2"), torch.device("cuda", mine))
    ((*args,),) = opened
    assert args[DEVICE_ARG] == mine
    assert args[3] == mine  # the one that was exported there
    assert args[DEVICE_ARG + 1 :] == list(ARGS[DEVICE_ARG + 1 :])


def test_a_gpu_without_a_handle_lists_both_sides(opened: list[tuple[Any, ...]]) -> None:
    """Local indices under an inherited CUDA_VISIBLE_DEVICES mean other GPUs (vllm-project/vime#144)."""
    with pytest.raises(TransportError, match=r"GPU-7.*\['GPU-4', 'GPU-5'\].*CUDA_VISIBLE_DEVICES"):
        open_handle(handles("GPU-4", "GPU-5"), torch.device("cuda", 7))
    assert opened == []


def test_vllms_pickle_holds_only_what_torch_itself_puts_there() -> None:
    data = base64.b64decode(pickle_for_vllm(handles("GPU-0", "GPU-1")))
    assert set(pickle.loads(data)) == {"GPU-0", "GPU-1"}
    assert pickle.loads(data)["GPU-1"][7:] == ARGS[7:]
