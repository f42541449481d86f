"""The lines of a trajectory, and the segments that are read from them."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.agent.events import (
    CallTokens,
    Event,
    ModelCallFinished,
    RuleMatched,
    ToolCallFinished,
    ToolCallStarted,
    TurnStarted,
)
from proxy.errors import BusyError
from proxy.schemas.trajectory import (
    TRUNCATION_MARKER,
    TrajectoryWriter,
    json_pieces,
    read_trajectory,
    to_openai,
)
from tests.fakes.results import SUBMITTED
from tests.fakes.tasks import make_task
from tests.proxy.agent.runs import MemoryArtifactStore

SYSTEM = {"role": "system", "content": "Use the tools."}
QUESTION = {"role": "user", "content": "How many?"}
FIRST, SECOND = ({"role": "assistant", "content": text} for text in ("One.", "Two."))
LONG = {"role": "user", "content": "output " * 100}
STUB = {"role": "user", "content": "[moved]"}
SUMMARY_REQUEST = {"role": "user", "content": "Summarize."}
SUMMARY = {"role": "assistant", "content": "So far: one."}
TASK = make_task("r1", MemoryArtifactStore(), "fake-model", [QUESTION])


def model_call(
    shared_prefix: int,
    *messages: dict[str, Any],
    reply: dict[str, Any] | None = None,
    **settings: Any,
) -> ModelCallFinished:
    return ModelCallFinished(shared_prefix, messages, settings, 1.0, reply)


def read(
    events: Sequence[Event], end: Any = SUBMITTED, max_bytes: int = 1_000_000
) -> dict[str, Any]:
    """Return the trajectory of a run with these events."""
    writer = TrajectoryWriter(TASK, 0, max_bytes)
    lines = [line for event in events for line in writer.write(1.0, event)]
    return read_trajectory("r1", 5, [b"\n".join([*lines, *writer.finish(2.0, end)]).decode()])


def prompts(trajectory: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the prompt of each model call, as a client reads it."""
    return [
        [
            trajectory["messages"][index]
            for index in trajectory["segments"][each["segment"]][: each["prompt_messages"]]
        ]
        for each in trajectory["model_calls"]
    ]


def test_compaction_begins_a_segment_and_repeated_messages_are_kept_once() -> None:
    trajectory = read(
        [
            TurnStarted(1),
            model_call(0, SYSTEM, QUESTION, reply=FIRST),
            TurnStarted(2),
            model_call(2, FIRST, LONG, reply=SECOND),
            TurnStarted(3),
            model_call(3, STUB, SECOND, QUESTION, reply=FIRST),
        ]
    )
    assert trajectory["messages"] == [SYSTEM, QUESTION, FIRST, LONG, SECOND, STUB]
    assert trajectory["segments"] == [[0, 1, 2, 3], [0, 1, 2, 5, 4, 1]]
    assert prompts(trajectory) == [
        [SYSTEM, QUESTION],
        [SYSTEM, QUESTION, FIRST, LONG],
        [SYSTEM, QUESTION, FIRST, STUB, SECOND, QUESTION],
    ]


def test_segment_continues_after_an_out_of_band_call_with_another_prompt() -> None:
    trajectory = read(
        [
            model_call(0, SYSTEM, QUESTION, reply=FIRST),
            model_call(0, LONG, SUMMARY_REQUEST, reply=SUMMARY),
            model_call(0, SYSTEM, QUESTION, FIRST, LONG, reply=SECOND),
            model_call(4, reply=SECOND),
        ]
    )
    assert [each["segment"] for each in trajectory["model_calls"]] == [0, 1, 0, 0]
    assert prompts(trajectory)[2] == prompts(trajectory)[3] == [SYSTEM, QUESTION, FIRST, LONG]


def test_equal_settings_of_calls_are_kept_once_in_a_trajectory() -> None:
    tools = [{"type": "function", "function": {"name": "execute_bash"}}]
    trajectory = read(
        [
            model_call(0, QUESTION, reply=FIRST, tools=tools),
            model_call(1, FIRST, reply=SECOND, tools=tools),
            model_call(2, LONG, reply=FIRST),
        ]
    )
    assert trajectory["settings"] == [{"tools": tools}, {}]
    assert [each["settings"] for each in trajectory["model_calls"]] == [0, 0, 1]
    # The last call has no tools, but the segment's earlier calls have.
    assert to_openai(trajectory)["tools"] == tools


def test_message_contents_beyond_the_size_limit_are_left_out() -> None:
    started = ToolCallStarted(1, "call_1", "execute_bash", {"command": "x" * 500})
    finished = ToolCallFinished(1, "call_1", "execute_bash", "y" * 500, 0, 1, 0.5)
    events = [model_call(0, QUESTION, reply=FIRST), started, finished, model_call(1, LONG)]
    whole, cut = read(events), read(events, max_bytes=700)
    assert (whole["is_truncated"], cut["is_truncated"]) == (False, True)
    assert cut["messages"][:2] == [QUESTION, FIRST]
    assert cut["messages"][2] == {"role": "user", "content": TRUNCATION_MARKER}
    assert cut["tool_calls"][0]["observation"] == TRUNCATION_MARKER
    assert cut["result"] == whole["result"]


def test_settings_and_rule_matches_beyond_the_size_limit_of_a_trajectory_are_left_out() -> None:
    tools = [{"type": "function", "function": {"name": "execute_bash"}}]
    rule = RuleMatched("no-network", "deny", "command", "curl", "")
    events = [model_call(0, QUESTION, reply=FIRST, tools=tools), rule]
    whole, cut = read(events), read(events, max_bytes=100)
    assert (len(whole["rules"]), whole["settings"]) == (1, [{"tools": tools}])
    assert (cut["rules"], cut["settings"]) == ([], [{"note": TRUNCATION_MARKER}])


