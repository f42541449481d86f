"""A command runs in bash, and its exit code and output are reported exactly."""

import pytest

from sandbox_runtime.sandbox import Sandbox
from tests.sandbox_runtime.transfer import PLENTY_S, output


async def test_a_command_that_succeeds_reports_its_output_and_exit_code_zero(
    sandbox: Sandbox,
) -> None:
    result = await sandbox.exec("echo hello", timeout_s=PLENTY_S)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "hello\n", "")
    assert (result.timed_out, result.truncated) == (False, False)
    assert (result.stdout_bytes, result.stderr_bytes) == (6, 0)
    assert result.duration_s >= 0


async def test_stdout_and_stderr_are_separate(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo out; echo err >&2; echo out 2>&1", timeout_s=PLENTY_S)
    assert (result.stdout, result.stderr) == ("out\nout\n", "err\n")
    assert (result.stdout_bytes, result.stderr_bytes) == (8, 4)


@pytest.mark.parametrize("code", [1, 3, 255])
async def test_the_exit_code_of_a_failing_command_is_reported(sandbox: Sandbox, code: int) -> None:
    result = await sandbox.exec(f"sh -c 'exit {code}'", timeout_s=PLENTY_S)
    assert (result.exit_code, result.timed_out) == (code, False)


async def test_unknown_command_has_exit_code_127_and_a_message(sandbox: Sandbox) -> None:
    result = await sandbox.exec("no-such-command --now", timeout_s=PLENTY_S)
    assert (result.exit_code, result.stdout) == (127, "")
    assert "no-such-command" in result.stderr


@pytest.mark.parametrize("command", ["", " \n\n ", "# only a comment"])
async def test_empty_command_succeeds_without_output(sandbox: Sandbox, command: str) -> None:
    result = await sandbox.exec(command, timeout_s=PLENTY_S)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


async def test_newlines_of_the_output_are_unchanged(sandbox: Sandbox) -> None:
    assert await output(sandbox, "printf 'no newline'") == "no newline"
    assert await output(sandbox, "printf '\\n\\ttab \\n\\n'") == "\n\ttab \n\n"


async def test_utf_8_passes_unchanged_to_a_command_and_back(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo 'Größe π 数 🎉'", timeout_s=PLENTY_S)
    assert result.stdout == "Größe π 数 🎉\n"
    assert result.stdout_bytes == len("Größe π 数 🎉\n".encode())


async def test_bytes_that_are_not_utf_8_are_replaced_and_counted(sandbox: Sandbox) -> None:
    result = await sandbox.exec("printf 'a\\377b'; printf '\\351' >&2", timeout_s=PLENTY_S)
    assert (result.stdout, result.stderr) == ("a\ufffdb", "\ufffd")
    assert (result.stdout_bytes, result.stderr_bytes) == (3, 1)


async def test_character_split_over_two_writes_is_returned_intact(sandbox: Sandbox) -> None:
    assert await output(sandbox, "printf 'caf\\303'; printf '\\251'") == "café"


async def test_both_kinds_of_quotes_keep_their_meaning(sandbox: Sandbox) -> None:
    command = """x=5; echo 'single "$x"' "double '$x'" "esc \\"$x\\" \\$x" plain\\ blank"""
    assert await output(sandbox, command) == ("""single "$x" double '5' esc "5" $x plain blank\n""")


async def test_unbalanced_quote_fails_and_leaves_the_sandbox_usable(sandbox: Sandbox) -> None:
    result = await sandbox.exec('echo "never closed', timeout_s=PLENTY_S)
    assert (result.exit_code != 0, result.stdout) == (True, "")
    assert result.stderr.strip() != ""
    assert await output(sandbox, "echo fine") == "fine\n"


async def test_a_quoted_heredoc_is_taken_literally(sandbox: Sandbox) -> None:
    command = "cat > file <<'END'\n\ttab $HOME `x` \"q\" 'q' \\n\n\nlast\nEND\ncat file"
    assert await output(sandbox, command) == "\ttab $HOME `x` \"q\" 'q' \\n\n\nlast\n"


async def test_an_unquoted_heredoc_is_expanded(sandbox: Sandbox) -> None:
    assert await output(sandbox, "x=7\ncat <<END\nx is $x\nEND\necho after") == "x is 7\nafter\n"


async def test_lines_of_a_script_run_in_order(sandbox: Sandbox) -> None:
    script = "echo one\nif [ -d /testbed ]; then\n  echo two\nfi\nfor n in 3 4; do echo $n; done\n"
    assert await output(sandbox, script) == "one\ntwo\n3\n4\n"


async def test_pipeline_has_the_exit_code_of_its_last_command(sandbox: Sandbox) -> None:
    assert await output(sandbox, "seq 1 1000 | tail -n 2 | tr '9' 'x'") == "xxx\n1000\n"
    assert (await sandbox.exec("true | false", timeout_s=PLENTY_S)).exit_code == 1
    assert (await sandbox.exec("false | true", timeout_s=PLENTY_S)).exit_code == 0


async def test_shell_and_or_operators_follow_exit_codes(sandbox: Sandbox) -> None:
    command = "true && echo a; false && echo b; false || echo c; true || echo d; echo $?"
    assert await output(sandbox, command) == "a\nc\n0\n"


async def test_redirected_output_is_in_the_file(sandbox: Sandbox) -> None:
    command = (
        "echo one > out; echo two >> out; sh -c 'echo wrong >&2' 2> err; nope > both 2>&1;"
        " cat < out; cat err; wc -l < both; echo gone > /dev/null"
    )
    assert (await output(sandbox, command)).split() == ["one", "two", "wrong", "1"]


async def test_a_script_of_200_kb_runs(sandbox: Sandbox) -> None:
    text = "x" * 200_000
    assert await output(sandbox, f"echo {text} | wc -c; echo end") == "200001\nend\n"


async def test_a_script_of_many_lines_beyond_200_kb_runs_to_its_end(sandbox: Sandbox) -> None:
    lines = "".join(f": 'line {number} {'y' * 1000}'\n" for number in range(210))
    assert await output(sandbox, f"{lines}echo $?") == "0\n"


async def test_shell_killed_by_a_signal_has_exit_code_128_plus_its_number(
    sandbox: Sandbox,
) -> None:
    result = await sandbox.exec("echo before; kill -9 $$; echo after", timeout_s=PLENTY_S)
    assert (result.exit_code, result.stdout, result.timed_out) == (137, "before\n", False)


async def test_child_killed_by_a_signal_has_exit_code_128_plus_its_number(sandbox: Sandbox) -> None:
    assert await output(sandbox, "sh -c 'kill -TERM $$' 2> /dev/null; echo $?") == "143\n"


async def test_command_that_exits_with_124_is_not_reported_as_timed_out(sandbox: Sandbox) -> None:
    result = await sandbox.exec("sh -c 'exit 124'", timeout_s=PLENTY_S)
    assert (result.exit_code, result.timed_out) == (124, False)


async def test_commands_start_in_testbed(
    sandbox: Sandbox,
) -> None:
    command = "pwd; [ -d /testbed/documents ] && [ -d /testbed/output ] && echo there; ls"
    assert await output(sandbox, command) == "/testbed\nthere\ndocuments\noutput\n"
