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
    replay = EventLog(max_chars)
    for event in events:
        replay.add(event)
    return replay.events()


def call(observation: str) -> ToolCallFinished:
    return ToolCallFinished(1, "c1", "execute_bash", observation, 0, 1, 0.1)


def test_pieces_of_one_text_are_joined() -> None:
    pieces = [ReasoningDelta("a"), ReasoningDelta("b"), AnswerDelta("c"), AnswerDelta("d")]
    end = RunFinished(StopReason.ANSWERED)
    assert replayed(*pieces, end) == [ReasoningDelta("ab"), AnswerDelta("cd"), end]


def test_the_arguments_of_a_clients_call_are_joined_call_by_call() -> None:
    begun = [ClientCallStarted(index, f"call_r1_{index + 1}", "lookup") for index in (0, 1)]
    pieces = [ClientCallDelta(0, '{"a":'), ClientCallDelta(0, " 1}"), ClientCallFinished(0)]
    last = [ClientCallDelta(1, "{"), ClientCallDelta(1, "}"), ClientCallFinished(1)]
    assert replayed(begun[0], *pieces, begun[1], *last) == [
        *(begun[0], ClientCallDelta(0, '{"a": 1}'), ClientCallFinished(0)),
        *(begun[1], ClientCallDelta(1, "{}"), ClientCallFinished(1)),
    ]


def test_pieces_that_carry_probabilities_stay_as_they_are() -> None:
    pieces = [AnswerDelta("a", {"content": [1]}), AnswerDelta("b", {"content": [2]})]
    assert replayed(*pieces) == pieces


def test_event_log_can_be_read_while_it_grows() -> None:
    replay = EventLog()
    replay.add(AnswerDelta("a"))
    assert replay.events() == [AnswerDelta("a")]
    replay.add(AnswerDelta("b"))
    assert replay.events() == [AnswerDelta("a"), AnswerDelta("b")]


def test_of_a_commands_live_output_the_beginning_is_kept() -> None:
    begun = ToolCallStarted(1, "c1", "execute_bash", {"command": "ls"})
    pieces = [ToolOutput(1, "stdout", "x" * 1000) for _ in range(200)]
    kept = replayed(begun, *pieces, ToolOutput(1, "stderr", "late"), call("x"))
    assert kept == [begun, ToolOutput(1, "stdout", "x" * 101_000), call("x")]


def test_each_stream_of_a_command_and_each_command_has_its_own_text() -> None:
    events: list[Event] = [
        ToolOutput(1, "stdout", "a"),
        ToolOutput(1, "stderr", "b"),
        ToolOutput(2, "stderr", "c"),
    ]
    assert replayed(*events) == events


def test_the_oldest_turns_are_forgotten_and_the_answer_never() -> None:
    events: list[Event] = [RunStarted("r1"), AnswerDelta("First words.")]
    for turn in range(1, 101):
        events += [TurnStarted(turn), call("x" * 1000)]
    events += [AnswerDelta("y" * 100_000)]
    kept = replayed(*events, max_chars=20_000)
    turns = [event.turn for event in kept if isinstance(event, TurnStarted)]
    assert kept[0] == AnswerDelta("First words.")
    assert kept[-1] == events[-1]
    assert turns == list(range(turns[0], 101))
    assert len([event for event in kept if isinstance(event, ToolCallFinished)]) == len(turns)
    assert 1 <= len(turns) <= 20


def test_narration_of_forgotten_turns_stays_apart_from_the_answer() -> None:
    narration: list[Event] = [AnswerDelta("I look first.\n\n"), AnswerRestarted()]
    events: list[Event] = [TurnStarted(1), *narration]
    for turn in range(2, 101):
        events += [TurnStarted(turn), call("x" * 1000)]
    kept = replayed(*events, AnswerDelta("42"), max_chars=20_000)
    assert kept[:2] == narration
    assert kept[-1] == AnswerDelta("42")


def test_single_turn_beyond_the_limit_is_kept() -> None:
    events = [TurnStarted(1), *(call("x" * 1000) for _ in range(50))]
    assert replayed(*events, max_chars=10_000) == events


def test_further_choices_are_kept_as_the_first_is() -> None:
    pieces = [ChoiceEvent(1, ToolOutput(1, "stdout", "x" * 1000)) for _ in range(300)]
    replay = EventLog()
    for event in (AnswerDelta("a"), *pieces, ChoiceEvent(1, AnswerDelta("b"))):
        replay.add(event)
    assert replay.events() == [
        AnswerDelta("a"),
        ChoiceEvent(1, ToolOutput(1, "stdout", "x" * 101_000)),
        ChoiceEvent(1, AnswerDelta("b")),
    ]


def test_number_of_dropped_steps_is_reported() -> None:
    events: list[Event] = [AnswerDelta("First words.")]
    for step in range(1, 101):
        made = ToolCallStarted(step, f"c{step}", "execute_bash", {"command": "ls"})
        events += [TurnStarted(step), made, call("x" * 1000)]
    first, omitted, *kept = replayed(*events, max_chars=20_000)
    assert first == AnswerDelta("First words.")
    assert isinstance(omitted, StepsOmitted)
    steps = [event.step for event in kept if isinstance(event, ToolCallStarted)]
    assert steps == list(range(omitted.steps + 1, 101))
