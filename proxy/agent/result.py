"""The result of a run and its statistics: token counts of all model calls, times spent in model and
sandbox, and the capabilities that were used. `RunOutcome` collects the outcome during the run."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, TypeVar

from policies.answer_form import is_answer
from policies.artifacts import SkippedFile
from policies.capabilities import Capability, capabilities_of
from policies.limits import StopReason
from policies.prompts import WHY_NO_MORE_TOOLS
from policies.routing import RouteReason
from proxy.agent.history import text_of
from proxy.agent.model import Completion
from proxy.agent.suspended_run import SuspendedRun
from proxy.agent.tool_calls import ToolCall, Turn
from proxy.workspaces import Origin

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Artifact:
    """A produced file as the client receives it."""

    file_id: str
    container_id: str
    path: str
    bytes: int
    mime_type: str
    sha256: str
    url: str
    data_url: str | None
    """Data URL of an image that is small enough to be part of the message; else None."""
    filename: str = ""
    """The name that users see, unique among the run's files; "": the name in `path`."""


@dataclass(frozen=True, slots=True)
class RunStats:
    """The statistics of a run."""

    llm_calls: int = 0
    """Number of model calls."""
    tool_calls: int = 0
    """Number of calls of the proxy's tools, including submit. Calls of the client's tools and calls
    that a limit ruled out are not counted."""
    context_tokens: int = 0
    """Tokens of the last prompt."""
    env_tokens: int = 0
    """Tokens of tool output in the prompts, each counted once. The number is derived from the
    backend's token counts of successive prompts, and is partly an estimate."""
    wall_ms: int = 0
    """Duration of the run, in milliseconds."""
    sandbox_ms: int = 0
    """Time spent in tools, in milliseconds."""
    cpu_ms: int = 0
    """CPU time of the commands, in milliseconds."""
    peak_mem_bytes: int = 0
    """Peak memory of the largest command, in bytes."""
    commands: int = 0
    """Number of tool calls other than submit."""
    egress_bytes: int = 0
    """Bytes transferred between the sandbox and the network, in both directions."""
    cost_usd: float | None = None
    """Cost of the model calls; None if unknown."""
    documents_tokens: int = 0
    """Estimated tokens that each prompt saves because long texts became files."""
    documents_tokens_saved: int = 0
    """`documents_tokens` times the number of model calls."""
    turns: int = 0
    """Number of turns. The final-answer call and the calls for summaries are not turns."""
    prompt_tokens: int = 0
    """Prompt tokens of all model calls."""
    completion_tokens: int = 0
    """Completion tokens of all model calls."""
    reasoning_tokens: int = 0
    """Reasoning tokens of all model calls."""
    cached_tokens: int = 0
    """Cached prompt tokens of all model calls."""
    trajectory_tokens: int = 0
    """Tokens of the trajectory. Each token counts once, however often it was sent."""
    model_ms: int = 0
    """Time spent waiting for the model, including retries, in milliseconds."""
    own_ms: int = 0
    """Time spent in neither model nor sandbox, in milliseconds."""
    capability_turns: Mapping[str, int] = field(default_factory=dict)
    """Number of turns that used each of the paper's meta-capabilities."""

    def counts(self) -> dict[str, Any]:
        """Return the value of each statistic by the name of its field."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Compaction:
    """One compaction of the history."""

    kind: Literal["stubs", "summary"]
    """The replacement for earlier messages: stubs for single observations, or one summary."""
    cause: Literal["nearly full", "refused"]
    """nearly full: the prompt exceeded the limit that the context window sets. refused: the backend
    refused the prompt as too long."""
    tokens_before: int
    """Prompt tokens before: the backend's count and an estimate of later messages."""
    tokens_after: int
    """Prompt tokens after."""


@dataclass(frozen=True, slots=True)
class RunWarning:
    """A warning about the answer for the client."""

    code: str
    """A word for the kind of warning."""
    message: str
    """The warning in a sentence."""


