"""The request and response models of the routes that call no model: files, containers,
conversations, runs, models and capabilities. The OpenAPI description is generated from them.

`parse` validates a body; `validation_error` turns an error of pydantic into an error like OpenAI's.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    StrictInt,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from policies.sessions import TrajectoryExportFormat, TrajectoryFormat, TrajectoryLabels
from proxy.agent.tokens import MAX_VERSION_CHARS
from proxy.errors import BadRequestError
from proxy.schemas.responses_parameters import check_input_item
from proxy.schemas.validation import (
    Check,
    accept_anything,
    array,
    integer,
    missing_error,
    too_long_error,
    unsupported_error,
    unsupported_value_error,
    wrong_type_error,
)
from proxy.store.records import (
    Container,
    ContainerFile,
    FileSource,
    NewContainer,
    PageRequest,
    StoredConversation,
    StoredUpload,
)

M = TypeVar("M", bound=BaseModel)


def _replace_surrogates(value: Any) -> Any:
    """Replace lone surrogates, which cannot be encoded as UTF-8."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _parse_digits(value: Any) -> Any:
    """Return an integer for a string of digits, because forms and queries have only strings."""
    is_number = isinstance(value, str) and value.removeprefix("-").isdecimal() and len(value) < 20
    return int(value) if is_number else value


Text = Annotated[str, BeforeValidator(_replace_surrogates)]
Name = Annotated[str, Field(max_length=512), BeforeValidator(_replace_surrogates)]
Object = Annotated[Any, WithJsonSchema({"type": "object"})]
"""A JSON object that pydantic does not change."""


class _ResponseModel(BaseModel):
    model_config = ConfigDict(json_schema_serialization_defaults_required=True)


# Errors

_EXPECTED_TYPES = {
    "string_type": "a string",
    "int_type": "an integer",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
}
"""The expected types, as error messages name them, by pydantic's error type."""
_TOO_LONG_CODES: Mapping[str, tuple[str, str]] = {
    "Dictionary": ("object_above_max_properties", "pairs"),
    "List": ("array_above_max_length", "items"),
}
_QUOTED_WORD = re.compile(r"'([^']*)'")
_INVALID_KEY = "[key]"
"""The last element of pydantic's location of an invalid key; the key is the element before."""


def parse(model: type[M], value: Any) -> M:
    """Validate a body or a query. Raises BadRequestError."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)[0]) from error


def validation_error(error: Mapping[str, Any]) -> BadRequestError:
    """Return an error of pydantic as OpenAI's error, with the path of the field as `param`."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    param = _field_path(error["loc"])
    if kind == "missing":
        return missing_error(param)
    if kind in _EXPECTED_TYPES or (kind == "literal_error" and not isinstance(value, str)):
        return wrong_type_error(param, _EXPECTED_TYPES.get(kind, "a string"), value)
    if kind == "literal_error":
        return unsupported_value_error(value, _QUOTED_WORD.findall(context["expected"]), param)
    if kind == "string_too_long":
        return too_long_error(
            param, "string_above_max_length", f"{context['max_length']} characters"
        )
    if kind == "too_long":
        code, noun = _TOO_LONG_CODES[context["field_type"]]
        return too_long_error(param, code, f"{context['max_length']} {noun}")
    if kind in ("greater_than_equal", "less_than_equal"):
        return _error_of(integer(context.get("ge"), context.get("le")), value, param)
    if kind == "too_short":
        return _error_of(array(accept_anything, minimum=context["min_length"]), value, param)
    return BadRequestError(f"{error['msg']}.", param=param or None, code="invalid_value")


def _field_path(location: Sequence[str | int]) -> str:
    if location and location[-1] == _INVALID_KEY:
        location = location[:-2]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return path.removeprefix(".")


def _error_of(check: Check, value: Any, param: str) -> BadRequestError:
    """Return the error that a check raises for a value."""
    try:
        check(value, param)
    except BadRequestError as error:
        return error
    raise ValueError(f"{param} is accepted: {value}")


class ErrorDetail(BaseModel):
    """The error that ended a request or a run."""

    model_config = ConfigDict(extra="allow")
    message: str
    type: str
    param: str | None = Field(description="The path of the invalid field.")
    code: str | int | None


