"""The event log replays the past events of a run to subscribers that join later."""

from policies.limits import StopReason
from proxy.agent.events import (
    AnswerDelta,
    AnswerRestarted,
    ChoiceEvent,
    ClientCallDelta,
    ClientCallFinished,
    ClientCallStarted,
    Event,
    ReasoningDelta,
    RunFinished,
    RunStarted,
    StepsOmitted,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
    TurnStarted,
)
from proxy.runs.event_log import EventLog


def replayed(*events: Event, max_chars: int = 1_000_000) -> list[Event]:
    event_log = EventLog(max_chars)
    for event in events:
        event_log.add(event)
    return event_log.events()


def call_finished(observation: str) -> ToolCallFinished:
    return ToolCallFinished(1, "c1", "execute_bash", observation, 0, 1, 0.1)


def test_event_log_joins_the_pieces_of_one_text() -> None:
    pieces = [ReasoningDelta("a"), ReasoningDelta("b"), AnswerDelta("c"), AnswerDelta("d")]
    end = RunFinished(StopReason.ANSWERED)
    assert replayed(*pieces, end) == [ReasoningDelta("ab"), AnswerDelta("cd"), end]


def test_argument_pieces_of_each_client_tool_call_are_joined() -> None:
    begun = [ClientCallStarted(index, f"call_r1_{index + 1}", "lookup") for index in (0, 1)]
    pieces = [ClientCallDelta(0, '{"a":'), ClientCallDelta(0, " 1}"), ClientCallFinished(0)]
    last = [ClientCallDelta(1, "{"), ClientCallDelta(1, "}"), ClientCallFinished(1)]
    assert replayed(begun[0], *pieces, begun[1], *last) == [
        *(begun[0], ClientCallDelta(0, '{"a": 1}'), ClientCallFinished(0)),
        *(begun[1], ClientCallDelta(1, "{}"), ClientCallFinished(1)),
    ]


def test_pieces_with_logprobs_are_not_joined() -> None:
    pieces = [AnswerDelta("a", {"content": [1]}), AnswerDelta("b", {"content": [2]})]
    assert replayed(*pieces) == pieces


def test_event_log_can_be_read_while_it_grows() -> None:
    event_log = EventLog()
    event_log.add(AnswerDelta("a"))
    assert event_log.events() == [AnswerDelta("a")]
    event_log.add(AnswerDelta("b"))
    assert event_log.events() == [AnswerDelta("a"), AnswerDelta("b")]


def test_beginning_of_the_live_output_of_a_command_is_kept() -> None:
    begun = ToolCallStarted(1, "c1", "execute_bash", {"command": "ls"})
    pieces = [ToolOutput(1, "stdout", "x" * 1000) for _ in range(200)]
    replayed_events = replayed(begun, *pieces, ToolOutput(1, "stderr", "late"), call_finished("x"))
    assert replayed_events == [begun, ToolOutput(1, "stdout", "x" * 101_000), call_finished("x")]


def test_output_is_not_joined_across_streams_and_commands() -> None:
    events: list[Event] = [
        ToolOutput(1, "stdout", "a"),
        ToolOutput(1, "stderr", "b"),
        ToolOutput(2, "stderr", "c"),
    ]
    assert replayed(*events) == events


def test_event_log_drops_the_oldest_turns_and_keeps_the_answer() -> None:
    events: list[Event] = [RunStarted("r1"), AnswerDelta("First words.")]
    for turn in range(1, 101):
        events += [TurnStarted(turn), call_finished("x" * 1000)]
    events += [AnswerDelta("y" * 100_000)]
    replayed_events = replayed(*events, max_chars=20_000)
    turns = [event.turn for event in replayed_events if isinstance(event, TurnStarted)]
    assert replayed_events[0] == AnswerDelta("First words.")
    assert replayed_events[-1] == events[-1]
    assert turns == list(range(turns[0], 101))
    assert len([event for event in replayed_events if isinstance(event, ToolCallFinished)]) == len(
        turns
    )
    assert 1 <= len(turns) <= 20


def test_narration_of_dropped_turns_is_kept_separate_from_the_answer() -> None:
    narration: list[Event] = [AnswerDelta("I look first.\n\n"), AnswerRestarted()]
    events: list[Event] = [TurnStarted(1), *narration]
    for turn in range(2, 101):
        events += [TurnStarted(turn), call_finished("x" * 1000)]
    replayed_events = replayed(*events, AnswerDelta("42"), max_chars=20_000)
    assert replayed_events[:2] == narration
    assert replayed_events[-1] == AnswerDelta("42")


def test_event_log_keeps_its_only_turn_whole_even_if_it_exceeds_the_limit() -> None:
    events = [TurnStarted(1), *(call_finished("x" * 1000) for _ in range(50))]
    assert replayed(*events, max_chars=10_000) == events


def test_event_log_joins_and_truncates_events_of_further_choices_too() -> None:
    pieces = [ChoiceEvent(1, ToolOutput(1, "stdout", "x" * 1000)) for _ in range(300)]
    event_log = EventLog()
    for event in (AnswerDelta("a"), *pieces, ChoiceEvent(1, AnswerDelta("b"))):
        event_log.add(event)
    assert event_log.events() == [
        AnswerDelta("a"),
        ChoiceEvent(1, ToolOutput(1, "stdout", "x" * 101_000)),
        ChoiceEvent(1, AnswerDelta("b")),
    ]


def test_event_log_reports_the_number_of_dropped_steps() -> None:
    events: list[Event] = [AnswerDelta("First words.")]
    for step in range(1, 101):
        started = ToolCallStarted(step, f"c{step}", "execute_bash", {"command": "ls"})
        events += [TurnStarted(step), started, call_finished("x" * 1000)]
    first, omitted, *replayed_events = replayed(*events, max_chars=20_000)
    assert first == AnswerDelta("First words.")
    assert isinstance(omitted, StepsOmitted)
    steps = [event.step for event in replayed_events if isinstance(event, ToolCallStarted)]
    assert steps == list(range(omitted.steps + 1, 101))
