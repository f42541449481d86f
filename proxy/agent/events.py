"""The events of a run. All that a listener learns of a run arrives as one of these."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from policies.limits import StopReason
from policies.rules import Action, RuleTarget
from sandbox_runtime.egress.decision import Decision


@dataclass(frozen=True, slots=True)
class RunStarted:
    run_id: str
    prompt: str = ""
    """The SHA-256 of our words before the client's own; "" if there are none."""


@dataclass(frozen=True, slots=True)
class TurnStarted:
    turn: int
    """Counted from 1."""


@dataclass(frozen=True, slots=True)
class CallAccepted:
    """The backend has accepted a model call; what follows is the reply. As an event: the run's
    first call."""


@dataclass(frozen=True, slots=True)
class CallFailed:
    """An attempt at a model call has failed, and another is to follow. As an event: an attempt at
    the run's first call."""

    status: int
    """The backend's."""
    retry_in_s: float


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Narration(ReasoningDelta):
    """The model's words beside its calls, which clients are shown as thinking."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the model's prose; whether it is the answer shows only when the turn ends."""

    text: str
    logprobs: Any = None
    """The choice's `logprobs` of this piece, as the backend sent them."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call as the model writes it."""

    index: int
    name: str
    """The name so far; whole from the first piece that carries arguments."""
    arguments: str
    """The piece of the arguments' JSON text."""


@dataclass(frozen=True, slots=True)
class ClientCallStarted:
    """The model has begun a call of a client's tool. The client runs it, unless the reply breaks
    off before the call is whole."""

    index: int
    """The call's place among the result's `tool_calls`."""
    call_id: str
    """Its id there."""
    name: str
    takes_text: bool = False
    """Whether the tool takes a text and no arguments (OpenAI's `custom`)."""


@dataclass(frozen=True, slots=True)
class ClientCallDelta:
    """A piece of the arguments of a client's call, or of its text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ClientCallFinished:
    """A client's call is whole."""

    index: int


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The tokens that the backend has counted so far, if it tells while the model writes."""

    prompt: int
    completion: int


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    step: int
    """Counted from 1 over the whole run."""
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
    """The lines that a command wrote; None if no command ran."""
    duration_s: float


@dataclass(frozen=True, slots=True)
class StepsOmitted:
    """Stands for the oldest steps, for a listener that came too late to hear of them."""

    steps: int


@dataclass(frozen=True, slots=True)
class EgressDecided:
    """A program in the sandbox tried to reach a host; emitted when the connection is over."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class RuleMatched:
    """The run is about to do something that a rule is about; emitted before it is done."""

    rule: str
    action: Action
    over: RuleTarget
    subject: str
    """The command, path or `host:port`, or its beginning."""
    reason: str


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """A piece of the answer, with links to produced files."""

    text: str
    logprobs: Any = None


@dataclass(frozen=True, slots=True)
class AnswerRestarted:
    """The answer begins anew: what was sent of it so far was narration, which stays in a stream
    and is no part of a whole answer."""


@dataclass(frozen=True, slots=True)
class Refused:
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
    """An event in the run of a further choice (`n`); those of the first choice come bare."""

    index: int
    """Counted from 1."""
    event: "Event"


CallProgress = CallAccepted | CallFailed
ModelDelta = ReasoningDelta | TextDelta | ToolCallDelta | TokenCount | CallProgress
Event = (
    RunStarted
    | TurnStarted
    | CallAccepted
    | CallFailed
    | ReasoningDelta
    | Narration
    | TextDelta
    | ToolCallDelta
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
    | Refused
    | FileProduced
    | RunFinished
    | ChoiceEvent
)
Emit = Callable[[Event], Awaitable[None]]
OnDelta = Callable[[ModelDelta], Awaitable[None]]
