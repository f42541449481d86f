"""Validation of the final answer against its form, and refusals."""

from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import pytest

from policies.answer_form import ANY_OBJECT, AnswerForm
from policies.isolation import Isolation
from policies.limits import Limits, StopReason
from policies.profile import Profile
from proxy.agent.answer import AnswerWriter
from proxy.agent.budget import RunBudget
from proxy.agent.context import ObservationFiles
from proxy.agent.context_windows import ContextWindow, ContextWindows
from proxy.agent.conversation import Conversation
from proxy.agent.events import Event, ModelRefused, OnDelta
from proxy.agent.final_answer import FinalAnswer, FinalAnswerCall, check_form
from proxy.agent.guard import Guard
from proxy.agent.metered_model import MeteredModel
from proxy.agent.model import Completion
from proxy.agent.prose import ProseRules
from proxy.agent.result import Result
from proxy.agent.status_hold import FirstCallProgress
from proxy.agent.tools import ToolExecutor
from proxy.models.scripted import ScriptedModel, text_reply, tool_reply
from sandbox_runtime.sandbox import Sandbox
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.tasks import make_task
from tests.proxy.agent.runs import FAILURE, SUBMIT, USER, MemoryArtifactStore, Run, bash, valid

OBJECT: dict[str, Any] = {
    "answer_form": ANY_OBJECT,
    "final": {"response_format": {"type": "json_object"}},
}
REFUSAL = {"message": {"role": "assistant", "content": None, "refusal": "I will not."}}


async def answered(run: Run, **fields: Any) -> Result:
    """Return the result of a run. Assert that its answer equals the streamed answer."""
    result = await run.go(**fields)
    assert run.events.answer == result.answer
    return result


