"""Classification of tool calls by the paper's three meta-capabilities.

`labelled_commands.txt` contains commands as models write them. The line above each command is its
label: E(xternal resources), F(ile management), C(omputation), or - for none.
"""

import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from policies.capabilities import MAX_CHARS, Capability, capabilities_of

LETTERS = {
    Capability.EXTERNAL_RESOURCES: "E",
    Capability.FILE_MANAGEMENT: "F",
    Capability.COMPUTATION: "C",
}


def read_labelled_commands() -> dict[str, list[tuple[str, str]]]:
    """Return the labels and commands of each group."""
    text = Path(__file__).with_name("labelled_commands.txt").read_text(encoding="utf-8")
    groups: dict[str, list[tuple[str, str]]] = {}
    for group in re.split("^== ", text, flags=re.MULTILINE)[1:]:
        name, _, rest = group.partition("\n")
        entries = re.split(r"^%% ([-EFC]+)\n", rest, flags=re.MULTILINE)[1:]
        pairs = zip(entries[::2], entries[1::2], strict=True)
        groups[name] = [(label.strip("-"), command.removesuffix("\n")) for label, command in pairs]
    return groups


GROUPS = read_labelled_commands()
LABELLED = [pair for group in GROUPS.values() for pair in group]
COMPLETE = [(label, text) for label, text in LABELLED if "unterminated" not in text]
COMPLETE = [(label, text) for label, text in COMPLETE if not text.startswith("cat <<EOF\ncurl")]
"""Commands that another command can follow."""


def letters(tool: str, arguments: object) -> str:
    used = capabilities_of(tool, arguments)
    return "".join(letter for kind, letter in LETTERS.items() if kind in used)


def command_letters(text: str) -> str:
    return letters("execute_bash", {"command": text})


def test_there_are_at_least_200_distinct_labelled_commands() -> None:
    assert len({command for _, command in LABELLED}) == len(LABELLED) >= 200
    assert {label for label, _ in LABELLED} == {"", "E", "F", "C", "EF", "EC", "FC", "EFC"}


@pytest.mark.parametrize("group", GROUPS)
def test_labelled_command_uses_the_capabilities_of_its_label(group: str) -> None:
    assert [(command_letters(text), text) for _, text in GROUPS[group]] == GROUPS[group]


# Properties of every command


def test_text_with_two_commands_has_the_capabilities_of_each_command() -> None:
    rng = random.Random(5)
    for _ in range(300):
        (first_label, first), (second_label, second) = rng.sample(COMPLETE, 2)
        assert set(command_letters(f"{first}\n{second}")) == {*first_label, *second_label}, (
            first,
            second,
        )


@pytest.mark.parametrize(("label", "text"), [LABELLED[at] for at in range(0, len(LABELLED), 3)])
def test_quoted_command_uses_no_capability(label: str, text: str) -> None:
    commented = "\n".join(f"# {line}" for line in text.splitlines())
    heredoc = f"cat <<'END OF IT'\n{text}\nEND OF IT"
    for quoted in (f"echo {shlex.quote(text)}", commented, heredoc):
        assert command_letters(quoted) == ""


@pytest.mark.parametrize("shell", ["bash -c {}", "sudo -u x sh -ec {}", "echo $(eval {})"])
def test_command_in_a_nested_shell_uses_the_same_capabilities_as_outside_it(shell: str) -> None:
    for label, text in COMPLETE:
        assert command_letters(shell.format(shlex.quote(text))) == label, text


def test_truncated_command_is_parsed_without_errors() -> None:
    rng = random.Random(7)
    for _, text in LABELLED:
        command_letters(text[: rng.randrange(len(text))])
        command_letters(text[rng.randrange(len(text)) :])


