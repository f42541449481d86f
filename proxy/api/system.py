"""The routes about the server itself: front page, health, models, capabilities, metrics, and the
pause of runs."""

import asyncio
import html
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Query
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from policies.headers import RequestHeader
from policies.routing import PLAIN_SUFFIX
from policies.steps import STEPS_MODES
from proxy.agent.model import Model, Upstream, UpstreamRequest
from proxy.api.dependencies import (
    JSONResponse,
    Services,
    base_url,
    get_model,
    run_while_connected,
)
from proxy.api.description import DISTRIBUTION, PAGE_HEADERS
from proxy.api.parameters import (
    REQUIRES_KEY,
    REQUIRES_OPERATOR,
    KeyOrOperator,
    ServicesDep,
    content,
    errors,
)
from proxy.errors import BackendError, NotFoundError, ProxyError
from proxy.schemas.resources import (
    Capabilities,
    Health,
    ModelList,
    ModelObject,
    PauseObject,
    PauseQuery,
    ResumeQuery,
)

router = APIRouter(tags=["Server"], default_response_class=JSONResponse)

BACKEND_TIMEOUT_S = 5.0
"""Timeout for the backend's metrics and for its list of models, in seconds. Prometheus's own
timeout is 10 s by default."""
MAX_BACKEND_BYTES = 16 << 20
CHECK_TIMEOUT_S = 2.0
"""Timeout for the backend's answer to the front page's check."""
CHECK_EVERY_S = 5.0
"""Seconds for which the result of a check is cached. The front page needs no key, so requests to
the backend must be rarer than views of the page."""
TEXT, OPENMETRICS = "text/plain", "application/openmetrics-text"
ACCEPT_HEADERS = {
    TEXT: f"{TEXT}; version=0.0.4",
    OPENMETRICS: f"{OPENMETRICS}; version=1.0.0, {TEXT}; version=0.0.4; q=0.5",
}
"""The Accept header for the backend, by the format that the client prefers."""
EOF = b"# EOF\n"
"""The last line of OpenMetrics."""


class BackendCheck:
    """Checks that the backend answers, at most once every `CHECK_EVERY_S` seconds."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._lock = asyncio.Lock()
        self._expires_at = 0.0
        self._result = ""

    async def result(self) -> str:
        """Return one line about the backend: the number of its models, or why it lists none."""
        async with self._lock:
            if time.monotonic() >= self._expires_at:
                self._result = await self._check()
                self._expires_at = time.monotonic() + CHECK_EVERY_S
            return self._result

    async def _check(self) -> str:
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                served = await self._model.models()
        except TimeoutError:
            return "no answer in time"
        except BackendError as error:
            if error.status in (401, 403):
                return "answers; it requires the client's own key"
            return "does not list its models; `sandbox-proxy doctor` tells the reason"
        return f"answers; models: {len(served)}"


@router.get("/", include_in_schema=False)
@router.head("/", include_in_schema=False)
async def front_page(request: Request, services: ServicesDep) -> Response:
    """Return the state of the server and a command to try: a page for browsers, else plain text."""
    url = base_url(request).rstrip("/")
    pool = services.runs.metrics.pool_stats()
    check: BackendCheck = request.app.state.backend_check
    key = "" if services.keyring.is_open else ' -H "Authorization: Bearer $API_KEY"'
    question = '[{"role": "user", "content": "Which day of the week is 2100-01-01?"}]'
    body = f'{{"model": "MODEL", "messages": {question}}}'
    call = f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json'"
    lines = {
        "model backend": await check.result(),
        "sandboxes": f"{pool.idle} ready, {pool.leased} in use" if pool else "started on demand",
        "base URL for OpenAI SDKs": f"{url}/v1",
        "API": f"{url}/docs",
        "list the models": f"curl {url}/v1/models{key}",
        "try, with a listed model for MODEL": f"{call} -d '{body}'",
    }
    title = f"{DISTRIBUTION} {version(DISTRIBUTION)}"
    if "text/html" not in request.headers.get("accept", ""):
        text = "".join(f"{name}: {value}\n" for name, value in lines.items())
        return Response(f"{title}\n{text}", media_type="text/plain")
    rows = "".join(_html_row(name, value) for name, value in lines.items())
    page = _FRONT_PAGE.format(title=html.escape(title), rows=rows)
    return Response(page, media_type="text/html", headers=PAGE_HEADERS)


_FRONT_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>body {{ font: 16px sans-serif; margin: 3em auto; max-width: 50em; padding: 0 1em }}
dt {{ font-weight: bold; margin-top: 1em }} dd {{ margin: 0 }}
code {{ white-space: pre-wrap }}</style>
<h1>{title}</h1>
<dl>{rows}</dl>
</html>
"""


