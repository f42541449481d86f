"""The trajectory of a run, as it is written and as clients get it.

`TrajectoryWriter` turns the events of a run into lines of JSON, which are stored. `read_trajectory`
turns the lines into the trajectory in the native format; `to_openai` and `to_reference_format`
convert the native format into other formats. A message that occurs in several prompts is written
once.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from policies.capabilities import capabilities_of
from policies.json_bounds import encode_json
from policies.redaction import SecretFinder
from policies.sessions import TrajectoryLabels
from proxy.agent.events import (
    CallTokens,
    ChoiceEvent,
    EgressDecided,
    Event,
    ModelCallFinished,
    RuleMatched,
    ToolCallFinished,
    ToolCallStarted,
    TurnStarted,
)
from proxy.agent.guard import redact_json
from proxy.agent.history import reasoning_texts, text_of
from proxy.agent.result import Result
from proxy.agent.task import AgentTask
from proxy.errors import ProxyError
from proxy.schemas.result_objects import sandbox_object

CAPTURED_EVENTS = frozenset(
    {
        ChoiceEvent,
        TurnStarted,
        ModelCallFinished,
        ToolCallStarted,
        ToolCallFinished,
        RuleMatched,
        EgressDecided,
    }
)
MAX_BYTES = 64_000_000
"""Maximum size of a trajectory's lines, which are JSON. Beyond it, messages, settings, tokens,
arguments, observations, rules and connections are left out."""
NUMBERS_PER_PIECE = 10_000
"""Maximum number of numbers in one piece of JSON."""
TRUNCATION_MARKER = f"[left out: the trajectory has more than {MAX_BYTES} bytes]"
Line = dict[str, Any]
Object = dict[str, Any]


# Writing


class TrajectoryWriter:
    """Turns the events of one choice of a run into the lines of its trajectory."""

    def __init__(self, task: AgentTask, choice: int, max_bytes: int = MAX_BYTES) -> None:
        suspended = task.session.suspended_run
        self._secrets = SecretFinder(task.profile.redaction)
        self._run_line: Line | None = {
            "kind": "run",
            "model": task.model,
            "profile": task.profile.name,
            "route": task.route,
            "choice": choice,
            "continues": suspended.key if suspended else None,
            "user_message": self._secrets.redact(_user_message(task)),
        }
        self._max_bytes = max_bytes
        self._bytes = 0
        self._is_truncated = False
        self._turn = 0
        self._call_count = 0
        """Number of model calls so far."""
        self._messages: dict[bytes, int] = {}
        """The index of each message that was written, by the message's digest."""
        self._settings: dict[bytes, int] = {}
        """The index of each settings object that was written, by the digest of the object."""
        self._token_segment_count = 0
        """Number of token segments so far."""
        self._token_ids: list[int] = []
        """All tokens of the latest token segment."""

    def write(self, elapsed_s: float, event: Event) -> Iterator[bytes]:
        """Yield the lines for an event. `elapsed_s` is the time since the start of the run, in
        seconds."""
        yield from self._begin()
        match event:
            case TurnStarted(turn):
                self._turn = turn
                yield self._encode_line({"kind": "turn", "turn": turn, "started_s": elapsed_s})
            case ModelCallFinished():
                yield from self._call_lines(elapsed_s, event)
            case ToolCallStarted(step, call_id, name, arguments):
                line = {
                    "kind": "tool_call",
                    "turn": self._turn,
                    "model_call": self._call_count - 1,
                    "step": step,
                    "id": call_id,
                    "name": name,
                    "arguments": arguments if self._has_room() else {},
                    "capabilities": sorted(map(str, capabilities_of(name, arguments))),
                    "started_s": elapsed_s,
                }
                yield self._encode_line(line)
            case ToolCallFinished():
                line = {
                    "kind": "observation",
                    "step": event.step,
                    "observation": event.observation if self._has_room() else TRUNCATION_MARKER,
                    "exit_code": event.exit_code,
                    "output_lines": event.output_lines,
                    "duration_s": event.duration_s,
                }
                yield self._encode_line(line)
            case RuleMatched() if self._has_room():
                at = {"kind": "rule", "turn": self._turn, "at_s": elapsed_s}
                yield self._encode_line(at | asdict(event))
            case EgressDecided(decision) if self._has_room():
                at = {"kind": "connection", "turn": self._turn, "at_s": elapsed_s}
                yield self._encode_line(at | asdict(decision))

    def finish(self, elapsed_s: float, outcome: Result | BaseException) -> Iterator[bytes]:
        """Yield the last lines of a run that ended with a result or an error. CancelledError means
        that the run was cancelled."""
        yield from self._begin()
        last = {"kind": "end", "duration_s": elapsed_s, "is_truncated": self._is_truncated}
        yield self._encode_line(last | _end_fields(outcome, self._secrets))

    def _begin(self) -> Iterator[bytes]:
        """Yield the line about the run at the first call, and nothing at later calls."""
        first, self._run_line = self._run_line, None
        if first:
            yield self._encode_line(first)

    def _call_lines(self, elapsed_s: float, call: ModelCallFinished) -> Iterator[bytes]:
        added, reply = [], None
        for message in call.messages:
            index, text = _index_and_new_text(message, self._messages)
            added.append(index)
            if text:
                yield self._message_line(message, text)
        if call.reply is not None:
            reply, text = _index_and_new_text(call.reply, self._messages)
            if text:
                yield self._message_line(call.reply, text)
        settings, text = _index_and_new_text(call.settings, self._settings)
        if text:
            if not self._has_room():
                text = encode_json({"note": TRUNCATION_MARKER})
            yield self._count_line_bytes(b'{"kind":"settings","settings":%b}' % text)
        self._call_count += 1
        line = {
            "kind": "model_call",
            "turn": self._turn,
            "kept": call.shared_prefix,  # the name in stored trajectories, which cannot change
            "added": added,
            "reply": reply,
            "settings": settings,
            "finish_reason": call.finish_reason,
            "usage": call.usage,
            "error": call.error,
            "started_s": max(0.0, elapsed_s - call.duration_s),
            "duration_s": call.duration_s,
            **(self._token_fields(call.tokens) if call.tokens else {}),
        }
        yield self._encode_line(line)

    def _token_fields(self, tokens: CallTokens) -> Line:
        """Return the fields about the tokens of a call. If the call's prompt begins with all tokens
        of the previous call, both calls belong to one segment, and the fields have only the new
        tokens."""
        missing = tokens.missing
        if missing is None and not self._has_room():
            missing = TRUNCATION_MARKER
        fields: Line = {"tokens_missing": missing, "weight_version": tokens.weight_version}
        if missing is not None:
            return fields
        prompt_ids, known = list(tokens.prompt_ids), len(self._token_ids)
        if not self._token_segment_count or prompt_ids[:known] != self._token_ids:
            self._token_segment_count, known = self._token_segment_count + 1, 0
        self._token_ids = [*prompt_ids, *tokens.reply_ids]
        return {
            **fields,
            "token_segment": self._token_segment_count - 1,
            "prompt_ids": prompt_ids[known:],
            "reply_ids": tokens.reply_ids,
            "logprobs": tokens.logprobs,
        }

    def _message_line(self, message: Mapping[str, Any], text: bytes) -> bytes:
        if not self._has_room():
            text = encode_json({"role": message.get("role"), "content": TRUNCATION_MARKER})
        return self._count_line_bytes(b'{"kind":"message","message":%b}' % text)

    def _has_room(self) -> bool:
        """Return True if the trajectory has not exceeded its maximum size, else mark it as
        truncated."""
        has_room = self._bytes <= self._max_bytes
        self._is_truncated |= not has_room
        return has_room

    def _encode_line(self, line: Line) -> bytes:
        return self._count_line_bytes(encode_json(line))

    def _count_line_bytes(self, line: bytes) -> bytes:
        self._bytes += len(line)
        return line


