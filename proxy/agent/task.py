"""The task of one run: the parts of a request that the agent reads, and the interfaces through
which the run reaches the server. `proxy.api.prepare` builds tasks."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from policies.answer_form import AnswerForm
from policies.artifacts import ProducedFile
from policies.budgets import DailyBudget, Expense, Reservation
from policies.prices import Tariff
from policies.profile import Capture, Profile
from policies.routing import RouteReason
from policies.sessions import ResumePoint, Session, SessionState, TrajectoryLabels
from policies.steps import NarrationSetting, UsageScope
from policies.tool_support import SUPPORTED, ToolVerdict
from proxy.agent.checkpoint import Checkpoint, SaveCheckpoint
from proxy.agent.events import Event
from proxy.agent.model import Credentials, Message
from proxy.agent.result import Artifact, Result
from proxy.agent.status_hold import StatusHold
from proxy.agent.suspended_run import SuspendedRun
from proxy.body_memory import BodyReservation
from proxy.errors import OutOfTimeError, RunCancelledError
from sandbox_runtime.sandbox import Sandbox


@dataclass(slots=True)
class WeightVersion:
    """The version of the model's weights, as the trainer has named it. All runs of a server share
    one instance."""

    value: str | None = None
    """The version, or None if it is unknown."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input file of the client, which is uploaded into the sandbox before the first command."""

    path: str
    identity: str
    """A digest of the contents, or of the URL or upload id. A file with the same path and identity
    is uploaded into a workspace only once."""
    read: Callable[[], AsyncGenerator[bytes, None]]
    """Return the file's bytes from the start. Raises SandboxFileError if the file is gone."""


class RunObserver(Protocol):
    """Observes one run. An observer receives each event redacted, and before any subscriber. At the
    end of the run, either `on_result` or `on_error` is called, before any client learns of the
    end."""

    @property
    def event_types(self) -> frozenset[type]:
        """The types of the events that `on_event` receives."""

    async def on_event(self, event: Event) -> None:
        """Handle an event. An error that this method raises ends the run."""

    async def on_result(self, result: Result) -> None:
        """Handle the result. An error that this method raises replaces the result."""

    async def on_error(self, error: BaseException) -> None:
        """Handle the error that ends the run. CancelledError: the run was cancelled."""


class ArtifactStore(Protocol):
    """Saves the artifacts of one run."""

    @property
    def container_id(self) -> str:
        """Id of the API's container that lists the files."""

    def artifact_url(self, path: str) -> str:
        """Return the URL that a file will have once it is saved."""

    async def has(self, path: str) -> bool:
        """Return True if the file is saved."""

    async def save(self, sandbox: Sandbox, file: ProducedFile, timeout_s: float) -> Artifact:
        """Save a file of the sandbox. Raises SandboxFileError; after `timeout_s` its subclass
        FileTimeoutError."""


class BudgetAccount(Protocol):
    """The daily budget of one key, shared by concurrent runs in all processes."""

    @property
    def budget(self) -> DailyBudget:
        """The limits of a day."""

    async def take(self, expected: Expense) -> Reservation:
        """Reserve an expense. If a part of the budget is used up, reserve nothing and return a
        Reservation whose `exhausted_kind` names that part."""

    async def overdraw(self, expected: Expense) -> Reservation:
        """Reserve an expense even if the budget is used up."""

    async def settle(self, reservation: Reservation, actual: Expense) -> None:
        """Replace the expected expense of a reservation by the actual expense."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat-completions request without its model parameters."""

    messages: Sequence[Message] = ()
    """The client's messages, before files and long texts are replaced by paths."""
    has_client_indexes: bool = False
    """True if each message has the same index here as in the request that the client sent."""
    client_tools: Sequence[Mapping[str, Any]] = ()
    """Tools that only the client can run."""
    text_tools: frozenset[str] = frozenset()
    """Names of the `custom` tools, which take a text instead of arguments."""
    tool_choice: Any = None
    """The `tool_choice` of the first model call."""
    must_call: bool = False
    """True if the run has to end in a call of one of the client's tools."""
    parallel_tool_calls: Any = None
    """False if the client can answer only one call per turn; None if unspecified."""
    max_tool_calls: int | None = None
    """Maximum number of calls of the proxy's tools."""
    answer_form: AnswerForm | None = None
    """The form of the visible answer, if it can be validated."""
    rewrite_links: bool = True
    """True if paths of produced files in the answer may be rewritten to links."""
    stream: bool = False
    """True if the client wants a streamed response."""
    legacy_state: str | None = None
    """The session state from which call ids are derived, because calls of the legacy `functions`
    have no ids (see `function_call_id`). None if the client does not use `functions`."""


