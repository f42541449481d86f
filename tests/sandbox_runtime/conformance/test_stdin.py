"""A command reads what it is given, and nothing more."""

from sandbox_runtime.sandbox import Sandbox
from tests.sandbox_runtime.transfer import PLENTY_S, output, read


async def test_text_on_stdin_reaches_the_command(sandbox: Sandbox) -> None:
    result = await sandbox.exec("cat", stdin="two\nlines ü".encode(), timeout_s=PLENTY_S)
    assert result.stdout == "two\nlines ü"


async def test_every_byte_on_stdin_arrives_as_it_is(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 5
    await sandbox.exec("cat > copy", stdin=data, timeout_s=PLENTY_S)
    assert await read(sandbox, "/testbed/copy") == data


async def test_a_mebibyte_on_stdin_arrives_whole(sandbox: Sandbox) -> None:
    result = await sandbox.exec("cat | wc -c", stdin=b"x" * (1 << 20), timeout_s=PLENTY_S)
    assert result.stdout == "1048576\n"


async def test_a_command_that_reads_nothing_is_not_kept_by_a_large_stdin(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo done", stdin=b"x" * (1 << 20), timeout_s=PLENTY_S)
    assert (result.exit_code, result.stdout) == (0, "done\n")


async def test_a_command_that_reads_finds_the_end_at_once(sandbox: Sandbox) -> None:
    assert await output(sandbox, "cat; head -c 5 | wc -c; sh -c cat; echo end") == "0\nend\n"
