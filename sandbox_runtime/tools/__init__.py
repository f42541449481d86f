"""The tools a model is given: schema and doing side by side."""

from policies.profile import Profile
from sandbox_runtime.tools.base import Tool
from sandbox_runtime.tools.execute_bash import ExecuteBash
from sandbox_runtime.tools.paper_bash import PaperBash
from sandbox_runtime.tools.paper_editor import PaperEditor
from sandbox_runtime.tools.paper_submit import PaperSubmit
from sandbox_runtime.tools.str_replace_editor import StrReplaceEditor
from sandbox_runtime.tools.submit import Submit


def make_tools(profile: Profile = Profile()) -> tuple[Tool, ...]:
    """The paper's three tools in its order, new for each run: the editor remembers what to undo."""
    shown = profile.observation
    if profile.manner.kind == "paper":
        return _papers(profile)
    return (StrReplaceEditor(shown), ExecuteBash(shown, profile.limits), Submit())


def _papers(profile: Profile) -> tuple[Tool, ...]:
    """The same as the reference has them."""
    if not profile.manner.words.tools:
        return (PaperEditor(), PaperBash(profile.observation), PaperSubmit())
    editor, bash, submit = map(dict, profile.manner.words.tools)
    return (PaperEditor(editor), PaperBash(profile.observation, bash), PaperSubmit(submit))
