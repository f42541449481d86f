"""Turns a request into a run.

`start_or_join_run` joins the run of an earlier attempt if the request is a retry, else it starts a
run. `prepare_request` builds the `AgentTask` of a new run. The daily budget is reserved after all
checks, so that a rejected request costs nothing.
"""

import asyncio
import hashlib
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from policies.artifacts import replace_signed_links
from policies.budgets import Expense
from policies.headers import RequestHeader
from policies.history import strip_steps
from policies.json_bounds import encode_sorted_json
from policies.prices import Tariff
from policies.profile import Profile
from policies.routing import forbids_tools
from policies.sessions import (
    ResumePoint,
    Session,
    SessionState,
    container_id,
    named_session,
    run_container_id,
    session_container_id,
    session_state_names,
    trajectory_labels,
)
from policies.tool_support import SUPPORTED
from proxy import stepwise
from proxy.agent.model import Message
from proxy.agent.status_hold import StatusHold
from proxy.agent.suspended_run import SuspendedRun
from proxy.agent.suspension import answered_run_keys
from proxy.agent.task import (
    AgentInput,
    AgentTask,
    ArtifactStore,
    BudgetReservation,
    DeliveryOptions,
    InputFile,
    PendingInput,
    RunObserver,
    SessionPlan,
    TaskLimits,
)
from proxy.api.daily_budget import find_tariff, reserve_expense
from proxy.api.dependencies import (
    SLOW_BYTES,
    ModelRequest,
    Services,
    base_url,
    body_reservation,
    pause_if_large,
)
from proxy.api.routing import RoutingDecision
from proxy.api.upstream_relay import check_for_refusable_files, urls_in
from proxy.errors import BudgetError, ProxyError
from proxy.inputs import InputContext
from proxy.runs.run import RequestIdentity, Subscriber
from proxy.schemas.chat_request import choice_count, parse_chat, with_tool_call_ids
from proxy.schemas.content_parts import extract_files
from proxy.schemas.request_options import RequestOptions

IDENTITY_HEADERS = (
    RequestHeader.PROFILE,
    RequestHeader.ENABLED,
    RequestHeader.PROMPT,
    RequestHeader.OFFLOAD_DOCUMENTS,
)
"""Headers that change the result of a request."""
DELIVERY_FIELDS = ("stream", "stream_options")
"""Fields that change how the result is sent, but not the result."""
REQUEST_IDS = frozenset({"request_id", "rid"})
"""Fields with the request id of vLLM and SGLang. Two concurrent requests may not have the same
id."""

StartRecording = Callable[[str, int, SessionPlan], Awaitable[RunObserver]]
"""A function that starts to record the response of a run. The arguments are the run's id, the Unix
time of the run's creation and the run's session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A checked request for a run, from any of the APIs."""

    model_request: ModelRequest
    body: Mapping[str, Any]
    """The client's body in the form of a chat-completions request."""
    decision: RoutingDecision
    options: RequestOptions
    is_translated: bool = False
    """True if `body` was translated from another API."""
    forces_tool: bool = False
    """True if the run must begin with a tool call."""
    max_tool_calls: int | None = None
    """Maximum number of calls of the proxy's tools."""
    resume_point: ResumePoint | None = None
    """The state that the request names to resume from."""
    is_stored: bool = False
    """True if the run saves its state under the run's id, for later requests to resume from."""
    is_background: bool = False
    """True if the run continues without its client."""
    start_recording: StartRecording | None = None
    translate_error: Callable[[ProxyError], None] | None = None
    """Replaces the field names of `body` in an error by those of the client's API."""


async def start_or_join_run(request: RunRequest) -> tuple[Subscriber, StatusHold | None]:
    """Return a subscriber, and the StatusHold of a streamed response. The subscriber belongs to the
    run of an earlier attempt if the request is a retry, else to a new run. The earlier attempt may
    have asked for JSON where the retry asks for a stream, or the reverse. The caller must
    unsubscribe the subscriber. The StatusHold is None for a JSON response and for a background run.

    Raises IdempotencyError, PausedError, BusyError, and the errors of `prepare_request`.
    """
    identity = await identify(request)
    services, options = request.model_request.services, request.options
    stream_hold = None
    if identity.stream and not request.is_background:
        hold_s = services.status_hold_s
        if options.read_timeout_s is not None:
            hold_s = min(hold_s, options.read_timeout_s / 2)
        stream_hold = StatusHold(hold_s)
    # The client's timeout does not apply if the client receives data or keep-alives, or if the run
    # continues after a disconnect.
    receives_data = identity.stream or services.nonstream_keep_alive_s is not None
    ignores_timeout = receives_data or identity.detach
    deadline_s = options.deadline_s if ignores_timeout else options.client_timeout_s
    runs = services.runs
    async with runs.lock(identity):  # so that two retries with one key share one run
        if subscriber := await runs.join(identity):
            return subscriber, stream_hold
        runs.require_no_pause()
        services.available_memory.require()
        try:
            task = await prepare_request(request, uuid.uuid4().hex, deadline_s, stream_hold)
        except ProxyError as error:
            # Another process may have started a run for the key; to join it costs no budget.
            may_join = isinstance(error, BudgetError) and identity.key is not None
            if may_join and (subscriber := await runs.join(identity)):
                return subscriber, stream_hold
            if request.translate_error:
                request.translate_error(error)
            raise
        return await runs.start(identity, task), stream_hold


