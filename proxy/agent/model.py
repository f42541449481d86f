"""What the house asks of a language model."""

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


class ReplyStopped(Exception):
    """Raised by whoever hears a reply to end it: what would follow is not wanted."""

    def __init__(self, cause: StopCause, stop: str | None = None) -> None:
        """`stop` is the client's stop string, where one was found."""
        super().__init__(cause)
        self.cause = cause
        self.stop = stop
        self.reply: Reply | None = None
        """What the backend had sent of the reply, where the model can tell."""


@dataclass(frozen=True, slots=True)
class Reply:
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


class NoMoreAttempts(Exception):
    """Raised by a listener that hears of a failed attempt (`CallFailed`), to have the model raise
    the attempt's error instead of making another one."""


class RelayedBody(Protocol):
    """A body on its way."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None:
        """End the backend's work, whether or not iteration ever began. Safe to call twice."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """A backend's response passed on as bytes."""

    status: int
    headers: Mapping[str, str]
    """Only those that mean something to the client (content-type, request ids, rate limits)."""
    body: RelayedBody
    """To be closed in any case."""


@dataclass(frozen=True, slots=True)
class Passing:
    """A request of any kind on its way to the backend's server."""

    method: str
    path: str
    """As the client wrote it, query included."""
    headers: Mapping[str, str]
    body: bytes | AsyncIterable[bytes] | None


@dataclass(frozen=True, slots=True)
class Credentials:
    """A client's own with the backend."""

    key: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Which of its organizations and projects is meant."""


class Passage(Protocol):
    """The way to all that a backend's server has beside chat completions."""

    async def pass_on(self, passing: Passing) -> Relayed:
        """Send a request on as it is, once, and pass the answer back untouched, whatever its
        status. Raises BackendError only when there is no answer."""


class Answering(Protocol):
    """Who answers in chat completions."""

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Reply:
        """Ask for one assistant message.

        `body` is a chat-completions request without `stream`; every field of it reaches the
        backend. With `on_delta` the backend is asked to stream and each piece is passed on as it
        arrives, after a `CallAccepted`; without it the message comes whole. Raises BackendError,
        ContextOverflowError.
        """


class Model(Answering, Protocol):
    """A door to a language model that speaks chat completions."""

    async def relay(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Relayed:
        """Send a chat-completions request on as it is, `stream` included, and pass the answer back
        untouched, whatever its status. Raises BackendError only when there is no answer."""

    def for_client(self, credentials: Credentials) -> "Model":
        """The same door, all calls through which are made with a client's own key."""

    def with_timeout(self, timeout_s: float) -> "Model":
        """The same model, on the same connections, with this longest silence of the backend."""

    async def count_tokens(self, model: str, text: str) -> int | None:
        """How many tokens a text has for a model; None where nobody here can tell."""

    @property
    def passage(self) -> Passage | None:
        """To the backend's other paths, where it is a server that has any."""

    def keep_warm(self) -> AbstractAsyncContextManager[None]:
        """Keep a connection open for the next call while the block runs, for some minutes at most.
        A failure of the backend is ignored."""

    async def models(self) -> list[dict[str, Any]]:
        """The backend's models, as `GET /v1/models` lists them. Raises BackendError."""

    async def aclose(self) -> None:
        """Give back the connections."""


def refusal_of(message: Message) -> str | None:
    """What the model said instead of an answer, where it declined in the field for it."""
    refusal = message.get("refusal")
    return refusal if isinstance(refusal, str) and refusal else None
