"""The flattened bucket as SGLang and LMDeploy decode it: one flat tensor and a metadata object per tensor.

Metadata objects are `types.SimpleNamespace`: both engines read them by attribute, SGLang's unpickler allows them, and the
sender needs neither engine installed. `start_idx`, `end_idx` and `numel` count bytes for SGLang 0.5.x and elements for
LMDeploy 0.18.
"""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import torch

from stages.errors import ConfigError
from stages.flow import Bucket, BucketLayout, dtype_name
from stages.transport.shm import handle_pickle

LOAD_FORMATS = ("flattened_bucket", "per_tensor")


def check_load_format(load_format: str) -> str:
    """Raise ConfigError for one that is not in LOAD_FORMATS."""
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"backend.load_format: {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    return load_format


def metadata_of(layout: BucketLayout, unit: int) -> list[SimpleNamespace]:
    """One object per entry, counting in `unit` bytes (1, or the item size of the bucket's only dtype)."""
    return [
        SimpleNamespace(
            name=e.spec.name,
            shape=torch.Size(e.spec.shape),
            dtype=e.spec.dtype,
            start_idx=e.offset // unit,
            end_idx=(e.offset + e.nbytes) // unit,
            numel=e.nbytes // unit,
        )
        for e in layout.entries
    ]


def names_of(layout: BucketLayout) -> dict[str, Any]:
    """The three parallel lists by which distributed routes announce a bucket."""
    return {
        "names": [e.spec.name for e in layout.entries],
        "dtypes": [dtype_name(e.spec.dtype) for e in layout.entries],
        "shapes": [list(e.spec.shape) for e in layout.entries],
    }


def encode(obj: Any, device_by_uuid: bool = False) -> str:
    """base64 of a pickle in which tensors are handles."""
    return base64.b64encode(handle_pickle(obj, device_by_uuid)).decode()


class PayloadCache:
    """Payloads of persistent slots, which are the same in every update as long as the plan is."""

    def __init__(self) -> None:
        self._plan = ""
        self._payloads: dict[tuple[int, str], str] = {}

    def get(self, bucket: Bucket) -> str | None:
        return self._payloads.get(self._key(bucket))

    def put(self, bucket: Bucket, payload: str) -> str:
        self._payloads[self._key(bucket)] = payload
        return payload

    def clear(self) -> None:
        self._payloads.clear()

    def _key(self, bucket: Bucket) -> tuple[int, str]:
        assert bucket.slot is not None
        if bucket.plan.hash != self._plan:
            self._plan = bucket.plan.hash
            self._payloads.clear()
        return bucket.layout.seq, bucket.slot.handle.name