ToolTrouble = Literal["malformed_call", "echo", "runaway"]
"""Signs that a model cannot use tools: none of a turn's calls could be run, the model repeats the
proxy's own texts, or the model repeats itself without end."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run."""

    run_id: str
    container_id: str
    model: str
    answer: str
    stop_reason: StopReason
    finish_reason: str
    """OpenAI's finish reason: stop, length, tool_calls, function_call, content_filter."""
    client_calls: Sequence[Mapping[str, Any]]
    """Calls of the client's tools, for the client to run."""
    usage: Mapping[str, Any]
    """The usage to report; see `DeliveryOptions.usage_scope`."""
    segments: int
    """Number of segments of the history: 1 plus the number of compactions."""
    stats: RunStats
    artifacts: Sequence[Artifact]
    skipped_files: Sequence[SkippedFile]
    choice: Mapping[str, Any]
    """Other fields of the choice with the answer, such as `logprobs`."""
    response: Mapping[str, Any]
    """Other fields of the last response, such as `system_fingerprint`."""
    origin: Origin = "new"
    """The origin of the files in the workspace."""
    route: RouteReason = "auto"
    """The reason for which the request was answered with or without tools."""
    steps: int = 0
    """Number of tool calls that clients see as steps."""
    suspended_run: SuspendedRun | None = None
    """The suspended run that waits for client tool results, if any."""
    refusal: str | None = None
    """The model's `refusal` text if it declined to answer."""
    answer_offset: int = 0
    """Offset of the answer in the streamed text, in characters: the length of the narration and its
    separators."""
    warnings: Sequence[RunWarning] = ()
    others: Sequence["Result"] = ()
    """The results of the request's further choices (`n`)."""
    usages: Sequence[Mapping[str, Any]] = ()
    """The usage of each model call, in order."""
    compactions: Sequence[Compaction] = ()
    """The compactions of the history, in order."""
    tool_trouble: tuple[ToolTrouble, ...] = ()
    """Signs that the model cannot use tools, each once."""
    sandbox_losses: int = 0
    """Number of sandboxes that were lost during a tool call."""


@dataclass
class RunOutcome:
    """The outcome of one run so far."""

    submitted_answer: str | None = None
    prose: str = ""
    """The model's last prose."""
    prose_reply: Completion | None = None
    """The reply that contains `prose`, if `prose` can be the answer; else None."""
    finish_reason: str = "stop"
    client_calls: list[ToolCall] = field(default_factory=list)
    client_ids_by_model_id: Mapping[str, str] = field(default_factory=dict)
    """The client's id of each call that was already streamed, by the model's id."""
    has_cut_call: bool = False
    """True if a timeout cut off a streamed client tool call: nothing can follow it in the
    stream."""
    calls_are_text: bool = False
    """True if the last calls were written as text."""
    reply: Completion | None = None
    """The reply with the answer, or else the last reply."""
    choice: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the reply's choice, such as `logprobs`, if one reply contains the answer."""
    announcement: str = ""
    """Prose that announces a tool call which the model has not made yet."""
    trouble: list[ToolTrouble] = field(default_factory=list)
    """Signs that the model cannot use tools, each once."""
    refusal: str | None = None
    warnings: Sequence[RunWarning] = ()
    route: RouteReason | None = None
    """The reason for which the run was answered without tools; None if the task's route applies."""

    def finish_reason_of(self, stop: StopReason, answer: str, legacy_state: str | None) -> str:
        """Return the run's OpenAI finish reason."""
        if stop is StopReason.CLIENT_TOOL_CALLS:
            return "tool_calls" if legacy_state is None else "function_call"
        if not answer and not self.refusal and stop in WHY_NO_MORE_TOOLS:
            return "length"
        return self.finish_reason if self.finish_reason in ("length", "content_filter") else "stop"

    def record_narration(self, turn: Turn, reply: Completion, *, is_echo: bool) -> None:
        """Record the prose beside tool calls, which becomes the answer if the run finds no better
        answer. Ignore prose that repeats the proxy's own texts (`is_echo`), and the prose of a turn
        whose calls were written as text."""
        prose = "" if turn.calls_are_text or is_echo else text_of(reply.message).strip()
        if prose:
            self.prose = prose
            self.prose_reply = reply if is_answer(prose, "stop") else None

    def record_trouble(self, trouble: ToolTrouble) -> None:
        """Record a sign that the model cannot use tools."""
        if trouble not in self.trouble:
            self.trouble.append(trouble)


