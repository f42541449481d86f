"""The recorder of a stored response. It stores the final response object and, for a background
response, all frames of its stream."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from proxy.agent.events import ALL_EVENTS, Event
from proxy.agent.result import Result
from proxy.errors import ProxyError, RunCancelledError, internal_error
from proxy.runs.frame_log import FrameLog
from proxy.schemas.responses_response import ResponseContext, ResponseEncoder, ResponseStreamEncoder
from proxy.store.responses import ResponseRepository

log = logging.getLogger(__name__)
INCLUDE_OUTPUTS = "code_interpreter_call.outputs"


class ResponseRecorder:
    """A RunObserver that stores the final response. For a background response, it records every
    frame too."""

    event_types = ALL_EVENTS

    def __init__(
        self, repository: ResponseRepository, owner: str, context: ResponseContext
    ) -> None:
        self._repository = repository
        self._owner = owner
        self._response_encoder = ResponseEncoder(_with_all_outputs(context))
        self.initial_response: Mapping[str, Any] = self._response_encoder.begin()[0]["response"]
        """OpenAI's response object at the start of the run."""
        self.frames: FrameLog | None = None
        if context.body.get("background"):
            self.frames = FrameLog()
            self._frame_encoder = ResponseStreamEncoder(context)
            self.frames.add(_split_frames(self._frame_encoder.begin()))

    async def on_event(self, event: Event) -> None:
        self._response_encoder.encode(event)
        if self.frames:
            self.frames.add(_split_frames(self._frame_encoder.encode(event)))

    async def on_result(self, result: Result) -> None:
        response = self._response_encoder.finish(result)[-1]["response"]
        await self._store(response, self._frame_encoder.finish(result) if self.frames else "")

    async def on_error(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            error = RunCancelledError()
        elif not isinstance(error, ProxyError):
            error = internal_error()
        response = self._response_encoder.fail(error)[-1]["response"]
        await self._store(response, self._frame_encoder.fail(error) if self.frames else "")

    async def _store(self, response: Mapping[str, Any], last_frames: str) -> None:
        storing = asyncio.ensure_future(self._write(response, _split_frames(last_frames)))
        try:
            await asyncio.shield(storing)
        except asyncio.CancelledError:
            await storing  # else the response would stay in progress for ever
            raise
        except Exception:  # the client of the run still receives the response
            log.exception("response %s cannot be stored", response["id"])
        finally:
            # The last frames are sent after the response is stored: on receiving them, the client
            # may continue the response at once.
            if self.frames:
                self.frames.add(_split_frames(last_frames))
                self.frames.end()

    async def _write(self, response: Mapping[str, Any], last_frames: Sequence[str]) -> None:
        frames = await asyncio.to_thread(self.frames.to_json, last_frames) if self.frames else None
        await self._repository.end(self._owner, response["id"], response, frames)


def _split_frames(frames: str) -> list[str]:
    return [f"{frame}\n\n" for frame in frames.split("\n\n") if frame]


def _with_all_outputs(context: ResponseContext) -> ResponseContext:
    """Return the context with `INCLUDE_OUTPUTS` in the request's `include`, because a later request
    may ask for the outputs."""
    include = {*(context.body.get("include") or []), INCLUDE_OUTPUTS}
    return replace(context, body={**context.body, "include": sorted(include)})
