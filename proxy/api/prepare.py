"""From the parsed body of a request to its run.

`identify` gives a request the identity by which a retry finds the run of the first attempt, and
`start_or_join` finds that run or starts one. `prepare_request` builds the task of a new run from
top to bottom: the body, the session, the profile, the files, and last the daily budget, so
that a request that is refused spends nothing.
"""

import hashlib
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from policies.artifacts import without_links
from policies.budgets import Expense
from policies.history import without_steps
from policies.profile import Profile
from policies.routing import forbids_tools
from policies.sessions import (
    ResumePoint,
    Session,
    State,
    container_id,
    container_named,
    container_of,
    named,
    states,
)
from policies.steps import UsageOf
from proxy.agent.suspension import SuspendedRun, names
from proxy.agent.task import (
    AgentInput,
    AgentTask,
    ArtifactStore,
    BudgetReservation,
    ChatRequest,
    Delivery,
    InputFile,
    PendingInput,
    RunObserver,
    SessionPlan,
    StatusHold,
    TaskLimits,
)
from proxy.api.dependencies import (
    base_url,
    body_reservation,
    get_credentials,
    get_owner,
    get_services,
)
from proxy.api.routing import COMPUTER_HEADER, PROFILE_HEADER, PROMPT_HEADER, RoutingDecision
from proxy.api.upstream_relay import daily_account, known_tariff, take_from, urls_in
from proxy.errors import BudgetError, ProxyError
from proxy.inputs import InputContext
from proxy.runs.run import RequestIdentity, Subscriber
from proxy.schemas.chat_request import choice_count, parse_chat, with_ids
from proxy.schemas.content_parts import read
from proxy.schemas.request_options import (
    DOCUMENTS_HEADER,
    RequestOptions,
    documents_wanted,
    usage_asked,
)

IDENTITY_HEADERS = (PROFILE_HEADER, COMPUTER_HEADER, PROMPT_HEADER, DOCUMENTS_HEADER)
"""Headers that change a request's result."""
DELIVERY_FIELDS = ("stream", "stream_options")
"""Fields that change how the result is sent, and not the result."""
REQUEST_IDS = frozenset({"request_id", "rid"})
"""vLLM's and SGLang's names of one request: two that run at once may not share it."""

StartRecording = Callable[[str, int, SessionPlan], Awaitable[RunObserver]]
"""Begins to record the response of a run, from the run's id, its Unix time and its session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What `prepare_request` is given beside the HTTP request: the body as chat completions, and
    what the client's own API adds to it."""

    body: Mapping[str, Any]
    decision: RoutingDecision
    deadline_s: float | None
    hold: StatusHold | None
    """The hold on the status line of a streamed response."""
    is_translated: bool = False
    """True if the body was translated from another API."""
    forces_tool: bool = False
    """True if the first model call must be one of a tool."""
    max_tool_calls: int | None = None
    """The number of calls of the proxy's tools that the client allows."""
    follows: ResumePoint | None = None
    """The state that the request itself names to resume from."""
    is_kept: bool = False
    """True if a later request may resume from the run by its name."""
    record: StartRecording | None = None
    translate_error: Callable[[ProxyError], ProxyError] | None = None
    """Puts the client's own names of fields into an error, in place of those of `body`."""


# The identity of a request, and how long it waits


def identify(
    request: Request,
    body: Mapping[str, Any],
    terms: RequestOptions,
    written: bytes,
    *,
    detach: bool = False,
) -> RequestIdentity:
    """Return the request's identity. With an idempotency key, requests are equal that differ only
    in whether they stream; without one, equal to the byte, as the SDKs' retries are. `detach`: the
    run continues without its client."""
    if terms.idempotency_key is not None:
        work = {key: value for key, value in body.items() if key not in DELIVERY_FIELDS}
        written = json.dumps(work, sort_keys=True).encode()
    headers = "\n".join(request.headers.get(name, "") for name in IDENTITY_HEADERS)
    head = f"{request.url.path}\n{named(request.headers, body)}\n{headers}\n"
    on_disconnect = terms.on_disconnect or get_services(request).on_disconnect
    return RequestIdentity(
        owner=get_owner(request),
        fingerprint=hashlib.sha256(head.encode(errors="surrogatepass") + written).hexdigest(),
        key=terms.idempotency_key,
        retry_count=terms.retry_count,
        stream=bool(body.get("stream")),
        detach=detach or on_disconnect == "detach",
    )


