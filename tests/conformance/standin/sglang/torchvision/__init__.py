"""Stands in for torchvision, which SGLang and transformers import at start-up for vision models that are not run here.

The released wheels are CUDA builds and raise on import next to a CPU-only torch. Every name in here can be imported;
using it raises.
"""

import enum
import importlib.machinery
import sys
import types

__version__ = "0.28.0"  # goes with torch 2.13


class InterpolationMode(enum.Enum):
    """Real members: they serve as dict keys at import time."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _unusable(module, name):
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(self, *_, **__):
        raise NotImplementedError(f"{module}.{name}: torchvision is a stand-in here")

    return type(name, (), {"__init__": refuse})


def __getattr__(name):
    return _unusable(__name__, name)


class _Module(types.ModuleType):
    def __getattr__(self, name):
        return _unusable(self.__name__, name)


def _add(dotted):
    name = f"{__name__}.{dotted}"
    module = _Module(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.InterpolationMode = InterpolationMode
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    setattr(sys.modules[parent], child, module)


for _dotted in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _add(_dotted)
