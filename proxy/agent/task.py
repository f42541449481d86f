"""What the agent is asked for and what it gives back."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from policies.answer_form import AnswerForm
from policies.artifacts import LeftOut, Produced
from policies.budgets import DailyBudget, Expense, Receipt
from policies.limits import StopReason
from policies.prices import Tariff
from policies.profile import Profile
from policies.routing import RouteReason
from policies.sessions import GoesOn, State
from policies.steps import NarrationSetting
from policies.usage import UsageOf
from proxy.agent.events import Event
from proxy.agent.first_call import StatusHold
from proxy.agent.model import Credentials, Message
from proxy.agent.parking import Parked
from proxy.body_memory import HeldBody
from proxy.errors import OutOfTimeError, ProxyError
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

    async def save(self, sandbox: Sandbox, file: Produced, timeout_s: float) -> Artifact:
        """Take a file out of the sandbox. Raises SandboxFileError; of these FileTimeoutError where
        that takes longer than `timeout_s`."""


class Account(Protocol):
    """The daily budget of one key. Runs of the key at the same time, in other processes too, see
    what each has taken."""

    @property
    def budget(self) -> DailyBudget:
        """The bounds of a day."""

    async def take(self, expected: Expense) -> Receipt:
        """Count an expense before it is made, unless something of the budget is used up: the
        receipt then says what."""

    async def overdraw(self, expected: Expense) -> Receipt:
        """Count an expense that must be made, even if the budget is used up."""

    async def settle(self, receipt: Receipt, actual: Expense) -> None:
        """Replace the expected expense of a receipt by the actual one."""


@dataclass(frozen=True, slots=True)
class Task:
    """One request, split into what the loop needs."""

    run_id: str
    outbox: Outbox
    model: str
    messages: Sequence[Message]
    owner: str = ""
    """Whose request it is: a digest of the client's key."""
    are_as_sent: bool = False
    """Whether these are the client's messages one by one, so that their indexes are its own."""
    profile: Profile = Profile()
    route: RouteReason = "auto"
    """Why there is a run, or one call of the model's without tools."""
    inputs: Sequence[InputFile] = ()
    file_notes: Sequence[str] = ()
    """What the model is told of the files of the user's last message, where that says nothing of
    them itself."""
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
    """The client's token limit, under the name it used. It bounds visible prose; thinking and calls
    may take `limits.min_turn_tokens` at least."""
    plain_messages: Sequence[Message] = ()
    """The client's messages as it sent them, for an answer without tools; empty: `messages`."""
    narration: NarrationSetting = "content"
    """How prose before a tool call is streamed. `content`: as content once it was held for a
    moment; `reasoning`: as reasoning, for clients that take all content for the answer."""
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
    status_hold: StatusHold | None = None
    """The status line of the response that waits for the first model call, if one does."""
    waited_s: float = 0.0
    """How much of the client's deadline the files took that arrived before the run's start."""
    form: AnswerForm | None = None
    """What the visible answer must be, as far as it can be checked."""
    body: HeldBody | None = None
    """The request's share of the memory for bodies, which its run keeps as well."""
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
    charge: Receipt | None = None
    """What was taken of the account for the run to be made."""
    credentials: Credentials | None = None
    """The client's own with the backend, where its model is reached with those."""
    others: Sequence["Task"] = ()
    """The same request's further choices, each answered in a run of its own."""


def out_of_time(task: Task) -> OutOfTimeError:
    """Return the error of a task that has no answer when its time is up."""
    if task.deadline_s is None:
        return OutOfTimeError("The model did not answer in time.")
    deadline_s = task.deadline_s + task.waited_s
    return OutOfTimeError(
        f"The model did not answer within the client's deadline of {deadline_s:g} s."
        " Allow more time: X-Sandbox-Deadline, sandbox.deadline_s or the SDK's timeout."
    )


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


ToolTrouble = Literal["malformed_call", "echo", "runaway"]
"""Signs that a model cannot use tools: it calls one in no known form, says its prompt's words
again, or goes on without end."""


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
    route: RouteReason = "auto"
    """As the task has it."""
    steps: int = 0
    """How many tool calls clients are shown as steps."""
    parked: Parked | None = None
    """What it takes to go on once the client has answered."""
    refusal: str | None = None
    """What the model said instead of an answer, where it declined in OpenAI's way."""
    streamed_before: int = 0
    """How many characters a stream has had before the answer began: narration."""
    notices: Sequence[Notice] = ()
    others: Sequence["Result"] = ()
    """How the runs of the request's further choices ended."""
    usages: Sequence[Mapping[str, Any]] = ()
    """Of each model call, in order."""
    compactions: Sequence[Compaction] = ()
    """Why each segment but the first was begun."""
    tool_trouble: tuple[ToolTrouble, ...] = ()
    """What went wrong with the model's tool calls, each kind once."""
