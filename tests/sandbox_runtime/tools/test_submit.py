"""The submit tool ends a run."""

import pytest

from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.tools.base import Observation
from sandbox_runtime.tools.submit import Submit
from tests.fakes.memory_sandbox import MemoryLease, MemorySandbox
from tests.sandbox_runtime.transfer import PLENTY_S


async def _submit(arguments: object) -> Observation:
    return await Submit().run(MemoryLease(MemorySandbox()), arguments, timeout_s=PLENTY_S)


def _finished(answer: str | None) -> Observation:
    return Observation("Submitted.", finished=True, answer=answer)


async def test_submitted_answer_ends_the_run() -> None:
    assert await _submit({"answer": " 42\n"}) == _finished(" 42\n")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (42, "42"),
        (2.5, "2.5"),
        (True, "true"),
    ],
)
async def test_number_or_boolean_is_accepted_as_the_answer(given: object, text: str) -> None:
    assert await _submit({"answer": given}) == _finished(text)


@pytest.mark.parametrize("given", [["ü", 1], {"x": None}])
async def test_answer_that_is_an_object_or_array_is_refused(given: object) -> None:
    observation = await _submit({"answer": given})
    assert (observation.finished, observation.answer) == (False, None)
    assert "answer" in observation.text


@pytest.mark.parametrize("arguments", [{}, None, {"answer": None}, {"answer": " "}])
async def test_submit_without_an_answer_ends_the_run(arguments: object) -> None:
    assert await _submit(arguments) == _finished(None)


async def test_extra_arguments_beside_an_answer_are_ignored() -> None:
    assert await _submit({"answer": "42", "certainty": 0.9}) == _finished("42")


@pytest.mark.parametrize("arguments", ["42", ["42"], {"result": "42"}, {"answer": "\ud800"}])
async def test_wrong_arguments_do_not_end_the_run(arguments: object) -> None:
    observation = await _submit(arguments)
    assert not observation.finished
    assert '{"answer": <string, optional>}' in observation.text


async def test_submit_does_not_wait_for_a_sandbox() -> None:
    lease = MemoryLease(SandboxStartError("there is none"))
    assert await Submit().run(lease, {}, timeout_s=PLENTY_S) == _finished(None)
