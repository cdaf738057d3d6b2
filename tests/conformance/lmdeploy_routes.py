"""The weight-update half of LMDeploy 0.18.0 behind its own HTTP routes, without a GPU. Run by LMDeploy's interpreter.

LMDeploy generates on GPUs only, but all that an update meets is its own code here: routes, request models, error
handlers, key and sleep middleware, health monitor, AsyncEngine's sleep bookkeeping, BaseModelAgent's update and group
methods, FlattenedTensorBucket, the models with their loaders (fusing, slicing, block fp8) and their finalization.

What stands in: the engine and its ray executor (`Engine`; rank 0 in this process, each further rank in its own), four
names of torch.cuda, the rewriting of a handle's device (`unpickle`), the kernels of expert parallelism, and sleep level 2:
after wakeup the weights are NaN where a GPU would show uninitialized memory. There is no text generation.

Two routes are ours: GET /_debug/params (per rank {parameter: {sha256, dtype, shape}}) and GET /_debug/state (counters).
"""

import argparse
import asyncio
import contextlib
import hashlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import types
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch

AGENT = "lmdeploy.pytorch.engine.model_agent.agent"
sys.modules.setdefault("lmdeploy_routes", sys.modules[__name__])  # rank processes import this file by that name


# ---- in place of CUDA


class Event:
    """torch.cuda.Event: nothing to wait for on CPU; counts its calls, so that a test sees the protocol was followed."""

    calls = {"from_ipc_handle": 0, "wait": 0, "record": 0}

    def __init__(self, *_, **__):
        pass

    @classmethod
    def from_ipc_handle(cls, device, handle):
        cls.calls["from_ipc_handle"] += 1
        return cls()

    def wait(self, *_):
        self.calls["wait"] += 1

    def record(self, *_):
        self.calls["record"] += 1


def replace_cuda():
    def nothing(*_, **__):
        pass

    replaced = {"current_device": lambda: "cpu", "empty_cache": nothing, "synchronize": nothing, "Event": Event}
    for name, value in replaced.items():
        mock.patch(f"torch.cuda.{name}", value).start()


def leave_out_expert_kernels():
    """Expert parallelism without DeepGEMM and DeepEP, which only a forward pass would use."""
    from lmdeploy.pytorch.backends.cuda.moe import default

    def init(self, ep_size, ep_group, top_k, num_experts, hidden_dim, renormalize=False, **_):
        default.TritonFusedMoEImpl.__init__(self, top_k, num_experts, renormalize)

    mock.patch.object(default.FusedMoEEPImpl, "__init__", init).start()


def unpickle(data):
    """ForkingPickler.loads. The agent then writes its device index into args[6] of each handle (rebuild, args), which
    is meant for rebuild_cuda_tensor; args of any other rebuild function are moved out of the way of that."""
    loaded = pickle.loads(data)
    if isinstance(loaded, list):
        return [(name, _shielded(handle)) for name, handle in loaded]
    if isinstance(loaded, dict) and "flattened_tensor" in loaded:
        loaded["flattened_tensor"] = _shielded(loaded["flattened_tensor"])
    return loaded


def _shielded(handle):
    if not (isinstance(handle, tuple) and len(handle) == 2) or handle[0].__name__ == "rebuild_cuda_tensor":
        return handle
    return _call, (*handle, None, None, None, None, None)


def _call(rebuild, args, *_):
    return rebuild(*args)


# ---- one tensor-parallel rank