class ErrorResponse(BaseModel):
    """OpenAI's error body."""

    error: ErrorDetail


# Lists


class ListQuery(BaseModel):
    """The query parameters that select a page of a list."""

    limit: Annotated[StrictInt, Field(ge=1, le=100), BeforeValidator(_parse_digits)] = 20
    order: Literal["asc", "desc"] = Field("desc", description="By the time of creation.")
    after: str | None = Field(None, description="The id of the last object of the previous page.")

    @property
    def page_request(self) -> PageRequest:
        """The page request for the store: limit, order and the id to continue after."""
        return PageRequest(self.limit, self.order == "desc", self.after or None)


class _ObjectWithId(_ResponseModel):
    id: Text


T = TypeVar("T", bound=_ObjectWithId)


class ListObject(_ResponseModel, Generic[T]):
    """OpenAI's list object. In an empty list `first_id` and `last_id` are empty strings."""

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str
    last_id: str
    has_more: bool

    @classmethod
    def from_page(cls, items: Sequence[T], has_more: bool) -> Self:
        """Return the list object for the objects of a page."""
        first, last = (items[0].id, items[-1].id) if items else ("", "")
        return cls(data=list(items), first_id=first, last_id=last, has_more=has_more)


def items_list(items: Sequence[Mapping[str, Any]], has_more: bool) -> dict[str, Any]:
    """Return OpenAI's list object for items, which stay unchanged."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else "",
        "last_id": items[-1]["id"] if items else "",
        "has_more": has_more,
    }


class DeletedObject(_ObjectWithId):
    """OpenAI's response to the deletion of an object."""

    object: str
    deleted: Literal[True] = True


# Uploads

MIN_UPLOAD_S, MAX_UPLOAD_S = 3600, 2592000
"""The shortest and the longest lifetime of an upload, in seconds."""
_EXPIRY_FIELDS = ("anchor", "seconds")


class UploadExpiry(BaseModel):
    """The lifetime of an upload: `seconds` after its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[
        StrictInt, Field(ge=MIN_UPLOAD_S, le=MAX_UPLOAD_S), BeforeValidator(_parse_digits)
    ]


def _add_file_field(schema: dict[str, Any]) -> None:
    """Add the file of a form, which is streamed to disk, to the OpenAPI description."""
    schema["properties"]["file"] = {"type": "string", "format": "binary"}


class UploadForm(BaseModel):
    """The fields of the form that uploads a file."""

    model_config = ConfigDict(json_schema_extra=_add_file_field)
    purpose: Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]
    expires_after: UploadExpiry | None = None

    @model_validator(mode="before")
    @classmethod
    def _join_expiry(cls, form: Mapping[str, str]) -> dict[str, Any]:
        """Return the form with `expires_after` as an object. SDKs send each field of the object as
        a form field; other clients send the object as JSON."""
        return {**form, "expires_after": _expires_after(form)}


def _expires_after(form: Mapping[str, str]) -> Any:
    text = form.get("expires_after")
    if text is None:
        fields = {name: form.get(f"expires_after[{name}]") for name in _EXPIRY_FIELDS}
        return {name: value for name, value in fields.items() if value is not None} or None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


class FileListQuery(ListQuery):
    """The query parameters that list files."""

    limit: Annotated[StrictInt, Field(ge=1, le=10_000), BeforeValidator(_parse_digits)] = 10_000
    purpose: str | None = None


class FileObject(_ObjectWithId):
    """OpenAI's file object."""

    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: Text
    purpose: Text
    status: Literal["processed"] = "processed"


def file_object(upload: StoredUpload) -> FileObject:
    """Return OpenAI's file object for an upload."""
    return FileObject.model_validate(upload, from_attributes=True)


# Containers


class ContainerExpiry(BaseModel):
    """The lifetime of a container: `minutes` after its last use."""

    anchor: Literal["last_active_at"]
    minutes: StrictInt = Field(
        ge=1, description="At most the server's `artifacts.retention_hours`, in minutes."
    )


