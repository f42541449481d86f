"""How a run ended, what it has cost, and the small parts that add that up: token counts of several
model calls, the times spent in model and sandbox, and the capabilities that were used."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, TypeVar

from policies.artifacts import SkippedFile
from policies.capabilities import Capability, capabilities_of
from policies.limits import StopReason
from policies.routing import RouteReason
from proxy.agent.suspension import SuspendedRun
from proxy.workspaces import Origin

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Artifact:
    """A produced file as the client gets it."""

    file_id: str
    container_id: str
    path: str
    bytes: int
    mime_type: str
    sha256: str
    url: str
    data_url: str | None
    """The content of a picture that is small enough to be part of the message."""
    filename: str = ""
    """The name that users see, unique among the run's files; empty: as `path` says."""


@dataclass(frozen=True, slots=True)
class RunStats:
    """What a run has cost beside model tokens."""

    llm_calls: int = 0
    tool_calls: int = 0
    context_tokens: int = 0
    """The last prompt's length."""
    env_tokens: int = 0
    """The part of the prompts that was output of the sandbox, by the backend's own count."""
    wall_ms: int = 0
    sandbox_ms: int = 0
    """Time spent in tools."""
    cpu_ms: int = 0
    """Processor time of the commands."""
    peak_mem_bytes: int = 0
    """Memory of the largest command."""
    commands: int = 0
    """Tool calls but submit."""
    egress_bytes: int = 0
    """Traffic between the sandbox and the network, both ways."""
    cost_usd: float | None = None
    """Cost of the model calls; None if it is not known."""
    documents_tokens: int = 0
    """What long texts that became files would take in each prompt, less what stands for them: an
    estimate."""
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
    """The whole trajectory, each token counted once however often it was sent."""
    model_ms: int = 0
    """Time spent waiting for the model, retries included."""
    own_ms: int = 0
    """The rest of the time, which the proxy took."""
    capability_turns: Mapping[str, int] = field(default_factory=dict)
    """Turns that used each of the paper's meta-capabilities."""

    def counts(self) -> dict[str, Any]:
        """Return each figure by its name."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Compaction:
    """A new segment of the history, begun to make room in the model's context."""

    kind: Literal["stubs", "summary"]
    """What took the place of earlier words."""
    cause: Literal["nearly full", "refused"]
    """refused: the backend refused the prompt as too long."""
    tokens_before: int
    """Tokens of the prompt, by the backend's counts and an estimate of the rest."""
    tokens_after: int


@dataclass(frozen=True, slots=True)
class RunWarning:
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
    stats: RunStats
    artifacts: Sequence[Artifact]
    skipped_files: Sequence[SkippedFile]
    choice: Mapping[str, Any]
    """Other fields of the choice that the answer came in, such as logprobs."""
    response: Mapping[str, Any]
    """Other fields of the last reply, such as system_fingerprint."""
    origin: Origin = "new"
    """Where the files of its workspace came from."""
    route: RouteReason = "auto"
    """The task's route."""
    steps: int = 0
    """How many tool calls clients are shown as steps."""
    suspended_run: SuspendedRun | None = None
    """What the run needs to go on once the client has answered."""
    refusal: str | None = None
    """The model's words if it declined to answer, in OpenAI's field for it."""
    answer_offset: int = 0
    """How many characters of narration a stream has had before the answer began."""
    warnings: Sequence[RunWarning] = ()
    others: Sequence["Result"] = ()
    """How the runs of the request's further choices ended."""
    usages: Sequence[Mapping[str, Any]] = ()
    """Of each model call, in order."""
    compactions: Sequence[Compaction] = ()
    """Why each segment but the first was begun."""
    tool_trouble: tuple[ToolTrouble, ...] = ()
    """What went wrong with the model's tool calls, each kind once."""


class CapabilityUse:
    """Counts the turns of a run that used each of the paper's meta-capabilities.

    As in the paper, a turn counts once for each capability, however many of its calls use it.
    """

    def __init__(self) -> None:
        self.turns = dict.fromkeys(map(str, Capability), 0)
        self._in_this_turn = frozenset[Capability]()

    def begin_turn(self) -> None:
        """Begin another turn."""
        self._in_this_turn = frozenset()

    def note(self, tool: str, arguments: object) -> None:
        """Count a call that is made; `tool` is our own name of the tool."""
        used = capabilities_of(tool, arguments)
        for capability in used - self._in_this_turn:
            self.turns[capability] += 1
        self._in_this_turn |= used


class Stopwatch:
    """Adds up how long one thing was waited for, without what was done meanwhile."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.spent_s = 0.0
        self._now = now
        self._began = 0.0

    def __enter__(self) -> None:
        """Start; leaving the block stops it."""
        self._began = self._now()

    def __exit__(self, *_: object) -> None:
        self.spent_s += self._now() - self._began

    def pausing(self, work: Callable[[T], Awaitable[None]]) -> Callable[[T], Awaitable[None]]:
        """Return the same work, during which a stopwatch that runs stands still."""

        async def done_meanwhile(piece: T) -> None:
            began = self._now()
            try:
                await work(piece)
            finally:
                self.spent_s -= self._now() - began

        return done_meanwhile


class TokenCounts(TypedDict):
    """The token counts of a Tally, of all model calls."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int


class Times(TypedDict):
    """The times of a Tally."""

    wall_ms: int
    model_ms: int
    sandbox_ms: int
    own_ms: int


def token_counts(usage: Mapping[str, Any]) -> TokenCounts:
    """Return the token counts in the summed usage of the calls."""
    return TokenCounts(
        prompt_tokens=usage_count(usage, "prompt_tokens"),
        completion_tokens=usage_count(usage, "completion_tokens"),
        reasoning_tokens=usage_count(
            _details(usage, "completion_tokens_details"), "reasoning_tokens"
        ),
        cached_tokens=usage_count(_details(usage, "prompt_tokens_details"), "cached_tokens"),
    )


def run_times(*, wall_s: float, model_s: float, sandbox_s: float) -> Times:
    """Return the times in milliseconds; what neither model nor sandbox took is the proxy's."""
    wall_ms, model_ms, sandbox_ms = (int(each * 1000) for each in (wall_s, model_s, sandbox_s))
    own_ms = max(0, wall_ms - model_ms - sandbox_ms)
    return Times(wall_ms=wall_ms, model_ms=model_ms, sandbox_ms=sandbox_ms, own_ms=own_ms)


def _details(usage: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    details = usage.get(key)
    return details if isinstance(details, Mapping) else {}


def add_usage(total: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return two usage reports as one: every number summed, nested ones too; fields that only one
    report has are kept."""
    summed = dict(total)
    for key, value in more.items():
        before = summed.get(key)
        if _is_number(value) and _is_number(before):
            summed[key] = before + value
        elif isinstance(value, Mapping):
            summed[key] = add_usage(before if isinstance(before, Mapping) else {}, value)
        elif value is not None:
            summed[key] = value
    return summed


def usage_count(usage: Mapping[str, Any], key: str) -> int:
    """Return one count of a usage report, 0 if the report has none."""
    value = usage.get(key)
    return value if isinstance(value, int) else 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)  # and not bool, which is an int too
