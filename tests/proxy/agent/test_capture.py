"""The capture of model calls, when the capture itself fails."""

from dataclasses import replace

from policies.limits import Limits
from proxy.agent.budget import RunBudget
from proxy.agent.capture import model_of_run
from proxy.agent.events import Event, ModelCallFinished
from proxy.models.scripted import ScriptedModel, text_reply
from tests.fakes.tasks import make_task
from tests.proxy.agent.runs import MemoryArtifactStore

QUESTION = {"role": "user", "content": "How many?"}
TASK = replace(make_task("r1", MemoryArtifactStore(), "m", [QUESTION]), capture="messages")


async def test_failed_capture_does_not_fail_the_call_and_its_messages_are_in_the_next_capture() -> (
    None
):
    emitted: list[ModelCallFinished] = []
    failures = [ValueError("no room")]

    async def emit(event: Event) -> None:
        if failures:
            raise failures.pop()
        assert isinstance(event, ModelCallFinished)
        emitted.append(event)

    model = ScriptedModel([text_reply("One.")])
    captured = model_of_run(model, RunBudget(TASK, Limits(), 0.0), TASK, emit)
    body = {"model": "m", "messages": [QUESTION]}
    replies = [(await captured.complete(body, None)).message["content"] for _ in range(3)]
    assert replies == ["One."] * 3
    assert [(each.shared_prefix, each.messages) for each in emitted] == [(0, [QUESTION]), (1, [])]
