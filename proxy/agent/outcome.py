"""How a run ends: its outcome as far as it is known while the run goes on, the calls that its
client has to run, and the run that waits for their results."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.answer_form import is_answer
from policies.limits import StopReason
from policies.prompts import WHY_NO_MORE_TOOLS
from policies.routing import RouteReason
from policies.sessions import ResumePoint, function_call_id
from proxy.agent.history import History, text_of
from proxy.agent.model import Completion
from proxy.agent.result import RunWarning, ToolTrouble
from proxy.agent.suspension import SuspendedRun, run_id_of_call
from proxy.agent.task import AgentTask
from proxy.agent.tool_calls import ToolCall, Turn, to_custom_call


@dataclass
class RunOutcome:
    """What is known of one run's outcome."""

    submitted: str | None = None
    prose: str = ""
    """The model's last words that were no tool call."""
    prose_reply: Completion | None = None
    """The reply with these words, if they show that the model is done."""
    finish_reason: str = "stop"
    client_calls: list[ToolCall] = field(default_factory=list)
    sent_ids: Mapping[str, str] = field(default_factory=dict)
    """The client's id of each call that was sent while the model wrote it, by the model's id."""
    has_cut_call: bool = False
    """Whether the time was up while a client call was being sent: nothing can follow the call."""
    as_text: bool = False
    """Whether the last calls were written as text."""
    reply: Completion | None = None
    """The reply that wrote the answer, or the last one."""
    choice: Mapping[str, Any] = field(default_factory=dict)
    """The choice's other fields, such as `logprobs`, where the answer is one reply."""
    announced: str = ""
    """Prose that announced a call and made none, until a call or another answer follows."""
    trouble: list[ToolTrouble] = field(default_factory=list)
    """The signs that the model cannot use tools, each once."""
    refusal: str | None = None
    warnings: Sequence[RunWarning] = ()
    route: RouteReason | None = None
    """Why the run was answered without tools; None: for the task's own reason."""

    def finish_reason_of(self, stop: StopReason, answer: str, legacy_state: str | None) -> str:
        """Return the run's finish reason, in OpenAI's words."""
        if stop is StopReason.CLIENT_TOOL_CALLS:
            return "tool_calls" if legacy_state is None else "function_call"
        if not answer and not self.refusal and stop in WHY_NO_MORE_TOOLS:
            return "length"
        return self.finish_reason if self.finish_reason in ("length", "content_filter") else "stop"

    def note_narration(self, turn: Turn, reply: Completion, *, is_echo: bool) -> None:
        """Note the prose beside calls: it is the answer if nothing better comes. `is_echo`: the
        prose repeats the proxy's own texts."""
        prose = "" if turn.as_text or is_echo else text_of(reply.message).strip()
        if prose:
            self.prose = prose
            self.prose_reply = reply if is_answer(prose, "stop") else None

    def note(self, trouble: ToolTrouble) -> None:
        """Note that the model showed it cannot use tools."""
        if trouble not in self.trouble:
            self.trouble.append(trouble)


def client_tool_calls(
    task: AgentTask, outcome: RunOutcome, new_id: Iterator[str]
) -> list[dict[str, Any]]:
    """Return the calls of the client's tools as the client is sent them. They have ids of ours,
    which lead back to the run: a model's own ids are not unique."""
    made = []
    for call in outcome.client_calls:
        if task.request.legacy_state is not None:
            function = call.raw["function"]
            id = function_call_id(
                task.request.legacy_state, function["name"], function["arguments"]
            )
        elif sent := outcome.sent_ids.get(call.id):
            id = sent
        else:
            id = call.id if run_id_of_call(call.id) == task.run_id else next(new_id)
        entry = {**call.raw, "id": id}
        made.append(to_custom_call(entry) if call.name in task.request.text_tools else entry)
    return made


def suspend_run(
    task: AgentTask,
    outcome: RunOutcome,
    calls: Sequence[Mapping[str, Any]],
    history: History,
    *,
    used_sandbox: bool,
) -> SuspendedRun | None:
    """Return the run that waits for the results of `calls`, which the client was sent, or None if
    there are none. `used_sandbox`: the run has a sandbox."""
    if not calls:
        return None
    state = task.session.save_as or task.session.suspend_as
    return SuspendedRun(
        messages=list(history.messages),
        own_start=history.own_start,
        calls=[
            (made["id"], call.id, call.name)
            for made, call in zip(calls, outcome.client_calls, strict=True)
        ],
        as_text=outcome.as_text,
        resume_from=ResumePoint(state.session, [state.name]) if state else None,
        used_sandbox=used_sandbox
        or bool(task.session.suspended_run and task.session.suspended_run.used_sandbox),
        marks=history.marks,
    )