async def identify(request: RunRequest) -> RequestIdentity:
    """Return the request's identity, by which a retry finds the run of the first attempt.

    With an idempotency key, two requests are equal if they differ only in `DELIVERY_FIELDS`.
    Without a key they must be equal byte by byte, as the retries of the SDKs are. In both cases the
    path, the session and `IDENTITY_HEADERS` must be equal too.
    """
    model_request, options = request.model_request, request.options
    body, raw_body = model_request.body, model_request.raw_body
    if options.idempotency_key is not None:
        fields = {key: value for key, value in body.items() if key not in DELIVERY_FIELDS}
        if len(raw_body) > SLOW_BYTES:
            raw_body = await stepwise.encode(fields, encode_sorted_json)
        else:
            raw_body = _encode_fields(fields)
    headers = "\n".join(model_request.headers.get(name, "") for name in IDENTITY_HEADERS)
    session = named_session(model_request.headers, request.body)
    head = f"{model_request.http.url.path}\n{session}\n{headers}\n"
    on_disconnect = options.on_disconnect or model_request.services.on_disconnect
    return RequestIdentity(
        owner=model_request.owner,
        fingerprint=await _fingerprint(head.encode(errors="surrogatepass"), raw_body),
        key=options.idempotency_key,
        retry_count=options.retry_count,
        stream=bool(body.get("stream")),
        detach=request.is_background or on_disconnect == "detach",
    )


def _encode_fields(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True).encode()


async def _fingerprint(head: bytes, raw_body: bytes | bytearray) -> str:
    """Return the digest of a request. A large body is hashed in a thread, which releases the GIL
    meanwhile. On the event loop, hashing 100 MB would block other requests for 0.3 s."""
    digest = hashlib.sha256(head)
    if len(raw_body) > SLOW_BYTES:
        await asyncio.to_thread(digest.update, raw_body)
    else:
        digest.update(raw_body)
    return digest.hexdigest()


async def prepare_request(
    request: RunRequest,
    run_id: str,
    deadline_s: float | None,
    stream_hold: StatusHold | None,
) -> AgentTask:
    """Return the task of a request, with one further task for each further choice (`n`).

    Raises BadRequestError, FileTooLargeError, BodyTooLargeError, BusyError, BudgetError, and the
    errors of `request.start_recording`.
    """
    model_request, decision, options = request.model_request, request.decision, request.options
    services, profile = model_request.services, decision.profile
    is_single_call = decision.is_plain
    has_refusable_files = await check_for_refusable_files(model_request, decision, request.body)
    body, session = await _body_and_session(request, run_id)
    chat, params = parse_chat(
        body,
        has_client_indexes=_has_client_indexes(request, body["messages"]),
        forces_tool=request.forces_tool,
        max_tool_calls=request.max_tool_calls,
    )

    # The profile, with the settings that the request changes.
    if not is_single_call:
        profile = replace(profile, artifacts=profile.artifacts.for_client(model_request.headers))
        if not options.offload_documents:
            inputs = replace(profile.inputs, offload_text_over_tokens=None)
            profile = replace(profile, inputs=inputs)

    # The messages and the files.
    agent_input: AgentInput | PendingInput = AgentInput(chat.messages)
    count = 1
    if not is_single_call:
        context = InputContext(
            owner=model_request.owner,
            model=decision.route.model,
            credentials=model_request.credentials,
            limits=profile.inputs,
            reservation=body_reservation(model_request.http),
            container_files=await _open_container(services, session),
            # The reference style appends the notes on files after the user's last message.
            style_adds_notes=profile.agent.style == "reference" and session.suspended_run is None,
        )
        messages = await services.files.replace_links(chat.messages, model_request.owner)
        await pause_if_large(model_request.raw_body)
        agent_input = await services.inputs.load(messages, body, context)
        count = choice_count(body, profile.limits.max_choices)

    # The daily budget: a failure after this point must refund it.
    tariff, reservation = await _reserve_budget(
        model_request, decision.route.model, profile, runs=0 if is_single_call else count
    )
    created = int(time.time())
    observer = None
    if request.start_recording:
        try:
            observer = await request.start_recording(run_id, created, session)
        except BaseException:
            if reservation:
                await reservation.refund()
            raise

    task = AgentTask(
        run_id=run_id,
        model=decision.route.model,
        artifact_store=_artifact_store(model_request, session, profile),
        session=session,
        input=agent_input,
        request=chat,
        params=params,
        profile=profile,
        route=decision.route.reason,
        is_single_call=is_single_call,
        files_verdict=decision.verdict if has_refusable_files else SUPPORTED,
        default_instruction=_default_instruction(services, decision),
        limits=TaskLimits(deadline_s, tariff, reservation),
        delivery=DeliveryOptions(
            services.narration, "all_calls" if is_single_call else options.usage, stream_hold
        ),
        credentials=model_request.credentials,
        upstream=decision.upstream,
        body_memory=body_reservation(model_request.http),
        capture=decision.capture,
        weight_version=services.runs.weight_version,
        labels=trajectory_labels(model_request.headers, model_request.body),
        observer=observer,
        created=created,
    )
    if count == 1:
        return task
    return fan_out(task, count, lambda session: _artifact_store(model_request, session, profile))


