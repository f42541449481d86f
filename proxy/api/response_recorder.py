"""The recorder of a stored response, and the log of its frames. The recorder stores the final
response object and, for a background response, all frames."""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from proxy.agent.events import ALL_EVENTS, Event
from proxy.agent.result import Result
from proxy.errors import ProxyError, RunCancelledError, internal_error
from proxy.schemas.responses_response import ResponseContext, ResponseEncoder, ResponseStreamEncoder
from proxy.store.responses import ResponseRepository

log = logging.getLogger(__name__)
INCLUDE_OUTPUTS = "code_interpreter_call.outputs"
MAX_LOG_CHARS = 8_000_000
"""Maximum number of characters in a log. Beyond it, the oldest frames are dropped."""


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
        self._response_encoder.event(event)
        if self.frames:
            self.frames.add(_split_frames(self._frame_encoder.event(event)))

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


class FrameLog:
    """The frames of one streamed answer, numbered from 0, for clients that subscribe late or resume
    the stream."""

    def __init__(self, max_chars: int = MAX_LOG_CHARS) -> None:
        self.first_number = 0
        """The number of the oldest frame in the log."""
        self.chars = 0
        self._max_chars = max_chars
        self._frames = deque[str]()
        self._is_complete = False
        self._change_event = asyncio.Event()

    def add(self, frames: Iterable[str]) -> None:
        """Append frames."""
        for frame in frames:
            self._frames.append(frame)
            self.chars += len(frame)
        while self.chars > self._max_chars and len(self._frames) > 1:
            self.chars -= len(self._frames.popleft())
            self.first_number += 1
        self._wake()

    def end(self) -> None:
        """Mark the stream as complete."""
        self._is_complete = True
        self._wake()

    def to_json(self, last_frames: Sequence[str] = ()) -> str:
        """Return the JSON that `from_json` reads: the frames of the log, then those of
        `last_frames`."""
        return json.dumps({"first": self.first_number, "frames": [*self._frames, *last_frames]})

    @classmethod
    def from_json(cls, text: str) -> "FrameLog":
        """Return the log of a complete stream from the JSON that `to_json` returned."""
        value = json.loads(text)
        log = cls()
        log.first_number = value["first"]
        log.add(value["frames"])
        log.end()
        return log

    async def wait_for_frames(self, number: int) -> Sequence[str]:
        """Wait for frames from `number` on and return them. Frames that were dropped are left out.
        Return an empty list if the stream is complete and has no further frames."""
        while number >= self.first_number + len(self._frames) and not self._is_complete:
            await self._change_event.wait()
        # Slice from the end: a reader that keeps up takes one frame of many thousands.
        new = islice(reversed(self._frames), max(0, self.first_number + len(self._frames) - number))
        return list(new)[::-1]

    def _wake(self) -> None:
        self._change_event.set()
        self._change_event = asyncio.Event()
