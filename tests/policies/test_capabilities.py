"""Which of the paper's three meta-capabilities a tool call uses.

`labelled_commands.txt` has commands as models write them, each below a line with what it uses:
E(xternal resources), F(ile management), C(omputation), or nothing (-).
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


def labelled() -> dict[str, list[tuple[str, str]]]:
    """Groups of labels and commands."""
    text = Path(__file__).with_name("labelled_commands.txt").read_text(encoding="utf-8")
    groups: dict[str, list[tuple[str, str]]] = {}
    for group in re.split("^== ", text, flags=re.MULTILINE)[1:]:
        name, _, rest = group.partition("\n")
        entries = re.split(r"^%% ([-EFC]+)\n", rest, flags=re.MULTILINE)[1:]
        pairs = zip(entries[::2], entries[1::2], strict=True)
        groups[name] = [(label.strip("-"), command.removesuffix("\n")) for label, command in pairs]
    return groups


GROUPS = labelled()
LABELLED = [pair for group in GROUPS.values() for pair in group]
WHOLE = [(label, text) for label, text in LABELLED if "unterminated" not in text]
WHOLE = [(label, text) for label, text in WHOLE if not text.startswith("cat <<EOF\ncurl")]
"""Those after which another command can stand."""


def letters(tool: str, arguments: object) -> str:
    used = capabilities_of(tool, arguments)
    return "".join(letter for kind, letter in LETTERS.items() if kind in used)


def of_command(text: str) -> str:
    return letters("execute_bash", {"command": text})


def test_labelled_commands_are_numerous_and_distinct() -> None:
    assert len({command for _, command in LABELLED}) == len(LABELLED) >= 200
    assert {label for label, _ in LABELLED} == {"", "E", "F", "C", "EF", "EC", "FC", "EFC"}


@pytest.mark.parametrize("group", GROUPS)
def test_each_labelled_command_uses_what_its_label_says(group: str) -> None:
    assert [(of_command(text), text) for _, text in GROUPS[group]] == GROUPS[group]


# What holds for every command


def test_commands_after_each_other_use_what_each_uses() -> None:
    chosen = random.Random(5)
    for _ in range(300):
        (one, first), (two, second) = chosen.sample(WHOLE, 2)
        assert set(of_command(f"{first}\n{second}")) == {*one, *two}, (first, second)


@pytest.mark.parametrize(("label", "text"), [LABELLED[at] for at in range(0, len(LABELLED), 3)])
def test_a_command_that_is_only_mentioned_uses_nothing(label: str, text: str) -> None:
    commented = "\n".join(f"# {line}" for line in text.splitlines())
    heredoc = f"cat <<'END OF IT'\n{text}\nEND OF IT"
    for mentioned in (f"echo {shlex.quote(text)}", commented, heredoc):
        assert of_command(mentioned) == ""


@pytest.mark.parametrize("shell", ["bash -c {}", "sudo -u x sh -ec {}", "echo $(eval {})"])
def test_a_command_that_another_shell_runs_uses_the_same(shell: str) -> None:
    for label, text in WHOLE:
        assert of_command(shell.format(shlex.quote(text))) == label, text


def test_truncated_command_is_parsed_without_errors() -> None:
    chosen = random.Random(7)
    for _, text in LABELLED:
        of_command(text[: chosen.randrange(len(text))])
        of_command(text[chosen.randrange(len(text)) :])


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
def test_a_megabyte_of_anything_is_read_in_time(piece: str) -> None:
    of_command(piece * (1_000_000 // len(piece)))


@pytest.mark.parametrize("piece", HOSTILE_PYTHON)
def test_a_megabyte_of_any_python_is_too(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    of_command(f"python3 - <<'EOF'\n{text}")
    letters("str_replace_editor", {"command": "create", "path": "a.py", "file_text": text})


def test_command_before_unclosed_brackets_counts() -> None:
    for brackets in ("$(", "(", '"$(', "<("):
        text = f"pip install numpy; {brackets * MAX_CHARS}"
        assert capabilities_of("execute_bash", {"command": text}) == {Capability.EXTERNAL_RESOURCES}


def test_the_beginning_of_a_very_long_command_is_what_counts() -> None:
    data = "cat > data.csv <<'EOF'\n" + "1,2\n" * (MAX_CHARS // 8) + "EOF\n"
    assert of_command(data + "curl https://example.org") == "EF"
    assert of_command(data * 3 + "curl https://example.org") == "F"


def test_code_is_looked_for_in_code_a_few_times_over() -> None:
    text = "curl https://example.org"
    for _ in range(3):
        text = f"bash -c {shlex.quote(text)}"
    assert of_command(text) == "E"
    for _ in range(9):
        text = f"bash -c {shlex.quote(text)}"
    assert of_command(text) == ""


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
def test_the_editor_manages_files_and_writes_code(arguments: Any, expected: str) -> None:
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
def test_other_calls_use_no_capability(tool: str, arguments: object) -> None:
    assert letters(tool, arguments) == ""


def test_a_call_that_names_no_job_is_a_command() -> None:
    assert letters("execute_bash", {"command": "ls", "job_id": None}) == "F"
