"""Builders of tasks for tests of the agent. A test names only the fields that matter to it."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from policies.budgets import Expense, Reservation
from policies.sessions import Session
from proxy.agent.model import Message
from proxy.agent.task import (
    AgentInput,
    AgentTask,
    ArtifactStore,
    BudgetReservation,
    ChatRequest,
    DeliveryOptions,
    Params,
    SessionPlan,
    TaskLimits,
)


def make_task(
    run_id: str,
    artifact_store: ArtifactStore,
    model: str,
    messages: Sequence[Message],
    *,
    inputs: Sequence[Any] = (),
    plain_messages: Sequence[Message] | None = None,
    account: Any = None,
    **named: Any,
) -> AgentTask:
    """Return a task; `named` are fields of the task or of one of its groups. `plain_messages` are
    the messages as the client sent them, by default the initial messages of the run."""

    def of(group: Any) -> dict[str, Any]:
        return {f.name: named.pop(f.name) for f in fields(group) if f.name in named}

    plain = messages if plain_messages is None else plain_messages
    reservation = (
        BudgetReservation(account, Reservation(0, Expense(), Expense())) if account else None
    )
    return AgentTask(
        run_id=run_id,
        model=model,
        artifact_store=artifact_store,
        session=SessionPlan(Session("", artifact_store.container_id), **of(SessionPlan)),
        input=AgentInput(messages, inputs),
        request=ChatRequest(plain, **of(ChatRequest)),
        params=Params(**of(Params)),
        limits=TaskLimits(reservation=reservation, **of(TaskLimits)),
        delivery=DeliveryOptions(**of(DeliveryOptions)),
        **named,
    )
