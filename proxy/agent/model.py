"""The interface to a language model: the calls that a backend answers, and their results."""

import copy
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

from proxy.agent.events import OnDelta

Message = dict[str, Any]
"""An OpenAI chat message, unknown fields included."""


StopCause = Literal["max_tokens", "stop", "runaway", "echo", "no_call", "many_calls"]
"""The reason for which the proxy ended a reply. max_tokens, stop: the client's token limit or stop
string was reached. runaway: the model repeats itself. echo: the model repeats the proxy's own
texts. no_call: the model writes prose where a tool call was requested. many_calls: the model has
made more than `MAX_CALLS` calls."""
MAX_CALLS = 256
"""Maximum number of tool calls in one reply."""


class CompletionStopped(Exception):
    """Raised by an `on_delta` callback to end a reply early."""

    def __init__(self, cause: StopCause, stop_string: str | None = None) -> None:
        """`stop_string` is the client's stop string that was found, if any."""
        super().__init__(cause)
        self.cause = cause
        self.stop_string = stop_string
        self.partial_completion: Completion | None = None
        """The reply as far as it arrived; None if the model client has not set it."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One reply of a model."""

    message: Message
    """The assistant message as the backend sent it."""
    finish_reason: str
    usage: Mapping[str, Any]
    """The backend's `usage`; empty if there was none."""
    choice: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the choice, such as `logprobs` and `stop_reason`."""
    response: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the response, such as `model` and `system_fingerprint`."""
    stop_cause: StopCause | None = None
    """The reason for which the proxy ended the reply; None if the model ended it."""


class StopRetryingError(Exception):
    """Raised by an `on_delta` callback on `ModelCallFailed`, so that the model raises the attempt's
    error instead of retrying."""


class UpstreamResponseBody(Protocol):
    """The body of a relayed response, streamed."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None:
        """Close the response, whether or not iteration has begun. Safe to call twice."""


@dataclass(frozen=True, slots=True)
class UpstreamResponse:
    """A backend's response, relayed as bytes."""

    status: int
    headers: Mapping[str, str]
    """The headers that the client needs: content-type, request ids, rate limits."""
    body: UpstreamResponseBody
    """The body, which the caller must close."""


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A request to any path of the backend."""

    method: str
    path: str
    """The path and query as the client wrote them."""
    headers: Mapping[str, str]
    body: bytes | bytearray | AsyncIterable[bytes] | None


@dataclass(frozen=True, slots=True)
class Credentials:
    """A client's own credentials for the backend."""

    key: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The headers that select the client's organization and project."""


class Upstream(Protocol):
    """Sends requests unchanged to paths of a backend for which `Model` has no method."""

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send a request unchanged, without retries, and return the response of any status. Raises
        BackendError only if there is no response."""


class ChatModel(Protocol):
    """Answers chat-completions requests: a model, or a model whose calls are metered."""

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        """Request one assistant message.

        `body` is a chat-completions request without `stream`; all its fields are sent. With
        `on_delta`, the backend streams, and `on_delta` is called with `ModelCallAccepted` and then
        with each delta. Before a retry, `on_delta` is called with `ModelCallFailed`. Raises
        BackendError, ContextOverflowError.
        """


class Model(ChatModel, Protocol):
    """A language model with a chat-completions API.

    By default, a call of a run passes through MeteredModel (the run's budget), MonitoredModel
    (metrics, refused tools) and RetryingModel to OpenAIHTTPModel, which sends it.
    """

    async def relay(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> UpstreamResponse:
        """Send a chat-completions request unchanged, including `stream`, and return the response of
        any status. Raises BackendError only if there is no response."""

    def with_credentials(self, credentials: Credentials) -> "Model":
        """Return this model with a client's own credentials."""

    def with_timeout(self, timeout_s: float) -> "Model":
        """Return this model with another read timeout, on the same connections."""

    def with_upstream(self, url: str) -> "Model":
        """Return this model with its chat completions sent to another base URL, which ends in /v1
        as in OpenAI's SDKs. Other calls go to the backend as before."""

    async def count_tokens(self, model: str, text: str) -> int | None:
        """Return the number of tokens of a text for a model, or None if unknown."""

    async def tokenize_prompt(self, model: str, prompt: str) -> list[int] | None:
        """Return the token ids of a prompt that the backend's chat template has rendered, or None
        if they are unknown."""

    @property
    def upstream(self) -> Upstream | None:
        """Sends requests to the backend's other paths; None if the backend has no other paths."""

    def keep_warm(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager that keeps a connection open for the next call, for some minutes
        at most. Backend failures are ignored."""

    async def models(self) -> list[dict[str, Any]]:
        """Return the backend's models as listed by `GET /v1/models`. Raises BackendError."""

    async def aclose(self) -> None:
        """Close the connections."""


class ModelWrapper:
    """Base class of models that wrap another model and forward all calls except `complete`, which
    subclasses define."""

    def __init__(self, model: Model) -> None:
        self._model = model

    async def relay(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> UpstreamResponse:
        return await self._model.relay(body, headers)

    def with_credentials(self, credentials: Credentials) -> Self:
        return self._wrap(self._model.with_credentials(credentials))

    def with_timeout(self, timeout_s: float) -> Self:
        return self._wrap(self._model.with_timeout(timeout_s))

    def with_upstream(self, url: str) -> Self:
        return self._wrap(self._model.with_upstream(url))

    async def count_tokens(self, model: str, text: str) -> int | None:
        return await self._model.count_tokens(model, text)

    async def tokenize_prompt(self, model: str, prompt: str) -> list[int] | None:
        return await self._model.tokenize_prompt(model, prompt)

    @property
    def upstream(self) -> Upstream | None:
        return self._model.upstream

    def keep_warm(self) -> AbstractAsyncContextManager[None]:
        return self._model.keep_warm()

    async def models(self) -> list[dict[str, Any]]:
        return await self._model.models()

    async def aclose(self) -> None:
        await self._model.aclose()

    def _wrap(self, model: Model) -> Self:
        other = copy.copy(self)
        other._model = model  # noqa: SLF001 - an instance of the same class
        return other


def refusal_of(message: Message) -> str | None:
    """Return the message's `refusal` text, or None if the model did not refuse."""
    refusal = message.get("refusal")
    return refusal if isinstance(refusal, str) and refusal else None
