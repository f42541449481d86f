"""From a checked request to the agent's task, with what was before it and the files it brings."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from policies.artifacts import without_links
from policies.budgets import Expense
from policies.history import without_steps
from policies.profile import Profile
from policies.routing import forbids_tools
from policies.sessions import GoesOn, Session, State, container_id
from proxy.agent.agent import several
from proxy.agent.parking import Parked, names
from proxy.agent.task import InputFile, Outbox, StatusHold, Task
from proxy.api.dependencies import base_url, body_reservation, credentials, owner, services
from proxy.api.routing import RoutingDecision
from proxy.api.upstream_relay import daily_account, known_tariff, take_from, urls_in
from proxy.wire.chat_request import choice_count, to_task, with_ids
from proxy.wire.content_parts import read
from proxy.wire.conversations import thread
from proxy.wire.terms import documents_wanted, usage_asked


async def task_of(
    request: Request,
    body: Mapping[str, Any],
    decision: RoutingDecision,
    *,
    run_id: str,
    deadline_s: float | None,
    hold: StatusHold | None,
    follows: GoesOn | None = None,
    is_kept: bool = False,
    is_translated: bool = True,
) -> Task:
    """The task of a chat-completions request, with its further choices; for the model alone where
    no sandbox is wanted. `follows`, `is_kept` as in `thread`; `is_translated`: from another API.

    Raises BadRequestError, BudgetError."""
    whose = owner(request)
    if decision.is_passthrough:
        return await _reserve_budget(
            request, await _alone(request, body, decision, run_id, deadline_s, hold), 1
        )
    asked = _asked(body)
    said = (request.headers, asked, await _waiting(request, whose, asked))
    place = thread(whose, run_id, *said, follows=follows, is_kept=is_kept)
    outbox = _outbox(request, whose, place.container_id, decision.profile)
    task = replace(
        to_task(asked, model=decision.route.model, run_id=run_id, outbox=outbox, owner=whose),
        are_as_sent=not is_translated and _roles(asked) == _roles(body),
        profile=_profile(request, body, decision),
        route=decision.route.reason,
        goes_on=place.goes_on,
        leaves=place.leaves,
        parks=place.parks,
        resumes=place.resumes,
        deadline_s=deadline_s,
        status_hold=hold,
        credentials=credentials(request),
        narration=services(request).narration,
        inputs=await _lying_there(request, whose, place.goes_on),
        usage_of=usage_asked(body, request.headers),
    )
    return await _with_files_and_choices(request, whose, task, asked)


async def _with_files_and_choices(
    request: Request, whose: str, task: Task, asked: Mapping[str, Any]
) -> Task:
    """The task with its files and its further choices; charged last, so that a request that is
    wrong spends nothing."""
    messages = await services(request).files.unlinked(task.messages, whose)
    task = replace(task, messages=messages, body=body_reservation(request))
    task = await services(request).inputs.receive(task, whose, asked)
    count = choice_count(asked, task.profile.limits.max_choices)
    task = await _reserve_budget(request, task, runs=count)
    return several(task, count, lambda other: _own(request, whose, other))


async def _reserve_budget(request: Request, task: Task, runs: int) -> Task:
    """Return the task with its model's prices, charged to the daily budget of the client's key.

    Raises BudgetError, and BadRequestError if cost is bounded and the prices are unknown.
    """
    parts, per_day = services(request), task.profile.per_day
    if task.alone:
        per_day, runs = per_day.of_model_calls, 0
    if per_day.cost_usd is None and task.profile.limits.max_cost_usd is None:
        tariff = parts.prices.own(task.model)
    else:
        tariff = await known_tariff(parts.prices, task.model)
    if tariff is not None:
        task = replace(task, tariff=tariff)
    if not per_day.is_set:
        return task
    account = daily_account(request, per_day)
    receipt = await take_from(request, account, Expense(runs=runs))
    return replace(task, account=account, charge=receipt)


def _asked(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a run is asked for."""
    asked = {**body, "messages": without_steps(body["messages"])}
    if forbids_tools(body):  # there must be a run nevertheless: one without the client's
        asked |= dict.fromkeys(("tools", "tool_choice", "functions", "function_call"))
    return asked


def _roles(body: Mapping[str, Any]) -> list[Any]:
    return [message.get("role") for message in body["messages"]]


def _profile(request: Request, body: Mapping[str, Any], decision: RoutingDecision) -> Profile:
    """What holds for the run, whose request may want its text kept. Raises BadRequestError."""
    profile = replace(
        decision.profile, artifacts=decision.profile.artifacts.suited(request.headers)
    )
    if documents_wanted(body, request.headers):
        return profile
    return replace(profile, inputs=replace(profile.inputs, move_text_over_tokens=None))


async def _alone(
    request: Request,
    body: Mapping[str, Any],
    decision: RoutingDecision,
    run_id: str,
    deadline_s: float | None,
    hold: StatusHold | None,
) -> Task:
    """The task of a request that the model answers by itself. Raises BadRequestError."""
    whose = owner(request)
    await services(request).inputs.refuse_private(urls_in(body["messages"]), whose)
    outbox = _outbox(request, whose, container_id(whose, run_id), decision.profile)
    messages, _ = read(without_links(body["messages"]))
    asked = {**body, "messages": messages, "tools": None, "tool_choice": None}
    task = to_task(asked, model=decision.route.model, run_id=run_id, outbox=outbox, owner=whose)
    return replace(
        task,
        profile=decision.profile,
        route=decision.route.reason,
        deadline_s=deadline_s,
        status_hold=hold,
        credentials=credentials(request),
        body=body_reservation(request),
        alone=True,
    )


async def _lying_there(request: Request, whose: str, goes_on: GoesOn | None) -> Sequence[InputFile]:
    """What is in the container that a request goes on with, beside its workspace."""
    if goes_on is None:
        return ()
    files, session = services(request).files, goes_on.session
    await files.remember(session.name, whose)
    put_in = await files.put_in(session.name, whose)
    if goes_on.anew or await services(request).store.workspaces.newest(session):
        return put_in
    return [*put_in, *await files.handed_back(session.name, whose)]


def _own(request: Request, whose: str, choice: Task) -> Task:
    """A further choice in a workspace of its own, which begins as the first one's does."""
    container = container_id(whose, choice.run_id)
    return replace(
        choice,
        outbox=_outbox(request, whose, container, choice.profile),
        leaves=None,
        parks=State(Session(whose, container), choice.run_id),
    )


def _outbox(request: Request, whose: str, container: str, profile: Profile) -> Outbox:
    return services(request).files.outbox(container, base_url(request), whose, profile.artifacts)


async def _waiting(request: Request, whose: str, body: Mapping[str, Any]) -> Parked | None:
    """The run that these messages answer, if they do and it still waits."""
    messages = with_ids(body["messages"]) if body.get("functions") else body["messages"]
    for name in names(messages):
        if waiting := await services(request).store.parked.find(whose, name):
            return waiting
    return None