def _user_message(task: AgentTask) -> str:
    """Return the text of the client's last user message, without the proxy's additions."""
    users = [message for message in task.request.messages if message.get("role") == "user"]
    return text_of(users[-1]) if users else ""


def _index_and_new_text(
    value: Mapping[str, Any], indexes: dict[bytes, int]
) -> tuple[int, bytes | None]:
    """Return the index of `value`, and its JSON text if the value is new, else None. `indexes` maps
    the SHA-256 of each known value's JSON text to the value's index. A new value is added to it."""
    text, count = encode_json(value), len(indexes)
    index = indexes.setdefault(hashlib.sha256(text).digest(), count)
    return index, text if index == count else None


def _end_fields(outcome: Result | BaseException, secrets: SecretFinder) -> Line:
    """Return the status of a run that has ended, with its result or error. Only the error is
    redacted here: a result is redacted already."""
    if not isinstance(outcome, Result):
        if not isinstance(outcome, Exception):
            return {"status": "cancelled"}
        if isinstance(outcome, ProxyError):
            return {"status": "failed", **redact_json(outcome.body(), secrets)}
        error = {"message": "The run failed.", "type": "server_error", "param": None, "code": None}
        return {"status": "failed", "error": error}
    about = sandbox_object(outcome)
    return {
        "status": "completed",
        "result": {
            "answer": outcome.answer,
            "refusal": outcome.refusal,
            "stop_reason": str(outcome.stop_reason),
            "finish_reason": outcome.finish_reason,
            "tool_calls": list(outcome.client_calls),
            "usage": outcome.usage,
            "stats": outcome.stats.counts(),
            "container_id": outcome.container_id,
            # Without the links, which open the files for everybody until they expire.
            "files": [{k: v for k, v in file.items() if k != "url"} for file in about["files"]],
            "files_left_out": about.get("files_left_out", []),
            "warnings": about.get("warnings", []),
            "sandbox_losses": outcome.sandbox_losses,
            "compactions": about.get("compactions", []),
        },
    }