@dataclass(frozen=True, slots=True)
class Params:
    """The model parameters of a run, grouped by the model calls that send them."""

    base: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of each model call."""
    optional: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that are sent with each model call until the backend has refused a call as too
    long; later calls are sent without them."""
    final: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the call that writes the visible answer. Other calls do not send them, except
    for `logprobs` and `top_logprobs`, which each turn sends (see `LOGPROBS_PARAMS`)."""
    token_limits: Mapping[str, Any] = field(default_factory=dict)
    """The client's token limit, by the parameter name that the client used. It limits the visible
    prose. The limit that is sent with a call is raised to `limits.min_turn_tokens`, so that
    reasoning and tool calls have room."""


@dataclass(frozen=True, slots=True)
class AgentInput:
    """The messages and files that a run starts with."""

    messages: Sequence[Message]
    """The client's messages, with a path in the sandbox in place of each file."""
    files: Sequence[InputFile] = ()
    notes: Sequence[str] = ()
    """Notes on the files of the last user message, if the message does not contain them."""
    documents_tokens: int = 0
    """Estimated tokens of the texts that were moved from messages to files."""


@dataclass(frozen=True, slots=True)
class PendingInput:
    """The input of a request with files on the web. The run downloads them, so that a stream can
    start earlier."""

    messages: Sequence[Message]
    """The client's messages, with their files."""
    files: Sequence[InputFile]
    """The files that need no download."""
    load: Callable[[], Awaitable[AgentInput]]
    """Downloads the files and returns the input of the run. Raises BusyError."""


@dataclass(frozen=True, slots=True)
class RunClock:
    """The start and the deadline of one choice's run."""

    started_at: float
    """Start time by time.monotonic, in seconds."""
    deadline_s: float | None = None
    """Seconds from `started_at` to the client's deadline; None if there is no deadline."""


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """The session of a run: the state that the run resumes from, and the state to save."""

    session: Session
    resume_from: ResumePoint | None = None
    """The state that the run resumes from; None for an empty workspace."""
    save_as: SessionState | None = None
    """The state to save the workspace as; None to discard it."""
    suspend_as: SessionState | None = None
    """The state to save the workspace as if the run is suspended for client tool results."""
    suspended_run: SuspendedRun | None = None
    """The suspended run to resume, if any."""

    def state_to_save(self, *, is_suspended: bool) -> SessionState | None:
        """Return the state under which the workspace is saved when the run ends, or None to discard
        the workspace. A suspended run resumes from this state."""
        return self.save_as or (self.suspend_as if is_suspended else None)

    @property
    def owner(self) -> str:
        """Owner of the session: a digest of the client's key."""
        return self.session.owner

    @property
    def container_id(self) -> str:
        """Id of the API's container that lists the session's files."""
        return self.session.name