class NetworkPolicy(BaseModel):
    """The network policy of a container. It is stored and returned, and has no effect."""

    type: Literal["disabled", "allowlist"]
    allowed_domains: list[Text] | None = Field(None, min_length=1, max_length=1000)

    @model_validator(mode="before")
    @classmethod
    def _check_domains(cls, policy: Any) -> Any:
        """Require the domains of an allowlist, and ignore the domains of a disabled network."""
        if not isinstance(policy, dict) or policy.get("type") not in ("disabled", "allowlist"):
            return policy
        if policy["type"] == "disabled":
            return {"type": "disabled"}
        if policy.get("allowed_domains") is None:
            raise wrong_type_error("network_policy.allowed_domains", "an array", None)
        return policy


class ContainerCreate(BaseModel):
    """The request body that creates a container."""

    name: Name
    memory_limit: Literal["1g", "4g", "16g", "64g"] | None = None
    expires_after: ContainerExpiry | None = None
    network_policy: NetworkPolicy | None = None
    file_ids: list[Text] | None = Field(
        None, max_length=100, description="The uploads to copy into the container."
    )

    @model_validator(mode="before")
    @classmethod
    def _check_supported(cls, body: Mapping[str, Any]) -> dict[str, Any]:
        """Refuse unsupported fields, and drop null fields."""
        policy = body.get("network_policy")
        secrets = policy.get("domain_secrets") if isinstance(policy, dict) else None
        for field, value in (
            ("skills", body.get("skills")),
            ("network_policy.domain_secrets", secrets),
        ):
            if value not in (None, []):
                raise unsupported_error(field, "Containers of this server do not support it.")
        return {name: value for name, value in body.items() if value is not None}

    def to_new_container(self, *, max_minutes: int) -> NewContainer:
        """Return the container for the store. Raises BadRequestError."""
        minutes = self.expires_after.minutes if self.expires_after else max_minutes
        integer(1, max_minutes)(minutes, "expires_after.minutes")
        policy = self.network_policy
        return NewContainer(
            name=self.name,
            minutes=minutes,
            memory_limit=self.memory_limit,
            network_policy=policy.model_dump(exclude_none=True) if policy else None,
        )


class ContainerFileCreate(BaseModel):
    """A file to add to a container: an upload, or the file of a form."""

    model_config = ConfigDict(json_schema_extra=_add_file_field)
    file_id: Name | None = None


class ContainerListQuery(ListQuery):
    """The query parameters that list containers."""

    name: str | None = None


class ContainerFileListQuery(ListQuery):
    """The query parameters that list the files of a container."""

    path: str | None = Field(None, description="Only files under this path.")


class LinkQuery(BaseModel):
    """The query parameters of a signed link, which authorize the request instead of an API key."""

    exp: str = Field("", description="The Unix time at which the link expires.")
    sig: str = Field("", description="The signature of the link.")


class ArchiveQuery(LinkQuery):
    """The query parameters of the request that downloads the files of a container as an archive."""

    format: Literal["zip"] = "zip"
    path: str | None = Field(None, description="Only files under this path.")


def _mark_optional(schema: dict[str, Any]) -> None:
    """Describe `memory_limit` and `network_policy`, which a response may omit, as optional."""
    schema["required"] = [
        name for name in schema["required"] if name not in ("memory_limit", "network_policy")
    ]


class ContainerObject(_ObjectWithId):
    """OpenAI's container object, with the URL of an archive of all its files."""

    model_config = ConfigDict(json_schema_extra=_mark_optional)

    object: Literal["container"] = "container"
    name: Text
    created_at: int
    status: Literal["running"] = "running"
    last_active_at: int
    expires_after: dict[str, str | int]
    memory_limit: str | None = None
    network_policy: dict[str, Any] | None = None
    zip_url: str


class ContainerFileObject(_ObjectWithId):
    """OpenAI's container file object, with the URL of the file."""

    object: Literal["container.file"] = "container.file"
    container_id: str
    created_at: int
    bytes: int
    path: Text
    source: FileSource
    url: Text


