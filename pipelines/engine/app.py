"""The starlette application: body limit, keys, what a dead engine still answers, and handlers in threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio.to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pipelines.engine.common import PREFIX, Common
from pipelines.engine.engine import Engine, FatalError
from pipelines.engine.protocols.base import Protocol
from pipelines.engine.schema import InvalidRequestError
from pipelines.engine.web import Call, Endpoint, Handler, has_key

_HEALTH = {"/health", "/health_generate", "/ready"}
CONCURRENT_CALLS = 512  # every request waiting for tokens holds a thread


def make_protocol(engine: Engine) -> Protocol:
    """The HTTP side of the engine's backend."""
    backend = engine.settings.backend
    if backend == "lmdeploy":
        from pipelines.engine.protocols.lmdeploy import Lmdeploy

        return Lmdeploy(engine)
    if backend == "sglang":
        from pipelines.engine.protocols.sglang import Sglang

        return Sglang(engine)
    from pipelines.engine.protocols.vllm import Vllm

    return Vllm(engine)


def make_app(engine: Engine) -> Starlette:
    """The application over a started engine."""
    protocol = make_protocol(engine)
    endpoints = [*protocol.endpoints(), *Common(protocol).endpoints()]
    limit = engine.settings.max_body_bytes
    routes = [Route(e.path, _endpoint(protocol, e.handler, limit), methods=list(e.methods)) for e in endpoints]
    app = Starlette(routes=routes, lifespan=_lifespan, exception_handlers={HTTPException: _http_exception})
    app.add_middleware(Gate, protocol=protocol, endpoints=endpoints)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    anyio.to_thread.current_default_thread_limiter().total_tokens = CONCURRENT_CALLS
    yield


async def _http_exception(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, in the words of the framework that all three engines use."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)


def _endpoint(protocol: Protocol, handler: Handler, limit: int) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        data = await _read_body(request, limit)
        if data is None:
            return JSONResponse(protocol.error(413, f"the body exceeds {limit} bytes"), 413)
        gone = threading.Event()
        call = Call(request.method, request.scope["path"], request.query_params, request.headers, data, gone)
        watch = asyncio.create_task(_watch_client(request, gone))
        try:
            return await run_in_threadpool(_run, protocol, handler, call)
        finally:
            watch.cancel()

    return endpoint


async def _watch_client(request: Request, gone: threading.Event) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    gone.set()


async def _read_body(request: Request, limit: int) -> bytes | None:
    """The whole body, or None as soon as it is known to be too long."""
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit:
        return None
    parts: list[bytes] = []
    total = 0
    async for part in request.stream():
        total += len(part)
        if total > limit:
            return None
        parts.append(part)
    return b"".join(parts)


def _run(protocol: Protocol, handler: Handler, call: Call) -> Response:
    try:
        return handler(call)
    except InvalidRequestError as problem:
        return protocol.invalid(problem)
    except FatalError as fatal:
        protocol.engine.die(fatal)
        return protocol.fatal(fatal)
    except Exception as error:
        return protocol.crash(error)


class Gate:
    """Lets a request through to its route: the key, the engine's own gates, and whether the engine is still there."""

    def __init__(self, app: ASGIApp, protocol: Protocol, endpoints: list[Endpoint]) -> None:
        self._app = app
        self._protocol = protocol
        self._admin = {endpoint.path for endpoint in endpoints if endpoint.admin}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refuse(Request(scope)) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refuse(self, request: Request) -> Response | None:
        path: str = request.scope["path"]  # request.url is made from the Host header, which is the client's
        if "origin" in request.headers and not self._known(request):
            words = "a web page asks: the embedded engine takes that with its key only"
            return JSONResponse(self._protocol.error(403, words), 403)
        if self._protocol.settings.exposed and path not in _HEALTH and not self._known(request):
            return JSONResponse(self._protocol.error(401, "Unauthorized"), 401)
        if path.startswith(PREFIX):
            refusal = self._protocol.guarded_by_key(request.headers)
        else:
            refusal = self._protocol.gate(request.method, path, request.headers, path in self._admin)
        readable = path.startswith(PREFIX) and request.method == "GET"
        if refusal is None and self._protocol.engine.dead is not None and not readable:
            refusal = self._protocol.dead()
        return refusal

    def _known(self, request: Request) -> bool:
        """Whether it carries one of our keys, if there are any."""
        settings = self._protocol.settings
        return any(has_key(request.headers, key) for key in (settings.api_key, settings.admin_key) if key)
