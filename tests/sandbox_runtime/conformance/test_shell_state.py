"""The shell state of one command carries over to the next, and nothing else does."""

import pytest

from sandbox_runtime.sandbox import Sandbox
from tests.sandbox_runtime.transfer import PLENTY_S, output


async def test_working_directory_persists_between_commands(sandbox: Sandbox) -> None:
    await output(sandbox, "mkdir -p 'a b/c' && cd 'a b'")
    await output(sandbox, "cd c")
    assert await output(sandbox, "pwd") == "/testbed/a b/c\n"


async def test_an_exported_variable_persists_and_programs_see_it(sandbox: Sandbox) -> None:
    await output(sandbox, "export GREETING=hello")
    assert await output(sandbox, "sh -c 'echo $GREETING'") == "hello\n"


async def test_a_plain_variable_persists_and_stays_unexported(sandbox: Sandbox) -> None:
    await output(sandbox, "plain=hello")
    assert await output(sandbox, """echo "$plain"; sh -c 'echo "[$plain]"'""") == "hello\n[]\n"


async def test_value_of_a_variable_persists_exactly(sandbox: Sandbox) -> None:
    await output(sandbox, "value='a  \"b\" $c `d` \\e\n\tü '\"'\"' ;'")
    assert await output(sandbox, 'echo "$value"') == 'a  "b" $c `d` \\e\n\tü \' ;\n'


async def test_large_variable_persists_between_commands(sandbox: Sandbox) -> None:
    await output(sandbox, "large=$(head -c 300000 /dev/zero | tr '\\0' y)")
    assert await output(sandbox, "echo ${#large}") == "300000\n"


async def test_array_variable_persists_between_commands(sandbox: Sandbox) -> None:
    await output(sandbox, "list=(one 'two words' three)")
    command = 'echo ${#list[@]}; for item in "${list[@]}"; do echo "<$item>"; done'
    assert await output(sandbox, command) == "3\n<one>\n<two words>\n<three>\n"


async def test_shell_function_persists_between_commands(sandbox: Sandbox) -> None:
    await output(sandbox, 'greet() { echo "hello $1, of $#"; }')
    assert await output(sandbox, "greet 'you there' 2") == "hello you there, of 2\n"


async def test_variable_that_a_command_unsets_stays_unset(sandbox: Sandbox) -> None:
    await output(sandbox, "export gone=1; kept=2; f() { echo f; }")
    await output(sandbox, "unset gone; unset -f f; unset HOME")
    assert await output(sandbox, 'echo "[$gone][$kept][$HOME]"') == "[][2][]\n"
    assert (await sandbox.exec("f", timeout_s=PLENTY_S)).exit_code == 127


async def test_exit_builtin_ends_the_command_and_keeps_its_shell_state(sandbox: Sandbox) -> None:
    result = await sandbox.exec("cd /tmp; x=5; exit 3; x=6", timeout_s=PLENTY_S)
    assert result.exit_code == 3
    assert await output(sandbox, "echo $x; pwd") == "5\n/tmp\n"


async def test_errexit_option_does_not_carry_over_to_the_next_command(sandbox: Sandbox) -> None:
    result = await sandbox.exec("set -e; x=1; false; echo not reached", timeout_s=PLENTY_S)
    assert (result.exit_code, result.stdout) == (1, "")
    assert await output(sandbox, "false; echo still here $x") == "still here 1\n"


async def test_syntax_error_leaves_the_shell_state_unchanged(sandbox: Sandbox) -> None:
    await output(sandbox, "x=1; cd /tmp")
    assert (await sandbox.exec("x=2; if then (", timeout_s=PLENTY_S)).exit_code != 0
    assert await output(sandbox, "pwd; echo $x") == "/tmp\n1\n"


async def test_killed_shell_does_not_change_the_shell_state(
    sandbox: Sandbox,
) -> None:
    await output(sandbox, "x=1")
    await sandbox.exec("x=2; kill -9 $$", timeout_s=PLENTY_S)
    assert await output(sandbox, "echo $x") == "1\n"


async def test_subshell_does_not_change_the_shell_state_of_its_command(
    sandbox: Sandbox,
) -> None:
    assert await output(sandbox, "x=1; (x=2; cd /tmp; echo $x); echo $x; pwd") == "2\n1\n/testbed\n"


async def test_exit_code_does_not_carry_over_to_the_next_command(sandbox: Sandbox) -> None:
    await sandbox.exec("false", timeout_s=PLENTY_S)
    assert await output(sandbox, "echo $? $# $1") == "0 0\n"


async def test_argument_cwd_applies_to_one_command_only(sandbox: Sandbox) -> None:
    result = await sandbox.exec("pwd; x=1", cwd="/tmp", timeout_s=PLENTY_S)
    assert result.stdout == "/tmp\n"
    assert await output(sandbox, 'pwd; echo "[$x]"') == "/testbed\n[]\n"


async def test_missing_cwd_fails_the_command_before_it_runs(
    sandbox: Sandbox,
) -> None:
    result = await sandbox.exec("echo ran", cwd="/no/such/place", timeout_s=PLENTY_S)
    assert (result.exit_code != 0, result.stdout) == (True, "")


async def test_argument_env_applies_to_one_command_only(sandbox: Sandbox) -> None:
    await output(sandbox, "export NAME=mine")
    awkward = 'it\'s "$x"\nnew line'
    result = await sandbox.exec(
        "sh -c 'echo \"$NAME\"'; cd /tmp", env={"NAME": awkward}, timeout_s=PLENTY_S
    )
    assert result.stdout == awkward + "\n"
    assert await output(sandbox, "echo $NAME; pwd") == "mine\n/testbed\n"


@pytest.mark.parametrize("command", ["cd /tmp; y=2", "exit 4"])
async def test_shell_state_none_neither_reads_nor_saves_the_state(
    sandbox: Sandbox, command: str
) -> None:
    await output(sandbox, "mkdir sub; cd sub; x=1; f() { echo f; }")
    bare = 'pwd; echo "[$x]"; f 2> /dev/null || echo no f'
    result = await sandbox.exec(bare, shell_state="none", timeout_s=PLENTY_S)
    assert result.stdout == "/testbed\n[]\nno f\n"
    await sandbox.exec(command, shell_state="none", timeout_s=PLENTY_S)
    assert await output(sandbox, 'pwd; echo "[$x$y]"; f') == "/testbed/sub\n[1]\nf\n"
