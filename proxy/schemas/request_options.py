"""The options of a request that all APIs share, from the body's `sandbox` object and from headers.

`read_requested_policy` reads what decides on the route: the profile, stricter settings, the capture
of a trajectory and the upstream. `read_request_options` reads the rest: the deadlines, the
idempotency key, the behaviour after a disconnect, the form of the steps, the scope of the usage,
and the offloading of documents to files.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict, TypeVar, get_args

from pydantic import Field

from policies.artifacts import ArtifactLimits
from policies.headers import RequestHeader
from policies.isolation import Isolation
from policies.limits import Limits
from policies.observation import ObservationLimits
from policies.profile import Capture, Enabled, PromptStyle
from policies.steps import STEPS_MODES, USAGE_SCOPES, StepsMode, UsageScope, default_usage_scope
from policies.workspace import InputLimits
from proxy.deprecated_settings import REQUEST_RULES, DuplicateSettingError, find_header, upgrade
from proxy.errors import BadRequestError
from proxy.schemas.validation import check_boolean, check_mapping, check_text

OnDisconnect = Literal["cancel", "detach"]
READ_TIMEOUT_HEADERS = (RequestHeader.STAINLESS_READ_TIMEOUT, RequestHeader.STAINLESS_TIMEOUT)
"""Headers of OpenAI's SDKs: the timeout for each byte (Python), or for the first byte (Node)."""
_ON_DISCONNECT: tuple[OnDisconnect, ...] = get_args(OnDisconnect)
_CAPTURES: tuple[Capture, ...] = get_args(Capture)
_RETRY_COUNT = re.compile(r"[0-9]{1,9}")
_T = TypeVar("_T", bound=str)


class PolicyOptions(TypedDict, total=False):
    """The settings of the profile that a request's `sandbox` object may make stricter."""

    enabled: Enabled
    prompt: PromptStyle
    limits: Limits
    isolation: Isolation
    inputs: InputLimits
    observation: ObservationLimits
    artifacts: ArtifactLimits


class SandboxOptions(PolicyOptions, total=False):
    """The `sandbox` object of a request. An unknown field is refused with status 400; old spellings
    of fields are accepted. A field that is null counts as absent."""

    profile: str
    """The name of the profile. A profile that allows more than the default profile needs an API key
    that lists it. Default: the profile of the model or the key, else the server's `profile`."""
    steps: StepsMode
    """Form of the steps in the answer. Default: the server's `steps`."""
    offload_documents: bool
    """False if documents in long texts stay in the prompt instead of becoming files. Default:
    true."""
    usage: UsageScope
    """The model calls that the usage counts: all calls, or the last call. Default: `all_calls`, and
    `last_call` for Codex and opencode."""
    deadline_s: Annotated[float, Field(gt=0)]
    """Seconds after which the client no longer wants an answer. The run ends before the deadline,
    with an answer. Default: none."""
    on_disconnect: OnDisconnect
    """The fate of the run when the client disconnects: `cancel` ends it, `detach` continues it.
    Default: the server's `on_disconnect`."""
    capture: Capture
    """The part of the run that is kept as its trajectory, for GET /v1/runs/{id}/trajectory.
    `messages`: the model calls with their messages, the tool calls and the result. `tokens`: also
    the token ids and log probabilities of the model calls, for training; only if the profile has
    `agent.capture_tokens`. Default: the profile's `agent.capture`, which is `none` by default."""
    upstream: str
    """The base URL, up to /v1, to which the run's model calls are sent, such as the URL of a
    gateway that records the calls of a rollout. The server's `backend.upstreams` must allow it.
    Default: the server's `backend.base_url`."""
    session: str
    """The client's name for the session. The run finds the files of the session's earlier runs.
    Default: the id of the chat in a header or in `metadata.session_id`, else none."""
    container_id: str
    """The id of a container. The run finds the files of the container. Takes precedence over
    `session`. Default: none."""
    file_ids: list[str]
    """The ids of uploads that the run gets as input files. Default: empty."""


_RESTRICTABLE_SETTINGS = tuple(PolicyOptions.__annotations__)
"""Profile settings that the body's `sandbox` object may restrict."""
_SANDBOX_FIELDS = SandboxOptions.__annotations__.keys()


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of one request."""

    deadline_s: float | None = None
    """Seconds after which the client no longer wants an answer."""
    read_timeout_s: float | None = None
    """Seconds without a byte after which the client disconnects."""
    on_disconnect: OnDisconnect | None = None
    idempotency_key: str | None = None
    retry_count: int | None = None
    """The number of earlier attempts, or None if the client does not send a valid number."""
    steps: StepsMode | None = None
    """Form of the steps; None for the API's default."""
    usage: UsageScope = "all_calls"
    """The model calls that the reported usage includes."""
    offload_documents: bool = True
    """True if documents in long texts may become files."""

    @property
    def client_timeout_s(self) -> float | None:
        """Seconds after which a client that receives nothing has disconnected, or None."""
        timeouts = (self.deadline_s, self.read_timeout_s)
        return min((each for each in timeouts if each is not None), default=None)


@dataclass(frozen=True, slots=True)
class RequestedPolicy:
    """The parts of a request's `sandbox` object and headers that decide on its route and its
    profile."""

    profile: str | None = None
    """The name of the profile, or None if the request names none."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The request's values for settings of the profile, which they may only make stricter."""
    capture: Capture | None = None
    """The part of the run that is kept as its trajectory, or None for the profile's default."""
    upstream: str | None = None
    """The base URL for the run's model calls, or None for the backend's."""


NO_POLICY = RequestedPolicy()


