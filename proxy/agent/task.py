"""The task of one run: a request in the parts that the agent reads, and the interfaces to what the
run needs from the server. `proxy.api.prepare` builds tasks."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from policies.answer_form import AnswerForm
from policies.artifacts import ProducedFile
from policies.budgets import DailyBudget, Expense, Receipt
from policies.prices import Tariff
from policies.profile import Profile
from policies.routing import RouteReason
from policies.sessions import ResumePoint, Session, State
from policies.steps import NarrationSetting, UsageOf
from proxy.agent.events import Event
from proxy.agent.model import Credentials, Message
from proxy.agent.result import Artifact, Result
from proxy.agent.suspension import SuspendedRun
from proxy.body_memory import BodyReservation
from proxy.errors import OutOfTimeError, ProxyError, RunCancelledError
from sandbox_runtime.sandbox import Sandbox

LAST_ATTEMPT_S = 2.0
"""While the status line is held back, no attempt starts with less time than this left."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of the client's, which is put into the sandbox before the first command."""

    path: str
    identity: str
    """Equal for equal contents."""
    read: Callable[[], AsyncGenerator[bytes, None]]
    """Return its bytes, from the start at each call. Raises SandboxFileError if they are gone."""


class StatusHold:
    """The status line of one streamed response, which is held back for `hold_s` at most."""

    def __init__(self, hold_s: float) -> None:
        self.until = time.monotonic() + hold_s
        self.is_held = True
        """False once the status line was sent: attempts are then bounded no more."""

    def has_time_for_attempt(self, in_s: float) -> bool:
        """Return whether an attempt that is made in `in_s` seconds may still give the status."""
        return not self.is_held or time.monotonic() + in_s + LAST_ATTEMPT_S <= self.until


class RunObserver(Protocol):
    """An observer of one run, told of its end before any client is."""

    def heard(self, event: Event) -> None:
        """An event of the run."""

    async def ended(self, result: Result) -> None:
        """The run has ended with a result."""

    async def failed(self, error: ProxyError) -> None:
        """The run has failed."""


class ArtifactStore(Protocol):
    """Where the produced files of one run are saved."""

    @property
    def container_id(self) -> str:
        """The id of the container whose files they are, by the API."""

    def url(self, path: str) -> str:
        """Return the URL that a file will have once it is saved."""

    async def has(self, path: str) -> bool:
        """Return whether a file of that path is saved."""

    async def save(self, sandbox: Sandbox, file: ProducedFile, timeout_s: float) -> Artifact:
        """Take a file out of the sandbox. Raises SandboxFileError; FileTimeoutError, which is one,
        if that takes longer than `timeout_s`."""


class BudgetAccount(Protocol):
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
class ChatRequest:
    """A chat-completions request as a run reads it, apart from its model parameters."""

    messages: Sequence[Message] = ()
    """The client's messages as it sent them."""
    has_client_indexes: bool = False
    """True if the indexes of these messages are those of the client's own request."""
    client_tools: Sequence[Mapping[str, Any]] = ()
    """Tools that only the client can run."""
    text_tools: frozenset[str] = frozenset()
    """The names of those that the client calls `custom`: they take a text and no arguments."""
    tool_choice: Any = None
    """The `tool_choice` of the first model call."""
    must_call: bool = False
    """True if the run has to end in a call of one of the client's tools."""
    parallel_tool_calls: Any = None
    """Whether the client can answer several calls of its tools in one turn."""
    max_tool_calls: int | None = None
    """The number of calls of the proxy's tools that the client allows."""
    answer_form: AnswerForm | None = None
    """The form of the visible answer, as far as it can be checked."""
    rewrite_links: bool = True
    """True if the answer is prose, in which links to produced files may be put."""
    stream: bool = False
    """True if the model is asked to stream, because the client reads along."""
    legacy_state: str | None = None
    """The state of the conversation, if the client knows its tools as `functions`, whose calls have
    no ids."""


@dataclass(frozen=True, slots=True)
class Params:
    """The model parameters of a run, by the model calls that they go with."""

    base: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of each model call."""
    optional: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of each model call until the backend refuses one for its length."""
    final: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the call that writes the visible answer, and of no other."""
    token_limits: Mapping[str, Any] = field(default_factory=dict)
    """The client's token limit, under the name it used. It bounds visible prose; thinking and calls
    may take `limits.min_turn_tokens` at least."""


@dataclass(frozen=True, slots=True)
class AgentInput:
    """The messages and the files that a run begins with."""

    messages: Sequence[Message]
    """The client's messages, with a path in the sandbox in place of each file."""
    files: Sequence[InputFile] = ()
    notes: Sequence[str] = ()
    """The notes on the files of the user's last message, if that does not contain them itself."""
    documents_tokens: int = 0
    """An estimate of the tokens of the messages that are in files instead."""