def _html_row(name: str, value: str) -> str:
    text = html.escape(value)
    if name == "API":
        text = f'<a href="{text}">{text}</a>'
    elif name != "sandboxes" and name != "model backend":
        text = f"<code>{text}</code>"
    return f"<dt>{html.escape(name)}</dt><dd>{text}</dd>"


@router.get("/health", response_model=Health)
@router.get("/health/live", response_model=Health)
@router.head("/health", include_in_schema=False)
async def health() -> Response:
    """Return status 200: the process is running."""
    return Response('{"status":"ok"}', media_type="application/json")


@router.get("/health/ready", response_model=Health, responses=errors(503))
async def ready(services: ServicesDep) -> Response:
    """Return status 200 if the server can serve requests: its database can be reached."""
    await services.store.check()
    return Response('{"status":"ok"}', media_type="application/json")


@router.get(
    "/v1/models",
    response_model=ModelList,
    responses=errors("4XX"),
    dependencies=[REQUIRES_KEY],
)
async def list_models(request: Request) -> Response:
    """Return the backend's models, and each as `<model>:plain` too."""
    return JSONResponse({"object": "list", "data": await _listed_models(request)})


@router.get(
    "/v1/models/{model:path}",
    response_model=ModelObject,
    responses=errors(404, "4XX"),
    dependencies=[REQUIRES_KEY],
)
async def retrieve_model(request: Request, model: str) -> Response:
    """Return a model of the backend."""
    for entry in await _listed_models(request):
        if entry.get("id") == model:
            return JSONResponse(entry)
    raise NotFoundError(f"The model {model!r} does not exist.", code="model_not_found")


async def _listed_models(request: Request) -> list[dict[str, Any]]:
    served = await get_model(request).models()
    return served + [{**entry, "id": f"{entry.get('id')}{PLAIN_SUFFIX}"} for entry in served]


@router.get("/v1/capabilities", response_model=Capabilities, responses=errors("4XX"))
async def capabilities(request: Request, services: ServicesDep, key: KeyOrOperator) -> Response:
    """Return the models, tools, limits and endpoints of this server. `models` is empty, and
    `backend_error` is set, if the backend does not list them."""
    names = services.profiles.selectable_names(key) if key else list(services.profiles.by_name)
    served, failure = await run_while_connected(request, _models_or_error(get_model(request)))
    return JSONResponse(
        {
            "object": "capabilities",
            "version": version(DISTRIBUTION),
            "models": [entry["id"] for entry in served],
            "backend_error": failure,
            **_capability_fields(services, names),
            "endpoints": request.app.state.endpoints,
        }
    )


async def _models_or_error(model: Model) -> tuple[list[dict[str, Any]], str | None]:
    """Return the backend's models and None, or an empty list and the reason why the backend does
    not list its models. Raises BackendError for a wrong key."""
    try:
        async with asyncio.timeout(BACKEND_TIMEOUT_S):
            return await model.models(), None
    except TimeoutError:
        return [], "The backend does not answer in time."
    except BackendError as error:
        if error.status in (401, 403):
            raise
        return [], error.message


def _capability_fields(services: Services, profiles: Sequence[str]) -> dict[str, Any]:
    profile = services.profiles.default
    isolation = asdict(profile.isolation)
    egress = isolation.pop("network")
    return {
        "steps": {
            "default": services.steps,
            "modes": list(STEPS_MODES),
            "profiles": list(STEPS_MODES),  # deprecated
        },
        "tools": [tool.name for tool in services.runs.agent.make_tools(profile)],
        "limits": asdict(profile.limits),
        "isolation": isolation,
        "egress": {"mode": egress["mode"]},
        "files": asdict(profile.artifacts),
        "responses": asdict(services.store.responses.settings),
        "profiles": {name: services.profiles.by_name[name].about for name in profiles},
        "profile": profile.name,
        "features": {
            "plain_suffix": PLAIN_SUFFIX,
            "passthrough": services.model.upstream is not None,
        },
    }