def deadline_s(request: Request, terms: RequestOptions, claim: RequestIdentity) -> float | None:
    """Return the seconds within which the run must answer. A client that receives something
    meanwhile, or may leave without ending the run, sets no bound by its patience."""
    hears = claim.stream or get_services(request).nonstream_keep_alive_s is not None
    return terms.deadline_s if hears or claim.detach else terms.client_timeout_s


def status_hold(
    request: Request, terms: RequestOptions, claim: RequestIdentity
) -> StatusHold | None:
    """Return the hold on the status of a streamed response, which ends in good time before the
    client hangs up; None if the response is no stream."""
    if not claim.stream:
        return None
    hold_s = get_services(request).status_hold_s
    if terms.patience_s is not None:
        hold_s = min(hold_s, terms.patience_s / 2)
    return StatusHold(hold_s)


async def start_or_join(request: Request, claim: RequestIdentity, asked: RunRequest) -> Subscriber:
    """Subscribe to the run that the request repeats, or prepare the request and start its run. The
    caller must leave the run again.

    Raises IdempotencyError, and what `prepare_request` raises.
    """
    runs = get_services(request).runs
    async with runs.one_at_a_time(claim):  # two retries with one key must not both be prepared
        if subscriber := await runs.join(claim):
            return subscriber
        try:
            task = await prepare_request(request, asked, run_id=uuid.uuid4().hex)
        except ProxyError as error:
            # A run that another process has started for the key meanwhile costs nothing.
            may_join = isinstance(error, BudgetError) and claim.key is not None
            if may_join and (subscriber := await runs.join(claim)):
                return subscriber
            if asked.translate_error:
                asked.translate_error(error)
            raise
        return await runs.start(claim, task)


async def prepare_request(request: Request, asked: RunRequest, *, run_id: str) -> AgentTask:
    """Return the task of a request, complete with its further choices.

    Raises BadRequestError, FileTooLargeError, BusyError, BudgetError.
    """
    parts, decision, whose = get_services(request), asked.decision, get_owner(request)
    alone = decision.is_passthrough
    # The body and its session
    if alone:
        await parts.inputs.refuse_private(urls_in(asked.body["messages"]), whose)
        body, session = _without_tools(asked.body), _own_session(whose, run_id)
    else:
        body = _for_a_run(asked.body)
        waiting = await _suspended_run(request, whose, body)
        told = (request.headers, body, waiting)
        session = resolve_session(
            whose, run_id, *told, follows=asked.follows, is_kept=asked.is_kept
        )
    chat, params = parse_chat(
        body,
        has_client_indexes=not asked.is_translated and _roles(body) == _roles(asked.body),
        forces_tool=asked.forces_tool,
        max_tool_calls=asked.max_tool_calls,
    )
    # The profile, and how the client is told
    profile = decision.profile if alone else _profile_of_run(request, asked)
    usage_of: UsageOf = "all_calls" if alone else usage_asked(asked.body, request.headers)
    # The files
    given: AgentInput | PendingInput = AgentInput(chat.messages)
    if not alone:
        given = await _input_of(request, body, chat, session, profile, decision.route.model)
    count = 1 if alone else choice_count(body, profile.limits.max_choices)
    # The budget: from here on, a failure has to refund it
    limits = await _reserve_budget(request, asked, profile, runs=0 if alone else count)
    created = int(time.time())
    observer = None
    if asked.record:
        try:
            observer = await asked.record(run_id, created, session)
        except BaseException:
            if limits.reservation:
                await limits.reservation.refund()
            raise
    task = AgentTask(
        run_id=run_id,
        model=decision.route.model,
        artifact_store=_artifact_store(request, session, profile),
        session=session,
        input=given,
        request=chat,
        params=params,
        profile=profile,
        route=decision.route.reason,
        is_single_call=alone,
        limits=limits,
        delivery=Delivery(parts.narration, usage_of, asked.hold),
        credentials=get_credentials(request),
        body_memory=body_reservation(request),
        observer=observer,
        created=created,
    )
    return fan_out(task, count, lambda session: _artifact_store(request, session, profile))


