"""Asks Linux for the AMX tile state when a Python process of this environment starts (a .pth file imports it).

vLLM 0.32.0's bfloat16 attention uses AMX on CPU without asking. oneDNN asks, but is not called for very short prompts:
a first prompt of four tokens then ends the worker with SIGILL. Where the CPU has no AMX the request fails, without
effect.
"""

import ctypes
import platform

ARCH_PRCTL = 158  # system call number on x86-64
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_XTILEDATA = 18

if platform.system() == "Linux" and platform.machine() == "x86_64":
    ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
