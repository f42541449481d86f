"""The prompts of the paper's style: general prompts, and prompts for each domain of the paper.

The prompts have the facts and the structure of the reference implementation's prompts, in this
project's words. The operator can replace them by the reference implementation's prompts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from policies.workspace import INPUT_DIR, OUTPUT_DIR, WORKING_DIR

Domain = Literal[
    "general",
    "math",
    "physics",
    "chemistry",
    "biomedicine",
    "long-context",
    "instructions",
]
"""The domains of the paper, and `general` for other tasks."""

_RULES = """\
<ENCOURAGED_APPROACHES>
- The computer is yours alone: make files, experiment, install packages where its network lets you.
- Try different ways: libraries, programs, data, simulation, search, calculation.
- Prefer a thorough computation to a quick guess.
</ENCOURAGED_APPROACHES>

<ANTI_HARDCODING>
Do not think in comments or in print statements, and do not write an answer into the program as a
constant, such as the letter of a choice. Let the program derive the result from the problem.
</ANTI_HARDCODING>"""
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
"""
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

    system: str = f"{_SYSTEM}\n{_RULES}"
    """The system prompt, a template with the reference's placeholders."""
    instance: str = _INSTANCE
    """The template for the first user message."""
    no_call: str = NO_CALL
    """The message after a turn without a tool call."""
    output_dir: str = OUTPUT_DIR
    """The directory that the prompts name for results."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools' descriptions for the model. Empty: the descriptions of this project."""

    def system_prompt(self) -> str:
        """Return the system prompt. Raises KeyError, IndexError or ValueError for an unknown
        placeholder."""
        return self._with_paths(self.system).format(command_docs="", demo="")

    def problem_message(self, text: str) -> str:
        """Return the first user message for a problem. Raises KeyError, IndexError or ValueError
        for an unknown placeholder."""
        return self._with_paths(self.instance).format(problem_statement=text)

    def _with_paths(self, template: str) -> str:
        paths = {"working_dir": WORKING_DIR, "input_dir": INPUT_DIR, "output_dir": self.output_dir}
        for name, path in paths.items():
            template = template.replace(f"{{{name}}}", path)
        return template


# The domains

_DOMAIN_SYSTEM = """\
You are an expert in %(subject)s, and you solve problems by programming.

<TASK>
%(task)s
</TASK>

<WORKFLOW>
1. Read the problem until you know exactly what is asked.
2. Work out how a program can find the answer.
3. **You must write a program to a file and run it.** Reasoning alone, a bare print of a result and
a result written into the code do not count.
4. Write the result of the program to {output_dir}/answer.txt.
</WORKFLOW>

<IMPORTANT_NOTES>
- {output_dir}/answer.txt contains %(answer)s, and no explanation.
- execute_bash runs commands and programs.
- str_replace_editor creates files, such as answer.txt.
- submit ends your work; call it when answer.txt is complete.
</IMPORTANT_NOTES>
"""
_DOMAIN_INSTANCE = """\
<problem>
{problem_statement}
</problem>

%(request)s

You work in: {working_dir}"""
_BOXED_IN_FILE = """

**The backslash must reach the file.** Some commands turn \\b into a backspace. These do not:
- the create command of str_replace_editor (the simplest)
- printf '%s\\n' '\\boxed{{...}}' > {output_dir}/answer.txt
- cat > {output_dir}/answer.txt << 'EOF', then the answer and a line with EOF"""
_LETTER = "the letter of the right choice"


def _domain_prompts(subject: str, task: str, answer: str, request: str) -> ReferencePrompts:
    """Return the prompts of a domain. The answer file is in the working directory, as in the
    reference's benchmarks."""
    return ReferencePrompts(
        system=f"{_DOMAIN_SYSTEM % {'subject': subject, 'task': task, 'answer': answer}}\n{_RULES}",
        instance=_DOMAIN_INSTANCE % {"request": request},
        output_dir=WORKING_DIR,
    )


DOMAIN_PROMPTS: Mapping[Domain, ReferencePrompts] = {
    "general": ReferencePrompts(),
    "math": _domain_prompts(
        "mathematics",
        "Solve a problem of mathematics. Its formulas may be written in LaTeX.",
        "the final answer inside \\boxed{{}}",
        "Solve it step by step. Write the final answer inside \\boxed{{}} to"
        f" {{output_dir}}/answer.txt.{_BOXED_IN_FILE}",
    ),
    "physics": _domain_prompts(
        "physics",
        "Solve a problem of physics. Its formulas may be written in LaTeX, and it may have several"
        " parts.",
        "the final answer or answers inside \\boxed{{}}",
        "Solve it step by step. Write the final answer inside \\boxed{{}} to"
        " {output_dir}/answer.txt, and nothing else. If the problem has several parts, give an"
        " answer to each, in their order and separated by commas: \\boxed{{first, second, third}}."
        f"{_BOXED_IN_FILE}",
    ),
    "chemistry": _domain_prompts(
        "chemistry",
        "Solve a multiple-choice problem of chemistry. It may contain formulas and structures of"
        " molecules.",
        _LETTER,
        f"Solve it step by step. Write only {_LETTER} to {{output_dir}}/answer.txt.",
    ),
    "biomedicine": _domain_prompts(
        "medicine",
        "Solve a multiple-choice problem of medicine.",
        _LETTER,
        f"Solve it step by step. Write only {_LETTER} to {{output_dir}}/answer.txt.",
    ),
    "long-context": _domain_prompts(
        "analysing documents",
        "Answer a question by combining what several documents say. All of them are in"
        " {input_dir}/.",
        "the final answer as plain text",
        "Solve it with the documents in {input_dir}/. Write the final answer as plain text to"
        " {output_dir}/answer.txt.",
    ),
    "instructions": _domain_prompts(
        "demanding problems of all kinds",
        "Answer a question, and follow every instruction on the form and the content of the answer"
        " exactly.",
        "the final answer as plain text",
        "Solve it. Write the final answer to {output_dir}/answer.txt.",
    ),
}