# The body


def _for_a_run(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run is asked for: the messages without the proxy's own steps in them, and no
    tools of the client's if it forbids tools, for the run has its own."""
    told = {**body, "messages": without_steps(body["messages"])}
    if forbids_tools(body):
        told |= dict.fromkeys(("tools", "tool_choice", "functions", "function_call"))
    return told


def _without_tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the model is asked for that answers by itself."""
    messages, _ = read(without_links(body["messages"]))
    return {**body, "messages": messages, "tools": None, "tool_choice": None}


def _roles(body: Mapping[str, Any]) -> list[Any]:
    return [message.get("role") for message in body["messages"]]


# The session


async def _suspended_run(
    request: Request, whose: str, body: Mapping[str, Any]
) -> SuspendedRun | None:
    """Return the suspended run whose tool calls these messages answer, if it is still stored."""
    messages = with_ids(body["messages"]) if body.get("functions") else body["messages"]
    for name in names(messages):
        if waiting := await get_services(request).store.parked.find(whose, name):
            return waiting
    return None


def resolve_session(
    whose: str,
    run_id: str,
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    waiting: SuspendedRun | None,
    *,
    follows: ResumePoint | None = None,
    is_kept: bool = False,
) -> SessionPlan:
    """Return the session of a run: the state it resumes from, and those it saves its files as.

    `headers` are in lower case; `waiting` is the suspended run that the client has answered;
    `follows` is the state that the request names to resume from; `is_kept`: a later request may
    resume from this run by its name. A chat needs neither of these: its messages show both.
    """
    resume_from, save_as = _of_conversation(whose, run_id, headers, body, follows)
    if resume_from is None and waiting is None:
        resume_from = _of_lost_run(whose, body)
    if waiting and waiting.goes_on and not _is_within(waiting.goes_on, follows):
        resume_from = waiting.goes_on
    own = _own_session(whose, run_id)
    session = resume_from.session if resume_from else own.session
    suspend_as = State(session, run_id)
    if save_as is None or save_as.session != session:
        save_as = suspend_as if is_kept else None
    return SessionPlan(session, resume_from, save_as, suspend_as, waiting)


def _own_session(whose: str, run_id: str) -> SessionPlan:
    """Return the session of a run that belongs to no conversation."""
    session = Session(whose, container_id(whose, run_id))
    return SessionPlan(session, suspend_as=State(session, run_id))


def _of_conversation(
    whose: str,
    run_id: str,
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    follows: ResumePoint | None,
) -> tuple[ResumePoint | None, State | None]:
    """Return the state that the request's conversation goes on from, and the one it leaves."""
    chat = named(headers, body)
    if follows and (chat is None or chat.by_messages):
        return follows, State(follows.session, run_id)
    if chat is None:
        return None, None
    session = Session(whose, container_named(whose, chat.name))
    if not chat.by_messages:
        return ResumePoint(session), State(session, run_id)
    state, parents = states(body["messages"])
    return ResumePoint(session, tuple(parents), anew=not parents), State(session, state)


def _of_lost_run(whose: str, body: Mapping[str, Any]) -> ResumePoint | None:
    """Return the files of a suspended run that is stored no more, if its calls are answered and it
    had no conversation."""
    for name in names(body["messages"]):
        if container := container_of(whose, name):
            return ResumePoint(Session(whose, container), (name,), anew=True)
    return None


def _is_within(waited: ResumePoint, follows: ResumePoint | None) -> bool:
    """Return True if the request follows the run that waited, and says so more exactly."""
    if follows is None or follows.session != waited.session:
        return False
    return set(waited.parents) <= set(follows.parents)


def _artifact_store(request: Request, session: SessionPlan, profile: Profile) -> ArtifactStore:
    url, files = base_url(request), get_services(request).files
    return files.artifact_store(session.container_id, url, session.owner, profile.artifacts)


# The profile


def _profile_of_run(request: Request, asked: RunRequest) -> Profile:
    """Return the profile with what the request changes in it: how files are returned, and whether
    long texts become files. Raises BadRequestError."""
    profile, headers = asked.decision.profile, request.headers
    profile = replace(profile, artifacts=profile.artifacts.suited(headers))
    if documents_wanted(asked.body, headers):
        return profile
    return replace(profile, inputs=replace(profile.inputs, move_text_over_tokens=None))


# The files


async def _input_of(
    request: Request,
    body: Mapping[str, Any],
    chat: ChatRequest,
    session: SessionPlan,
    profile: Profile,
    model: str,
) -> AgentInput | PendingInput:
    """Return the messages and files of a request. Raises BadRequestError, FileTooLargeError,
    BusyError."""
    parts = get_services(request)
    context = InputContext(
        owner=session.owner,
        model=model,
        credentials=get_credentials(request),
        limits=profile.inputs,
        body=body_reservation(request),
        present=await _files_in_container(request, session),
        # The reference style puts the notes on the files of the user's last message after it.
        notes_follow=profile.manner.kind == "paper" and session.suspended_run is None,
    )
    messages = await parts.files.replace_links(chat.messages, session.owner)
    return await parts.inputs.load(messages, body, context)


async def _files_in_container(request: Request, session: SessionPlan) -> Sequence[InputFile]:
    """Return the files of the container that a run resumes in, beside those of its workspace."""
    resume_from = session.resume_from
    if resume_from is None:
        return ()
    files, whose, container = get_services(request).files, session.owner, session.container_id
    await files.remember(container, whose)
    client_files = await files.client_files(container, whose)
    if resume_from.anew or await get_services(request).store.workspaces.newest(session.session):
        return client_files
    return [*client_files, *await files.produced_files(container, whose)]


# The budget


async def _reserve_budget(
    request: Request, asked: RunRequest, profile: Profile, runs: int
) -> TaskLimits:
    """Return the limits of a task, with `runs` runs charged to the daily budget of the client's
    key; 0 is one model call without a sandbox.

    Raises BudgetError, and BadRequestError if cost is bounded and the prices are unknown.
    """
    prices, model = get_services(request).prices, asked.decision.route.model
    per_day = profile.per_day if runs else profile.per_day.of_model_calls
    if per_day.cost_usd is None and profile.limits.max_cost_usd is None:
        tariff = prices.own(model)
    else:
        tariff = await known_tariff(prices, model)
    if not per_day.is_set:
        return TaskLimits(asked.deadline_s, tariff)
    account = daily_account(request, per_day)
    receipt = await take_from(request, account, Expense(runs=runs))
    return TaskLimits(asked.deadline_s, tariff, BudgetReservation(account, receipt))


# The further choices


def fan_out(
    task: AgentTask, count: int, make_artifact_store: Callable[[SessionPlan], ArtifactStore]
) -> AgentTask:
    """Return the task with further choices (`n`), `count` in all. Each has a workspace of its own,
    which begins as the first one's does."""
    others = []
    for index in range(1, count):
        run_id = uuid.uuid4().hex
        base = {k: v for k, v in task.params.base.items() if k not in REQUEST_IDS}
        if isinstance(seed := base.get("seed"), int):
            base["seed"] = seed + index  # else all would say the same, as vLLM knows too
        own = _own_session(task.session.owner, run_id)
        first = task.session
        session = replace(own, resume_from=first.resume_from, suspended_run=first.suspended_run)
        other = replace(
            task,
            run_id=run_id,
            artifact_store=make_artifact_store(session),
            session=session,
            params=replace(task.params, base=base),
        )
        others.append(other)
    return replace(task, others=tuple(others)) if others else task
