"""A script in the place of a model, for tests and demonstrations. It understands nothing."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from proxy.agent.events import CallAccepted, OnDelta
from proxy.agent.model import Credentials, Relayed, Reply
from proxy.errors import BackendError
from proxy.models.assembly import Assembly, deltas_of, reply_of, reply_when_stopped
from proxy.models.backend_errors import backend_error
from proxy.models.relay import ReadyBody, ready_json, refused
from proxy.models.script import ScriptedError, chunks_of, completion_of, read_script, sse


class ScriptedModel:
    """Plays a script of replies.

    A request with k assistant messages in its history gets the reply number k (from 0), so the
    script starts anew for every conversation and conversations do not disturb each other. With
    `cycle` it starts over after its last reply; without, it then fails. An error in the script
    stands before the reply it delays: it is raised once in this object's life, then skipped.
    """

    passage = None

    def __init__(
        self, replies: Sequence[Mapping[str, Any]], *, cycle: bool = False, name: str = "script"
    ) -> None:
        script = read_script({"model": name, "replies": list(replies)}, "script")
        self.requests: list[dict[str, Any]] = []
        """Copies of the bodies it was asked with."""
        self._name = script.model
        self._replies = script.replies
        self._cycle = cycle
        self._raised: set[int] = set()

    @classmethod
    def from_yaml(cls, path: Path) -> "ScriptedModel":
        """Play a file, over and over. Raises ValueError with one line that says what is wrong."""
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
        script = read_script(data, str(path))
        replies = [reply.model_dump(exclude_unset=True) for reply in script.replies]
        return cls(replies, cycle=True, name=script.model)

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Reply:
        """See Model."""
        completion, streams = self._next(body)
        if on_delta is None:
            return reply_of(completion)
        await on_delta(CallAccepted())
        if not streams:
            reply = reply_of(completion)
            for delta in deltas_of(reply):
                await on_delta(delta)
            return reply
        assembly = Assembly()
        with reply_when_stopped(assembly.reply):
            for chunk in chunks_of(completion, include_usage=True):
                for delta in assembly.add(chunk):
                    await on_delta(delta)
                await asyncio.sleep(0)  # others run between a backend's pieces
        return assembly.reply()

    async def relay(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Relayed:
        """See Model."""
        try:
            completion, _ = self._next(body)
        except BackendError as error:
            return refused(error)
        if not body.get("stream"):
            return ready_json(completion)
        include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        frames = sse(chunks_of(completion, include_usage=include_usage))
        return Relayed(200, {"content-type": "text/event-stream"}, ReadyBody(frames))

    def for_client(self, credentials: Credentials) -> "ScriptedModel":
        """See Model. A script knows no keys."""
        return self

    def with_timeout(self, timeout_s: float) -> "ScriptedModel":
        """See Model. A script is never silent."""
        return self

    async def count_tokens(self, model: str, text: str) -> int | None:
        """See Model. A script has no tokenizer."""
        return None

    def keep_warm(self) -> AbstractAsyncContextManager[None]:
        """See Model. A script has no connection."""
        return nullcontext()

    async def models(self) -> list[dict[str, Any]]:
        """See Model."""
        return [{"id": self._name, "object": "model", "created": 0, "owned_by": "script"}]

    async def aclose(self) -> None:
        """See Model. Nothing is held."""

    def _next(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """The next completion, and whether it can be streamed: a message that is given as it
        stands comes whole, as from a server that does not stream though it was asked to."""
        self.requests.append(deepcopy(dict(body)))
        position = sum(message.get("role") == "assistant" for message in body["messages"])
        spoken = sum(reply.error is None for reply in self._replies)
        wanted = position % spoken if self._cycle and spoken else position
        for number, reply in enumerate(self._replies):
            if reply.error is not None:
                if wanted == 0 and number not in self._raised:
                    self._raised.add(number)
                    raise _refusal(reply.error)
                continue
            if wanted == 0:
                model = body.get("model") or self._name
                return completion_of(reply, model=model, position=position), reply.message is None
            wanted -= 1
        raise BackendError("the script has no more replies", status=500, code="script_ended")


def call(name: str, /, **arguments: Any) -> dict[str, Any]:
    """A tool call, for `tool_reply`."""
    return {"name": name, "arguments": arguments}


def tool_reply(*calls: Mapping[str, Any], content: str | None = None) -> dict[str, Any]:
    """A scripted reply that calls tools."""
    return {"content": content, "tool_calls": list(calls)}


def text_reply(text: str) -> dict[str, Any]:
    """A scripted reply in prose."""
    return {"content": text}


def _refusal(error: ScriptedError) -> BackendError:
    return backend_error(
        {"message": error.message, "type": error.type, "code": error.code},
        status=error.status,
        retry_after_s=error.retry_after_s,
    )