@router.get(
    "/metrics",
    response_class=Response,
    responses=content(TEXT) | errors(403),
    dependencies=[REQUIRES_OPERATOR],
)
async def metrics(request: Request, services: ServicesDep) -> Response:
    """Return the metrics of the backend and of the proxy in Prometheus's text format, or in
    OpenMetrics if the client accepts it and the backend does not answer in the text format. The
    backend's metrics are left out if they are late, too large or unreadable."""
    wanted = _wanted_format(request.headers.get(RequestHeader.ACCEPT, ""))
    upstream = get_model(request).upstream
    backend_metrics, media_format = await run_while_connected(
        request, _backend_metrics(upstream, wanted)
    )
    encode, media_type = choose_encoder(media_format)
    return Response(backend_metrics + encode(services.runs.metrics), media_type=media_type)


def _wanted_format(accept: str) -> str:
    """Return OPENMETRICS if an Accept header lists that format, else TEXT.

    The client's header is not passed to `choose_encoder` of prometheus_client, because that
    function raises TypeError for a version such as `1.x`, and repeats any version from 1.0.0 on in
    the Content-Type.
    """
    named = {each.partition(";")[0].strip().lower() for each in accept.split(",")}
    return OPENMETRICS if OPENMETRICS in named else TEXT


async def _backend_metrics(upstream: Upstream | None, wanted_format: str) -> tuple[bytes, str]:
    """Return the backend's metrics in complete lines, and their format. The format is text if the
    backend answers in it, else `wanted_format`. The metrics are empty if the backend has none,
    fails, or is too slow."""
    if upstream is None:
        return b"", wanted_format
    try:
        async with asyncio.timeout(BACKEND_TIMEOUT_S):
            return await _read_metrics(upstream, wanted_format)
    except (ProxyError, TimeoutError):
        return b"", wanted_format


async def _read_metrics(upstream: Upstream, wanted_format: str) -> tuple[bytes, str]:
    relayed = await upstream.send(
        UpstreamRequest("GET", "/metrics", {"accept": ACCEPT_HEADERS[wanted_format]}, None)
    )
    text = bytearray()
    async with aclosing(relayed.body):
        async for piece in relayed.body:
            text += piece
            if len(text) > MAX_BACKEND_BYTES:
                return b"", wanted_format
    content_type = relayed.headers.get("content-type", "").partition(";")[0]
    if relayed.status == 200 and content_type == TEXT:
        return bytes(text if text.endswith(b"\n") else text + b"\n"), TEXT
    if relayed.status == 200 and content_type == wanted_format and text.endswith(EOF):
        return bytes(text.removesuffix(EOF)), wanted_format
    return b"", wanted_format


@router.get("/v1/pause", responses=errors(403), dependencies=[REQUIRES_OPERATOR])
async def retrieve_pause(services: ServicesDep) -> PauseObject:
    """Return whether the start of runs is paused, and the number of runs at work."""
    return _pause_object(services)


@router.post("/v1/pause", responses=errors(400, 403), dependencies=[REQUIRES_OPERATOR])
async def pause(services: ServicesDep, query: Annotated[PauseQuery, Query()]) -> PauseObject:
    """Start no new runs, for example while a trainer changes the weights of the model. Runs at work
    go on. A request that would start a run gets 503 with `Retry-After`. A second pause replaces the
    first one."""
    services.runs.pause(query.timeout_s)
    return _pause_object(services)


@router.post("/v1/resume", responses=errors(400, 403), dependencies=[REQUIRES_OPERATOR])
async def resume(services: ServicesDep, query: Annotated[ResumeQuery, Query()]) -> PauseObject:
    """Start runs again."""
    services.runs.resume(query.weight_version)
    return _pause_object(services)


def _pause_object(services: Services) -> PauseObject:
    runs = services.runs
    ends_in_s = runs.pause_ends_in_s
    return PauseObject(
        paused=ends_in_s > 0,
        ends_in_s=ends_in_s,
        runs_at_work=runs.runs_at_work,
        weight_version=runs.weight_version.value,
    )
