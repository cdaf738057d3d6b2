"""A broadcast group between one trainer (rank 0) and the ranks of inference engines.

Built straight from a store and a backend, without torch's table of named groups: nothing global is left behind, several
generations may live at once, and the listening socket is ours, bound to one address only. The key prefixes are those of
torch's own group creation, which is what SGLang 0.5.x and LMDeploy 0.18 use on their side.
"""

from __future__ import annotations

import base64
import contextlib
import socket
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from stages.errors import TransportError
from stages.transport.messages import GroupInit

dist: Any = torch.distributed  # its classes come and go with the build, so that types cannot follow them


class GroupStore:
    """The listening end of the rendezvous, kept for the trainer's life so that nobody else can take the port.

    Group names carry a generation, so keys of a dead group are never read again.
    """

    def __init__(self, address: str, port: int, timeout: float) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            raise TransportError(
                f"transport.port: cannot listen on {address} port {port}: {error.strerror}; "
                f"set transport.port to a free port, or transport.address to an address of this host"
            ) from error
        self.address = address
        self.port: int = listener.getsockname()[1]
        self.store = dist.TCPStore(
            address,
            self.port,
            world_size=None,
            is_master=True,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


class BroadcastGroup:
    """One generation of a group. Every broadcast has source rank 0."""

    def __init__(self, store: Any, init: GroupInit, rank: int, device: torch.device) -> None:
        timeout = timedelta(seconds=init.timeout)
        named = dist.PrefixStore(f"{init.group_name}/", dist.PrefixStore(init.group_name, store))
        self.name = init.group_name
        self.rank = rank
        self.device = device
        self._timeout = timeout
        self._backend: Any
        if init.backend == "gloo":
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [_gloo_device(init.master_address)]
            options._threads = 2
            prefixed = dist.PrefixStore("cpu/", named)
            self._backend = dist.ProcessGroupGloo(prefixed, rank, init.world_size, options)
        elif init.backend == "nccl" and hasattr(dist, "ProcessGroupNCCL"):
            prefixed = dist.PrefixStore("cuda/", named)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._backend = dist.ProcessGroupNCCL(prefixed, rank, init.world_size, options)
        else:
            raise TransportError(f"group backend {init.backend!r} is not available in this torch; use gloo or nccl")

    @classmethod
    def lead(cls, store: GroupStore, init: GroupInit, device: torch.device) -> BroadcastGroup:
        """Form the group as rank 0. Blocks until all ranks joined; raises TransportError after `init.timeout` seconds."""
        # Over a connection of its own: one that waits for a group that never forms would block the next generation.
        return cls.join(replace(init, master_address=store.address, master_port=store.port), 0, device)

    @classmethod
    def join(cls, init: GroupInit, rank: int, device: torch.device | str = "cpu") -> BroadcastGroup:
        """Join as `rank` (1..). Blocks until all ranks joined; raises TransportError after `init.timeout` seconds."""
        if not 0 < init.master_port < 1 << 16 or not 0 <= rank < init.world_size < 1 << 20:
            raise TransportError(
                f"group {init.group_name}: rank {rank} of {init.world_size} at port {init.master_port} cannot be"
            )
        try:
            store = dist.TCPStore(
                init.master_address,
                init.master_port,
                world_size=None,
                is_master=False,
                timeout=timedelta(seconds=init.timeout),
                wait_for_workers=False,
            )
        except (RuntimeError, ValueError, TypeError) as error:
            raise TransportError(
                f"group {init.group_name}: no trainer answers at {init.master_address} port {init.master_port}: {error}"
            ) from error
        return cls._form(store, init, rank, torch.device(device))

    @classmethod
    def _form(cls, store: Any, init: GroupInit, rank: int, device: torch.device) -> BroadcastGroup:
        try:
            group = cls(store, init, rank, device)
            if init.backend == "nccl":  # its communicator is made at the first collective
                group.broadcast(torch.zeros(1, device=device))
            return group
        except (RuntimeError, ValueError, TypeError) as error:
            raise TransportError(
                f"group {init.group_name}: rank {rank} of {init.world_size} could not join: {error}"
            ) from error

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send (rank 0) or receive `tensor`, contiguous. Blocks; raises TransportError on failure or timeout."""
        if not tensor.is_contiguous():
            raise TransportError(
                f"group {self.name}: a tensor that is not contiguous would be sent in its storage's order"
            )
        try:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            options.rootTensor = 0
            work = self._backend.broadcast([tensor], options)
            work.wait(self._timeout)
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()
        except RuntimeError as error:
            raise TransportError(f"group {self.name}: broadcast failed on rank {self.rank}: {error}") from error

    def destroy(self) -> None:
        """Drop the connections; a peer still inside a collective gets an error. Safe to call twice."""
        backend, self._backend = self._backend, None
        if backend is None:
            return
        with contextlib.suppress(RuntimeError):
            backend.abort()
        with contextlib.suppress(RuntimeError):
            backend.shutdown()


class NcclIdGroup:
    """The trainer's end of vLLM's native nccl wire: a communicator from a unique id, and its warm-up all-reduce.

    As vLLM 0.32 has it: every rank enters ncclCommInitRank together, then all reduce one element. Not run on a GPU yet.
    """

    def __init__(self, init: GroupInit, device: torch.device) -> None:
        assert init.unique_id is not None
        self.name = init.group_name
        self.rank = 0
        self.device = device
        self._comm: Any = torch.cuda.nccl.init_rank(init.world_size, base64.b64decode(init.unique_id), 0)
        torch.cuda.nccl.all_reduce([torch.zeros(1, device=device)], comms=[self._comm])
        torch.cuda.current_stream(device).synchronize()

    @staticmethod
    def new_id() -> str:
        """A fresh unique id, base64."""
        return base64.b64encode(torch.cuda.nccl.unique_id()).decode()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send `tensor`, contiguous, to all engine ranks. Blocks until it has left."""
        try:
            torch.cuda.nccl.broadcast([tensor], root=0, comms=[self._comm])
            torch.cuda.current_stream(self.device).synchronize()
        except RuntimeError as error:
            raise TransportError(f"group {self.name}: broadcast failed: {error}") from error

    def destroy(self) -> None:
        """Drop the communicator. Safe to call twice."""
        self._comm = None


def _gloo_device(address: str) -> Any:
    """The interface that gloo listens on: loopback where the group lives on one host, else the host's own default."""
    if address in ("127.0.0.1", "::1", "localhost"):
        return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    return dist.ProcessGroupGloo.create_default_device()
