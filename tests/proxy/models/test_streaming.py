"""Running token counts of a stream, and servers that refuse to stream."""

import anyio
import pytest

from proxy.agent.budget import RunBudget
from proxy.agent.events import ModelDelta, TextDelta, TokenCount
from proxy.agent.metered_model import MeteredModel
from proxy.agent.model import CompletionStopped
from proxy.errors import BackendError
from proxy.models.completion_builder import COUNT_EVERY, CompletionBuilder
from proxy.models.openai_http import OpenAIHTTPModel
from proxy.models.scripted import text_reply
from proxy.models.streaming import StreamSupport, refuses_to_stream
from tests.fakes.backend import Refusal, chunk, scripted_backend
from tests.fakes.tasks import make_task
from tests.proxy.agent.runs import USER, MemoryArtifactStore
from tests.proxy.models.delta_recorder import DeltaRecorder

BODY = {"model": "m", "messages": [USER]}


async def test_model_that_refused_to_stream_is_not_streamed_again() -> None:
    refusal = Refusal(400, "Streaming is not supported by this deployment.")
    script = [refusal, text_reply("42"), text_reply("43"), text_reply("44")]
    async with scripted_backend(script) as backend:
        model = OpenAIHTTPModel(backend.base_url, api_key=None, timeout_s=5)
        deltas = DeltaRecorder()
        with anyio.fail_after(5):
            await model.complete(BODY, deltas)
            await model.complete(BODY, deltas)
            await model.complete({**BODY, "model": "other"}, deltas)
        await model.aclose()
    assert deltas.text == "424344"
    assert ["stream" in seen.body for seen in backend.requests] == [True, False, False, True]


async def test_refusal_to_stream_with_certain_parameters_is_not_remembered() -> None:
    refusal = Refusal(400, "Streaming is not supported with beam search.")
    script = [refusal, text_reply("42"), text_reply("43")]
    async with scripted_backend(script) as backend:
        model = OpenAIHTTPModel(backend.base_url, api_key=None, timeout_s=5)
        deltas = DeltaRecorder()
        with anyio.fail_after(5):
            await model.complete({**BODY, "use_beam_search": True}, deltas)
            await model.complete(BODY, deltas)
        await model.aclose()
    assert deltas.text == "4243"
    assert ["stream" in seen.body for seen in backend.requests] == [True, False, True]


def test_refusal_to_stream_is_remembered_for_ten_minutes() -> None:
    now = 0.0
    streaming = StreamSupport(lambda: now)
    streaming.note_refusal("m", BackendError("cannot stream", status=400))
    assert (streaming.is_supported("m"), streaming.is_supported("other")) == (False, True)
    now = 601.0
    assert streaming.is_supported("m")


@pytest.mark.parametrize(
    ("message", "refuses"),
    [
        ("stream is not supported for this model", True),
        ("This endpoint does not support streaming.", True),
        ("Streaming responses are not available here", True),
        ("We cannot stream this model", True),
        ("logprobs is not supported with tools + stream", False),
        ("Parameter 'n' is not supported when stream is on", False),
        ("The model does not exist", False),
    ],
)
def test_refusal_to_stream_is_recognized(message: str, refuses: bool) -> None:
    assert refuses_to_stream(BackendError(message, status=400)) is refuses
    assert not refuses_to_stream(BackendError(message, status=500))


@pytest.mark.parametrize(
    ("owner", "fields"),
    [
        ("vllm", {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
        ("sglang", {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
        ("llamacpp", {"stream_options": {"include_usage": True}, "timings_per_token": True}),
        ("openai", {"stream_options": {"include_usage": True}}),
    ],
)
def test_running_token_counts_are_requested_from_servers_that_have_them(
    owner: str, fields: dict[str, object]
) -> None:
    streaming = StreamSupport()
    streaming.note_server_kind([{"id": "m", "owned_by": owner}])
    assert streaming.request_body(BODY) == {**BODY, "stream": True, **fields}


USAGE = {"prompt_tokens": 7, "completion_tokens": 21, "total_tokens": 28}
TIMINGS = {"prompt_n": 5, "cache_n": 2, "predicted_n": 21}


@pytest.mark.parametrize("counted", [{"usage": USAGE}, {"timings": TIMINGS}])
def test_running_token_count_is_emitted_every_few_chunks(counted: dict[str, object]) -> None:
    builder = CompletionBuilder()
    deltas: list[ModelDelta] = []
    for _ in range(COUNT_EVERY * 2):
        deltas += builder.add({**chunk({"content": "a"}), **counted})
    counts = [delta for delta in deltas if isinstance(delta, TokenCount)]
    assert counts == [TokenCount(7, 21)] * 2


async def test_usage_of_a_stopped_completion_is_computed_from_the_running_token_count() -> None:
    class Counting:
        async def complete(self, body: object, on_delta: object) -> object:
            assert callable(on_delta)
            for piece in (TextDelta("a"), TokenCount(7, 21), TextDelta("b"), TextDelta("c")):
                await on_delta(piece)
            raise AssertionError

    async def stop_at_c(delta: ModelDelta) -> None:
        if delta == TextDelta("c"):
            raise CompletionStopped("max_tokens")

    task = make_task(run_id="r", artifact_store=MemoryArtifactStore(), model="m", messages=[USER])
    budget = RunBudget(task, task.profile.limits, 0.0)
    completion = await MeteredModel(Counting(), budget).complete(BODY, stop_at_c)  # type: ignore[arg-type] # it answers
    assert completion.usage == {"prompt_tokens": 7, "completion_tokens": 23, "total_tokens": 30}
    assert (completion.message["content"], completion.finish_reason) == ("abc", "length")
