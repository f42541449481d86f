"""The submit tool."""

import json
from collections.abc import Mapping

from policies.workspace import ANSWER_FILES
from sandbox_runtime.sandbox import Lease, OnOutput
from sandbox_runtime.tools.arguments import checked
from sandbox_runtime.tools.base import Mistake, Observation, ToolSchema

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
            answer = _given_answer(arguments)
        except Mistake as mistake:
            return Observation(str(mistake))
        return Observation("Submitted.", finished=True, answer=answer)


def _given_answer(arguments: object) -> str | None:
    if isinstance(arguments, Mapping) and "answer" in arguments:
        # What else stands beside an answer is no reason to refuse it.
        answer = arguments["answer"]
        if isinstance(answer, int | float):
            answer = json.dumps(answer)
        arguments = {"answer": answer}
    text = checked(SCHEMA, arguments).get("answer")
    return text if text and text.strip() else None