def read_requested_policy(body: Mapping[str, Any], headers: Mapping[str, str]) -> RequestedPolicy:
    """Return the policy that a request names in its body or headers. Raises BadRequestError, also
    for unknown fields of `sandbox`."""
    sandbox = body.get("sandbox") or {}
    check_mapping(sandbox, "sandbox")
    sandbox = _with_new_spellings(sandbox)
    if unknown := sandbox.keys() - _SANDBOX_FIELDS:
        raise BadRequestError(
            f"Unknown parameter: 'sandbox.{min(unknown)}'.",
            param=f"sandbox.{min(unknown)}",
            code="unknown_parameter",
        )
    by_header = {
        "enabled": _read_header(headers, RequestHeader.ENABLED),
        "prompt": headers.get(RequestHeader.PROMPT) or None,
    }
    settings = {
        name: value for name, value in _with_new_spellings(by_header).items() if value is not None
    }
    settings |= {
        name: sandbox[name] for name in _RESTRICTABLE_SETTINGS if sandbox.get(name) is not None
    }
    name = sandbox.get("profile") or headers.get(RequestHeader.PROFILE) or None
    if name is not None:
        check_text(name, "sandbox.profile")
    upstream = sandbox.get("upstream")
    if upstream is not None:
        check_text(upstream, "sandbox.upstream")
    capture = _one_of(_CAPTURES, sandbox.get("capture"), "sandbox.capture")
    return RequestedPolicy(name, settings, capture, upstream)


def read_request_options(body: Mapping[str, Any], headers: Mapping[str, str]) -> RequestOptions:
    """Return the options. `headers` have lower-case names. Raises BadRequestError."""
    sandbox = body.get("sandbox") or {}
    check_mapping(sandbox, "sandbox")
    deadlines = [
        _parse_seconds(sandbox.get("deadline_s"), "sandbox.deadline_s"),
        _parse_seconds(headers.get(RequestHeader.DEADLINE), "X-Sandbox-Deadline"),
    ]
    # The SDKs send the timeout and the retry count themselves, so an invalid value is ignored.
    timeouts = (_parse_number(headers.get(name)) for name in READ_TIMEOUT_HEADERS)
    retries = headers.get(RequestHeader.STAINLESS_RETRY_COUNT, "")
    return RequestOptions(
        deadline_s=min((each for each in deadlines if each is not None), default=None),
        read_timeout_s=next((each for each in timeouts if each is not None and each > 0), None),
        on_disconnect=_read_option(
            body, headers, "on_disconnect", RequestHeader.ON_DISCONNECT, _ON_DISCONNECT
        ),
        idempotency_key=headers.get(RequestHeader.IDEMPOTENCY_KEY) or None,
        retry_count=int(retries) if _RETRY_COUNT.fullmatch(retries) else None,
        steps=_read_option(body, headers, "steps", RequestHeader.STEPS, STEPS_MODES),
        usage=_read_option(body, headers, "usage", RequestHeader.USAGE, USAGE_SCOPES)
        or default_usage_scope(headers),
        offload_documents=_may_offload_documents(sandbox, headers),
    )


def _with_new_spellings(sandbox: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a request's `sandbox` with the new names of its fields. Raises BadRequestError."""
    try:
        renamed: Mapping[str, Any] = upgrade(sandbox, REQUEST_RULES, lambda _: None)
    except DuplicateSettingError as error:
        raise _duplicate_setting_error(error, f"sandbox.{error.old}") from error
    return renamed


def _read_header(headers: Mapping[str, str], name: str) -> str | None:
    """Return the value of a header, or None. The client may send the header under its deprecated
    name. Raises BadRequestError if the request has both names."""
    try:
        return find_header(headers, name)
    except DuplicateSettingError as error:
        raise _duplicate_setting_error(error, error.old) from error


def _duplicate_setting_error(error: DuplicateSettingError, param: str) -> BadRequestError:
    return BadRequestError(f"{error}.", param=param, code="invalid_value")


def _may_offload_documents(sandbox: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
    value = _with_new_spellings(sandbox).get("offload_documents") if sandbox else None
    if value is not None:
        check_boolean(value, "sandbox.offload_documents")
        return bool(value)
    switch = (_read_header(headers, RequestHeader.OFFLOAD_DOCUMENTS) or "on").lower()
    if switch not in ("on", "off"):
        raise _invalid_value_error(switch, "X-Sandbox-Offload-Documents", "one of 'on', 'off'")
    return switch == "on"


def _read_option(
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    name: str,
    header: RequestHeader,
    values: tuple[_T, ...],
) -> _T | None:
    """Return the option that the field `name` of the `sandbox` object sets, else the option that
    the header sets, else None."""
    sandbox = body.get("sandbox")
    value, param = sandbox.get(name) if isinstance(sandbox, dict) else None, f"sandbox.{name}"
    if value is None:
        value, param = headers.get(header), header.title()
    return _one_of(values, value, param)


def _one_of(values: tuple[_T, ...], value: object, param: str) -> _T | None:
    """Return `value` if it is in `values`, or None if it is None. Raises BadRequestError for any
    other value."""
    if value is None:
        return None
    for known in values:
        if value == known:
            return known
    raise _invalid_value_error(value, param, f"one of {', '.join(map(repr, values))}")


def _parse_seconds(value: object, param: str) -> float | None:
    if value is None:
        return None
    number = _parse_number(value)
    if number is None or number <= 0:
        raise _invalid_value_error(value, param, "a number of seconds above 0")
    return number


def _invalid_value_error(value: object, param: str, expected: str) -> BadRequestError:
    return BadRequestError(
        f"Invalid value {value!r} for '{param}': {expected}.", param=param, code="invalid_value"
    )


def _parse_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
