"""The outcome of a run. `RunOutcome` collects it during the run; `hand_back_calls` returns the
calls that the client gets, and the suspended run that waits for their results."""

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
from proxy.agent.result import Artifact, RunWarning, ToolTrouble
from proxy.agent.suspension import SuspendedCall, SuspendedRun, key_of_call
from proxy.agent.task import AgentTask
from proxy.agent.tool_calls import ToolCall, Turn, to_custom_call


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
    sent_call_ids: Mapping[str, str] = field(default_factory=dict)
    """The client's id of each call that was already streamed, by the model's id."""
    has_cut_call: bool = False
    """True if a timeout cut off a streamed client tool call: nothing can follow it in the
    stream."""
    calls_are_text: bool = False
    """True if the last calls were written as text."""
    reply: Completion | None = None
    """The reply with the answer, or else the last reply."""
    choice: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the choice, such as `logprobs`, if the answer is one reply."""
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


def hand_back_calls(
    task: AgentTask,
    outcome: RunOutcome,
    history: History,
    new_ids: Iterator[str],
    *,
    used_sandbox: bool,
    artifacts: Sequence[Artifact],
) -> tuple[list[dict[str, Any]], SuspendedRun | None]:
    """Return the calls of the client's tools in the form that the client expects, and the suspended
    run that waits for their results; None if there are no calls."""
    suspended_calls, entries = [], []
    for call in outcome.client_calls:
        client_id = _client_id(call, task, outcome, new_ids)
        suspended_calls.append(SuspendedCall(client_id, call.id, call.name))
        entry = {**call.raw, "id": client_id}
        entries.append(to_custom_call(entry) if call.name in task.request.text_tools else entry)
    if not entries:
        return [], None
    session, state = task.session, task.session.state_to_save(is_suspended=True)
    earlier = session.suspended_run
    saved_files = [*(earlier.saved_files if earlier else ()), *(file.path for file in artifacts)]
    suspended_run = SuspendedRun(
        messages=list(history.messages),
        run_start_index=history.run_start_index,
        calls=suspended_calls,
        calls_are_text=outcome.calls_are_text,
        resume_from=ResumePoint(state.session, [state.name]) if state else None,
        used_sandbox=used_sandbox or bool(earlier and earlier.used_sandbox),
        message_kinds=history.message_kinds,
        saved_files=tuple(dict.fromkeys(saved_files)),
    )
    return entries, suspended_run


def _client_id(call: ToolCall, task: AgentTask, outcome: RunOutcome, new_ids: Iterator[str]) -> str:
    """Return the id of a call that the client gets. It contains the run id, by which the client's
    results are assigned to the run. The id of a call of legacy `functions` is derived from
    `legacy_state` and the call instead."""
    if task.request.legacy_state is not None:
        function = call.raw["function"]
        return function_call_id(task.request.legacy_state, function["name"], function["arguments"])
    if sent := outcome.sent_call_ids.get(call.id):
        return sent
    return call.id if key_of_call(call.id) == task.run_id else next(new_ids)