async def _body_and_session(request: RunRequest, run_id: str) -> tuple[dict[str, Any], SessionPlan]:
    """Return the request's body, prepared for the model, and the session of the run."""
    model_request, owner = request.model_request, request.model_request.owner
    body = dict(request.body)
    if request.decision.is_plain:
        await model_request.services.inputs.refuse_unsafe_urls(urls_in(body["messages"]), owner)
        body["messages"], _ = extract_files(replace_signed_links(body["messages"]))
        body |= {"tools": None, "tool_choice": None}
        return body, _new_session(owner, run_id)
    body["messages"] = strip_steps(body["messages"])
    if forbids_tools(body):  # forbids only the client's tools: the run keeps the proxy's tools
        body |= dict.fromkeys(("tools", "tool_choice", "functions", "function_call"))
    messages, has_functions = body["messages"], bool(body.get("functions"))
    keys = answered_run_keys(with_tool_call_ids(messages) if has_functions else messages)
    session = resolve_session(
        owner,
        run_id,
        model_request.headers,
        body,
        await _suspended_run(model_request, keys),
        # The key of a run with `functions` is a digest, not the run id.
        answered_run_ids=() if has_functions else keys,
        resume_point=request.resume_point,
        is_stored=request.is_stored,
    )
    return body, session


def _default_instruction(services: Services, decision: RoutingDecision) -> str:
    """Return the default instruction of the model's chat template. Return "" in the reference style
    and in a single call, which do not use it, and with an upstream that the client names, whose
    template is unknown."""
    is_reference = decision.profile.agent.style == "reference"
    if decision.is_plain or is_reference or decision.upstream is not None:
        return ""
    return services.tool_verdicts.default_instruction(decision.route.model)


def _has_client_indexes(request: RunRequest, messages: Sequence[Message]) -> bool:
    """Return True if each of `messages` has the same index in the client's request. An index in a
    backend's error then names the same message to the client."""
    if request.is_translated:
        return False
    sent = request.body["messages"]
    return [message.get("role") for message in messages] == [each.get("role") for each in sent]


def _artifact_store(
    model_request: ModelRequest, session: SessionPlan, profile: Profile
) -> ArtifactStore:
    url, files = base_url(model_request.http), model_request.services.files
    return files.artifact_store(session.container_id, url, session.owner, profile.artifacts)


# The session


async def _suspended_run(model_request: ModelRequest, keys: Sequence[str]) -> SuspendedRun | None:
    """Return the first suspended run that is stored under one of `keys`, or None."""
    for key in keys:
        find = model_request.services.store.suspended_runs.find
        if suspended_run := await find(model_request.owner, key):
            return suspended_run
    return None


