"""The tools a model is given: schema and doing side by side."""

from policies.limits import Limits
from policies.observation import DEFAULT_LIMITS, ObservationLimits
from sandbox_runtime.tools.base import Tool
from sandbox_runtime.tools.execute_bash import ExecuteBash
from sandbox_runtime.tools.str_replace_editor import StrReplaceEditor
from sandbox_runtime.tools.submit import Submit


def make_tools(
    limits: Limits = Limits(), shown: ObservationLimits = DEFAULT_LIMITS
) -> tuple[Tool, ...]:
    """The paper's three tools in its order, new for each run: the editor remembers what to undo."""
    return (StrReplaceEditor(shown), ExecuteBash(shown, limits), Submit())
