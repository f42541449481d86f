"""The tools that a model can call in a sandbox: `make_tools` returns those of a run."""

from policies.profile import Profile
from sandbox_runtime.tools.base import Tool
from sandbox_runtime.tools.bash import ExecuteBash, ReferenceBash
from sandbox_runtime.tools.editor import StrReplaceEditor
from sandbox_runtime.tools.reference_editor import ReferenceEditor
from sandbox_runtime.tools.submit import ReferenceSubmit, Submit


def make_tools(profile: Profile = Profile()) -> tuple[Tool, ...]:
    """Return new tools for one run, in the order of the reference agent: editor, bash, submit.
    StrReplaceEditor keeps the run's edits for undo_edit."""
    shown = profile.observation
    if profile.agent.style != "reference":
        return (StrReplaceEditor(shown), ExecuteBash(shown, profile.limits), Submit())
    if not profile.agent.prompts.tools:
        return (ReferenceEditor(), ReferenceBash(shown), ReferenceSubmit())
    editor, bash, submit = map(dict, profile.agent.prompts.tools)
    return (ReferenceEditor(editor), ReferenceBash(shown, bash), ReferenceSubmit(submit))
