"""The texts that the proxy itself sends to the model: the system prompt and its instructions."""

from collections.abc import Sequence
from dataclasses import dataclass

from policies.answer_form import AnswerForm
from policies.egress import Egress, expanded_hosts
from policies.isolation import Isolation
from policies.limits import Limits, StopReason
from policies.profile import Profile
from policies.workspace import INPUT_DIR, OUTPUT_DIR, SHARED_DIR, WORKING_DIR

TOOL_NAMES = ("str_replace_editor", "execute_bash", "submit")
"""The sandbox tools, in the order of their descriptions for the model."""
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
    StopReason.COST_BUDGET: "The budget for what model calls cost is used up.",
    StopReason.COMMAND_BUDGET: "The limit of tool calls is reached.",
    StopReason.CPU_BUDGET: "The budget of processor time is used up.",
    StopReason.EGRESS_BUDGET: "The budget for network traffic is used up.",
    StopReason.TOOL_OUTPUT_BUDGET: "The budget for tool output is used up.",
    StopReason.DAILY_TOKEN_BUDGET: "Today's token budget is used up.",
    StopReason.DAILY_COST_BUDGET: "Today's budget for what model calls cost is used up.",
    StopReason.DAILY_COMMAND_BUDGET: "Today's limit of tool calls is reached.",
    StopReason.DAILY_CPU_BUDGET: "Today's budget of processor time is used up.",
    StopReason.DAILY_EGRESS_BUDGET: "Today's budget for network traffic is used up.",
    StopReason.DAILY_TOOL_OUTPUT_BUDGET: "Today's budget for tool output is used up.",
    StopReason.CONTEXT_WINDOW: "The context window is full.",
    StopReason.TRAJECTORY_TOKENS: "The limit of the trajectory's tokens is reached.",
}
SUMMARY_REQUEST = (
    "The context window is nearly full: what was said so far will be taken out of it. Write down"
    " now, in at most {words} words, all that you need to go on: what was asked for, what you have"
    " done and found out (numbers, names, the paths of files), what failed, and what is left to do."
    " Do nothing else yet; no tool is at hand."
)
SUMMARY = (
    "[Your own summary of the work so far. The earlier steps were taken out to fit the context"
    " window; files and processes in the sandbox are as you left them.]\n{summary}"
)
BEFORE_SUMMARY = "(My earlier steps stood here; my summary of them follows.)"
"""An assistant message before the summary, so that no user message follows another user message."""
CALL_NOW = "Call one of the tools that are left now, with what you have found out."
NO_MORE_CALLS = "Not run: no more tool calls are allowed. Hand in the final answer now."
CALLS_LEFT_OUT = "Only the first {count} calls of this turn were taken. Make the others anew."
NOT_RUN = "Not run: the work was already submitted."
NOT_SUBMITTED = (
    "Not run: other tools were called beside it. Hand in the answer when their results are there."
)
NO_BUDGET = "Not run. {why} Hand in the final answer now."


INSTRUCTIONS = (
    NUDGE,
    FINAL_ANSWER,
    *WHY_NO_MORE_TOOLS.values(),
    SUMMARY_REQUEST,
    CALL_NOW,
    NO_MORE_CALLS,
)
"""Instructions to the model between its turns. A reply that quotes one of them is not an answer."""

SANDBOX_USE = {
    "neutral": (
        "Use it whenever computing, checking, searching or writing files gives a better answer than"
        " memory; answer simple things directly."
    ),
    "compute_first": (
        "Derive every answer with it: write programs into files and run them, search the given"
        " files, check what you find. What you recall or work out in your head is a guess until a"
        " program has shown it, and a program that prints what you knew before has shown nothing."
    ),
}
"""The instruction on the use of the sandbox, by prompt style."""


EXPECTED_SOFTWARE = frozenset({"bash", "tar", "curl", "ps", "unzip", "mpmath"})
"""Software that the system prompt does not list, because models use it anyway."""
_MAX_SOFTWARE = 20
"""Maximum number of names of installed software in the system prompt."""


