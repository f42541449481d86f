"""Standard input of commands."""

from sandbox_runtime.sandbox import Sandbox
from tests.sandbox_runtime.transfer import PLENTY_S, output, read


async def test_text_on_stdin_reaches_the_command(sandbox: Sandbox) -> None:
    result = await sandbox.exec("cat", stdin="two\nlines ü".encode(), timeout_s=PLENTY_S)
    assert result.stdout == "two\nlines ü"


async def test_all_byte_values_on_stdin_are_unchanged(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 5
    await sandbox.exec("cat > copy", stdin=data, timeout_s=PLENTY_S)
    assert await read(sandbox, "/testbed/copy") == data


async def test_stdin_of_one_mebibyte_is_complete(sandbox: Sandbox) -> None:
    result = await sandbox.exec("cat | wc -c", stdin=b"x" * (1 << 20), timeout_s=PLENTY_S)
    assert result.stdout == "1048576\n"


async def test_unread_large_stdin_does_not_delay_the_end_of_a_command(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo done", stdin=b"x" * (1 << 20), timeout_s=PLENTY_S)
    assert (result.exit_code, result.stdout) == (0, "done\n")


async def test_command_without_stdin_data_reads_end_of_file(sandbox: Sandbox) -> None:
    assert await output(sandbox, "cat; head -c 5 | wc -c; sh -c cat; echo end") == "0\nend\n"
