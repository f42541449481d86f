"""Retries of model calls."""

from collections.abc import Mapping
from typing import Any

import pytest

from proxy.agent.events import ModelCallAccepted, ModelCallFailed, ModelDelta
from proxy.agent.model import Completion, StopRetryingError, UpstreamResponse
from proxy.errors import BackendError, ContextOverflowError, ToolsRefusedError
from proxy.models.retry import RetryingModel
from proxy.models.scripted import ScriptedModel, text_reply
from tests.proxy.models.delta_recorder import DeltaRecorder

BODY = {"messages": [{"role": "user", "content": "What is 6 times 7?"}]}


def failing_model(*errors: dict[str, Any]) -> ScriptedModel:
    """Return a model that fails with these errors before it answers 42."""
    return ScriptedModel([*({"error": error} for error in errors), text_reply("42")])


class Delays(list[float]):
    """A `sleep` that records the delays instead of waiting."""

    async def __call__(self, delay_s: float) -> None:
        self.append(delay_s)


async def ignore(delta: ModelDelta) -> None:
    pass


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
async def test_temporary_failure_is_retried(status: int) -> None:
    model, delays = failing_model({"status": status, "message": "not now"}), Delays()
    completion = await RetryingModel(model, sleep=delays).complete(BODY, ignore)
    assert completion.message["content"] == "42"
    assert model.requests == [BODY, BODY]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
async def test_permanent_failure_is_not_retried(status: int) -> None:
    model, delays = failing_model({"status": status, "message": "never"}), Delays()
    with pytest.raises(BackendError, match="never"):
        await RetryingModel(model, sleep=delays).complete(BODY, None)
    assert (len(model.requests), delays) == (1, [])


async def test_context_overflow_is_not_retried_whatever_its_status() -> None:
    error = {"status": 500, "message": "too long", "code": "context_length_exceeded"}
    model, delays = failing_model(error), Delays()
    with pytest.raises(ContextOverflowError):
        await RetryingModel(model, sleep=delays).complete(BODY, None)
    assert (len(model.requests), delays) == (1, [])


async def test_refusal_of_tools_is_not_retried_whatever_its_status() -> None:
    model = failing_model({"status": 500, "message": "tools param requires --jinja flag"})
    delays = Delays()
    with pytest.raises(ToolsRefusedError):
        await RetryingModel(model, sleep=delays).complete(BODY, None)
    assert (len(model.requests), delays) == (1, [])


async def test_backoff_grows_to_a_maximum_with_full_jitter() -> None:
    ceilings = [1.0, 2.0, 4.0, 5.0, 5.0]
    seen: list[list[float]] = []
    for _ in range(50):
        model, delays = failing_model(*[{"status": 503, "message": "busy"}] * 5), Delays()
        retrying = RetryingModel(model, attempts=6, base_delay_s=1, max_delay_s=5, sleep=delays)
        await retrying.complete(BODY, None)
        seen.append(list(delays))
    for waits_of_one_attempt, ceiling in zip(zip(*seen, strict=True), ceilings, strict=True):
        assert 0 <= min(waits_of_one_attempt) < max(waits_of_one_attempt) <= ceiling
        assert max(waits_of_one_attempt) > ceiling / 2 > min(waits_of_one_attempt)


async def test_last_error_is_raised_after_the_last_attempt() -> None:
    errors = [{"status": 503, "message": f"busy {number}"} for number in range(1, 4)]
    model, delays = failing_model(*errors), Delays()
    with pytest.raises(BackendError, match="busy 3"):
        await RetryingModel(model, attempts=3, sleep=delays).complete(BODY, None)
    assert (len(model.requests), len(delays)) == (3, 2)


async def test_delay_before_a_retry_is_at_least_retry_after() -> None:
    error = {"status": 429, "message": "slow down", "retry_after_s": 20}
    model, delays = failing_model(error), Delays()
    await RetryingModel(model, base_delay_s=0.5, max_delay_s=30, sleep=delays).complete(BODY, None)
    assert delays == [20]


