"""What a model sees of its tools in the paper's manner: the reference's texts, byte for byte."""

import re

from policies.observation import CommandOutcome, ObservationLimits

FINISHED = "<<< Finished >>>"
NO_COMMAND = "Error: No command provided."
TIMED_OUT = 124
"""The exit code of a command that was stopped; one that ends so by itself is taken for it."""
_NOT_SHOWN = re.compile(r"\x1b\[[0-9;]*m|\r")
_RULE = "-" * 50
_CUT = f"{_RULE}\n<Observation truncated in middle for saving context>\n{_RULE}"


def bash_words(outcome: CommandOutcome, limits: ObservationLimits) -> str:
    """How a command ended and what it printed."""
    if outcome.timed_out or outcome.exit_code == TIMED_OUT:
        late = f"The command took too long to execute (>{outcome.timeout_s:g}s)"
        return _bash_words("-1", late, "")
    ended = f"Error: Exit code {outcome.exit_code}" if outcome.exit_code else "0"
    shown = (_cut(as_terminal(text), limits) for text in (outcome.stdout, outcome.stderr))
    return _bash_words(ended, *shown)


def _bash_words(ended: str, stdout: str, stderr: str) -> str:
    printed = _stream("STDOUT", stdout if stdout.strip() else "")
    if stderr.strip():
        printed = f"{printed}\n{_stream('STDERR', stderr)}"
    return f"Exit code: {ended}\n{tool_words('execute_bash', printed)}"


def nothing_run_words() -> str:
    """What is said to a command in arguments that are no object."""
    return f"Exit code: 0\n{tool_words('execute_bash', '')}"


def tool_words(name: str, text: str) -> str:
    """What came of a tool; the reference's brackets are escaped for its own console."""
    return f"Execution output of \\[{name}]:\n{text}"


def unknown_words(name: str) -> str:
    """What is said to a call of a tool that there is not."""
    return f"Unknown action: {name}"


def steps_words(left: int) -> str:
    """What ends the last message before each call of the model."""
    return f"\nSteps Remaining: {left}"


def as_terminal(text: str) -> str:
    """The text without colours and carriage returns."""
    return _NOT_SHOWN.sub("", text)


def _stream(name: str, text: str) -> str:
    return f"\\[{name}]\n{text}"


def _cut(text: str, limits: ObservationLimits) -> str:
    """The text, or so many of its first and of its last lines; a line is never cut."""
    lines, half = text.splitlines(), max(1, limits.max_lines // 2)
    if len(lines) <= 2 * half:
        return text
    return "\n".join([*lines[:half], _CUT, *lines[-half:]])