class CapabilityCounter:
    """Counts the turns of a run that used each of the paper's meta-capabilities.

    As in the paper, a turn counts once for each capability, however many of its calls use it.
    """

    def __init__(self) -> None:
        self.turns = dict.fromkeys(map(str, Capability), 0)
        self._used_this_turn = frozenset[Capability]()

    def begin_turn(self) -> None:
        self._used_this_turn = frozenset()

    def record(self, tool_name: str, arguments: object) -> None:
        """Count the capabilities that a tool call uses. `tool_name` is the proxy's own name of the
        tool."""
        used = capabilities_of(tool_name, arguments)
        for capability in used - self._used_this_turn:
            self.turns[capability] += 1
        self._used_this_turn |= used


class Stopwatch:
    """Adds up the durations of `with` blocks, without the time spent in wrapped callbacks."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.spent_s = 0.0
        self._now = now
        self._started_at = 0.0

    def __enter__(self) -> None:
        """Start the stopwatch; leaving the block stops it."""
        self._started_at = self._now()

    def __exit__(self, *_: object) -> None:
        self.spent_s += self._now() - self._started_at

    def pause_during(
        self, callback: Callable[[T], Awaitable[None]]
    ) -> Callable[[T], Awaitable[None]]:
        """Return a callback that runs `callback` while the stopwatch is paused."""

        async def paused(piece: T) -> None:
            began = self._now()
            try:
                await callback(piece)
            finally:
                self.spent_s -= self._now() - began

        return paused


class TokenCounts(TypedDict):
    """The token counts of RunStats."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int


class RunTimes(TypedDict):
    """The times of RunStats."""

    wall_ms: int
    model_ms: int
    sandbox_ms: int
    own_ms: int


def token_counts(usage: Mapping[str, Any]) -> TokenCounts:
    """Return the token counts of a usage report."""
    return TokenCounts(
        prompt_tokens=usage_count(usage, "prompt_tokens"),
        completion_tokens=usage_count(usage, "completion_tokens"),
        reasoning_tokens=usage_count(
            _details(usage, "completion_tokens_details"), "reasoning_tokens"
        ),
        cached_tokens=usage_count(_details(usage, "prompt_tokens_details"), "cached_tokens"),
    )


def run_times(*, wall_s: float, model_s: float, sandbox_s: float) -> RunTimes:
    """Return the times in milliseconds. The proxy's own time is the time spent in neither model nor
    sandbox."""
    wall_ms, model_ms, sandbox_ms = (int(s * 1000) for s in (wall_s, model_s, sandbox_s))
    own_ms = max(0, wall_ms - model_ms - sandbox_ms)
    return RunTimes(wall_ms=wall_ms, model_ms=model_ms, sandbox_ms=sandbox_ms, own_ms=own_ms)


def _details(usage: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    details = usage.get(key)
    return details if isinstance(details, Mapping) else {}


_NUMBER_TYPES = (int, float)
"""Types of the numbers in a usage report; not bool, which is an int."""


def add_usage(total: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sum of two usage reports, nested numbers included. Other fields come from `more`,
    or from `total` if `more` does not have them."""
    summed = dict(total)
    for key, value in more.items():
        before = summed.get(key)
        if type(value) in _NUMBER_TYPES and type(before) in _NUMBER_TYPES:
            summed[key] = before + value
        elif isinstance(value, Mapping):
            summed[key] = add_usage(before if isinstance(before, Mapping) else {}, value)
        elif value is not None:
            summed[key] = value
    return summed


def usage_count(usage: Mapping[str, Any], key: str) -> int:
    """Return one count of a usage report, or 0 if it is missing."""
    value = usage.get(key)
    return value if isinstance(value, int) else 0
