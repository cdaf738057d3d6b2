"""Keys of engines come from two environment variables, and are kept out of everything that is shown or saved."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any, TypeVar

from stages.errors import ConfigError

SECRETS = ("WEIGHTSTREAM_API_KEY", "WEIGHTSTREAM_ADMIN_KEY")
_SHORTEST = 8  # characters of a key whose presence in an override is no accident

T = TypeVar("T")


def redacted(tree: T) -> T:
    """The same tree with the values of the key variables, should one have got in, replaced by ***."""
    secrets = sorted((value for name in SECRETS if (value := os.environ.get(name))), key=len, reverse=True)

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {clean(k): clean(v) for k, v in value.items()}
        if isinstance(value, list):
            return [clean(v) for v in value]
        if isinstance(value, str):
            for secret in secrets:
                value = value.replace(secret, "***")
        return value

    return clean(tree)  # type: ignore[no-any-return]


def refuse_secrets(overrides: Iterable[str]) -> None:
    """Raise ConfigError for an override that holds a key or a password: Hydra saves all of them as they are."""
    keys = {name: value for name in SECRETS if len(value := os.environ.get(name, "")) >= _SHORTEST}
    for override in overrides:
        setting = override.partition("=")[0]
        for name, value in keys.items():
            if value in override:
                raise ConfigError(
                    f"an override of {redacted(setting)} holds the value of {name}, which would be saved in the run folder\n"
                    f"  leave it out; the variable alone is enough"
                )
        if any(name in override.partition("=")[0] for name in SECRETS):
            raise ConfigError(
                f"{setting} would save a key in the run folder\n  set the variable in the environment instead"
            )
        if re.search(r"://[^/\s,\]]*@", override):
            raise ConfigError(
                f"{setting}: a URL holds a user name or password, which would end up in logs and saved configs\n"
                "  leave it out; an engine's key goes into WEIGHTSTREAM_API_KEY"
            )