@dataclass(frozen=True, slots=True)
class BudgetReservation:
    """The part of a key's daily budget that was reserved for a run."""

    account: BudgetAccount
    reservation: Reservation

    async def refund(self) -> None:
        """Refund the reservation, because the run does not start."""
        await self.account.settle(self.reservation, Expense())


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """The client's deadline and the daily budget of its key, in addition to the profile's
    limits."""

    deadline_s: float | None = None
    """Deadline of the answer, in seconds from the start of the run."""
    tariff: Tariff | None = None
    """Prices of the model; None if no limit needs them and the operator has not configured them."""
    reservation: BudgetReservation | None = None
    """The run's reservation in the key's daily budget; None if the key has no daily budget."""


@dataclass(frozen=True, slots=True)
class DeliveryOptions:
    """Presentation of the run to the client."""

    narration: NarrationSetting = "content"
    """Form of streamed prose before a tool call. `content`: as content after a short hold;
    `reasoning`: as reasoning, for clients that take all content for the answer."""
    usage_scope: UsageScope = "all_calls"
    """The model calls that the reported usage includes."""
    status_hold: StatusHold | None = None
    """The held-back status line of a streamed response, if any."""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """The task of one run. `proxy.api.prepare` builds the task, and nothing changes it
    afterwards."""

    run_id: str
    model: str
    artifact_store: ArtifactStore
    session: SessionPlan
    input: AgentInput | PendingInput
    request: ChatRequest = ChatRequest()
    params: Params = Params()
    profile: Profile = Profile()
    route: RouteReason = "auto"
    """The reason for which the request is answered with or without tools."""
    is_single_call: bool = False
    """True if the model answers in one call, without tools."""
    files_verdict: ToolVerdict = SUPPORTED
    """The verdict on the model's tool support if the request has files that the backend may refuse;
    else SUPPORTED. The verdict explains to the client why the files could not be read."""
    default_instruction: str = ""
    """The default instruction of the model's chat template, or "" if there is none. It precedes the
    proxy's system prompt if the client sends no instructions."""
    limits: TaskLimits = TaskLimits()
    delivery: DeliveryOptions = DeliveryOptions()
    credentials: Credentials | None = None
    """The client's own credentials for the backend; None: the key that the configuration names."""
    upstream: str | None = None
    """The base URL to which the model calls are sent; None: the backend's."""
    body_memory: BodyReservation | None = None
    """The memory that is reserved for the request's body. The reservation is released once the
    response is sent and the run has ended."""
    capture: Capture = "none"
    """The part of the run that its trajectory keeps."""
    weight_version: WeightVersion = field(default_factory=WeightVersion)
    """The version of the weights of model calls whose backend reports none."""
    labels: TrajectoryLabels = TrajectoryLabels()
    observer: RunObserver | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    """Time of the request, in seconds since 1970."""
    save_checkpoint: SaveCheckpoint | None = None
    """Stores the checkpoints of the run; None if the run has none."""
    checkpoint: Checkpoint | None = None
    """The checkpoint of a dead server from which the run goes on, if any."""
    others: Sequence["AgentTask"] = ()
    """The request's further choices (`n`), each with a run of its own."""

    @property
    def captures_tokens(self) -> bool:
        """True if the run is recorded for training. The recorded prompts and replies are then
        exactly those of the model: the history is never compacted, the proxy neither ends replies
        early nor requests them again without tools, and the client's token limit applies to each
        call."""
        return self.capture == "tokens"

    async def discard(self) -> None:
        """Refund the daily budget and report RunCancelledError to the observer, because the run
        does not start."""
        if self.limits.reservation:
            await self.limits.reservation.refund()
        if self.observer:
            await self.observer.on_error(RunCancelledError())


def out_of_time_error(task: AgentTask) -> OutOfTimeError:
    """Return the error for a task that has no answer at its deadline."""
    deadline_s = task.limits.deadline_s
    if deadline_s is None:
        return OutOfTimeError("The model did not answer in time.")
    return OutOfTimeError(
        f"The model did not answer within the client's deadline of {deadline_s:g} s."
        " Allow more time: X-Sandbox-Deadline, sandbox.deadline_s or the SDK's timeout."
    )
