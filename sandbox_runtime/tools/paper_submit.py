"""The submit tool in the paper's manner: it takes nothing."""

from collections.abc import Mapping

from policies.reference_style import FINISHED
from policies.workspace import OUTPUT_DIR
from sandbox_runtime.sandbox import Lease, OnOutput
from sandbox_runtime.tools.base import Observation, ToolSchema

SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": "submit",
        "description": (
            f"End your work, the results being in {OUTPUT_DIR}. Nothing can be done afterwards."
        ),
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


class PaperSubmit:
    """Ends the run."""

    name = "submit"

    def __init__(self, schema: ToolSchema = SCHEMA) -> None:
        self.schema = schema

    async def run(
        self,
        lease: Lease,
        arguments: object,
        *,
        timeout_s: float,
        on_output: OnOutput | None = None,
    ) -> Observation:
        # A model that is used to it from elsewhere gives the answer here.
        answer = arguments.get("answer") if isinstance(arguments, Mapping) else None
        is_one = isinstance(answer, str) and answer.strip()
        return Observation(FINISHED, finished=True, answer=answer if is_one else None)
