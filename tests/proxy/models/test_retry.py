"""Asking again."""

from collections.abc import Mapping
from typing import Any

import pytest

from proxy.agent.events import CallAccepted, CallFailed, ModelDelta
from proxy.agent.model import Completion, StopRetryingError, UpstreamResponse
from proxy.errors import BackendError, ContextOverflowError, ToolsRefusedError
from proxy.models.retry import RetryingModel
from proxy.models.scripted import ScriptedModel, text_reply
from tests.proxy.models.delta_recorder import DeltaRecorder

BODY = {"messages": [{"role": "user", "content": "What is 6 times 7?"}]}


def failing(*errors: dict[str, Any]) -> ScriptedModel:
    """A model that fails so before it answers 42."""
    return ScriptedModel([*({"error": error} for error in errors), text_reply("42")])


class Waits(list[float]):
    """In the place of sleep: it only notes for how long."""

    async def __call__(self, delay_s: float) -> None:
        self.append(delay_s)


async def hear_nothing(delta: ModelDelta) -> None:
    pass


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
async def test_a_failure_that_may_pass_is_asked_again(status: int) -> None:
    model, waits = failing({"status": status, "message": "not now"}), Waits()
    reply = await RetryingModel(model, sleep=waits).complete(BODY, hear_nothing)
    assert reply.message["content"] == "42"
    assert model.requests == [BODY, BODY]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
async def test_a_refusal_is_final(status: int) -> None:
    model, waits = failing({"status": status, "message": "never"}), Waits()
    with pytest.raises(BackendError, match="never"):
        await RetryingModel(model, sleep=waits).complete(BODY, None)
    assert (len(model.requests), waits) == (1, [])


async def test_an_overflow_is_final_whatever_its_status() -> None:
    error = {"status": 500, "message": "too long", "code": "context_length_exceeded"}
    model, waits = failing(error), Waits()
    with pytest.raises(ContextOverflowError):
        await RetryingModel(model, sleep=waits).complete(BODY, None)
    assert (len(model.requests), waits) == (1, [])


async def test_a_refusal_of_tools_is_final_whatever_its_status() -> None:
    model = failing({"status": 500, "message": "tools param requires --jinja flag"})
    waits = Waits()
    with pytest.raises(ToolsRefusedError):
        await RetryingModel(model, sleep=waits).complete(BODY, None)
    assert (len(model.requests), waits) == (1, [])


async def test_the_waits_grow_up_to_a_ceiling_with_full_jitter() -> None:
    ceilings = [1.0, 2.0, 4.0, 5.0, 5.0]
    seen: list[list[float]] = []
    for _ in range(50):
        model, waits = failing(*[{"status": 503, "message": "busy"}] * 5), Waits()
        retrying = RetryingModel(model, attempts=6, base_delay_s=1, max_delay_s=5, sleep=waits)
        await retrying.complete(BODY, None)
        seen.append(list(waits))
    for waits_of_one_attempt, ceiling in zip(zip(*seen, strict=True), ceilings, strict=True):
        assert 0 <= min(waits_of_one_attempt) < max(waits_of_one_attempt) <= ceiling
        assert max(waits_of_one_attempt) > ceiling / 2 > min(waits_of_one_attempt)


async def test_it_gives_up_after_the_last_attempt_with_the_last_error() -> None:
    errors = [{"status": 503, "message": f"busy {number}"} for number in range(1, 4)]
    model, waits = failing(*errors), Waits()
    with pytest.raises(BackendError, match="busy 3"):
        await RetryingModel(model, attempts=3, sleep=waits).complete(BODY, None)
    assert (len(model.requests), len(waits)) == (3, 2)


async def test_a_retry_after_is_waited_for() -> None:
    error = {"status": 429, "message": "slow down", "retry_after_s": 20}
    model, waits = failing(error), Waits()
    await RetryingModel(model, base_delay_s=0.5, max_delay_s=30, sleep=waits).complete(BODY, None)
    assert waits == [20]


