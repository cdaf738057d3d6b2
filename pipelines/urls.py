"""Engine addresses as people write them, brought to one form or refused with the reason."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from stages.backends.actor import SCHEME
from stages.errors import ConfigError


def normalize(url: str) -> str:
    """`host:port` or an http(s) URL -> `http://host:port[/path]`, lower-case host, no trailing slash.

    Raises ConfigError for a bare IPv6 address with a port (where does the one end?), user names and passwords, queries,
    other schemes and impossible ports.
    """
    if not isinstance(url, str):
        raise ConfigError(f'engine URL {url!r} is not text\n  write it in quotes, like "http://host:8000"')
    text = url.strip()
    if text.startswith(SCHEME):
        return normalize_actors([text])[0]
    if not text:
        raise ConfigError("an engine URL is empty\n  write http://host:port")
    scheme, found, rest = text.partition("://")
    if not found:
        scheme, rest = "http", text
    if scheme.lower() not in ("http", "https"):
        raise ConfigError(
            f"engine URL {_shown(text)!r}: scheme {scheme!r} is not http or https\n  write http://host:port"
        )
    netloc = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in rest:
        raise ConfigError(
            f"engine URL {_shown(text)!r} holds a user name or password, which would end up in logs and saved configs\n"
            "  leave it out; an engine's key goes into WEIGHTSTREAM_API_KEY"
        )
    if re.search(r"[\s\\]", rest) or not netloc:
        raise ConfigError(f"engine URL {text!r} is not a URL\n  write http://host:port")
    if netloc.startswith("[") and not re.fullmatch(r"\[[^\[\]]+\](:\d*)?", netloc):
        raise ConfigError(f"engine URL {text!r} is not a URL\n  write http://[::1]:port")
    if netloc.count(":") > 1 and not netloc.startswith("["):
        raise ConfigError(
            f"engine URL {text!r}: an IPv6 address needs brackets\n  write http://{_with_brackets(netloc)}"
        )
    return _assemble(scheme.lower(), rest, text)


def normalize_all(urls: Iterable[str] | str) -> list[str]:
    """Normalize a list. Refuses a single string, an empty list and the same engine twice."""
    if isinstance(urls, str):
        raise ConfigError(f"engines.urls takes a list, not the text {_shown(urls)!r}\n  write '[{_shown(urls)}]'")
    result: list[str] = []
    for url in urls:
        clean = normalize(url)
        if clean in result:
            raise ConfigError(f"engines.urls lists {clean} twice\n  each engine is updated once; leave one out")
        result.append(clean)
    if not result:
        raise ConfigError("engines.urls is empty\n  write 'engines.urls=[http://host:port]'")
    return result


def normalize_actors(names: Iterable[str] | str) -> list[str]:
    """Names of Ray actors, `[namespace/]name`, as addresses. Refuses a single string, and the same actor twice."""
    if isinstance(names, str):
        raise ConfigError(f"engines.actors takes a list, not the text {names!r}\n  write '[{names}]'")
    result: list[str] = []
    for name in names:
        text = name.strip().removeprefix(SCHEME)
        if not re.fullmatch(r"([^\s/]+/)?[^\s/]+", text):
            raise ConfigError(f"engines.actors: {name!r} is no name of an actor\n  write name, or namespace/name")
        if SCHEME + text in result:
            raise ConfigError(f"engines.actors lists {text} twice\n  each engine is updated once; leave one out")
        result.append(SCHEME + text)
    return result


def _assemble(scheme: str, rest: str, text: str) -> str:
    try:
        parts = urlsplit(f"{scheme}://{rest}")
        host, port = parts.hostname or "", parts.port
        if ":" in host:
            host = f"[{ipaddress.IPv6Address(host.partition('%')[0]).compressed}{''.join(host.partition('%')[1:])}]"
    except ValueError as error:
        raise ConfigError(f"engine URL {text!r}: {error}\n  write http://host:port or http://[::1]:port") from None
    if not host or port == 0:
        raise ConfigError(f"engine URL {text!r} names no {'port' if host else 'host'}\n  write http://host:port")
    if parts.query or parts.fragment:
        raise ConfigError(
            f"engine URL {text!r} has a query or fragment\n  give the address only: {scheme}://{parts.netloc}"
        )
    return f"{scheme}://{host}{f':{port}' if port is not None else ''}{parts.path.rstrip('/')}"


def _shown(text: str) -> str:
    """The URL without user name and password, for messages."""
    return re.sub(r"(\w+:/+)?\S*@", r"\1***@", text)


def _with_brackets(netloc: str) -> str:
    address, _, port = netloc.rpartition(":")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return f"[{netloc}]:port"
    return f"[{address}]:{port}"
