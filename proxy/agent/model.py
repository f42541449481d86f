"""The interface to a language model: the calls that a backend answers, and what they return."""

from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from proxy.agent.events import OnDelta

Message = dict[str, Any]
"""An OpenAI chat message, unknown fields included."""


StopCause = Literal["max_tokens", "stop", "runaway", "echo", "no_call", "many_calls"]
"""Why the proxy ended a reply: the client's token limit or stop string was reached, the model
repeats itself or the proxy's own texts, it was asked for a tool call and writes prose, or it has
made `MAX_CALLS` calls."""
MAX_CALLS = 256
"""The most tool calls that are taken of one reply."""


class CompletionStopped(Exception):
    """Raised by a listener to end a reply: its rest is not wanted."""

    def __init__(self, cause: StopCause, stop: str | None = None) -> None:
        """`stop` is the client's stop string, where one was found."""
        super().__init__(cause)
        self.cause = cause
        self.stop = stop
        self.partial: Completion | None = None
        """The reply as far as the backend had sent it, if the model can tell."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of a model."""

    message: Message
    """The assistant message as the backend sent it, ready to be echoed back."""
    finish_reason: str
    usage: Mapping[str, Any]
    """The backend's `usage`; empty when it gave none."""
    choice: Mapping[str, Any] = field(default_factory=dict)
    """The choice's other fields, such as `logprobs` and `stop_reason`."""
    response: Mapping[str, Any] = field(default_factory=dict)
    """The response's other fields, such as `model` and `system_fingerprint`."""
    stopped: StopCause | None = None
    """Why the proxy ended it before the model did."""


class StopRetryingError(Exception):
    """Raised by a listener that hears of a failed attempt (`CallFailed`), to have the model raise
    the attempt's error instead of making another one."""


class UpstreamBody(Protocol):
    """The body of a relayed response, read as it arrives."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None:
        """End the backend's work, whether or not iteration ever began. Safe to call twice."""


@dataclass(frozen=True, slots=True)
class UpstreamResponse:
    """A backend's response passed on as bytes."""

    status: int
    headers: Mapping[str, str]
    """The headers that mean something to the client (content-type, request ids, rate limits)."""
    body: UpstreamBody
    """The caller closes it in any case."""


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A request of any kind to the backend's server."""

    method: str
    path: str
    """As the client wrote it, query included."""
    headers: Mapping[str, str]
    body: bytes | AsyncIterable[bytes] | None


@dataclass(frozen=True, slots=True)
class Credentials:
    """A client's own credentials with the backend."""

    key: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The headers that name one of the client's organizations and projects."""


class Upstream(Protocol):
    """The paths of a backend's server beside chat completions."""

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send a request as it is, once, and return the response untouched, whatever its status.
        Raises BackendError only if there is no response."""


class ChatModel(Protocol):
    """Something that answers chat completions: a model, or a model whose calls are counted."""

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        """Ask for one assistant message.

        `body` is a chat-completions request without `stream`; every field of it reaches the
        backend. With `on_delta` the backend is asked to stream and each piece is passed on as it
        arrives, after a `CallAccepted`; without it the message comes whole. Raises BackendError,
        ContextOverflowError.
        """


class Model(ChatModel, Protocol):
    """A language model that is reached by chat completions."""

    async def relay(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> UpstreamResponse:
        """Send a chat-completions request as it is, `stream` included, and return the response
        untouched, whatever its status. Raises BackendError only if there is no response."""

    def for_client(self, credentials: Credentials) -> "Model":
        """Return the same model, whose calls are made with a client's own key."""

    def with_timeout(self, timeout_s: float) -> "Model":
        """Return the same model, on the same connections; the backend may be silent for so long."""

    async def count_tokens(self, model: str, text: str) -> int | None:
        """Return how many tokens a text has for a model, or None if that is unknown."""

    @property
    def upstream(self) -> Upstream | None:
        """The backend's other paths; None if it has none."""

    def keep_warm(self) -> AbstractAsyncContextManager[None]:
        """Keep a connection open for the next call while the block runs, for some minutes at most.
        A failure of the backend is ignored."""

    async def models(self) -> list[dict[str, Any]]:
        """Return the backend's models, as `GET /v1/models` lists them. Raises BackendError."""

    async def aclose(self) -> None:
        """Close the connections."""


def refusal_of(message: Message) -> str | None:
    """Return the model's words if it declined in the field for that, else None."""
    refusal = message.get("refusal")
    return refusal if isinstance(refusal, str) and refusal else None
