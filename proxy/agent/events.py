"""The events of a run, which observers and subscribers receive, and the deltas of model replies."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from policies.limits import StopReason
from policies.rules import Action, RuleTarget
from sandbox_runtime.egress.decision import Decision


@dataclass(frozen=True, slots=True)
class RunStarted:
    run_id: str
    prompt: str = ""
    """SHA-256 of the proxy's system prompt; "" if there is none."""


@dataclass(frozen=True, slots=True)
class TurnStarted:
    turn: int
    """Number of the turn, counted from 1."""


@dataclass(frozen=True, slots=True)
class ModelCallAccepted:
    """The backend has accepted a model call; the reply follows. As an event, it is emitted for the
    run's first call only; as a delta, `on_delta` gets it in each call."""


@dataclass(frozen=True, slots=True)
class ModelCallFailed:
    """An attempt at a model call has failed, and a retry follows. As an event, it is emitted for
    the run's first call only; as a delta, `on_delta` gets it for every failed attempt."""

    status: int
    """HTTP status of the backend."""
    retry_in_s: float


@dataclass(frozen=True, slots=True)
class CallTokens:
    """The tokens of one model call, as the backend reports them, and the version of the weights."""

    prompt_ids: Sequence[int] = ()
    reply_ids: Sequence[int] = ()
    """The ids of the sampled tokens."""
    logprobs: Sequence[float] = ()
    """The log probability of each sampled token."""
    missing: str | None = None
    """The reason for which the tokens are unknown; the sequences are empty then. None if the tokens
    are known."""
    weight_version: str | None = None
    """The version of the model's weights that the backend reports, or else the version that the
    trainer has named (see `WeightVersion`). None if there is neither."""


@dataclass(frozen=True, slots=True)
class ModelCallFinished:
    """A model call has ended. Emitted only for runs whose trajectory is captured, and only to
    observers."""

    shared_prefix: int
    """Number of leading messages that are the same as in the previous call."""
    messages: Sequence[Mapping[str, Any]]
    """The messages of the prompt after the shared prefix."""
    settings: Mapping[str, Any]
    """The fields of the call other than its messages: the tools, the temperature and so on."""
    duration_s: float
    """Seconds until the reply was complete, including retries."""
    reply: Mapping[str, Any] | None = None
    """The assistant message, as far as it arrived; None if nothing arrived."""
    finish_reason: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    """The error that ended the call, if the call failed or was cut off."""
    tokens: CallTokens | None = None
    """The tokens of the call; None if the request does not capture them, or if the call failed."""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Narration(ReasoningDelta):
    """The model's prose beside its tool calls, which clients see as reasoning."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the model's prose. The end of the turn decides whether the prose is the answer."""

    text: str
    logprobs: Any = None
    """The choice's `logprobs` of this piece, as the backend sent them."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call."""

    index: int
    name: str
    """The name so far; complete from the first piece with arguments."""
    arguments: str
    """A piece of the JSON text of the arguments."""


@dataclass(frozen=True, slots=True)
class ClientCallStarted:
    """The model has begun a call of a client's tool, which the client runs once the call is
    complete."""

    index: int
    """Index of the call in the result's `client_calls`."""
    call_id: str
    """Id of the call in the result's `client_calls`."""
    name: str
    takes_text: bool = False
    """True if the tool takes a text instead of arguments (OpenAI's `custom`)."""


@dataclass(frozen=True, slots=True)
class ClientCallDelta:
    """A piece of the arguments, or of the text, of a client tool call."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ClientCallFinished:
    """A client tool call is complete."""

    index: int


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The token counts so far, from a backend that reports them during the reply."""

    prompt: int
    completion: int


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    step: int
    """Number of the tool call, counted from 1 over the whole run."""
    call_id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """A piece of a running command's output."""

    step: int
    stream: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallFinished:
    step: int
    call_id: str
    name: str
    observation: str
    exit_code: int | None
    output_lines: int | None
    """Number of lines that the command wrote; None if no command ran."""
    duration_s: float
    timed_out: bool = False
    """True if the command was ended at its timeout."""


@dataclass(frozen=True, slots=True)
class StepsOmitted:
    """Stands for the oldest steps, which a late subscriber does not receive."""

    steps: int


@dataclass(frozen=True, slots=True)
class EgressDecided:
    """A program in the sandbox tried to reach a host. Emitted when the connection is closed or
    refused, or at the end of the run if the connection is still open. If many connections fail, one
    event stands for all beyond a limit (see `EgressWatch`)."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class RuleMatched:
    """A rule of the profile matches a command, a file or a connection. Emitted before the run
    acts."""

    rule: str
    action: Action
    over: RuleTarget
    """The kind of `subject`: a command, a file or an egress connection."""
    subject: str
    """The command, path or `host:port`, possibly truncated."""
    reason: str


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """A piece of the answer, with links to produced files."""

    text: str
    logprobs: Any = None


@dataclass(frozen=True, slots=True)
class AnswerRestarted:
    """The answer starts again, because the text that was sent as the answer so far was narration. A
    stream keeps that text; the answer in the Result does not contain it."""


@dataclass(frozen=True, slots=True)
class ModelRefused:
    """The model declined to answer."""

    text: str


@dataclass(frozen=True, slots=True)
class FileProduced:
    file_id: str
    path: str
    bytes: int


@dataclass(frozen=True, slots=True)
class RunFinished:
    stop_reason: StopReason
    usage: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """An event of a further choice (`n`). Events of the first choice are not wrapped."""

    index: int
    """Index of the choice, at least 1."""
    event: "Event"


CallProgress = ModelCallAccepted | ModelCallFailed
ModelDelta = ReasoningDelta | TextDelta | ToolCallDelta | TokenCount | CallProgress
Event = (
    RunStarted
    | TurnStarted
    | ModelCallAccepted
    | ModelCallFailed
    | ModelCallFinished
    | ReasoningDelta
    | Narration
    | ClientCallStarted
    | ClientCallDelta
    | ClientCallFinished
    | ToolCallStarted
    | ToolOutput
    | ToolCallFinished
    | StepsOmitted
    | EgressDecided
    | RuleMatched
    | AnswerDelta
    | AnswerRestarted
    | ModelRefused
    | FileProduced
    | RunFinished
    | ChoiceEvent
)
ALL_EVENTS: frozenset[type] = frozenset(get_args(Event))
Emit = Callable[[Event], Awaitable[None]]
OnDelta = Callable[[ModelDelta], Awaitable[None]]
