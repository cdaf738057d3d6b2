"""Pickles read opcode by opcode, off an exact list: what stands for names is called, filled in, and nothing else happens.

Opcodes that hash, allocate or change things in ways of their own are not read at all. Python's own unpickler does the
reading, since the C one fills memory for whatever memo index a payload makes up.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from stages.errors import TransportError


class PayloadError(TransportError):
    """The payload is malformed."""


class BlockedError(PayloadError):
    """The payload names or does something that is not on the list."""


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


_OPCODES = (
    "PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT "
    "BINFLOAT STRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE "
    "TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST EMPTY_DICT PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET MEMOIZE GLOBAL "
    "STACK_GLOBAL"
)


class Reader(pickle._Unpickler):
    """Plain values only, until a subclass knows names."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Any]] = {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPCODES.split()
    }

    def find_class(self, module: str, name: str) -> Any:
        raise BlockedError(f"Blocked unsafe global ({module}.{name}) during pickle deserialization")

    def persistent_load(self, pid: Any) -> Any:
        raise BlockedError("Blocked persistent id")

    def load(self) -> Any:
        try:
            return super().load()
        except KeyError as error:  # of `dispatch`, or of the memo
            raise BlockedError(f"Blocked opcode or memo index {error} during pickle deserialization") from error

    def _refuse(self) -> None:
        raise BlockedError("Blocked opcode during pickle deserialization")

    def _append(self) -> None:
        value = self.stack.pop()
        exactly(list, self.stack[-1]).append(value)

    def _appends(self) -> None:
        items = self.pop_mark()
        exactly(list, self.stack[-1]).extend(items)

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        exactly(dict, self.stack[-1])[exactly(str, key)] = value

    def _setitems(self) -> None:
        items = self.pop_mark()
        target = exactly(dict, self.stack[-1])
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[exactly(str, key)] = value

    def _reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if function is Metadata and arguments == ():
            self.stack.append(Metadata())
        elif isinstance(function, Call):
            self.stack.append(function(*exactly(tuple, arguments)))
        else:
            raise BlockedError(f"Blocked call of a {type(function).__name__} during pickle deserialization")

    def _newobj(self) -> None:
        arguments, cls = self.stack.pop(), self.stack.pop()
        if cls is not Metadata or arguments != ():
            raise BlockedError("Blocked object during pickle deserialization")
        self.stack.append(Metadata())

    def _build(self) -> None:
        state = self.stack.pop()
        if type(self.stack[-1]) is not Metadata:
            raise BlockedError("a payload may not change what it names")
        self.stack[-1].__setstate__(state)

    def _persid(self) -> None:
        self.stack.append(self.persistent_load(self.stack.pop()))

    dispatch |= {
        pickle.APPEND[0]: _append,
        pickle.APPENDS[0]: _appends,
        pickle.SETITEM[0]: _setitem,
        pickle.SETITEMS[0]: _setitems,
        pickle.REDUCE[0]: _reduce,
        pickle.NEWOBJ[0]: _newobj,
        pickle.BUILD[0]: _build,
        pickle.BINPERSID[0]: _persid,
        pickle.PERSID[0]: _refuse,
    }


def exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise BlockedError(f"Blocked change of a {type(value).__name__} during pickle deserialization")
    return value
