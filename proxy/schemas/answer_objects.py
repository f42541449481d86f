"""The JSON objects and the stream events that the proxy adds to answers, for every API.

This module defines the name, the type and the meaning of each field that OpenAI's and Anthropic's
APIs do not have. `result_objects`, `steps` and the response modules build the objects.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Required, TypedDict

from policies.artifacts import SkippedFile
from policies.routing import RouteReason
from policies.rules import Action, RuleTarget
from proxy.agent.result import Compaction, RunWarning

Json = dict[str, Any]

# The `sandbox` object of an answer


class FileObject(TypedDict):
    """A produced file, in `sandbox.files`."""

    id: str
    """The id of the file, for `/v1/containers/{container_id}/files/{id}`."""
    filename: str
    """The name for users, unique in the answer."""
    path: str
    """The absolute path in the sandbox."""
    bytes: int
    """The size in bytes."""
    mime_type: str
    """The MIME type, from the extension of the name."""
    sha256: str
    """The SHA-256 of the content, in hexadecimal digits."""
    url: str
    """A signed URL of the content, which needs no key."""


class SandboxObject(TypedDict, total=False):
    """The `sandbox` object of an answer: the end of the run, and the produced files."""

    v: Required[Literal[1]]
    """The version of the object."""
    run_id: Required[str]
    """The id of the run."""
    container_id: Required[str]
    """The id of the run's container."""
    stop_reason: Required[str]
    """The reason why the run ended: see [Stop reasons](stop-reasons.md)."""
    route: Required[RouteReason]
    """The reason why the request had a run, or one model call without tools."""
    steps: Required[int]
    """The number of tool calls that are shown as steps."""
    files: Required[list[FileObject]]
    """The produced files."""
    restored: bool
    """True. Present if the files of the session were restored into a new sandbox."""
    segments: int
    """The number of segments of the history: 1 plus the number of compactions. Present after a
    compaction."""
    compactions: Annotated[list[Json], Compaction]
    """The compactions of the history, in order. Present after a compaction."""
    warnings: Annotated[list[Json], RunWarning]
    """Warnings about the answer. Present if there are any."""
    files_left_out_count: int
    """The number of produced files that are not returned. Present if there are any."""
    files_left_out: Annotated[list[Json], SkippedFile]
    """The first 100 of the files that are not returned. Present if there are any."""
    items: list[Mapping[str, Any]]
    """The steps as items of the Responses API, in a chat completion that is not streamed. Present
    if `sandbox.steps` of the request is `items`."""
    events: list[Mapping[str, Any]]
    """The steps as step events, in an answer that is not streamed and in the last event of a stream
    of /v1/responses. Present if `sandbox.steps` of the request is `events`."""


# The `sandbox` object of a usage


class SandboxUsage(TypedDict, total=False):
    """The fields of `usage.sandbox` that are computed from the statistics of the run."""

    cost_microusd: int
    """Cost of the model calls in millionths of a US dollar. Present if the prices are known."""
    env_permille: Required[int]
    """Tokens of tool output, which come from the environment, per thousand tokens of the
    trajectory."""
    capabilities: Required[dict[str, dict[str, int]]]
    """For each of the paper's meta-capabilities: the number of turns that used it (`turns`), and
    this number per thousand turns of the run (`permille`)."""


# Fields of messages and chunks


class MessageExtension(TypedDict, total=False):
    """The fields that OpenAI's API does not have in a chat completion's message, or in the deltas
    of its stream."""

    reasoning: str
    """The model's reasoning, with the steps if `sandbox.steps` of the request is `reasoning`.
    Present if there is any."""
    reasoning_content: str
    """The text of `reasoning`, for clients that read this name. Present with `reasoning`."""
    images: list[Json]
    """Produced images that are small enough, as `image_url` parts with data URLs. Present if
    there are any."""


class ChoiceExtension(TypedDict):
    """The field of a choice that OpenAI's API does not have. Present in a chat completion that is
    not streamed and has several choices."""

    sandbox: SandboxObject
    """The `sandbox` object of the choice's run."""


class CardFields(TypedDict, total=False):
    """The top-level fields of chunks from which Open WebUI makes cards. Present if `sandbox.steps`
    of the request is `items`. The delta of such a chunk is empty."""

    event: Json
    """An event of Open WebUI: `status` for its status line, or `files`. Present without `item`."""
    type: str
    """The type of an event of the Responses API, such as `response.output_item.done`. Present
    with `item`."""
    output_index: int
    """The index of the item. Present with `item`."""
    item: Json
    """The item: `function_call` or `function_call_output`. Present without `event`."""


