"""The second line of an error: what to do about an engine that does not answer as it should."""

from __future__ import annotations

from stages.errors import EngineBusy, EngineError, EngineUnreachable

_SECONDS = 5.0
_UNREACHABLE = {
    "Connection refused": "start the engine, or correct host and port in engines.urls; an engine that loads a model answers late",
    "Name or service not known": "correct the host in engines.urls",
    "Temporary failure in name resolution": "correct the host in engines.urls",
    "No route to host": "correct the host in engines.urls, or open the way to it",
    "WRONG_VERSION_NUMBER": "this engine speaks no TLS: write http:// in engines.urls",
    "CERTIFICATE_VERIFY_FAILED": "have its certificate trusted here (SSL_CERT_FILE), or use http:// on a trusted network",
    "no answer within": "see whether the engine hangs (its log), or raise session.timeouts",
}
_KEY = "set WEIGHTSTREAM_API_KEY here to the engine's key (SGLang's --admin-api-key goes to WEIGHTSTREAM_ADMIN_KEY)"
_STATUS = {
    401: _KEY,
    403: _KEY,
    301: "write the address that it points to in engines.urls",
    302: "write the address that it points to in engines.urls",
    307: "write the address that it points to in engines.urls",
    308: "write the address that it points to in engines.urls",
    413: "lower bucket.capacity",
    502: "a proxy answered, not the engine: name the engine itself in engines.urls",
    503: "wait until the engine has loaded its model",
}


def advice(error: BaseException) -> str | None:
    """What to do about the engine's error behind this one; None where nothing better is known than what it says."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, EngineError):
        found = found.__cause__
    if found is None or isinstance(found, EngineBusy) or ";" in str(found):
        return None  # its own words end with the advice
    if isinstance(found, EngineUnreachable):
        return next((what for cause, what in _UNREACHABLE.items() if cause in str(found)), None)
    if found.status == 404 and found.phase == "probe":
        return _of_another_kind(found.engine)
    return _STATUS.get(found.status or 0)


def _of_another_kind(url: str) -> str:
    """What to do where an engine lacks a route that every one of the configured kind has."""
    from stages.backends.base import Keys  # torch, which whoever met an engine has imported already
    from stages.backends.http import Http
    from stages.backends.kinds import kind_of

    keys = Keys.from_environment()
    api = Http(url, keys.api, _SECONDS, (keys.admin,))
    try:
        kind = kind_of(api)
    finally:
        api.close()
    if kind is None:
        return "set backend= to the engine that runs there, and engines.urls to its root, without a path such as /v1"
    words = f"it answers as {kind} does: set backend={kind}"
    return words + ("; where that is set, start vLLM with VLLM_SERVER_DEV_MODE=1" if kind == "vllm" else "")
