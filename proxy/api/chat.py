"""POST /v1/chat/completions."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from policies.routing import Route, route
from policies.steps import PROFILES, Steps, is_profile, suited
from proxy.agent.task import Task
from proxy.api.answering import streamed, whole
from proxy.api.claims import claim, deadline_s
from proxy.api.connection import authorize, parsed, read_body, services
from proxy.api.relay import relay
from proxy.api.tasks import task_of
from proxy.errors import BadRequestError
from proxy.wire.chat_answer import StreamedCompletion, WholeCompletion, head
from proxy.wire.chat_request import check, wants_usage
from proxy.wire.terms import read_terms

router = APIRouter()


async def chat_completions(request: Request) -> Response:
    authorize(request)
    written = await read_body(request, services(request).inputs.max_body_bytes)
    body = check(parsed(written))
    way = route(body, request.headers)
    if way.kind == "plain":
        plain = {key: value for key, value in body.items() if key != "sandbox"}
        return await relay(request, {**plain, "model": way.model})
    return await _run(request, body, written, way)


# Not @router.post: FastAPI's own handling of parameters, of which there are none, takes longer
# than relaying a plain request.
router.add_route("/v1/chat/completions", chat_completions, methods=["POST"])


async def _run(request: Request, body: dict[str, Any], written: bytes, way: Route) -> Response:
    """Answer by the loop: by a run of the request's own, or one that it repeats."""
    terms = read_terms(body, request.headers)
    steps = _steps(request, body)
    usage = wants_usage(body)
    asked = claim(request, body, terms, written)

    async def make_task(run_id: str) -> Task:
        by_s = deadline_s(request, terms, asked)
        return await task_of(request, body, model=way.model, run_id=run_id, deadline_s=by_s)

    listener = await services(request).runs.enter(asked, make_task)
    names = head(listener.run.id, listener.run.created, body["model"])
    if not asked.stream:
        return await whole(request, listener, WholeCompletion(names, listener.run.id, steps), terms)
    frames = StreamedCompletion(names, listener.run.id, steps, wants_usage=usage)
    return streamed(request, listener, frames, terms)


def _steps(request: Request, body: dict[str, Any]) -> Steps:
    """The profile asked for: in the body, by header, or as configured."""
    ours = body.get("sandbox")
    asked = ours.get("steps") if isinstance(ours, dict) else None
    asked = asked or request.headers.get("x-sandbox-steps")
    if not asked:
        return suited(services(request).steps, request.headers)
    if is_profile(asked):
        return asked
    raise BadRequestError(
        f"Invalid value {asked!r} for 'sandbox.steps': one of {', '.join(map(repr, PROFILES))}.",
        param="sandbox.steps",
        code="invalid_value",
    )
