"""The submit tool: Submit, which takes the final answer, and ReferenceSubmit of the reference
agent, whose schema has no argument."""

import json
from collections.abc import Mapping

from policies.reference_style import FINISHED
from policies.workspace import ANSWER_FILES, OUTPUT_DIR
from sandbox_runtime.sandbox import Lease, OnOutput
from sandbox_runtime.tools.base import Observation, ToolInputError, ToolSchema, parse_arguments

SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": "submit",
        "description": (
            "End your work with the final answer; without one, what you wrote to "
            f"{ANSWER_FILES[0]} is it."
        ),
        "parameters": {"type": "object", "properties": {"answer": {"type": "string"}}},
    },
}


class Submit:
    """Ends the run with the model's answer."""

    name = "submit"
    schema = SCHEMA

    async def run(
        self,
        lease: Lease,
        arguments: object,
        *,
        timeout_s: float,
        on_output: OnOutput | None = None,
    ) -> Observation:
        try:
            answer = _parse_answer(arguments)
        except ToolInputError as error:
            return Observation(str(error))
        return Observation("Submitted.", finished=True, answer=answer)


def _parse_answer(arguments: object) -> str | None:
    if isinstance(arguments, Mapping) and "answer" in arguments:
        # Further arguments beside an answer are no reason to refuse it.
        answer = arguments["answer"]
        if isinstance(answer, int | float):
            answer = json.dumps(answer)
        arguments = {"answer": answer}
    text = parse_arguments(SCHEMA, arguments).get("answer")
    return text if text and text.strip() else None


_REFERENCE_SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": "submit",
        "description": (
            f"End your work, the results being in {OUTPUT_DIR}. Nothing can be done afterwards."
        ),
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


class ReferenceSubmit:
    """Ends the run as the reference agent does."""

    name = "submit"

    def __init__(self, schema: ToolSchema = _REFERENCE_SCHEMA) -> None:
        self.schema = schema

    async def run(
        self,
        lease: Lease,
        arguments: object,
        *,
        timeout_s: float,
        on_output: OnOutput | None = None,
    ) -> Observation:
        # A model may give the answer here although the schema names no argument.
        answer = arguments.get("answer") if isinstance(arguments, Mapping) else None
        is_text = isinstance(answer, str) and answer.strip()
        return Observation(FINISHED, finished=True, answer=answer if is_text else None)
