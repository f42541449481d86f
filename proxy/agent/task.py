"""What the agent is asked for and what it gives back."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from policies.answer_form import AnswerForm
from policies.artifacts import LeftOut, Produced
from policies.limits import StopReason
from policies.prices import Tariff
from policies.profile import Profile
from policies.sessions import GoesOn, State
from policies.usage import UsageOf
from proxy.agent.account import Account
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
    filename: str = ""
    """As the user is to see it, different from the others'; empty: as its path says."""


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
    profile: Profile = Profile()
    route: str = ""
    """Why there is a run."""
    inputs: Sequence[InputFile] = ()
    client_tools: Sequence[Mapping[str, Any]] = ()
    """Tools that only the client can run."""
    free_text: frozenset[str] = frozenset()
    """Those of them, by name, that the client calls `custom`: they take no arguments but a text."""
    tool_choice: Any = None
    must_call: bool = False
    """Whether the run has to end in a call of a tool of the client's."""
    parallel_tool_calls: Any = None
    """Whether the client can answer several calls of its tools in one turn."""
    every_turn: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that go with each model call."""
    while_it_fits: Mapping[str, Any] = field(default_factory=dict)
    """The same, until the backend has no room for them any more."""
    final_only: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that go with the call that writes the visible answer, and with no other."""
    final_budget: Mapping[str, Any] = field(default_factory=dict)
    """The client's token limit, under the name it used; it bounds the visible answer alone."""
    usage_of: UsageOf = "all_calls"
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
    documents_tokens: int = 0
    """About how many tokens of the messages lie in files instead."""
    alone: bool = False
    """Whether the model answers by itself, without tools."""
    created: int = field(default_factory=lambda: int(time.time()))
    """When it was asked for, in seconds since 1970."""
    witness: Witness | None = None
    tariff: Tariff | None = None
    """What the model costs, where that is known and anybody needs it."""
    account: Account | None = None
    """What its key may spend today, where that is bounded."""
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
    commands: int = 0
    """Tool calls but submit."""
    egress_bytes: int = 0
    """What passed between the sandbox and the world, both ways."""
    cost_usd: float | None = None
    """What the model calls cost; None where that is not known."""
    documents_tokens: int = 0
    """What long texts that became files would take in each prompt, less what stands for them: by
    our own estimate."""
    documents_tokens_saved: int = 0
    """The same for all model calls together."""
    turns: int = 0
    """Model calls with tools."""
    prompt_tokens: int = 0
    """Of all model calls, as are the next three."""
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    trajectory_tokens: int = 0
    """All that was said, each token counted once however often it was sent."""
    model_ms: int = 0
    """Time spent waiting for the model, asking again included."""
    own_ms: int = 0
    """What is left of the time."""
    capability_turns: Mapping[str, int] = field(default_factory=dict)
    """Turns that used each of the paper's meta-capabilities."""

    def counts(self) -> dict[str, Any]:
        """Each by its name."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Compaction:
    """A new segment of the history, begun to make room in the model's context."""

    kind: Literal["stubs", "summary"]
    """What took the place of earlier words."""
    cause: Literal["nearly full", "refused"]
    """refused: the backend had said that the prompt is too long."""
    tokens_before: int
    """Of the prompt, by the backend's counts and an estimate of the rest."""
    tokens_after: int


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
    left_out: Sequence[LeftOut]
    choice: Mapping[str, Any]
    """Other fields of the choice that the answer came in, such as logprobs."""
    response: Mapping[str, Any]
    """Other fields of the last reply, such as system_fingerprint."""
    origin: Origin = "new"
    """Where its files came from."""
    route: str = ""
    """Why there was a run."""
    parked: Parked | None = None
    """What it takes to go on once the client has answered."""
    refusal: str | None = None
    """What the model said instead of an answer, where it declined in OpenAI's way."""
    notices: Sequence[Notice] = ()
    others: Sequence["Result"] = ()
    """How the runs of the request's further choices ended."""
    usages: Sequence[Mapping[str, Any]] = ()
    """Of each model call, in order."""
    compactions: Sequence[Compaction] = ()
    """Why each segment but the first was begun."""