# Reading


@dataclass(slots=True)
class _Reader:
    """Collects the parts of a trajectory from its lines."""

    run_line: Line = field(default_factory=dict)
    end_line: Line = field(default_factory=dict)
    tables: dict[str, list[Any]] = field(
        default_factory=lambda: {
            name: [] for name in ("message", "settings", "turn", "model_call", "rule", "connection")
        }
    )
    tool_calls: dict[int, Line] = field(default_factory=dict)
    """The tool calls, by the number of their step."""
    segments: list[list[int]] = field(default_factory=list)
    token_segments: list[Object] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    """The indexes of the messages of the latest prompt."""

    def add(self, line: Line) -> None:
        match line.pop("kind"):
            case "run":
                self.run_line = line
            case "end":
                self.end_line = line
            case "message" | "settings" as kind:
                self.tables[kind].append(line[kind])
            case "tool_call":
                self.tool_calls[line["step"]] = line
            case "observation":
                self.tool_calls[line["step"]] |= line
            case "model_call":
                self.tables["model_call"].append(self._model_call(line))
            case kind:
                self.tables[kind].append(line)

    def _model_call(self, line: Line) -> Line:
        self.prompt = [*self.prompt[: line.pop("kept")], *line.pop("added")]
        segment = self._segment_index(self.prompt)
        tokens = self._move_tokens(line)
        return {"segment": segment, "prompt_messages": len(self.prompt), **line, **tokens}

    def _move_tokens(self, line: Line) -> Line:
        """Move the captured tokens of a model call from the call's line to the token segment that
        the line names. Return the fields `prompt_tokens` and `reply_tokens`: the number of tokens
        of the whole prompt, and of the reply. Return no fields if no tokens were captured."""
        if "token_segment" not in line:
            return {}
        index = line["token_segment"]
        new, reply, logprobs = (line.pop(name) for name in ("prompt_ids", "reply_ids", "logprobs"))
        if index == len(self.token_segments):
            self.token_segments.append(
                {"prompt_ids": new, "response_ids": [], "response_mask": [], "logprobs": []}
            )
            new = []
        segment = self.token_segments[index]
        segment["response_ids"] += [*new, *reply]
        segment["response_mask"] += [0] * len(new) + [1] * len(reply)
        segment["logprobs"] += [0.0] * len(new) + logprobs
        before = len(segment["prompt_ids"]) + len(segment["response_ids"])
        return {"prompt_tokens": before - len(reply), "reply_tokens": len(reply)}

    def _segment_index(self, prompt: list[int]) -> int:
        """Return the index of the segment that begins with the prompt or that the prompt extends.
        Add a segment if there is none."""
        for index in reversed(range(len(self.segments))):
            segment = self.segments[index]
            length = min(len(segment), len(prompt))
            if segment[:length] == prompt[:length]:
                segment.extend(prompt[length:])
                return index
        self.segments.append(list(prompt))
        return len(self.segments) - 1