class StepExtension(TypedDict, total=False):
    """The `sandbox` object of a chunk whose delta has the text of a step. Present if
    `sandbox.steps` of the request is `reasoning`."""

    v: Required[Literal[1]]
    """The version of the object."""
    run_id: str
    """The id of the run. Present at the start of a step."""
    step: Required[int]
    """The number of the step, from 1."""
    kind: Required[Literal["tool_start", "tool_output", "tool_end"]]
    """The part of the step: its start, its output or its end."""
    tool: str
    """The name of the tool. Present at the start of a step."""
    exit_code: int | None
    """The exit code of the command; null if there is none. Present at the end of a step."""
    ms: int
    """The duration in milliseconds. Present at the end of a step."""


# Step events


class StepStreamEvent(StrEnum):
    """The stream event, in each API, whose field `sandbox` contains a step event."""

    CHAT_COMPLETIONS = "sandbox.step"
    """The name of a server-sent event whose data is a chunk with an empty delta. Clients ignore
    server-sent events with an unknown name."""
    RESPONSES = "keepalive"
    """The type of an event of the Responses API; the name of its server-sent event is
    `sandbox.step`. OpenAI's SDKs know this type, which has no content, and refuse unknown types."""
    MESSAGES = "ping"
    """The type of an event of the Messages API. SDKs ignore a ping, whatever fields it has."""


class RunStartedEvent(TypedDict):
    """The run has started."""

    kind: Literal["run_started"]


class ToolStartEvent(TypedDict):
    """A tool call starts."""

    kind: Literal["tool_start"]
    step: int
    """The number of the step, from 1."""
    call_id: str
    """The id of the call."""
    tool: str
    """The name of the tool."""
    arguments: Json
    """The arguments of the call."""


class ToolOutputEvent(TypedDict):
    """A command has written output. Sent in streams only, up to 100,000 characters a step."""

    kind: Literal["tool_output"]
    step: int
    """The number of the step."""
    stream: Literal["stdout", "stderr"]
    """The stream that the command wrote to."""
    text: str
    """A piece of the output."""


class ToolEndEvent(TypedDict):
    """A tool call has ended."""

    kind: Literal["tool_end"]
    step: int
    """The number of the step."""
    exit_code: int | None
    """The exit code of the command; null if there is none."""
    ms: int
    """The duration in milliseconds."""
    observation: str
    """The text that the model gets."""


class StepsOmittedEvent(TypedDict):
    """The oldest steps are left out for a late subscriber."""

    kind: Literal["steps_omitted"]
    steps: int
    """The number of omitted steps."""


class EgressEvent(TypedDict):
    """A program in the sandbox tried to reach a host."""

    kind: Literal["egress"]
    verdict: Literal["allowed", "denied"]
    """`denied` by the network settings, a rule or a limit."""
    host: str
    """The host that the program named; empty if it named none."""
    port: int
    """The port that the program named."""
    reason: str
    """The reason why the connection was denied or failed; empty if it succeeded."""
    bytes_up: int
    """The bytes that the sandbox sent."""
    bytes_down: int
    """The bytes that the sandbox received."""


class RuleEvent(TypedDict):
    """A rule matches an action that the run is about to take."""

    kind: Literal["rule"]
    rule: str
    """The name of the rule."""
    action: Action
    """`deny` if the rule refuses the action of the run, `log` if it only records the action."""
    over: RuleTarget
    """The kind of the rule's subject."""
    subject: str
    """The command, path or `host:port`. A long subject is shortened."""
    reason: str
    """The reason that the rule gives."""


class FileEvent(TypedDict):
    """The run has produced a file."""

    kind: Literal["file"]
    id: str
    """The id of the file."""
    path: str
    """The absolute path in the sandbox."""
    bytes: int
    """The size in bytes."""


class RunFinishedEvent(TypedDict):
    """The run has ended."""

    kind: Literal["run_finished"]
    stop_reason: str
    """The reason why the run ended: see [Stop reasons](stop-reasons.md)."""


RunEvent = (
    RunStartedEvent | StepsOmittedEvent | EgressEvent | RuleEvent | FileEvent | RunFinishedEvent
)
"""The step events about the run, not about one tool call."""
StepEvent = ToolStartEvent | ToolOutputEvent | ToolEndEvent | RunEvent
"""The step events. Each event also has `v`, the version 1, and `run_id`, the id of the run."""