class Rank:
    """A BaseModelAgent with a model and a place in the tensor-parallel group, and without all that needs a GPU."""

    def __init__(self, model_dir, rank, tp, ep=1):
        replace_cuda()
        if ep > 1:
            leave_out_expert_kernels()
        torch.set_num_threads(1)
        mock.patch(f"{AGENT}.ForkingPickler", types.SimpleNamespace(loads=unpickle)).start()
        from lmdeploy.pytorch.weight_loader.model_weight_loader import load_model_weights

        self.model_dir = model_dir
        self.level = self.updates = self.errors = 0
        self.agent = self._make_agent(rank, tp, ep)
        self.model = self._build()
        with self.agent.all_context():
            load_model_weights(self.model, str(model_dir), device=torch.device("cpu"))

    def _make_agent(self, rank, tp, ep):
        from lmdeploy.pytorch.config import DistConfig
        from lmdeploy.pytorch.devices import DeviceContext
        from lmdeploy.pytorch.distributed import DistContext, DistGroup
        from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent

        group = DistGroup(rank=0 if ep > 1 else rank)
        groups = dict.fromkeys(("tp_group", "attn_tp_group", "mlp_tp_group", "moe_tp_group"), group)
        agent = BaseModelAgent.__new__(BaseModelAgent)  # its constructor needs a GPU
        agent.device_ctx = DeviceContext("cuda")
        layout = DistConfig(dp=ep, dp_rank=rank, ep=ep) if ep > 1 else DistConfig(tp=tp)
        agent.dist_ctx = DistContext(rank=rank, dp_rank=layout.dp_rank, ep_rank=rank % ep, dist_config=layout, **groups)
        agent.memdecode_agent = agent._update_params_ipc_tensor = agent._update_params_ipc_event = None
        agent._model_update_group = {}
        agent.state = types.SimpleNamespace(is_sleeping=False)
        agent.spec_agent = types.SimpleNamespace(
            is_enabled=lambda: False, method=None, get_model=lambda: None, reset_graph_runner=lambda: None
        )
        agent.patched_model = types.SimpleNamespace(
            get_model=lambda: self.model, reset=lambda: None, get_prefill_warmup_token_sizes=list
        )
        return agent

    def _build(self):
        from lmdeploy.pytorch.config import QuantizationConfig
        from lmdeploy.pytorch.models.patch import BuildModelContext, build_patched_model
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.model_dir)
        dtype = config.torch_dtype
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype)
        quantized = getattr(config, "quantization_config", None)
        context = BuildModelContext(**({"quant_config": QuantizationConfig.from_config(config)} if quantized else {}))
        wanted = types.SimpleNamespace(hf_config=config, dtype=dtype, custom_module_map=None)
        with self.agent.all_context():
            return build_patched_model(wanted, device=torch.device("cpu"), build_model_ctx=context)

    def call(self, method, *args):
        if method in ("sleep", "wakeup", "params", "state"):
            return getattr(self, method)(*args)
        self.updates += method.startswith("update_")
        try:
            result = getattr(self.agent, method)(*args)
        except BaseException:
            self.errors += 1
            raise
        self.errors += isinstance(result, tuple) and not result[0]
        return result

    def sleep(self, level):
        self.level = level
        self.agent.state.is_sleeping = True
        self.agent._update_params_ipc_tensor = self.agent._update_params_ipc_event = None
        if level == 2:
            self.model.to("meta")  # what is loaded before wakeup is lost, as on a GPU

    def wakeup(self, tags):
        if "weights" in tags and self.level == 2:
            self.model = self._build()
            for parameter in self.model.parameters():
                parameter.data.view(torch.uint8).fill_(0xFF)  # NaN in every float format used here
            self.level = 0
        if "kv_cache" in tags:
            self.agent.state.is_sleeping = False

    def params(self):
        return {name: _describe(parameter.detach()) for name, parameter in self.model.named_parameters()}

    def state(self):
        return {
            "updates": self.updates,
            "errors": self.errors,
            "event_calls": dict(Event.calls),
            "cached_bucket": self.agent._update_params_ipc_tensor is not None,
            "groups": sorted(self.agent._model_update_group),
        }