@pytest.mark.parametrize("stream", [False, True])
async def test_valid_answer_is_not_requested_again(stream: bool) -> None:
    model = ScriptedModel([SUBMIT, text_reply('{"n": 42}')])
    result = await answered(Run(model), **OBJECT, stream=stream)
    assert (result.answer, result.finish_reason, result.warnings) == ('{"n": 42}', "stop", ())
    assert len(model.requests) == 2
    assert model.requests[-1]["messages"][-1]["content"].endswith(
        "Answer with one JSON object and nothing else."
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_invalid_answer_is_requested_again_with_a_message_about_its_fault(
    stream: bool,
) -> None:
    model = ScriptedModel([SUBMIT, text_reply("It is 42."), text_reply('{"n": 42}')])
    result = await answered(Run(model), **OBJECT, stream=stream)
    assert (result.answer, result.finish_reason, result.warnings) == ('{"n": 42}', "stop", ())
    second, third = model.requests[1:]
    answer_message, complaint = third["messages"][-2:]
    assert answer_message == {"role": "assistant", "content": "It is 42."}
    assert "It is not JSON" in complaint["content"]
    assert third["response_format"] == second["response_format"] == {"type": "json_object"}
    assert "tools" not in third
    assert valid(third)


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_that_stays_invalid_has_finish_reason_length_and_a_warning(
    stream: bool,
) -> None:
    model = ScriptedModel([SUBMIT, text_reply("It is 42."), text_reply("42, I said.")])
    result = await answered(Run(model), **OBJECT, stream=stream)
    assert (result.answer, result.finish_reason) == ("42, I said.", "length")
    (warning,) = result.warnings
    assert warning.code == "response_format_violated"
    assert "It is not JSON" in warning.message
    assert len(model.requests) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_code_fence_around_an_answer_is_stripped_without_another_call(stream: bool) -> None:
    model = ScriptedModel([SUBMIT, text_reply('```json\n{"n": 42}\n```')])
    result = await answered(Run(model), **OBJECT, stream=stream)
    assert (result.answer, len(model.requests)) == ('{"n": 42}', 2)


async def test_schema_is_sent_to_the_model_and_its_answers_are_validated() -> None:
    form = AnswerForm({"type": "object", "required": ["n"]})
    model = ScriptedModel([SUBMIT, text_reply("{}"), text_reply('{"n": 42}')])
    result = await answered(Run(model), answer_form=form, final=OBJECT["final"])
    assert (result.answer, result.warnings) == ('{"n": 42}', ())
    assert '"required": ["n"]' in model.requests[1]["messages"][-1]["content"]
    assert '"n" is a required property' in model.requests[2]["messages"][-1]["content"]


async def test_first_answer_is_returned_if_the_retry_of_an_invalid_answer_fails() -> None:
    model = ScriptedModel([SUBMIT, text_reply("It is 42.")])
    result = await answered(Run(model), **OBJECT)
    assert (result.answer, result.finish_reason) == ("It is 42.", "length")
    assert result.warnings[0].code == "response_format_violated"


@pytest.mark.parametrize(
    ("prose", "finish_reason", "has_warning"),
    [('{"n": 42}', "stop", False), ("42", "length", True)],
)
async def test_prose_answer_is_validated_and_returned_if_the_final_call_fails(
    prose: str, finish_reason: str, has_warning: bool
) -> None:
    model = ScriptedModel([text_reply(prose), FAILURE])
    result = await answered(Run(model), **OBJECT)
    assert (result.answer, result.finish_reason) == (prose, finish_reason)
    assert bool(result.warnings) is has_warning


async def test_first_answer_is_returned_if_the_retry_of_an_invalid_answer_times_out() -> None:
    class Slow(ScriptedModel):
        async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
            if len(self.requests) == 1:
                await anyio.sleep_forever()
            return await super().complete(body, on_delta)

    async def ignore(event: Event) -> None:
        """Ignore the event."""

    async def prepare_nothing(sandbox: Sandbox) -> Sequence[str]:
        return ()

    async def no_sandbox() -> None:
        """Return no sandbox."""

    model = Slow([text_reply("It is 42.")])
    task = make_task("r1", MemoryArtifactStore(), "m", [USER], **OBJECT)
    writer = AnswerWriter(task, ignore)
    async with MemorySandboxes().lease(Isolation()) as lease:
        executor = ToolExecutor(
            [], lease, ignore, Guard(Profile(), ignore), prepare=prepare_nothing
        )
        files = ObservationFiles("r1", no_sandbox)
        metered = MeteredModel(model, RunBudget(task, Limits(), 0.0))
        conversation = Conversation(
            *(metered, task, [USER], task.params, [], ""),
            ContextWindow(ContextWindows(), model, "", "m"),
            files,
        )
        first_call = FirstCallProgress(None, ignore)
        call = FinalAnswerCall(
            task, conversation, writer, executor, ignore, first_call, ProseRules()
        )
        final = await call.answer(StopReason.SUBMITTED, "42", timeout_s=0.1)
    assert (final.text, final.finish_reason) == ("It is 42.", "length")
    assert [warning.code for warning in final.warnings] == ["response_format_violated"]


async def test_truncated_answer_is_not_retried() -> None:
    model = ScriptedModel([SUBMIT, {"content": '{"n": ', "finish_reason": "length"}])
    result = await answered(Run(model), **OBJECT)
    assert (result.answer, result.finish_reason) == ('{"n": ', "length")
    assert len(model.requests) == 2


async def test_endless_schema_validation_times_out() -> None:
    steps = {f"s{n}": {"allOf": [{"$ref": f"#/$defs/s{n + 1}"}] * 2} for n in range(60)}
    endless = AnswerForm({"$ref": "#/$defs/s0", "$defs": {**steps, "s60": {}}})
    final = await check_form(endless, FinalAnswer("{}", "stop"), timeout_s=0.5)
    assert (final.text, final.finish_reason) == ("{}", "stop")
    assert [warning.code for warning in final.warnings] == ["response_format_unchecked"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [[REFUSAL], [tool_reply(bash("ls")), REFUSAL]])
async def test_refusal_by_the_model_ends_the_run(
    script: list[dict[str, Any]], stream: bool
) -> None:
    run = Run(ScriptedModel(script))
    result = await answered(run, **OBJECT, stream=stream)
    assert (result.answer, result.refusal) == ("", "I will not.")
    assert (result.stop_reason, result.finish_reason) == (StopReason.REFUSED, "stop")
    assert ModelRefused("I will not.") in run.events


@pytest.mark.parametrize("stream", [False, True])
async def test_refusal_in_the_final_call_is_returned_as_refusal(stream: bool) -> None:
    run = Run(ScriptedModel([SUBMIT, REFUSAL]))
    result = await answered(run, **OBJECT, stream=stream)
    assert (result.answer, result.refusal, result.warnings) == ("", "I will not.", ())
    assert (result.stop_reason, result.finish_reason) == (StopReason.SUBMITTED, "stop")
    assert ModelRefused("I will not.") in run.events


async def test_response_format_still_applies_after_the_turn_limit() -> None:
    model = ScriptedModel([tool_reply(bash("ls")), text_reply("?"), text_reply('{"n": 1}')])
    result = await answered(Run(model, limits=Limits(max_turns=1)), **OBJECT)
    assert (result.answer, result.stop_reason) == ('{"n": 1}', StopReason.MAX_TURNS)