@dataclass(frozen=True, slots=True)
class SandboxContents:
    """The contents of the sandboxes that the system prompt describes."""

    software: tuple[str, ...] = ()
    """Programs and Python modules that a check of a sandbox has found; empty without a check."""
    has_shared_files: bool = False
    """True if sandboxes contain shared files of the operator."""


def system_prompt(
    profile: Profile = Profile(),
    contents: SandboxContents = SandboxContents(),
    tool_names: Sequence[str] = TOOL_NAMES,
) -> str:
    """Return the system prompt about the sandbox; empty if the profile's prompt is none.
    `tool_names` are the names of the tools, in the order of TOOL_NAMES.

    A test checks each sentence in a real sandbox: change the test together with the prompt.
    """
    if profile.prompt == "none":
        return ""
    editor, bash, submit = tool_names
    lines = (
        f"You have an isolated Linux sandbox, used through {bash} and {editor}."
        f" {SANDBOX_USE[profile.prompt]}",
        f"- {_directories_line(contents)}",
        f"- {_machine_line(profile.isolation, contents)}",
        f"- {_shell_line(profile.limits)}",
        f"- {_network_line(profile.isolation.network)}",
        f"- Nobody can answer questions while you work. You have {profile.limits.max_turns} turns."
        f" When you are done, call {submit} with the complete answer for the user; refer to"
        " produced files by their path.",
    )
    return "\n".join(lines)


def _directories_line(contents: SandboxContents) -> str:
    shared = f" What is always there to read: {SHARED_DIR}." if contents.has_shared_files else ""
    return (
        f"Working directory: {WORKING_DIR}. Files the user gave: {INPUT_DIR}.{shared} Put files"
        f" for the user into {OUTPUT_DIR}; nothing else is kept."
    )


def _machine_line(isolation: Isolation, contents: SandboxContents) -> str:
    user = "You are root." if isolation.level == "standard" else _STRICT_USER
    names = [name for name in contents.software if name not in EXPECTED_SOFTWARE][:_MAX_SOFTWARE]
    software = f" Installed: {', '.join(names)}." if names else ""
    return (
        f"{user} There are {isolation.memory_mib} MiB of memory, {isolation.cpus:g} processors and"
        f" {isolation.disk_mib} MiB of disk.{software}"
    )


_STRICT_USER = (
    f"You are not root and the system is read-only: write below {WORKING_DIR}, /tmp and your home"
    " directory."
)


def _shell_line(limits: Limits) -> str:
    longest_s = max(limits.command_timeout_s, limits.max_command_timeout_s)
    return (
        f"A command is stopped after {limits.command_timeout_s:g} s, or its timeout_s (at most"
        f" {longest_s:g}); after {limits.command_wait_s:g} s it goes on as a job."
    )


def _network_line(egress: Egress) -> str:
    if egress.mode == "none":
        return "The sandbox has no network."
    hosts = (
        "public hosts"
        if egress.mode == "open"
        else f"these hosts: {', '.join(expanded_hosts(egress))}"
    )
    return (
        f"From the sandbox, HTTP and HTTPS reach {hosts}; nothing else does. Programs find the way"
        " by the proxy variables that are set."
    )


def tool_call_request(stop_reason: StopReason) -> str:
    """Return the request for the tool call that the client's `tool_choice` demands."""
    return f"{WHY_NO_MORE_TOOLS.get(stop_reason, '')} {CALL_NOW}".lstrip()


def final_answer_request(stop_reason: StopReason, form: AnswerForm | None = None) -> str:
    """Return the request for the final answer. It states the reached limit and the form of the
    answer, if there are any."""
    parts = (WHY_NO_MORE_TOOLS.get(stop_reason), FINAL_ANSWER, form.instruction() if form else None)
    return " ".join(part for part in parts if part)


def summary_request(tokens: int) -> str:
    """Return the request for a summary of at most `tokens` tokens."""
    return SUMMARY_REQUEST.format(words=max(50, tokens // 2))


def summary_message(summary: str) -> str:
    """Return the message that replaces the summarized messages."""
    return SUMMARY.format(summary=summary)


def corrected_answer_request(error: str, form: AnswerForm) -> str:
    """Return the request for a final answer in the right form, after an answer with an error."""
    return f"That answer does not have the form that was asked for: {error}\n{form.instruction()}"
