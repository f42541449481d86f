"""The paper's tools in a real sandbox: no shell state is kept, and paths are never evaluated."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox_runtime.sandbox import Sandbox
from sandbox_runtime.tools import make_tools
from sandbox_runtime.tools.base import Observation
from tests.fakes.paper import paper
from tests.sandbox_runtime.conformance.backends import open_backend

EDITED = "Execution output of \\[str_replace_editor]:\n"


class ToolSession:
    """One sandbox and its tools."""

    command_id = None

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._editor, self._bash, self._submit = make_tools(paper())

    async def sandbox(self) -> Sandbox:
        return self._sandbox

    async def bash(self, command: object, timeout_s: float = 20) -> str:
        seen = await self._bash.run(self, {"command": command}, timeout_s=timeout_s)
        return seen.text.partition("\\[STDOUT]\n")[2] or seen.text

    async def edit(self, **arguments: object) -> str:
        seen = await self._editor.run(self, arguments, timeout_s=20)
        assert seen.text.startswith(EDITED)
        return seen.text.removeprefix(EDITED)

    async def run_all(self, arguments: object) -> list[Observation]:
        tools = (self._editor, self._bash, self._submit)
        return [await tool.run(self, arguments, timeout_s=20) for tool in tools]


@pytest.fixture(params=["bubblewrap", "bubblewrap-python"])
async def session(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ToolSession]:
    async with open_backend(request.param, tmp_path) as sandbox:
        yield ToolSession(sandbox)


async def test_reference_shell_keeps_files_but_no_shell_state_between_commands(
    session: ToolSession,
) -> None:
    assert await session.bash("cd /tmp; export X=1; f() { :; }; touch /testbed/kept; pwd") == (
        "/tmp\n"
    )
    assert await session.bash("pwd; echo [$X]; type f >/dev/null 2>&1 || echo none; ls") == (
        "/testbed\n[]\nnone\ndocuments\nkept\noutput\n"
    )


async def test_reference_shell_runs_each_command_with_bash_c(session: ToolSession) -> None:
    assert await session.bash("echo \"$0 $# $-\"; echo 'it'\"'\"'s'") == "bash 0 hBc\nit's\n"
    assert (await session.bash("echo 'open")).endswith(
        "\\[STDERR]\nbash: -c: line 1: unexpected EOF while looking for matching `''\n"
    )
    assert await session.bash("kill -9 $$") == (
        "Exit code: Error: Exit code 137\nExecution output of \\[execute_bash]:\n\\[STDOUT]\n"
    )


async def test_a_command_too_long_for_an_argument_is_run(session: ToolSession) -> None:
    assert await session.bash(f"echo {'x' * 200_000} | wc -c") == "200001\n"


async def test_a_command_that_takes_too_long_is_stopped(session: ToolSession) -> None:
    assert await session.bash("echo begun; sleep 60", timeout_s=0.5) == (
        "The command took too long to execute (>0.5s)"
    )


async def test_pip_is_quiet_and_uses_no_mirror(session: ToolSession) -> None:
    assert await session.bash("env | grep ^PIP_ | grep -v BREAK | sort; ls ~/.pip 2>/dev/null") == (
        "PIP_DISABLE_PIP_VERSION_CHECK=1\nPIP_NO_WARN_SCRIPT_LOCATION=1\nPIP_ROOT_USER_ACTION=ignore\n"
    )


async def test_path_argument_is_never_evaluated_by_the_shell(session: ToolSession) -> None:
    for path in ("/testbed/my file.py", "/testbed/x.py; touch pwned", "/testbed/$(touch pwned).py"):
        assert (await session.edit(command="create", path=path, file_text="1")).startswith(
            f"File created at {path}. Here's the result"
        )
    assert await session.edit(command="view", path="/testbed/my file.py") == (
        "Here's the result of running `cat -n` on /testbed/my file.py:\n     1\t1\n     2\t"
    )
    assert (await session.edit(command="view", path="-delete")) == "Error: Path not found: -delete"
    assert await session.bash("ls; find . -name pwned") == (
        "$(touch pwned).py\ndocuments\nmy file.py\noutput\nx.py; touch pwned\n"
    )


async def test_view_shows_only_directories_and_py_or_rst_files(
    session: ToolSession,
) -> None:
    await session.bash("mkdir -p d/e/f .h; touch d/a.py d/b.txt d/e/c.rst d/e/f/g.py .h/i.py")
    assert await session.edit(command="view", path="/testbed/d/b.txt") == (
        "ERROR: Viewing non-Python files is disallowed for saving context. File"
        " '/testbed/d/b.txt' is not a .py or .rst file."
    )
    heading, *names = (await session.edit(command="view", path="/testbed/d")).splitlines()
    assert heading.endswith("2 levels deep in /testbed/d, excluding hidden:")
    assert sorted(names) == [
        "/testbed/d",
        "/testbed/d/a.py",
        "/testbed/d/e",
        "/testbed/d/e/c.rst",
        "/testbed/d/e/f",
    ]


async def test_create_makes_directories_and_overwrites(session: ToolSession) -> None:
    for text in ("one\n", "two\n"):
        await session.edit(command="create", path="/testbed/new/dir/a.py", file_text=text)
    assert await session.bash("cat -A new/dir/a.py") == "two$\n$\n"


async def test_failed_create_reports_the_reason(session: ToolSession) -> None:
    assert await session.edit(command="create", path="/testbed/output", file_text="x") == (
        "Error creating file: bash: line 1: /testbed/output: Is a directory\n"
    )
    await session.bash("touch f")
    seen = await session.edit(command="create", path="/testbed/f/a.py", file_text="x")
    assert seen.startswith("Error creating file: mkdir: cannot create directory")


async def test_edit_of_a_link_changes_its_target(session: ToolSession) -> None:
    await session.bash("printf 'a\\tb\\r\\n' > real.py; ln -s real.py link.py")
    seen = await session.edit(
        command="str_replace", path="/testbed/link.py", old_str="b", new_str="c"
    )
    assert "     1\ta       c\n     2\t\n" in seen
    assert await session.bash("cat -A real.py; readlink link.py") == "a       c$\n$\nreal.py\n"


async def test_an_edit_keeps_bytes_that_are_not_utf_8(session: ToolSession) -> None:
    await session.bash("printf '\\377 a' > a.py")
    seen = await session.edit(command="insert", path="/testbed/a.py", insert_line=1, new_str="b")
    assert "     1\t\N{REPLACEMENT CHARACTER} a\n     2\tb\n" in seen
    assert await session.bash("od -An -c a.py") == " 377       a  \\n   b  \\n\n"


async def test_edit_of_a_missing_file_creates_no_file(session: ToolSession) -> None:
    insertion = {"command": "insert", "path": "/testbed/no.py", "insert_line": 0, "new_str": "x"}
    assert await session.edit(**insertion) == "Error: Could not read file /testbed/no.py"
    replacement = {"command": "str_replace", "path": "/testbed/no.py", "old_str": "a"}
    assert await session.edit(**replacement, new_str="b") == (
        "Error: No occurrences of old_str found in /testbed/no.py for replacement."
    )
    assert await session.bash("ls") == "documents\noutput\n"


async def test_file_text_too_long_for_a_program_argument_is_written(session: ToolSession) -> None:
    await session.edit(command="create", path="/testbed/a.py", file_text="x" * 300_000)
    assert await session.bash("wc -c < a.py") == "300001\n"


async def test_non_object_arguments_give_the_observations_of_the_reference(
    session: ToolSession,
) -> None:
    editor, bash, submit = await session.run_all("ls")
    assert editor.text == EDITED
    assert bash.text == "Exit code: 0\nExecution output of \\[execute_bash]:\n"
    assert (submit.text, submit.finished) == ("<<< Finished >>>", True)
    assert (editor.exit_code, bash.exit_code) == (None, None)


async def test_missing_and_wrong_arguments_are_explained_to_the_model(
    session: ToolSession,
) -> None:
    editor, bash, _ = await session.run_all({})
    assert editor.text == f"{EDITED}Error: command and path are required."
    assert bash.text == "Error: No command provided."
    assert await session.edit(command="frob", path="/x") == "Unknown command: frob"
    assert "'command' must be a string, not an array" in await session.bash(["ls"])
    wrong = await session.edit(command="insert", path="/x", insert_line="first", new_str="x")
    assert "'insert_line' must be an integer" in wrong
    assert "NUL" in await session.edit(command="view", path="a\0b")
    assert "surrogate" in await session.edit(command="create", path="/x", file_text="\ud800")


async def test_reference_submit_accepts_a_text_answer_that_its_schema_does_not_declare(
    session: ToolSession,
) -> None:
    *_, submit = await session.run_all({"answer": "42"})
    assert (submit.text, submit.answer) == ("<<< Finished >>>", "42")
    *_, submit = await session.run_all({"answer": 42})
    assert submit.answer is None
