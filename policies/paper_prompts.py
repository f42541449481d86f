"""The prompts of the paper's style.

They have the structure of the reference implementation's prompts in the project's own words, unless
the operator supplies the reference's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from policies.workspace import INPUT_DIR, OUTPUT_DIR, WORKING_DIR

_SYSTEM = """\
You solve demanding problems by programming, and you are very good at it.

<TASK>
Carry out the task you are given, exactly as it asks.
</TASK>

<DIRECTORIES>
- You work in: {working_dir}
- What the user gave you lies in: {input_dir}
- Everything you produce belongs in: {output_dir}
</DIRECTORIES>

<WORKFLOW>
1. Study the problem until you know what is asked.
2. If it speaks of files, look into {input_dir}.
3. Choose a way to the solution.
4. **You must write a program to a file and run it.** Reasoning alone, a bare print of a result and
a result written into the code do not count.
5. Leave all results in {output_dir}.
</WORKFLOW>

<IMPORTANT_NOTES>
- execute_bash runs commands and programs.
- str_replace_editor shows, makes and changes files.
- submit ends your work; call it when all is done.
</IMPORTANT_NOTES>

<ENCOURAGED_APPROACHES>
- The computer is yours alone: make files, experiment, install packages where its network lets you.
- Try different ways: libraries, programs, data, simulation, search, calculation.
- Prefer a thorough computation to a quick guess.
</ENCOURAGED_APPROACHES>

<ANTI_HARDCODING>
Do not think in comments or in print statements, and do not write an answer into the program as a
constant, such as the letter of a choice. Let the program derive the result from the problem.
</ANTI_HARDCODING>"""
_INSTANCE = """\
<problem>
{problem_statement}
</problem>

Solve it.

<OUTPUT_INSTRUCTIONS>
- Where one answer is asked for (a number, a word, a text): write it to {output_dir}/answer.txt, as
plain text and with nothing beside it.
- Where files are asked for (a program, a document, a project): put them into {output_dir}/.
</OUTPUT_INSTRUCTIONS>

You work in: {working_dir}
Given files, if any: {input_dir}
Results: {output_dir}"""
NO_CALL = (
    "\nNo tool was called.\nEVERY REPLY MUST CALL A TOOL.\n\nNobody can help you or answer"
    " questions: go on by yourself, and call submit when you are done.\n"
)


@dataclass(frozen=True, slots=True)
class ReferencePrompts:
    """The prompts of the reference style."""

    system: str = _SYSTEM
    """The system prompt, a template with the reference's placeholders."""
    instance: str = _INSTANCE
    """The template for the first user message."""
    no_call: str = NO_CALL
    """The message after a turn without a tool call."""
    output_dir: str = OUTPUT_DIR
    """The directory for results in the prompts."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools' descriptions for the model. Empty: the descriptions of this project."""

    def system_prompt(self) -> str:
        """Return the system prompt. Raises KeyError, IndexError or ValueError for an unknown
        placeholder."""
        return self._with_paths(self.system).format(command_docs="", demo="")

    def problem(self, text: str) -> str:
        """Return the first user message for a problem. Raises KeyError, IndexError or ValueError
        for an unknown placeholder."""
        return self._with_paths(self.instance).format(problem_statement=text)

    def _with_paths(self, template: str) -> str:
        paths = {"working_dir": WORKING_DIR, "input_dir": INPUT_DIR, "output_dir": self.output_dir}
        for name, path in paths.items():
            template = template.replace(f"{{{name}}}", path)
        return template
