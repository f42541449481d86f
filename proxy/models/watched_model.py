"""Measures the model calls of runs, and reports refusals of tools to the verdicts of
`proxy.models.tool_support`."""

from collections.abc import Mapping
from typing import Any

from policies.reply_checks import is_quoted
from policies.tool_support import ToolVerdict
from proxy.agent.events import OnDelta
from proxy.agent.model import Completion, Model, ModelWrapper
from proxy.errors import BackendError, ToolsRefusedError, no_tools_error
from proxy.metrics import Metrics
from proxy.models.tool_support import ToolVerdicts


class WatchedModel(ModelWrapper):
    """Measures the model calls of runs, and notes the backend's refusals of tools. The error of a
    refusal has the text of the verdict if the model's setting is `probe`."""

    def __init__(self, model: Model, verdicts: ToolVerdicts, metrics: Metrics) -> None:
        super().__init__(model)
        self._verdicts = verdicts
        self._metrics = metrics

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        try:
            return await self._metrics.model_call(self._model.complete, body, on_delta)
        except ToolsRefusedError as error:
            if is_quoted(error.words, body):
                raise  # a quotation of the client's own text proves nothing
            verdict = self._verdicts.note_refusal(str(body.get("model")), error.message)
            raise _refusal_error(verdict, error) from error


def _refusal_error(verdict: ToolVerdict, error: ToolsRefusedError) -> BackendError:
    """Return the error that the agent loop gets for a refusal of tools. With `tool_support: always`
    the error is not a ToolsRefusedError, so that the loop does not answer without tools."""
    if verdict.reason:
        return no_tools_error(verdict)
    return BackendError(
        error.message, status=error.status, type=error.type, code=error.code, param=error.param
    )