async def test_a_retry_after_beyond_the_ceiling_is_final() -> None:
    error = {"status": 429, "message": "come back tomorrow", "retry_after_s": 86400}
    model, waits = failing(error), Waits()
    with pytest.raises(BackendError, match="come back tomorrow") as raised:
        await RetryingModel(model, max_delay_s=30, sleep=waits).complete(BODY, None)
    assert (raised.value.retry_after_s, waits) == (86400, [])


class BreaksOff(ScriptedModel):
    """Says its reply, then loses the connection."""

    async def complete(self, body: Mapping[str, Any], on_delta: Any) -> Completion:
        await super().complete(body, on_delta)
        raise BackendError("lost", status=502)


async def test_listener_that_has_shown_a_piece_ends_the_attempts() -> None:
    async def show(delta: ModelDelta) -> None:
        if isinstance(delta, CallFailed):
            raise StopRetryingError

    model, waits = BreaksOff([text_reply("42")]), Waits()
    with pytest.raises(BackendError, match="lost"):
        await RetryingModel(model, sleep=waits).complete(BODY, show)
    assert (len(model.requests), waits) == (1, [])


async def test_reply_that_broke_off_unseen_is_asked_for_again() -> None:
    model, waits = BreaksOff([text_reply("42")]), Waits()
    with pytest.raises(BackendError, match="lost"):
        await RetryingModel(model, sleep=waits).complete(BODY, hear_nothing)
    assert (len(model.requests), len(waits)) == (5, 4)


async def test_without_a_listener_nothing_was_passed_on() -> None:
    model, waits = BreaksOff([text_reply("42")]), Waits()
    with pytest.raises(BackendError, match="lost"):
        await RetryingModel(model, attempts=3, sleep=waits).complete(BODY, None)
    assert len(model.requests) == 3


class AcceptsThenFails(ScriptedModel):
    """Accepts its first call, and loses the connection before the first piece."""

    async def complete(self, body: Mapping[str, Any], on_delta: Any) -> Completion:
        if not self.requests:
            self.requests.append(dict(body))
            await on_delta(CallAccepted())
            raise BackendError("lost", status=502)
        return await super().complete(body, on_delta)


async def test_an_accepted_call_that_fails_before_its_first_piece_is_made_again() -> None:
    heard, model = DeltaRecorder(), AcceptsThenFails([text_reply("42")])
    reply = await RetryingModel(model, sleep=Waits()).complete(BODY, heard)
    assert (reply.message["content"], heard.text) == ("42", "42")


async def test_the_listener_hears_of_each_failed_attempt_before_the_pause() -> None:
    errors = [{"status": 503, "message": "busy"}, {"status": 429, "message": "slow down"}]
    heard, waits = DeltaRecorder(), Waits()
    await RetryingModel(failing(*errors), sleep=waits).complete(BODY, heard)
    failed = [CallFailed(503, waits[0]), CallFailed(429, waits[1])]
    assert heard.progress == [*failed, CallAccepted()]


async def test_a_listener_that_wants_no_more_attempts_gets_the_error() -> None:
    async def decline(delta: ModelDelta) -> None:
        raise StopRetryingError

    model, waits = failing(*[{"status": 503, "message": "busy"}] * 3), Waits()
    with pytest.raises(BackendError, match="busy") as raised:
        await RetryingModel(model, sleep=waits).complete(BODY, decline)
    assert (raised.value.status, len(model.requests), waits) == (503, 1, [])
    assert raised.value.headers == {}


async def test_an_error_after_several_attempts_asks_clients_for_no_more() -> None:
    model = failing(*[{"status": 503, "message": "busy"}] * 2)
    with pytest.raises(BackendError) as raised:
        await RetryingModel(model, attempts=2, sleep=Waits()).complete(BODY, None)
    assert raised.value.headers == {"x-should-retry": "false"}


async def test_a_relayed_failure_is_passed_on_at_once() -> None:
    model, waits = failing({"status": 503, "message": "busy"}), Waits()
    relayed: UpstreamResponse = await RetryingModel(model, sleep=waits).relay(BODY, {})
    assert (relayed.status, len(model.requests), waits) == (503, 1, [])


async def test_the_models_are_those_of_the_model_behind() -> None:
    model = failing()
    assert await RetryingModel(model).models() == await model.models()