async def test_failure_with_a_retry_after_beyond_the_maximum_is_not_retried() -> None:
    error = {"status": 429, "message": "come back tomorrow", "retry_after_s": 86400}
    model, delays = failing_model(error), Delays()
    with pytest.raises(BackendError, match="come back tomorrow") as raised:
        await RetryingModel(model, max_delay_s=30, sleep=delays).complete(BODY, None)
    assert (raised.value.retry_after_s, delays) == (86400, [])


class TruncatedModel(ScriptedModel):
    """A model that streams its completion, then loses the connection."""

    async def complete(self, body: Mapping[str, Any], on_delta: Any) -> Completion:
        await super().complete(body, on_delta)
        raise BackendError("lost", status=502)


async def test_truncated_stream_is_not_retried_if_the_listener_raises_stop_retrying_error() -> None:
    async def show(delta: ModelDelta) -> None:
        if isinstance(delta, ModelCallFailed):
            raise StopRetryingError

    model, delays = TruncatedModel([text_reply("42")]), Delays()
    with pytest.raises(BackendError, match="lost"):
        await RetryingModel(model, sleep=delays).complete(BODY, show)
    assert (len(model.requests), delays) == (1, [])


async def test_truncated_completion_is_retried() -> None:
    model, delays = TruncatedModel([text_reply("42")]), Delays()
    with pytest.raises(BackendError, match="lost"):
        await RetryingModel(model, sleep=delays).complete(BODY, ignore)
    assert (len(model.requests), len(delays)) == (5, 4)


async def test_failure_of_an_unstreamed_call_is_retried() -> None:
    model, delays = TruncatedModel([text_reply("42")]), Delays()
    with pytest.raises(BackendError, match="lost"):
        await RetryingModel(model, attempts=3, sleep=delays).complete(BODY, None)
    assert len(model.requests) == 3


class FailingOnceModel(ScriptedModel):
    """A model that accepts its first call, then loses the connection before the first piece."""

    async def complete(self, body: Mapping[str, Any], on_delta: Any) -> Completion:
        if not self.requests:
            self.requests.append(dict(body))
            await on_delta(ModelCallAccepted())
            raise BackendError("lost", status=502)
        return await super().complete(body, on_delta)


async def test_accepted_call_that_fails_before_its_first_piece_is_retried() -> None:
    deltas, model = DeltaRecorder(), FailingOnceModel([text_reply("42")])
    completion = await RetryingModel(model, sleep=Delays()).complete(BODY, deltas)
    assert (completion.message["content"], deltas.text) == ("42", "42")


async def test_listener_gets_each_failure_before_the_delay() -> None:
    errors = [{"status": 503, "message": "busy"}, {"status": 429, "message": "slow down"}]
    deltas, delays = DeltaRecorder(), Delays()
    await RetryingModel(failing_model(*errors), sleep=delays).complete(BODY, deltas)
    failed = [ModelCallFailed(503, delays[0]), ModelCallFailed(429, delays[1])]
    assert deltas.progress == [*failed, ModelCallAccepted()]


async def test_listener_can_prevent_a_retry() -> None:
    async def decline(delta: ModelDelta) -> None:
        raise StopRetryingError

    model, delays = failing_model(*[{"status": 503, "message": "busy"}] * 3), Delays()
    with pytest.raises(BackendError, match="busy") as raised:
        await RetryingModel(model, sleep=delays).complete(BODY, decline)
    assert (raised.value.status, len(model.requests), delays) == (503, 1, [])
    assert raised.value.headers == {}


async def test_error_after_several_attempts_tells_clients_not_to_retry() -> None:
    model = failing_model(*[{"status": 503, "message": "busy"}] * 2)
    with pytest.raises(BackendError) as raised:
        await RetryingModel(model, attempts=2, sleep=Delays()).complete(BODY, None)
    assert raised.value.headers == {"x-should-retry": "false"}


async def test_failure_of_a_relayed_request_is_not_retried() -> None:
    model, delays = failing_model({"status": 503, "message": "busy"}), Delays()
    relayed: UpstreamResponse = await RetryingModel(model, sleep=delays).relay(BODY, {})
    assert (relayed.status, len(model.requests), delays) == (503, 1, [])


async def test_retrying_model_lists_the_models_of_the_wrapped_model() -> None:
    model = failing_model()
    assert await RetryingModel(model).models() == await model.models()
