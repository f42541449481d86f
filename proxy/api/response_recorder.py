"""Records the response of a run: its end in the store, and each frame of one in the background."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from proxy.agent.events import Event
from proxy.agent.result import Result
from proxy.errors import ProxyError
from proxy.runs.recording import FrameLog
from proxy.schemas.responses_response import ResponseContext, ResponseWriter, StreamedResponse
from proxy.store.responses import ResponseRepository

log = logging.getLogger(__name__)
OUTPUTS = "code_interpreter_call.outputs"


class ResponseRecorder:
    """The witness of a run that writes the run's end to the store, and for a response in the
    background records every frame too."""

    def __init__(self, repository: ResponseRepository, owner: str, asked: ResponseContext) -> None:
        self._repository = repository
        self._owner = owner
        self._writer = ResponseWriter(_in_full(asked))
        self.begun: Mapping[str, Any] = self._writer.begin()[0]["response"]
        """OpenAI's response object as the run begins."""
        self.frames: FrameLog | None = None
        if asked.body.get("background"):
            self.frames = FrameLog()
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
            await keeping  # the run has ended all the same, and must not look as if it went on
            raise
        except Exception:  # the client has its answer all the same
            log.exception("response %s cannot be kept", response["id"])
        finally:
            if self.frames:  # only now: a client that has the end may continue the kept response
                self.frames.add(_apart(last))
                self.frames.end()

    async def _write(self, response: Mapping[str, Any], last: Sequence[str]) -> None:
        frames = await asyncio.to_thread(self.frames.to_json, last) if self.frames else None
        await self._repository.end(self._owner, response["id"], response, frames)


def _apart(frames: str) -> list[str]:
    return [f"{frame}\n\n" for frame in frames.split("\n\n") if frame]


def _in_full(asked: ResponseContext) -> ResponseContext:
    """Return the request as if it included all outputs: a later request may ask for them."""
    include = {*(asked.body.get("include") or []), OUTPUTS}
    return replace(asked, body={**asked.body, "include": sorted(include)})