def container_object(container: Container, zip_url: str) -> ContainerObject:
    """Return OpenAI's object for a container, with the URL of its archive."""
    expires_after = {"anchor": "last_active_at", "minutes": container.minutes}
    return ContainerObject.model_validate(
        {**asdict(container), "expires_after": expires_after, "zip_url": zip_url}
    )


def container_file_object(file: ContainerFile, url: str) -> ContainerFileObject:
    """Return OpenAI's object for a file of a container, with the URL of the file."""
    return ContainerFileObject.model_validate({**asdict(file), "url": url})


# Conversations


def _check_items(items: list[Any]) -> list[Any]:
    array(check_input_item)(items, "items")
    return items


Items = Annotated[list[Object], Field(max_length=20), AfterValidator(_check_items)]
"""The items that one request adds to a conversation."""
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64), BeforeValidator(_replace_surrogates)], Name],
    Field(max_length=16),
]


class ConversationUpdate(BaseModel):
    """The request body that replaces the metadata of a conversation."""

    metadata: Metadata | None = None


class ConversationCreate(ConversationUpdate):
    """The request body that creates a conversation with its first items."""

    items: Items | None = None


class ItemsCreate(BaseModel):
    """The request body that adds items to a conversation."""

    items: Items


class ConversationObject(_ObjectWithId):
    """OpenAI's conversation object."""

    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[Text, Text]


def conversation_object(conversation: StoredConversation) -> ConversationObject:
    """Return OpenAI's object for a conversation."""
    return ConversationObject.model_validate(conversation, from_attributes=True)


class ItemObject(_ObjectWithId):
    """An item of a conversation or a response: a message, a tool call, a tool's output, ...; each
    type has fields of its own."""

    model_config = ConfigDict(extra="allow")
    type: str = "message"


# Stored responses

MAX_SEQUENCE = 2**53


class StreamQuery(BaseModel):
    """The query parameters that stream the events of a response."""

    starting_after: (
        Annotated[StrictInt, Field(ge=0, le=MAX_SEQUENCE), BeforeValidator(_parse_digits)] | None
    ) = Field(None, description="The number of the event after which the stream begins.")


class ResponseQuery(StreamQuery):
    """The query parameters of a request for a stored response."""

    stream: str | None = Field(None, description="`true` streams the response's events.")
    include: list[str] | None = Field(
        None, description="Has no effect: the response is returned as it is stored."
    )


class ResponseObject(_ObjectWithId):
    """OpenAI's response object."""

    model_config = ConfigDict(extra="allow")
    object: Literal["response"] = "response"


# Runs


class RunObject(_ObjectWithId):
    """A run, with its completion or with the error that ended it."""

    object: Literal["run"] = "run"
    created_at: int
    model: str
    container_id: str
    status: Literal["running", "completed", "failed", "cancelled"]
    stop_reason: str | None
    usage: dict[str, Any] | None
    completion: dict[str, Any] | None = Field(description="OpenAI's chat completion.")
    error: ErrorDetail | None


class _LabelQuery(BaseModel):
    """The query parameters that select trajectories by their labels."""

    group_id: str | None = Field(None, description="Only trajectories with this label.")
    task_id: str | None = Field(None, description="Only trajectories with this label.")
    session_id: str | None = Field(None, description="Only trajectories of this session.")

    @property
    def labels(self) -> TrajectoryLabels:
        """The labels that the trajectories must have."""
        return TrajectoryLabels(self.group_id, self.task_id, self.session_id)


class TrajectoryListQuery(_LabelQuery, ListQuery):
    """The query of GET /v1/trajectories."""


class TrajectoryExportQuery(_LabelQuery):
    """The query of GET /v1/trajectories/export."""

    format: TrajectoryExportFormat = Field(
        description="rows: the token segments; verl: the same with the names of verl; openenv:"
        " OpenEnv's TrainingTrace; sft: messages and tools, for supervised training; native: whole"
        " trajectories."
    )


class TrajectoryQuery(BaseModel):
    """The query of GET /v1/runs/{id}/trajectory."""

    format: TrajectoryFormat = Field(
        default="native",
        description="native: the whole trajectory; openai: OpenAI's messages; reference: the format"
        " of the paper's reference package.",
    )


