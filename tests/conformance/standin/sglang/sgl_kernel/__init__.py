"""Stands in for the binary package `sgl_kernel`, whose wheels hold CUDA code only; SGLang imports it on CPU too.

SGLang 0.5.23 with `--device cpu --attention-backend torch_native` calls one function of it. Every other name can be
imported and raises when called. No torch ops are registered, hence SGLang's own check for AMX kernels is negative and
it takes its plain torch paths.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

import torch

__version__ = "0.4.10"  # what sglang 0.5.23 asks for


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, *_):
    """Write each request's next stretch of cache locations into its row of the table."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name} needs the binary package, which has no CPU build")

    return missing


# Block-fp8 linears. SGLang asserts AMX kernels for them on CPU. Creating, naming, sharding and loading of `weight` and
# `weight_scale_inv` stay its own; only the post-processing (a repack) and the product are replaced.

_FP8 = "sglang.srt.layers.quantization.fp8"


def _keep_as_loaded(self, layer):
    pass


def _dequantize_and_multiply(self, layer, x, bias=None, **_):
    rows, columns = self.quant_config.weight_block_size
    weight = layer.weight.float()
    scale = layer.weight_scale_inv.float().repeat_interleave(rows, 0)[: weight.shape[0]]
    scale = scale.repeat_interleave(columns, 1)[:, : weight.shape[1]]
    bias = None if bias is None else bias.float()
    return torch.nn.functional.linear(x.float(), weight * scale, bias).to(x.dtype)


class _Fp8Patch(importlib.abc.MetaPathFinder):
    """Replaces the methods once SGLang's fp8 module has run; it is imported long after this one."""

    def find_spec(self, name, path=None, target=None):
        if name != _FP8:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            method = module.Fp8LinearMethod
            method.process_weights_after_loading = _keep_as_loaded
            method.process_weights_after_loading_block_quant = _keep_as_loaded
            method.apply = _dequantize_and_multiply

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("WEIGHTSTREAM_SGLANG_FP8") == "1":
    sys.meta_path.insert(0, _Fp8Patch())
