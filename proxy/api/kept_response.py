"""A response that others may go on from: kept from its beginning on, and how it ends."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from policies.sessions import Session, State
from proxy.agent.events import Event
from proxy.agent.result import Result
from proxy.agent.task import Task
from proxy.api.dependencies import owner, services
from proxy.api.said_before import Before, is_reference
from proxy.errors import BadRequestError, ProxyError
from proxy.runs.recording import Recording
from proxy.runs.runs import give_back
from proxy.store.records import StoredResponse
from proxy.store.responses import ResponseShelf
from proxy.wire.responses_request import input_items
from proxy.wire.responses_response import Asked, ResponseWriter, StreamedResponse

log = logging.getLogger(__name__)
OUTPUTS = "code_interpreter_call.outputs"


class KeptResponse:
    """Hears a run, and keeps what becomes of it; of one in the background every frame too."""

    def __init__(self, shelf: ResponseShelf, owner: str, asked: Asked) -> None:
        self._shelf = shelf
        self._owner = owner
        self._writer = ResponseWriter(_in_full(asked))
        self.begun: Mapping[str, Any] = self._writer.begin()[0]["response"]
        """OpenAI's object, before anything is known."""
        self.frames: Recording | None = None
        if asked.body.get("background"):
            self.frames = Recording()
            self._told = StreamedResponse(asked)
            self.frames.add(_apart(self._told.begin()))

    def heard(self, event: Event) -> None:
        """See Witness."""
        self._writer.event(event)
        if self.frames:
            self.frames.add(_apart(self._told.event(event)))

    async def ended(self, result: Result) -> None:
        """See Witness."""
        response = self._writer.finish(result)[-1]["response"]
        await self._keep(response, self._told.finish(result) if self.frames else "")

    async def failed(self, error: ProxyError) -> None:
        """See Witness."""
        response = self._writer.fail(error)[-1]["response"]
        await self._keep(response, self._told.fail(error) if self.frames else "")

    async def _keep(self, response: Mapping[str, Any], last: str) -> None:
        keeping = asyncio.ensure_future(self._write(response, _apart(last)))
        try:
            await asyncio.shield(keeping)
        except asyncio.CancelledError:
            await keeping  # it is over all the same, and must not be shown as at work for ever
            raise
        except Exception:  # the client has its answer all the same
            log.exception("response %s cannot be kept", response["id"])
        finally:
            if self.frames:  # only now: who has heard the end goes on from what is kept
                self.frames.add(_apart(last))
                self.frames.end()

    async def _write(self, response: Mapping[str, Any], last: Sequence[str]) -> None:
        frames = await asyncio.to_thread(self.frames.to_json, last) if self.frames else None
        await self._shelf.end(self._owner, response["id"], response, frames)


def _apart(frames: str) -> list[str]:
    return [f"{frame}\n\n" for frame in frames.split("\n\n") if frame]


def _in_full(asked: Asked) -> Asked:
    """As if all had been asked for that is there anyway: who asks again may want more."""
    include = {*(asked.body.get("include") or []), OUTPUTS}
    return replace(asked, body={**asked.body, "include": sorted(include)})


def is_kept(body: Mapping[str, Any]) -> bool:
    """Whether the response to a request is to be kept. Raises BadRequestError."""
    asked = body.get("store") is not False
    if body.get("background") and not asked:
        raise BadRequestError(
            "Background responses require 'store' to be true.",
            param="background",
            code="invalid_value",
        )
    return asked


async def keep(request: Request, task: Task, asked: Asked, before: Before) -> Task:
    """Keep the response that a task is to make, as one that is at work."""
    store, whose = services(request).store, owner(request)
    witness = KeptResponse(store.responses, whose, asked)
    leaves = task.leaves or _as_before(task, whose, before)
    stored = StoredResponse(
        id=witness.begun["id"],
        session=leaves.session.name,
        state=leaves.name,
        record=witness.begun,
        previous_id=before.previous_id,
        conversation_id=before.conversation_id,
        seen_seq=before.seen_seq,
        worker=store.worker.id,
    )
    inputs = [i for i in input_items(asked.body["input"], task.run_id) if not is_reference(i)]
    task = replace(task, witness=witness)
    try:
        await store.responses.begin(whose, stored, inputs, before.chain)
    except BaseException:
        await give_back(task)
        raise
    return task


def _as_before(task: Task, owner: str, before: Before) -> State:
    """The state of files that a run has nothing to do with: there is none of that name, and so what
    goes on from it finds the one before."""
    session = Session(owner, task.outbox.container_id)
    return State(before.follows.session if before.follows else session, task.run_id)
