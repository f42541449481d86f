"""POST /v1/chat/completions."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from policies.routing import Route, route
from policies.steps import suited
from proxy.agent.task import Task
from proxy.api.answering import streamed, whole
from proxy.api.claims import claim, deadline_s
from proxy.api.connection import authorize, parsed, read_body, services
from proxy.api.relay import relay
from proxy.api.tasks import task_of
from proxy.wire.chat_answer import StreamedCompletion, WholeCompletion, head
from proxy.wire.chat_request import check, wants_usage
from proxy.wire.terms import read_terms, steps_asked

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
    asked_steps = steps_asked(body, request.headers)
    steps = asked_steps or suited(services(request).steps, request.headers)
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