class ModelCallObject(BaseModel):
    """A model call of a trajectory. Fields about tokens are absent if the tokens are unknown."""

    segment: int = Field(description="The index of the prompt's segment.")
    prompt_messages: int = Field(
        description="The number of messages of the prompt, which are the first ones of the segment."
    )
    turn: int
    reply: int | None = Field(description="The index of the reply's message.")
    settings: int = Field(description="The index of the call's settings.")
    finish_reason: str
    usage: dict[str, Any]
    error: str | None
    started_s: float = Field(description="Seconds from the start of the run.")
    duration_s: float
    token_segment: int | None = Field(
        None, description="The index of the token segment, if the tokens are known."
    )
    prompt_tokens: int | None = Field(
        None,
        description="The number of tokens of the prompt, which are the first ones of the token"
        " segment.",
    )
    reply_tokens: int | None = Field(
        None, description="The number of tokens of the reply, which follow those of the prompt."
    )
    tokens_missing: str | None = Field(
        None, description="Why the tokens are unknown, with `sandbox.capture: tokens`."
    )
    weight_version: str | None = Field(
        None, description="The version of the model's weights, if the backend reports it."
    )


class TokenSegment(_ResponseModel):
    """The tokens of successive model calls. The prompt of each call begins with all tokens of the
    previous call."""

    prompt_ids: list[int] = Field(description="The tokens of the first prompt.")
    response_ids: list[int] = Field(
        description="The tokens after the first prompt: the replies, and between two replies the"
        " tokens that the next prompt adds."
    )
    response_mask: list[int] = Field(
        description="1 for each token that the model sampled, 0 for each other token."
    )
    logprobs: list[float] = Field(
        description="The log probability of each sampled token, and 0.0 for each other token."
    )


class ToolCallObject(BaseModel):
    """A tool call of a trajectory. A call that has not ended has no observation."""

    turn: int
    model_call: int = Field(description="The index of the model call whose reply has the call.")
    step: int
    id: str
    name: str
    arguments: dict[str, Any]
    capabilities: list[str] = Field(description="The paper's meta-capabilities that it uses.")
    started_s: float
    observation: str | None = None
    exit_code: int | None = None
    output_lines: int | None = None
    duration_s: float | None = None


class TrajectoryResult(_ResponseModel):
    """The result of a run, in its trajectory."""

    answer: str
    refusal: str | None
    stop_reason: str
    finish_reason: str
    tool_calls: list[dict[str, Any]] = Field(description="Calls of the client's tools.")
    usage: dict[str, Any]
    stats: dict[str, Any]
    container_id: str
    files: list[dict[str, Any]] = Field(description="The produced files, without their contents.")
    files_left_out: list[dict[str, Any]]
    warnings: list[dict[str, Any]]
    sandbox_losses: int = Field(description="The number of sandboxes that were lost in the run.")
    compactions: list[dict[str, Any]]


class RewardCreate(BaseModel):
    """The request body that adds a reward to a trajectory."""

    value: Annotated[float, Strict(), Field(allow_inf_nan=False)] | None = Field(
        description="null: the trajectory cannot be scored."
    )
    source: Name = Field("", description="The name of the grader or person that gives the reward.")
    reason: Name = ""


class RewardObject(_ResponseModel):
    """A reward of a trajectory."""

    value: float | None
    source: Text
    reason: Text
    created_at: int


class TrajectorySummaryObject(_ObjectWithId):
    """A trajectory in a list."""

    object: Literal["run.trajectory.summary"] = "run.trajectory.summary"
    created_at: int
    ended_at: int | None = Field(description="When the run ended; null before.")
    bytes: int = Field(
        description="The stored size in bytes: of the compressed parts and of the rewards."
    )
    group_id: str | None = Field(None, description="The label in the request's `metadata`.")
    task_id: str | None = Field(None, description="The label in the request's `metadata`.")
    session_id: str | None = Field(None, description="The client's name for the session.")