def _describe(tensor):
    gone = tensor.is_meta
    digest = None if gone else hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()
    return {"sha256": digest, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def serve_rank(pipe, *args):
    """A rank's process: answers (True, result) or (False, traceback) to every (method, args)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        rank = Rank(*args)
        pipe.send((True, None))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        return
    while True:
        try:
            method, call_args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, rank.call(method, *call_args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _end_with_parent(parent):
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


class RankProcess:
    """The same `call` as Rank, carried out in a process of its own: gloo wants one rank per process."""

    def __init__(self, *args):
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.lock = threading.Lock()
        self.process = spawn.Process(target=serve_rank, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self):
        good, value = self.pipe.recv()
        if not good:
            raise RuntimeError(f"in a rank's process:\n{value}")
        return value

    def call(self, method, *args):
        with self.lock:
            self.pipe.send((method, args))
            return self.answer()


# ---- the engine behind the routes


class Engine:
    """Where LMDeploy has MPEngine, Engine and RayExecutor: fans each call out to all ranks and reduces their
    answers."""

    def __init__(self, model_dir, tp, ep=1, ep_rank=0):
        others = [RankProcess(model_dir, rank, tp) for rank in range(1, tp)]
        self.ranks = [Rank(model_dir, ep_rank, tp, ep), *others]
        for process in others:
            process.answer()  # it is built
        self.pool = ThreadPoolExecutor(tp)
        self.one_at_a_time = asyncio.Lock()  # as Engine._run_weights_update

    def call(self, method, *args):
        """All ranks at the same time: in a rendezvous or a broadcast they wait for one another."""
        return list(self.pool.map(lambda rank: rank.call(method, *args), self.ranks))

    async def _distributed(self, method, request):
        async with self.one_at_a_time:
            answers = await asyncio.to_thread(self.call, method, request)
        if all(good for good, _ in answers):
            return True, answers[0][1]
        return False, f"{method}: " + " | ".join(f"rank{i}: {message}" for i, (_, message) in enumerate(answers))

    def update_params(self, request):
        self.call("update_params", request)

    async def init_weights_update_group(self, request):
        return await self._distributed("init_weights_update_group", request)

    async def update_weights_from_distributed(self, request):
        return await self._distributed("update_weights_from_distributed", request)

    async def destroy_weights_update_group(self, request):
        return await self._distributed("destroy_weights_update_group", request)

    async def sleep(self, level):
        await asyncio.to_thread(self.call, "sleep", level)

    def wakeup(self, tags):
        self.call("wakeup", tags)

    def complete_weights_update(self):
        pass

    async def health_probe(self, scheduler_stall_timeout=None):
        dead = [i for i, rank in enumerate(self.ranks) if isinstance(rank, RankProcess) and not rank.process.is_alive()]
        return {"status": "unhealthy" if dead else "healthy", "message": f"ranks {dead} are dead" if dead else ""}


def make_app(engine, model_dir, api_key):
    from fastapi import FastAPI
    from fastapi.exceptions import RequestValidationError
    from lmdeploy.serve.core import EngineHealthMonitor
    from lmdeploy.serve.core.async_engine import AsyncEngine
    from lmdeploy.serve.openai.api_server import ServerContext, validation_exception_handler
    from lmdeploy.serve.openai.endpoints import create_openai_router
    from lmdeploy.serve.utils.server_utils import AuthenticationMiddleware, EngineSleepingMiddleware

    async def nothing():
        pass

    served = AsyncEngine.__new__(AsyncEngine)  # its constructor starts a GPU engine
    served.engine, served.backend, served.epoch = engine, "pytorch", 0
    served.model_name = model_dir  # as `lmdeploy serve api_server` has it without --model-name
    served.is_sleeping, served.sleeping_tags = False, set()
    served.backend_config = types.SimpleNamespace(device_type="cuda", max_batch_size=1, adapters=None)
    served.health_probe = engine.health_probe
    served.session_mgr = types.SimpleNamespace(async_abort_all=nothing, build_request_handle_pool=lambda *_: None)
    context = ServerContext()
    context.async_engine, context.enable_abort_handling = served, True

    @contextlib.asynccontextmanager
    async def lifespan(_):
        context.health_monitor = EngineHealthMonitor(served)
        context.health_monitor.start()
        yield
        await context.health_monitor.stop()

    app = FastAPI(lifespan=lifespan)
    app.include_router(create_openai_router(context))
    app.add_exception_handler(RequestValidationError, validation_exception_handler)
    if api_key:
        app.add_middleware(AuthenticationMiddleware, tokens=[api_key])
    app.add_middleware(EngineSleepingMiddleware, is_sleeping=lambda: served.is_sleeping)
    app.get("/_debug/params")(lambda: engine.call("params"))
    app.get("/_debug/state")(lambda: engine.call("state"))
    return app


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder with config.json and safetensors")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1, help="a server for each rank; this is one of so many")
    parser.add_argument("--ep-rank", type=int, default=0)
    parser.add_argument("--api-key")
    args = parser.parse_args()
    import uvicorn

    app = make_app(Engine(args.model, args.tp, args.ep, args.ep_rank), args.model, args.api_key)
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="info")


if __name__ == "__main__":
    main()
