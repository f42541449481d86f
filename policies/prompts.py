"""The words that go to the model beside the client's own."""

from collections.abc import Sequence

from policies.answer_form import AnswerForm
from policies.egress import Egress
from policies.limits import Limits, StopReason
from policies.workspace import INPUT_DIR, OUTPUT_DIR, WORKING_DIR

TOOL_NAMES = ("str_replace_editor", "execute_bash", "submit")
"""Ours, in the order in which the model is told of them."""
NUDGE = (
    "No tool was called. If there is work left, go on with the tools. If you are done, call submit"
    " with the complete final answer."
)
FINAL_ANSWER = (
    "Tools are no longer available. Write the final answer to the request now, complete and in the"
    " form it asked for, from what you have found out."
)
WHY_NO_MORE_TOOLS = {
    StopReason.MAX_TURNS: "The limit of steps is reached.",
    StopReason.WALL_TIME: "The time is up.",
    StopReason.DEADLINE: "The time is up.",
    StopReason.TOKEN_BUDGET: "The token budget is used up.",
    StopReason.TOOL_OUTPUT_BUDGET: "The budget for tool output is used up.",
    StopReason.CONTEXT_WINDOW: "The context window is full.",
}
CALL_NOW = "Call one of the tools that are left now, with what you have found out."
NO_MORE_CALLS = "Not run: no more tool calls are allowed. Hand in the final answer now."
NOT_RUN = "Not run: the work was already submitted."


def system_prompt(
    limits: Limits, egress: Egress = Egress(), names: Sequence[str] = TOOL_NAMES
) -> str:
    """What the model is told of its computer, `names` being those of its tools."""
    editor, bash, submit = names
    return (
        "You have a computer of your own: an isolated Linux sandbox that you use through the tools"
        f" {bash} and {editor}. Use it whenever computing, checking, searching or"
        " writing files gives a better answer than memory; answer simple things directly.\n"
        f"- Working directory: {WORKING_DIR}. Files the user gave: {INPUT_DIR}; the messages name"
        f" them in [brackets]. Put every file the user should receive into {OUTPUT_DIR}; nothing"
        " else is kept.\n"
        f"- {_network(egress)} The shell's directory, variables and functions carry over"
        f" between commands; one command may take {limits.command_timeout_s:g} s.\n"
        "- Nobody can answer questions while you work. When you are done, call"
        f" {submit} with the complete final answer as the user should read it; refer to produced"
        " files by their path."
    )


def _network(egress: Egress) -> str:
    if egress.mode == "none":
        return "The sandbox has no network."
    hosts = "public hosts" if egress.mode == "open" else f"these hosts: {', '.join(egress.allow)}"
    return (
        f"From the sandbox, HTTP and HTTPS reach {hosts}; nothing else does. Programs find the way"
        " by the proxy variables that are set."
    )


def call_request(stop: StopReason) -> str:
    """How the model is asked for the call that the client insists on."""
    return f"{WHY_NO_MORE_TOOLS.get(stop, '')} {CALL_NOW}".lstrip()


def final_request(stop: StopReason, form: AnswerForm | None = None) -> str:
    """How the model is asked for its last words."""
    words = (WHY_NO_MORE_TOOLS.get(stop), FINAL_ANSWER, form.words() if form else None)
    return " ".join(part for part in words if part)


def form_request(fault: str, form: AnswerForm) -> str:
    """How the model is asked for its last words again."""
    return f"That answer does not have the form that was asked for: {fault}\n{form.words()}"