class TrajectoryObject(_ObjectWithId):
    """The trajectory of a run. Each message is in `messages` once. A segment is a list of indexes
    of messages. The run only appends to a segment; a compaction begins a new segment."""

    object: Literal["run.trajectory"] = "run.trajectory"
    created_at: int
    status: Literal["running", "completed", "failed", "cancelled"]
    outcome: str = Field(
        description="The stop reason of a completed run, `infra_error` if it failed or its sandbox"
        " was lost, else `running` or `cancelled`."
    )
    model: str | None
    profile: str | None
    route: str | None
    group_id: str | None = Field(description="The label in the request's `metadata`.")
    task_id: str | None = Field(description="The label in the request's `metadata`.")
    session_id: str | None = Field(description="The client's name for the session.")
    choice: int = Field(description="The index of the choice, for requests with `n`.")
    continues: str | None = Field(description="The id of the suspended run that the run continues.")
    user_message: str = Field(
        description="The text of the client's last user message, without what the proxy adds."
    )
    duration_s: float | None
    is_truncated: bool = Field(description="True if contents were left out because of the size.")
    messages: list[dict[str, Any]]
    segments: list[list[int]]
    token_segments: list[TokenSegment] = Field(
        description="The tokens of the model calls, with `sandbox.capture: tokens`."
    )
    settings: list[dict[str, Any]] = Field(
        description="The distinct settings of the model calls: tools, temperature and so on."
    )
    turns: list[dict[str, Any]]
    model_calls: list[ModelCallObject]
    tool_calls: list[ToolCallObject]
    rules: list[dict[str, Any]] = Field(description="The rules of the profile that matched.")
    connections: list[dict[str, Any]] = Field(description="The network connections.")
    result: TrajectoryResult | None
    error: dict[str, Any] | None
    rewards: list[RewardObject] = Field(
        description="The rewards in the order in which they were given."
    )


class OpenAITrajectory(_ResponseModel):
    """The messages of a trajectory, in OpenAI's format of fine-tuning data."""

    id: str
    model: str | None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []


class ReferenceTrajectory(_ResponseModel):
    """A trajectory in the format of the paper's reference package."""

    problem_statement: str
    steps: list[dict[str, Any]]
    metadata: dict[str, Any]


# The server


class PauseQuery(BaseModel):
    """The query of POST /v1/pause."""

    timeout_s: float = Field(
        600,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="Seconds after which the pause ends by itself.",
    )


class ResumeQuery(BaseModel):
    """The query of POST /v1/resume."""

    weight_version: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_VERSION_CHARS,
        description="The version of the model's weights, for the trajectories of later model calls"
        " whose backend reports none. Without it, the version stays.",
    )


class PauseObject(_ResponseModel):
    """The state of the pause, during which no run starts, and the number of runs at work."""

    object: Literal["pause"] = "pause"
    paused: bool
    ends_in_s: float = Field(description="Seconds until the pause ends by itself; else 0.")
    runs_at_work: int = Field(description="Number of runs of this process that have not ended.")
    weight_version: str | None = Field(
        description="The version of the model's weights that the last POST /v1/resume has named."
    )


class Health(_ResponseModel):
    """The answer of the health routes. From `/health` and `/health/live` it means that the process
    is running. From `/health/ready` it means that the process can also reach its database."""

    status: Literal["ok"] = "ok"


class ModelObject(_ObjectWithId):
    """A model of the backend, with all fields that the backend has for the model."""

    model_config = ConfigDict(extra="allow")


class ModelList(_ResponseModel):
    """The backend's models, each also as `<model>:plain`."""

    object: Literal["list"] = "list"
    data: list[ModelObject]


class Capabilities(_ResponseModel):
    """The capabilities of the server for this client."""

    object: Literal["capabilities"] = "capabilities"
    version: str
    models: list[str]
    backend_error: str | None = Field(description="Why the backend lists no models.")
    steps: dict[str, Any]
    tools: list[str]
    limits: dict[str, Any]
    isolation: dict[str, Any]
    egress: dict[str, Any]
    files: dict[str, Any]
    responses: dict[str, Any]
    profiles: dict[str, str] = Field(description="The profiles that the API key may use.")
    profile: str
    features: dict[str, Any]
    endpoints: list[str]
