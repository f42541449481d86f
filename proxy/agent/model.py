"""What the house asks of a language model."""

from collections.abc import AsyncIterable, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.agent.events import OnDelta

Message = dict[str, Any]
"""An OpenAI chat message, unknown fields included."""


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
        arrives; without it the message comes whole. Raises BackendError, ContextOverflowError.
        """


class Model(Answering, Protocol):
    """A door to a language model that speaks chat completions."""

    async def relay(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Relayed:
        """Send a chat-completions request on as it is, `stream` included, and pass the answer back
        untouched, whatever its status. Raises BackendError only when there is no answer."""

    async def count_tokens(self, model: str, text: str) -> int | None:
        """How many tokens a text has for a model; None where nobody here can tell."""

    @property
    def passage(self) -> Passage | None:
        """To the backend's other paths, where it is a server that has any."""

    async def models(self) -> list[dict[str, Any]]:
        """The backend's models, as `GET /v1/models` lists them. Raises BackendError."""

    async def aclose(self) -> None:
        """Give back the connections."""