INFRA_ERROR = "infra_error"
"""The outcome of a run that failed, or whose sandbox was lost: its answer says nothing about the
model."""


def _outcome(status: str, result: Object | None) -> str:
    """Return the stop reason of a run, or `running`, `cancelled` or INFRA_ERROR."""
    if status == "failed":
        return INFRA_ERROR
    if result is None:
        return status
    was_lost = any(each["code"] == "sandbox_lost" for each in result["warnings"])
    return INFRA_ERROR if was_lost or result.get("sandbox_losses") else str(result["stop_reason"])


def read_trajectory(
    run_id: str,
    created_at: int,
    texts: Iterable[str],
    *,
    labels: TrajectoryLabels = TrajectoryLabels(),
    rewards: Sequence[Object] = (),
    is_lost: bool = False,
) -> Object:
    """Return the trajectory in the native format from its stored lines. `rewards` are in the order
    in which they were given. `is_lost` is True if the process of the run ended before the run
    did."""
    reader = _Reader()
    for text in texts:
        for line in text.split("\n"):
            reader.add(json.loads(line))
    status = reader.end_line.get("status", "failed" if is_lost else "running")
    return {
        "id": run_id,
        "object": "run.trajectory",
        "created_at": created_at,
        "status": status,
        "outcome": _outcome(status, reader.end_line.get("result")),
        "model": reader.run_line.get("model"),
        "profile": reader.run_line.get("profile"),
        "route": reader.run_line.get("route"),
        "group_id": labels.group_id,
        "task_id": labels.task_id,
        "session_id": labels.session_id,
        "choice": reader.run_line.get("choice", 0),
        "continues": reader.run_line.get("continues"),
        "user_message": reader.run_line.get("user_message", ""),
        "duration_s": reader.end_line.get("duration_s"),
        "is_truncated": reader.end_line.get("is_truncated", False),
        "messages": reader.tables["message"],
        "segments": reader.segments,
        "token_segments": reader.token_segments,
        "settings": reader.tables["settings"],
        "turns": reader.tables["turn"],
        "model_calls": reader.tables["model_call"],
        "tool_calls": list(reader.tool_calls.values()),
        "rules": reader.tables["rule"],
        "connections": reader.tables["connection"],
        "result": reader.end_line.get("result"),
        "error": reader.end_line.get("error"),
        "rewards": list(rewards),
    }


def to_openai(trajectory: Object) -> Object:
    """Return the messages and the tools of the last model call that has a reply, in OpenAI's format
    of fine-tuning data: the prompt, the reply, the observations of its tool calls and the answer.
    After a compaction, the prompt does not have the replaced messages."""
    messages, tools = last_call_messages(trajectory) or ([], None)
    if messages:
        messages += _observations(trajectory, messages[-1])
    answer = (trajectory["result"] or {}).get("answer")
    if answer and not (messages and _is_answer(messages[-1], answer)):
        messages.append({"role": "assistant", "content": answer})
    found: Object = {"id": trajectory["id"], "model": trajectory["model"], "messages": messages}
    return {**found, "tools": tools} if tools else found


