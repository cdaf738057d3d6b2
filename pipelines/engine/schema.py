"""Request bodies checked field by field, with the leniency of the frameworks behind the real engines.

Unknown fields are ignored, as all three engines do; a wrong type is an error with its location. Numbers and booleans
may come as strings, since pydantic in its default mode takes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a request: where, and what."""

    where: tuple[str, ...]
    what: str
    kind: str

    def pydantic(self) -> dict[str, Any]:
        return {"type": self.kind, "loc": self.where, "msg": self.what}


class InvalidRequestError(Exception):
    """A request that the engine's framework refuses before its handler runs."""

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("; ".join(f"{'.'.join(p.where)}: {p.what}" for p in problems))


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a body: its check returns the value to use or raises ValueError with pydantic's words."""

    name: str
    check: Callable[[Any], Any]
    default: Any = _MISSING


def read(body: Any, *fields: Field) -> dict[str, Any]:
    """The named fields of a JSON object. Raises InvalidRequestError with every problem at once."""
    if not isinstance(body, dict):
        raise InvalidRequestError(Problem(("body",), "Input should be a valid dictionary", "dict_type"))
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for field in fields:
        if field.name not in body:
            if field.default is _MISSING:
                problems.append(Problem(("body", field.name), "Field required", "missing"))
            values[field.name] = field.default
            continue
        try:
            values[field.name] = field.check(body[field.name])
        except ValueError as error:
            problems.append(Problem(("body", field.name), str(error), "value_error"))
    if problems:
        raise InvalidRequestError(*problems)
    return values


def parse_json(data: bytes, content_type: str) -> Any:
    """The JSON body. Raises InvalidRequestError where it is missing, malformed or not announced as JSON."""
    if not data:
        raise InvalidRequestError(Problem(("body",), "Field required", "missing"))
    media = content_type.split(";", 1)[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        raise InvalidRequestError(Problem(("body",), "Input should be a valid dictionary", "dict_type"))
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(Problem(("body",), "JSON decode error", "json_invalid")) from error


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("Input should be a valid string")
    return value


def integer(value: Any) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise ValueError("Input should be a valid integer, unable to parse string as an integer") from None
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, int):
        raise ValueError("Input should be a valid integer")
    return value


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("Input should be a valid number")
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise ValueError("Input should be a valid number, unable to parse string as a number") from None


_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = _BOOLEANS.get(str(value).lower()) if isinstance(value, str | int) else None
    if known is None:
        raise ValueError("Input should be a valid boolean")
    return known


def mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("Input should be a valid dictionary")
    return value


def list_of(check: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    def checked(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise ValueError("Input should be a valid list")
        return [check(item) for item in value]

    return checked


def optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


def either(*checks: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The first check that accepts the value."""

    def checked(value: Any) -> Any:
        reasons = []
        for check in checks:
            try:
                return check(value)
            except ValueError as error:
                reasons.append(str(error))
        raise ValueError(" or ".join(reasons))

    return checked


def one_of(*choices: str) -> Callable[[Any], str]:
    def checked(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"Input should be {' or '.join(repr(c) for c in choices)}")
        return str(value)

    return checked