def resolve_session(
    owner: str,
    run_id: str,
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    suspended_run: SuspendedRun | None,
    *,
    answered_run_ids: Sequence[str] = (),
    resume_point: ResumePoint | None = None,
    is_stored: bool = False,
) -> SessionPlan:
    """Return the session of a run: the state that it resumes from, and the states that it saves.

    The names of `headers` are in lower case. `suspended_run` is the run whose tool calls the client
    has answered. `answered_run_ids` are the ids of the runs whose tool calls the messages answer,
    latest first, even of runs that are no longer stored. `resume_point` is the state that the
    request names. `is_stored` is True if the run saves its state under its id. A chat request names
    no resume point and is not stored: its messages identify its state.
    """
    resume_from, save_as = _resume_point_and_state_to_save(
        owner, run_id, headers, body, resume_point
    )
    if resume_from is None and suspended_run is None:
        # The messages may answer tool calls of a suspended run that is no longer stored. If that
        # run belonged to no conversation, its id identifies its files.
        for answered_id in answered_run_ids:
            if container := run_container_id(owner, answered_id):
                session = Session(owner, container)
                resume_from = ResumePoint(session, (answered_id,), starts_empty=True)
                break
    if suspended_run and suspended_run.resume_from:
        suspended_at = suspended_run.resume_from
        # The request's own resume point wins if it is in the same session and more exact.
        is_more_exact = (
            resume_point is not None
            and resume_point.session == suspended_at.session
            and set(suspended_at.parents) <= set(resume_point.parents)
        )
        if not is_more_exact:
            resume_from = suspended_at
    session = resume_from.session if resume_from else _new_session(owner, run_id).session
    suspend_as = SessionState(session, run_id)
    if save_as is None or save_as.session != session:
        save_as = suspend_as if is_stored else None
    return SessionPlan(session, resume_from, save_as, suspend_as, suspended_run)


def _new_session(owner: str, run_id: str) -> SessionPlan:
    """Return a new session that belongs to this run alone."""
    session = Session(owner, container_id(owner, run_id))
    return SessionPlan(session, suspend_as=SessionState(session, run_id))


def _resume_point_and_state_to_save(
    owner: str,
    run_id: str,
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    resume_point: ResumePoint | None,
) -> tuple[ResumePoint | None, SessionState | None]:
    """Return the state that the run resumes from and the state that it saves. They depend on the
    session that the request names, or on `resume_point`. Both are None if there is neither."""
    chat = named_session(headers, body)
    if resume_point and (chat is None or chat.resumes_by_messages):
        return resume_point, SessionState(resume_point.session, run_id)
    if chat is None:
        return None, None
    session = Session(owner, session_container_id(owner, chat.name))
    if not chat.resumes_by_messages:
        return ResumePoint(session), SessionState(session, run_id)
    state, parents = session_state_names(body["messages"])
    return ResumePoint(session, tuple(parents), starts_empty=not parents), SessionState(
        session, state
    )


async def _open_container(services: Services, session: SessionPlan) -> Sequence[InputFile]:
    """Create the container in which the run resumes, or extend its expiry. Return its files that
    the sandbox needs. A run that resumes from no state has no container yet.

    The client's files are always included. The produced files are left out if the session has a
    saved state, which contains them, or if the resume point has `starts_empty`.
    """
    resume_from = session.resume_from
    if resume_from is None:
        return ()
    owner, container = session.owner, session.container_id
    await services.files.ensure_container(container, owner)
    client_files = await services.files.client_files(container, owner)
    if resume_from.starts_empty or await services.workspaces.has_state(session.session):
        return client_files
    return [*client_files, *await services.files.produced_files(container, owner)]


# The budget


async def _reserve_budget(
    model_request: ModelRequest, model: str, profile: Profile, runs: int
) -> tuple[Tariff | None, BudgetReservation | None]:
    """Return the model's prices (None if unknown), and a reservation of `runs` runs in the daily
    budget of the client's key (None without a daily budget). `runs` is 0 for a single model call
    without a sandbox.

    Raises BudgetError, and BadRequestError if the cost is limited and the prices are unknown.
    """
    per_day = profile.budgets.daily if runs else profile.budgets.daily.for_model_calls
    limits_cost = per_day.cost_usd is not None or profile.limits.max_cost_usd is not None
    tariff = await find_tariff(model_request.services, model, is_required=limits_cost)
    if not per_day.is_set:
        return tariff, None
    return tariff, BudgetReservation(
        *await reserve_expense(model_request, per_day, Expense(runs=runs))
    )


# Further choices


def fan_out(
    task: AgentTask, count: int, make_artifact_store: Callable[[SessionPlan], ArtifactStore]
) -> AgentTask:
    """Return the task with `count - 1` further tasks, one for each further choice (`n`). Each
    further task has a workspace of its own, with the same initial files as the first task."""
    others = []
    for index in range(1, count):
        run_id = uuid.uuid4().hex
        base = {k: v for k, v in task.params.base.items() if k not in REQUEST_IDS}
        if isinstance(seed := base.get("seed"), int):
            base["seed"] = seed + index  # with the same seed, all choices would be equal
        first = task.session
        session = replace(
            _new_session(first.owner, run_id),
            resume_from=first.resume_from,
            suspended_run=first.suspended_run,
        )
        others.append(
            replace(
                task,
                run_id=run_id,
                artifact_store=make_artifact_store(session),
                session=session,
                params=replace(task.params, base=base),
            )
        )
    return replace(task, others=tuple(others))
