"""What an embedded engine is started with."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from stages.errors import ConfigError

EMULATED = {"lmdeploy": "0.18.0", "sglang": "0.5.23", "vllm": "0.32.0"}
SUPPORTED = {
    "lmdeploy": ("0.18.0",),
    "sglang": ("0.5.23", "0.5.20"),
    "vllm": ("0.32.0", "0.33.0"),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked on creation; raises ConfigError. Keys come from the environment, never from the command line.

    `exposed`: other machines reach it, so that every route asks for a key, also where the real engine's does not.
    """

    model: str
    backend: str
    tp: int = 1
    dtype: str = "auto"
    device: str = "cpu"
    on_fatal: str = "answer"
    engine_version: str = ""
    prefix_cache: str = "auto"
    group_timeout: float = 1800.0
    max_body_bytes: int = 1 << 30
    scale_out: bool = False
    exposed: bool = False
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.backend not in EMULATED:
            raise ConfigError(f"backend: {self.backend!r} is not one of {', '.join(EMULATED)}")
        if not (Path(self.model) / "config.json").is_file():
            raise ConfigError(f"model: {self.model} is not a Hugging Face checkpoint: it has no config.json")
        if self.tp < 1:
            raise ConfigError(f"tp: {self.tp} is not a number of ranks")
        if self.version not in SUPPORTED[self.backend]:
            raise ConfigError(
                f"engine_version: {self.version!r} of {self.backend} is not emulated, only "
                f"{', '.join(SUPPORTED[self.backend])} are"
            )

    @property
    def version(self) -> str:
        """The engine release whose behaviour is copied."""
        return self.engine_version or EMULATED[self.backend]

    @property
    def caches_prefixes(self) -> bool:
        """LMDeploy's default is off, since it has no way to flush."""
        return self.backend != "lmdeploy" if self.prefix_cache == "auto" else self.prefix_cache == "on"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; a name other than localhost may be anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str, api_key: str | None) -> None:
    """Raises ConfigError for an address that others can reach while no key is set: payloads change the weights."""
    if not api_key and not is_loopback(host):
        raise ConfigError(
            f"host: {host} can be reached from other machines; set WEIGHTSTREAM_ENGINE_API_KEY in the engine's "
            f"environment, or listen on 127.0.0.1"
        )