def test_message_that_quotes_the_truncation_marker_does_not_count_as_truncated() -> None:
    quoting = {"role": "assistant", "content": TRUNCATION_MARKER}
    assert read([model_call(0, QUESTION, reply=quoting)])["is_truncated"] is False


def test_tool_call_that_has_not_ended_has_no_observation() -> None:
    started = ToolCallStarted(1, "call_1", "execute_bash", {"command": "sleep 1"})
    trajectory = read([model_call(0, QUESTION, reply=FIRST), started], asyncio.CancelledError())
    assert "observation" not in trajectory["tool_calls"][0]
    assert (trajectory["status"], trajectory["result"]) == ("cancelled", None)


def test_trajectory_of_a_failed_run_has_the_error() -> None:
    failed = read([], BusyError("The server is busy."))
    unknown = read([], ValueError("internal"))
    assert (failed["status"], failed["error"]["message"]) == ("failed", "The server is busy.")
    assert unknown["error"]["message"] == "The run failed."


def test_unfinished_trajectory_has_status_failed_if_its_run_is_lost_and_running_otherwise() -> None:
    writer = TrajectoryWriter(TASK, 0)
    lines = [line.decode() for line in writer.write(1.0, TurnStarted(1))]
    running = read_trajectory("r1", 5, lines)
    lost = read_trajectory("r1", 5, lines, is_lost=True)
    assert (running["status"], lost["status"]) == ("running", "failed")
    assert running["turns"] == [{"turn": 1, "started_s": 1.0}]
    assert read_trajectory("r1", 5, [])["model"] is None


def test_json_of_a_trajectory_is_written_in_pieces_of_one_item() -> None:
    messages = [{"role": "user", "content": f"{number} " * 1000} for number in range(200)]
    trajectory = read([model_call(0, *messages, reply=FIRST)])
    pieces = list(json_pieces(trajectory))
    assert json.loads("".join(pieces)) == trajectory
    assert max(map(len, pieces)) < 2 * max(len(json.dumps(each)) for each in messages)


def test_json_of_tokens_is_written_in_pieces() -> None:
    ids = list(range(25_000))
    tokens = CallTokens(ids, ids, [-0.5] * len(ids))
    trajectory = read([replace(model_call(0, QUESTION, reply=FIRST), tokens=tokens)])
    pieces = list(json_pieces(trajectory))
    assert json.loads("".join(pieces)) == trajectory
    assert max(map(len, pieces)) < len(json.dumps(ids)) / 2


IDS = st.lists(st.integers(0, 3), max_size=4)
"""Few and small ids, so that a prompt often begins with the tokens of another call by chance."""
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("continues"), IDS, IDS),
        st.tuples(st.sampled_from(["differs", "has no tokens", "fails"]), IDS, IDS),
    ),
    max_size=8,
)


@given(CALLS)
def test_tokens_of_each_call_are_found_in_its_segment(calls: list[tuple[str, Any, Any]]) -> None:
    events, expected, last = [], list[Any](), list[int]()
    for kind, new, reply_ids in calls:
        prompt_ids = [*last, *new] if kind == "continues" else new
        logprobs = [-(each + 1) / 8 for each in reply_ids]
        tokens: CallTokens | None = CallTokens(prompt_ids, reply_ids, logprobs)
        if kind == "has no tokens":
            tokens = CallTokens(missing="none")
        elif kind == "fails":
            tokens = None
        else:
            last = [*prompt_ids, *reply_ids]
        has_tokens = tokens is not None and tokens.missing is None
        expected.append((prompt_ids, reply_ids, logprobs) if has_tokens else None)
        events.append(replace(model_call(0, QUESTION, reply=FIRST), tokens=tokens))
    found = read(events)
    segments = found["token_segments"]
    for call, tokens_of_call in zip(found["model_calls"], expected, strict=True):
        if tokens_of_call is None:
            assert call.get("token_segment") is None
            continue
        segment = segments[call["token_segment"]]
        ids = [*segment["prompt_ids"], *segment["response_ids"]]
        end = call["prompt_tokens"] + call["reply_tokens"]
        start = call["prompt_tokens"] - len(segment["prompt_ids"])
        sampled = slice(start, start + call["reply_tokens"])
        assert (
            ids[: call["prompt_tokens"]],
            ids[call["prompt_tokens"] : end],
            segment["logprobs"][sampled],
        ) == tokens_of_call
        assert set(segment["response_mask"][sampled]) <= {1}
    known = [each for each in expected if each is not None]
    masks = [mask for segment in segments for mask in segment["response_mask"]]
    assert sum(masks) == sum(len(reply_ids) for _, reply_ids, _ in known)
    for segment in segments:
        lengths = {len(segment[name]) for name in ("response_ids", "response_mask", "logprobs")}
        assert len(lengths) == 1
    splits = sum(
        prompt_ids[: len(before) + len(reply)] != [*before, *reply]
        for (before, reply, _), (prompt_ids, _, _) in itertools.pairwise(known)
    )
    assert len(segments) == (splits + 1 if known else 0)


def test_tokens_of_a_call_beyond_the_size_limit_are_left_out_completely() -> None:
    first = CallTokens([1, 2], [3], [-0.5])
    second = CallTokens([1, 2, 3, 4], [5], [-0.25])
    calls = [replace(model_call(0, LONG, reply=FIRST), tokens=each) for each in (first, second)]
    found = read(calls, max_bytes=1200)
    assert [each["tokens_missing"] for each in found["model_calls"]] == [None, TRUNCATION_MARKER]
    assert [segment["response_ids"] for segment in found["token_segments"]] == [[3]]
    assert found["is_truncated"]
