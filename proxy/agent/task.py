"""What the agent is asked for and what it gives back."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from policies.answer_form import AnswerForm
from policies.artifacts import Produced
from policies.limits import StopReason
from policies.sessions import GoesOn, State
from proxy.agent.events import Event
from proxy.agent.model import Message
from proxy.agent.parking import Parked
from proxy.errors import ProxyError
from proxy.workspaces import Origin
from sandbox_runtime.sandbox import Sandbox


@dataclass(frozen=True, slots=True)
class Artifact:
    """A produced file as it is handed back."""

    file_id: str
    container_id: str
    path: str
    bytes: int
    mime_type: str
    sha256: str
    url: str
    data_url: str | None
    """The content itself, for a picture small enough to travel inside the message."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file that the client gave, for the sandbox to have before the first command."""

    path: str
    identity: str
    """The same for the same content."""
    read: Callable[[], AsyncGenerator[bytes, None]]
    """Its bytes, from the start at each call. Raises SandboxFileError where they cannot be had."""


class Witness(Protocol):
    """Who is told of all that happens in a run, and of its end before any client is."""

    def heard(self, event: Event) -> None:
        """Something has happened."""

    async def ended(self, result: "Result") -> None:
        """The run has come to its end."""

    async def failed(self, error: ProxyError) -> None:
        """It has not."""


class Outbox(Protocol):
    """Where one run's produced files go."""

    @property
    def container_id(self) -> str:
        """The name under which the files are found."""

    def url(self, path: str) -> str:
        """Where a file will be found, once saved."""

    async def has(self, path: str) -> bool:
        """Whether a file can be found there."""

    async def save(self, sandbox: Sandbox, file: Produced) -> Artifact:
        """Take a file out of the sandbox. Raises SandboxFileError."""


@dataclass(frozen=True, slots=True)
class Task:
    """One request, split into what the loop needs."""

    run_id: str
    outbox: Outbox
    model: str
    messages: Sequence[Message]
    inputs: Sequence[InputFile] = ()
    client_tools: Sequence[Mapping[str, Any]] = ()
    """Tools that only the client can run."""
    tool_choice: Any = None
    must_call: bool = False
    """Whether the run has to end in a call of a tool of the client's."""
    parallel_tool_calls: Any = None
    """Whether the client can answer several calls of its tools in one turn."""
    every_turn: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that go with each model call."""
    final_only: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that go with the call that writes the visible answer, and with no other."""
    final_budget: Mapping[str, Any] = field(default_factory=dict)
    """The client's token limit, under the name it used; it bounds the visible answer alone."""
    stream: bool = False
    """Whether the model is asked to stream, because someone watches."""
    rewrite_links: bool = True
    """Whether the answer is prose, in which links to produced files may be put."""
    goes_on: GoesOn | None = None
    """The conversation whose files the run finds."""
    leaves: State | None = None
    """What its files are kept as; None: they are not kept."""
    parks: State | None = None
    """The same for a run that waits for the client's tools."""
    resumes: Parked | None = None
    """The run that it goes on with, now that the client has answered."""
    deadline_s: float | None = None
    """When the answer must be there, from the run's start; the policy's limit holds beside it."""
    form: AnswerForm | None = None
    """What the visible answer must be, as far as it can be checked."""
    arriving: Callable[["Task"], Awaitable["Task"]] | None = None
    """What makes the task complete where some of its files have to be fetched."""
    legacy_state: str | None = None
    """Where the client knows its tools as `functions`, whose calls have no ids: the conversation's
    state by its own account."""
    max_tool_calls: int | None = None
    """How many calls of ours the client allows."""
    alone: bool = False
    """Whether the model answers by itself, without tools."""
    created: int = field(default_factory=lambda: int(time.time()))
    """When it was asked for, in seconds since 1970."""
    witness: Witness | None = None
    others: Sequence["Task"] = ()
    """The same request's further choices, each answered in a run of its own."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What a run has cost beside model tokens."""

    llm_calls: int = 0
    tool_calls: int = 0
    context_tokens: int = 0
    """The last prompt's length."""
    env_tokens: int = 0
    """How much of the prompts the sandbox's output was, by the backend's own count."""
    wall_ms: int = 0
    sandbox_ms: int = 0
    """Time spent in tools."""
    cpu_ms: int = 0
    """Processor time of the commands."""
    peak_mem_bytes: int = 0
    """The largest command's memory."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something about the answer that its reader must know."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended."""

    run_id: str
    container_id: str
    model: str
    answer: str
    stop_reason: StopReason
    finish_reason: str
    """OpenAI's: stop, length, tool_calls, function_call, content_filter."""
    tool_calls: Sequence[Mapping[str, Any]]
    """Calls of the client's own tools, for the client to run."""
    usage: Mapping[str, Any]
    """Summed over all model calls."""
    segments: int
    """1, and one more for each time the history had to be shortened."""
    tally: Tally
    artifacts: Sequence[Artifact]
    left_out: Sequence[Produced]
    choice: Mapping[str, Any]
    """Other fields of the choice that the answer came in, such as logprobs."""
    response: Mapping[str, Any]
    """Other fields of the last reply, such as system_fingerprint."""
    origin: Origin = "new"
    """Where its files came from."""
    parked: Parked | None = None
    """What it takes to go on once the client has answered."""
    refusal: str | None = None
    """What the model said instead of an answer, where it declined in OpenAI's way."""
    notices: Sequence[Notice] = ()
    others: Sequence["Result"] = ()
    """How the runs of the request's further choices ended."""
    usages: Sequence[Mapping[str, Any]] = ()
    """Of each model call, in order."""
