"""The suspension of a run whose model has called the client's tools, and its resumption by a later
request that has their results. The steps:

1. The loop ends the run. `suspend_run` returns the calls that the client gets, and a
   `SuspendedRun` as a part of the Result.
2. `RunManager` stores the suspended run, and `Workspaces` the files of its sandbox.
3. The client runs its tools, and sends their results. `prepare_request` takes the keys of suspended
   runs from the ids of the answered calls (`answered_run_keys`) and finds the stored run.
4. A new run begins with the history that `resumed_history` returns.
5. The sandbox is restored once the new run needs it: `ToolExecutor.sandbox` gets it from the
   `RunWorkspace`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from policies.sessions import ResumePoint, function_call_id
from proxy.agent.history import History
from proxy.agent.model import Message
from proxy.agent.result import RunOutcome
from proxy.agent.suspended_run import SuspendedCall, SuspendedRun, suspended_run_key
from proxy.agent.task import AgentTask
from proxy.agent.tool_calls import ToolCall, to_custom_call

NO_RESULT = "The tool was not run."
MAX_ANSWERED_KEYS = 16
"""Maximum number of keys that `answered_run_keys` returns. A request resumes one run:
the run of the first key under which a run is stored."""
INSTRUCTION_ROLES = ("system", "developer")
"""The roles of messages with instructions."""


def suspend_run(
    task: AgentTask,
    outcome: RunOutcome,
    history: History,
    new_ids: Iterator[str],
    *,
    used_sandbox: bool,
    answer_file: str,
) -> tuple[list[dict[str, Any]], SuspendedRun | None]:
    """Return the calls of the client's tools in the form that the client expects, and the suspended
    run that waits for their results; None if there are no calls. `answer_file` is the text of the
    run's answer file, or ""."""
    suspended_calls, entries = [], []
    for call in outcome.client_calls:
        client_id = _client_call_id(call, task, outcome, new_ids)
        suspended_calls.append(SuspendedCall(client_id, call.id, call.name))
        entry = {**call.raw, "id": client_id}
        entries.append(to_custom_call(entry) if call.name in task.request.text_tools else entry)
    if not entries:
        return [], None
    session, state = task.session, task.session.state_to_save(is_suspended=True)
    earlier = session.suspended_run
    suspended_run = SuspendedRun(
        messages=list(history.messages),
        run_start_index=history.run_start_index,
        calls=suspended_calls,
        calls_are_text=outcome.calls_are_text,
        resume_from=ResumePoint(state.session, [state.name]) if state else None,
        used_sandbox=used_sandbox or bool(earlier and earlier.used_sandbox),
        message_kinds=history.message_kinds,
        answer_file=answer_file,
    )
    return entries, suspended_run


def _client_call_id(
    call: ToolCall, task: AgentTask, outcome: RunOutcome, new_ids: Iterator[str]
) -> str:
    """Return the id under which the client gets a call. The id contains the run id, so that the
    client's result leads back to the run. For a call of legacy `functions`, the id is derived from
    `legacy_state` and the call instead."""
    if task.request.legacy_state is not None:
        function = call.raw["function"]
        return function_call_id(task.request.legacy_state, function["name"], function["arguments"])
    if sent := outcome.client_ids_by_model_id.get(call.id):
        return sent
    return call.id if suspended_run_key(call.id) == task.run_id else next(new_ids)


def answered_run_keys(messages: Sequence[Message]) -> list[str]:
    """Return the keys of the suspended runs whose calls are answered after the last assistant
    message, latest first."""
    found: dict[str, None] = {}
    for message in reversed(messages):
        if message.get("role") == "assistant":
            break
        answered = message.get("tool_call_id") if message.get("role") == "tool" else None
        if key := suspended_run_key(str(answered)):
            found[key] = None
    return list(found)[:MAX_ANSWERED_KEYS]


def resumed_history(
    run: SuspendedRun, messages: Sequence[Message], instructions: Sequence[Message]
) -> History:
    """Return the history of a run that resumes with the results in `messages`. `instructions`, if
    there are any, replace the leading instructions of the suspended run.

    The suspended run's own messages are used even if the client has edited or dropped them. They
    are followed by the results of the calls and by the client's later messages.
    """
    if instructions:
        run = _replace_instructions(run, instructions)
    ids = {call.client_id for call in run.calls}
    results = {
        str(message["tool_call_id"]): message
        for message in messages
        if message.get("role") == "tool" and message.get("tool_call_id") in ids
    }
    answered = result_messages(
        ((call.model_id, call.tool_name, results.get(call.client_id)) for call in run.calls),
        run.calls_are_text,
    )
    after = _messages_after_results(messages, ids)
    kinds = [*("result" for _ in answered), *("theirs" for _ in after)]
    message_kinds = {**run.message_kinds, **dict(enumerate(kinds, len(run.messages)))}
    return History([*run.messages, *answered, *after], run.run_start_index, message_kinds)


def _replace_instructions(run: SuspendedRun, instructions: Sequence[Message]) -> SuspendedRun:
    rest = run.messages[len(leading_instructions(run.messages)) :]
    moved = len(instructions) + len(rest) - len(run.messages)
    return replace(
        run,
        messages=[*instructions, *rest],
        run_start_index=run.run_start_index + moved,
        message_kinds={at + moved: kind for at, kind in run.message_kinds.items()},
    )


def leading_instructions(messages: Sequence[Message]) -> list[Message]:
    """Return the instructions at the beginning of the messages."""
    return list(takewhile(lambda message: message.get("role") in INSTRUCTION_ROLES, messages))


def result_messages(
    results: Iterable[tuple[str, str, Message | None]], calls_are_text: bool
) -> list[Message]:
    """Return the messages that answer calls. Each result consists of the model's call id, the tool
    name, and the client's message with the result (None if the client sent none)."""
    contents = [
        (id, name, NO_RESULT if message is None else _result_content(message))
        for id, name, message in results
    ]
    if calls_are_text:
        # One message: many chat templates want user and assistant to alternate.
        text = "\n\n".join(
            f"Result of {name}:\n{_content_text(content)}" for _, name, content in contents
        )
        other = [part for _, _, content in contents for part in _non_text_parts(content)]
        parts = [{"type": "text", "text": text}, *other]
        return [{"role": "user", "content": parts if other else text}]
    return [{"role": "tool", "tool_call_id": id, "content": content} for id, _, content in contents]


def _messages_after_results(messages: Sequence[Message], call_ids: set[str]) -> list[Message]:
    """Return the messages after the last result of the calls with these ids."""
    answered = (n for n, message in enumerate(messages) if message.get("tool_call_id") in call_ids)
    last = max(answered, default=len(messages) - 1)
    return list(messages[last + 1 :])


def _result_content(message: Message) -> Any:
    """Return a tool's result; "" if its message has no content."""
    content = message.get("content")
    return "" if content is None else content


def _content_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(_part_text(part) or "" for part in content)
    return str(content)


def _non_text_parts(content: Any) -> list[Any]:
    """Return the parts that are not text, such as images."""
    return (
        [part for part in content if _part_text(part) is None] if isinstance(content, list) else []
    )


def _part_text(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else None