@dataclass(frozen=True, slots=True)
class PendingInput:
    """The input of a request that names files on the web. They are downloaded by the run, so that
    the client of a stream is answered meanwhile."""

    messages: Sequence[Message]
    """The client's messages, with their files."""
    files: Sequence[InputFile]
    """The files that are there already."""
    load: Callable[[], Awaitable[AgentInput]]
    """Download the files. Raises BusyError."""


@dataclass(frozen=True, slots=True)
class RunClock:
    """When the work on a choice began, and how much of the client's deadline was left then."""

    began: float
    """By time.monotonic."""
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """The session of a run: the files it begins with, and the state it saves them as."""

    session: Session
    resume_from: ResumePoint | None = None
    """The state that the run resumes from; None: an empty workspace."""
    save_as: State | None = None
    """The state that its files are saved as; None: they are not saved."""
    suspend_as: State | None = None
    """The same for a run that waits for the client's tools."""
    suspended_run: SuspendedRun | None = None
    """The suspended run that the client has answered."""

    @property
    def owner(self) -> str:
        """The owner of the session: a digest of the client's key."""
        return self.session.owner

    @property
    def container_id(self) -> str:
        """The id under which the API shows the session's files."""
        return self.session.name


@dataclass(frozen=True, slots=True)
class BudgetReservation:
    """What was taken of a key's daily budget for a run to be made."""

    account: BudgetAccount
    receipt: Receipt

    async def refund(self) -> None:
        """Give it back, because no run is made."""
        await self.account.settle(self.receipt, Expense())


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """The client's deadline and the daily budget of its key, beside the limits of the profile."""

    deadline_s: float | None = None
    """When the answer must be there, in seconds from the run's start."""
    tariff: Tariff | None = None
    """The model's prices, if they are known and needed."""
    reservation: BudgetReservation | None = None
    """None if the key has no daily budget."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """How the client is told of the run."""

    narration: NarrationSetting = "content"
    """How prose before a tool call is streamed. `content`: as content once it was held for a
    moment; `reasoning`: as reasoning, for clients that take all content for the answer."""
    usage_of: UsageOf = "all_calls"
    """The model calls that the reported usage counts."""
    status_hold: StatusHold | None = None
    """The status line of the response that waits for the first model call, if one does."""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """One request, complete: `proxy.api.prepare` builds it, and nothing changes it afterwards."""

    run_id: str
    model: str
    artifact_store: ArtifactStore
    session: SessionPlan
    input: AgentInput | PendingInput
    request: ChatRequest = ChatRequest()
    params: Params = Params()
    profile: Profile = Profile()
    route: RouteReason = "auto"
    """Why there is a run, or one model call without tools."""
    is_single_call: bool = False
    """True if the model answers in one call, without tools."""
    limits: TaskLimits = TaskLimits()
    delivery: Delivery = Delivery()
    credentials: Credentials | None = None
    """The client's own credentials for the backend, if it brings such."""
    body_memory: BodyReservation | None = None
    """The memory that is reserved for the request's body, which the run keeps as well."""
    observer: RunObserver | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    """When it was asked for, in seconds since 1970."""
    others: Sequence["AgentTask"] = ()
    """The request's further choices (`n`), each answered in a run of its own."""

    async def discard(self) -> None:
        """Refund the budget and end the recording, because the run does not start."""
        if self.limits.reservation:
            await self.limits.reservation.refund()
        if self.observer:
            await self.observer.failed(RunCancelledError())


def out_of_time(task: AgentTask) -> OutOfTimeError:
    """Return the error of a task that has no answer when its time is up."""
    deadline_s = task.limits.deadline_s
    if deadline_s is None:
        return OutOfTimeError("The model did not answer in time.")
    return OutOfTimeError(
        f"The model did not answer within the client's deadline of {deadline_s:g} s."
        " Allow more time: X-Sandbox-Deadline, sandbox.deadline_s or the SDK's timeout."
    )