def last_call_messages(trajectory: Object) -> tuple[list[Object], Sequence[Any] | None] | None:
    """Return the messages (the prompt, then the reply) and the tools of the last model call that
    has a reply. Return None if no call has a reply."""
    calls = [call for call in trajectory["model_calls"] if call["reply"] is not None]
    if not calls:
        return None
    call = calls[-1]
    table, segment = trajectory["messages"], trajectory["segments"][call["segment"]]
    prompt = [table[index] for index in segment[: call["prompt_messages"]]]
    return [*prompt, table[call["reply"]]], _tools_of(trajectory, call["segment"])


def json_pieces(value: Any, depth: int = 4) -> Iterator[str]:
    """Yield the JSON text of a trajectory or of a part of an export in pieces: a piece for each
    value below `depth` levels of objects and lists, and a piece for each NUMBERS_PER_PIECE numbers
    of a list. The encoder holds the GIL for a whole piece, so a single piece of 64 MB would block
    the event loop."""
    if isinstance(value, list) and value and isinstance(value[0], int | float):
        for start in range(0, len(value), NUMBERS_PER_PIECE):
            yield ", " if start else "["
            yield json.dumps(value[start : start + NUMBERS_PER_PIECE])[1:-1]
        yield "]"
    elif isinstance(value, list) and value and depth:
        before = "["
        for item in value:
            yield before
            yield from json_pieces(item, depth - 1)
            before = ", "
        yield "]"
    elif isinstance(value, dict) and value and depth:
        before = "{"
        for name, item in value.items():
            yield f"{before}{json.dumps(name)}: "
            yield from json_pieces(item, depth - 1)
            before = ", "
        yield "}"
    else:
        yield json.dumps(value)


def _observations(trajectory: Object, reply: Mapping[str, Any]) -> list[Object]:
    """Return the tool messages that answer a reply: one for each of its calls that has an
    observation."""
    found = {call["id"]: call.get("observation") for call in trajectory["tool_calls"]}
    calls = reply.get("tool_calls") or []
    ids = [call.get("id") for call in calls if isinstance(call, dict)]
    return [
        {"role": "tool", "tool_call_id": call_id, "content": found[call_id]}
        for call_id in ids
        if found.get(call_id) is not None
    ]


def _tools_of(trajectory: Object, segment: int) -> Sequence[Any] | None:
    """Return the tools of a segment's last model call with tools, or None."""
    settings = [
        trajectory["settings"][call["settings"]]
        for call in reversed(trajectory["model_calls"])
        if call["segment"] == segment
    ]
    return next((each["tools"] for each in settings if each.get("tools")), None)


def _is_answer(message: Mapping[str, Any], answer: str) -> bool:
    return message.get("role") == "assistant" and text_of(dict(message)).strip() == answer.strip()


def to_reference_format(trajectory: Object) -> Object:
    """Return the trajectory in the format of the paper's reference package (`Trajectory.to_dict` in
    llm_in_sandbox/trajectory.py): one step for each tool call, or for a reply without a tool call.
    The thought of a reply with several calls is in the first step. `exec_time` is the duration of
    the model call in seconds."""
    steps: list[Object] = []
    for index, call in enumerate(trajectory["model_calls"]):
        if call["reply"] is None:
            continue
        reply = trajectory["messages"][call["reply"]]
        thought, reasoning = text_of(reply), "\n".join(reasoning_texts(reply))
        run = [each for each in trajectory["tool_calls"] if each["model_call"] == index]
        for tool_call in run or [{"name": "", "arguments": {}}]:
            action = {"function": tool_call["name"], "parameters": tool_call["arguments"]}
            steps.append(
                {
                    "thought": thought,
                    "reasoning_content": reasoning,
                    "action": action,
                    "observation": tool_call.get("observation", ""),
                    "metadata": {"step": len(steps) + 1, "exec_time": call["duration_s"]},
                }
            )
            thought = reasoning = ""
    return {
        "problem_statement": trajectory["user_message"],
        "steps": steps,
        "metadata": {"total_steps": len(steps)},
    }