HOSTILE = [
    *["'", '"', "`", "\\", "$(", "((", "a=(", "<(", "f()", "{", "<<<", "<<a ", "<<a\n", "1>", "|"],
    *["echo x|", "echo 'print(1)'|tee a.py|", "tee a.py b.sh ", "eval ", "sudo ", "bash -c "],
    *["python3 -m ", "xargs ", "a.b.", "A=", "#", "$'\\", "case a in (", "[[ < ", "timeout 1 "],
]
HOSTILE_PYTHON = [
    *[
        "(",
        "[",
        '"',
        "'''",
        '"""\\',
        "\\",
        "a.",
        "a**",
        "import a,",
        "from x import (a,",
        "1_",
        "f'",
    ],
    *[
        "import os\nos.system(",
        "import subprocess as s\ns.run([",
        "import a.b as c;c.",
        "#",
        "\x00",
    ],
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_megabyte_of_hostile_shell_code_is_parsed_without_an_error(piece: str) -> None:
    command_letters(piece * (1_000_000 // len(piece)))


@pytest.mark.parametrize("piece", HOSTILE_PYTHON)
def test_megabyte_of_hostile_python_code_is_parsed_without_an_error(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    command_letters(f"python3 - <<'EOF'\n{text}")
    letters("str_replace_editor", {"command": "create", "path": "a.py", "file_text": text})


def test_capability_of_a_command_before_unclosed_brackets_is_found() -> None:
    for brackets in ("$(", "(", '"$(', "<("):
        text = f"pip install numpy; {brackets * MAX_CHARS}"
        assert capabilities_of("execute_bash", {"command": text}) == {Capability.EXTERNAL_RESOURCES}


def test_only_the_beginning_of_a_very_long_command_is_parsed() -> None:
    data = "cat > data.csv <<'EOF'\n" + "1,2\n" * (MAX_CHARS // 8) + "EOF\n"
    assert command_letters(data + "curl https://example.org") == "EF"
    assert command_letters(data * 3 + "curl https://example.org") == "F"


def test_nested_shells_are_parsed_up_to_a_limit() -> None:
    text = "curl https://example.org"
    for _ in range(3):
        text = f"bash -c {shlex.quote(text)}"
    assert command_letters(text) == "E"
    for _ in range(9):
        text = f"bash -c {shlex.quote(text)}"
    assert command_letters(text) == ""


# Other calls


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"command": "view", "path": "/testbed"}, "F"),
        ({"command": "create", "path": "a.txt", "file_text": "import numpy"}, "F"),
        ({"command": "create", "path": "a.py", "file_text": "print('hello')"}, "F"),
        ({"command": "create", "path": "a.py", "file_text": "print(2**64)"}, "FC"),
        ({"command": "create", "path": "a.sh", "file_text": "pip install numpy"}, "EF"),
        (
            {
                "command": "create",
                "path": "get.py",
                "file_text": "import requests\nrequests.get('https://example.org')",
            },
            "EF",
        ),
        ({"command": "str_replace", "path": "a.py", "old_str": "x", "new_str": "y = 3 * z"}, "FC"),
        ({"command": "str_replace", "path": "a.md", "old_str": "x", "new_str": "3 * 4"}, "F"),
        ({"command": "insert", "path": "a.py", "insert_line": 1, "new_str": "import os"}, "F"),
        ({"command": "undo_edit", "path": "a.py"}, "F"),
        ({"command": "create", "path": "a.py", "file_text": 5}, "F"),
        ({"command": "fly", "path": "a.py"}, ""),
        ({"command": "view"}, ""),
        ({"path": "a.py"}, ""),
        ([], ""),
    ],
)
def test_editor_calls_use_file_management_and_the_capabilities_of_their_code(
    arguments: Any, expected: str
) -> None:
    assert letters("str_replace_editor", arguments) == expected


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("execute_bash", {"command": "curl https://example.org", "job_id": "1"}),
        ("execute_bash", {"command": ["ls"]}),
        ("execute_bash", {}),
        ("execute_bash", None),
        ("execute_bash", "ls"),
        ("submit", {"answer": "ls"}),
        ("lookup", {"command": "ls"}),
    ],
)
def test_malformed_calls_and_calls_of_other_tools_use_no_capability(
    tool: str, arguments: object
) -> None:
    assert letters(tool, arguments) == ""


def test_bash_call_with_a_null_job_id_is_classified_as_a_command() -> None:
    assert letters("execute_bash", {"command": "ls", "job_id": None}) == "F"
