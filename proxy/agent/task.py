"""What the agent is asked for: the task of one run, and what the run needs from the server."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from policies.answer_form import AnswerForm
from policies.artifacts import Produced
from policies.budgets import DailyBudget, Expense, Receipt
from policies.prices import Tariff
from policies.profile import Profile
from policies.routing import RouteReason
from policies.sessions import GoesOn, State
from policies.steps import NarrationSetting, UsageOf
from proxy.agent.events import Event
from proxy.agent.model import Credentials, Message
from proxy.agent.parking import Parked
from proxy.agent.result import Artifact, Result
from proxy.body_memory import HeldBody
from proxy.errors import OutOfTimeError, ProxyError
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


class Witness(Protocol):
    """An observer of one run, told of its end before any client is."""

    def heard(self, event: Event) -> None:
        """An event of the run."""

    async def ended(self, result: Result) -> None:
        """The run has ended with a result."""

    async def failed(self, error: ProxyError) -> None:
        """The run has failed."""


class Outbox(Protocol):
    """Where the produced files of one run are saved."""

    @property
    def container_id(self) -> str:
        """The id of the container whose files they are, by the API."""

    def url(self, path: str) -> str:
        """Return the URL that a file will have once it is saved."""

    async def has(self, path: str) -> bool:
        """Return whether a file of that path is saved."""

    async def save(self, sandbox: Sandbox, file: Produced, timeout_s: float) -> Artifact:
        """Take a file out of the sandbox. Raises SandboxFileError; FileTimeoutError, which is one,
        if that takes longer than `timeout_s`."""


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
