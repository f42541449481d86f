"""Output is bounded at its source, counted in full, and streamed while the command runs."""

import re

import anyio
import pytest

from sandbox_runtime.sandbox import ExecResult, OutputCap, Sandbox
from tests.sandbox_runtime.transfer import PLENTY_S, OutputRecorder, output


async def test_output_of_exactly_the_cap_is_not_truncated(sandbox: Sandbox) -> None:
    cap = OutputCap(max_bytes=1000, max_lines=100)
    result = await sandbox.exec(_letters(1000), timeout_s=PLENTY_S, cap=cap)
    assert (result.stdout, result.truncated) == ("x" * 1000, False)
    result = await sandbox.exec("seq 1 100", timeout_s=PLENTY_S, cap=cap)
    assert (result.stdout, result.truncated) == ("".join(f"{n}\n" for n in range(1, 101)), False)


async def test_output_beyond_the_cap_keeps_its_head_and_tail_with_a_marker_between(
    sandbox: Sandbox,
) -> None:
    cap = OutputCap(max_bytes=1000)
    result = await sandbox.exec("seq 1 100000", timeout_s=PLENTY_S, cap=cap)
    assert (result.exit_code, result.truncated) == (0, True)
    whole = "".join(f"{n}\n" for n in range(1, 100_001))
    assert result.stdout_bytes == len(whole)
    head, omitted, tail = _parts(result.stdout)
    assert 400 < len(head) <= 501
    assert 400 < len(tail) <= 500
    assert whole.startswith(head.rstrip("\n"))
    assert whole.endswith(tail)
    # The marker stands on a line of its own, which may have taken one more newline.
    assert omitted in (len(whole) - len(head) - len(tail), len(whole) - len(head) - len(tail) + 1)


async def test_lines_beyond_the_cap_are_omitted_from_the_middle(sandbox: Sandbox) -> None:
    cap = OutputCap(max_lines=10)
    result = await sandbox.exec("seq 1 100000", timeout_s=PLENTY_S, cap=cap)
    lines = result.stdout.splitlines()
    assert (result.truncated, result.stdout_bytes) == (True, 588_895)
    assert lines[:5] == ["1", "2", "3", "4", "5"]
    assert "99990 lines" in lines[5]
    assert lines[6:] == ["99996", "99997", "99998", "99999", "100000"]


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        ("seq 2500", 2500),
        ("seq 100000 >&2; seq 7", 100_007),
        ("printf 'a\\nb'", 2),
        ("printf 'a\\rb\\r\\nc\\n'", 2),
        ("true", 0),
        ("seq 999 | tr '\\n' ' '", 1),
    ],
)
async def test_line_count_of_output_includes_omitted_lines(
    command: str, lines: int, sandbox: Sandbox
) -> None:
    result = await sandbox.exec(command, timeout_s=PLENTY_S, cap=OutputCap(max_bytes=1000))
    assert result.output_lines == lines


async def test_line_of_300_kb_is_cut_in_its_middle(sandbox: Sandbox) -> None:
    cap = OutputCap(max_bytes=2000, max_lines=50)
    command = f"printf start; {_letters(300_000)}; printf end"
    result = await sandbox.exec(command, timeout_s=PLENTY_S, cap=cap)
    head, omitted, tail = _parts(result.stdout)
    assert (result.truncated, result.stdout_bytes) == (True, 300_008)
    assert (head.strip(), tail) == ("start" + "x" * 995, "x" * 997 + "end")
    assert omitted == 298_008


async def test_output_of_a_hundred_megabytes_is_counted_exactly_and_truncated(
    sandbox: Sandbox,
) -> None:
    cap = OutputCap(max_bytes=1000)
    command = f"echo first; {_letters(100_000_000)}; echo; echo last"
    result = await sandbox.exec(command, timeout_s=PLENTY_S, cap=cap)
    assert (result.exit_code, result.truncated) == (0, True)
    assert result.stdout_bytes == 100_000_012
    assert len(result.stdout) < 1200
    assert result.stdout.startswith("first\nxxx")
    assert result.stdout.endswith("xxx\nlast\n")


async def test_output_cap_applies_to_each_stream(sandbox: Sandbox) -> None:
    cap = OutputCap(max_bytes=1000)
    loud = _letters(5000)
    result = await sandbox.exec(f"{loud}; echo quiet >&2", timeout_s=PLENTY_S, cap=cap)
    assert (result.stderr, result.truncated) == ("quiet\n", True)
    result = await sandbox.exec(f"{{ {loud}; }} >&2; echo quiet", timeout_s=PLENTY_S, cap=cap)
    assert (result.stdout, result.truncated, result.stderr_bytes) == ("quiet\n", True, 5000)
    assert _parts(result.stderr)[1] == 4000


@pytest.mark.parametrize("max_bytes", [1000, 1001, 1002, 1003])
async def test_truncation_does_not_split_characters(sandbox: Sandbox, max_bytes: int) -> None:
    text = "é🎉数" * 1000
    cap = OutputCap(max_bytes=max_bytes)
    result = await sandbox.exec("cat", stdin=text.encode(), timeout_s=PLENTY_S, cap=cap)
    assert result.truncated
    assert "\ufffd" not in result.stdout


async def test_streamed_output_equals_the_reported_output(sandbox: Sandbox) -> None:
    recorder = OutputRecorder()
    result = await sandbox.exec(
        "for n in 1 2 3; do echo out $n; echo err $n >&2; done; printf 'é'",
        timeout_s=PLENTY_S,
        on_output=recorder,
    )
    assert recorder.text("stdout") == result.stdout == "out 1\nout 2\nout 3\né"
    assert recorder.text("stderr") == result.stderr == "err 1\nerr 2\nerr 3\n"


async def test_character_written_in_two_parts_is_streamed_whole(sandbox: Sandbox) -> None:
    recorder = OutputRecorder()
    command = "printf 'caf\\303'; sleep 0.2; printf '\\251'"
    await sandbox.exec(command, timeout_s=PLENTY_S, on_output=recorder)
    assert recorder.text() == "café"


async def test_output_is_streamed_while_its_command_runs(sandbox: Sandbox) -> None:
    await output(sandbox, "mkfifo gate")
    recorder = OutputRecorder()
    results: list[ExecResult] = []

    async def run() -> None:
        command = "echo first; cat gate; echo last"
        results.append(await sandbox.exec(command, timeout_s=PLENTY_S, on_output=recorder))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await recorder.something.wait()
            assert recorder.pieces == [("stdout", "first\n")]
            await output(sandbox, "echo opened > gate")
    assert recorder.text() == results[0].stdout == "first\nopened\nlast\n"


async def test_silent_command_streams_nothing(sandbox: Sandbox) -> None:
    recorder = OutputRecorder()
    await sandbox.exec("x=1; true", timeout_s=PLENTY_S, on_output=recorder)
    assert recorder.pieces == []


async def test_only_the_head_of_capped_output_is_streamed(sandbox: Sandbox) -> None:
    recorder = OutputRecorder()
    await sandbox.exec(
        f"echo start; {_letters(200_000)}; seq 1 1000 >&2",
        timeout_s=PLENTY_S,
        cap=OutputCap(max_bytes=1000, max_lines=20),
        on_output=recorder,
    )
    assert recorder.text("stdout") == "start\n" + "x" * 494
    assert recorder.text("stderr") == "".join(f"{n}\n" for n in range(1, 11))


def _letters(count: int) -> str:
    return f"head -c {count} /dev/zero | tr '\\0' x"


def _parts(text: str) -> tuple[str, int, str]:
    """Return the head, the number of omitted bytes in the marker line, and the tail."""
    found = re.search(r"^\[\.\.\. (\d+) bytes, \d+ lines left out \.\.\.\]\n", text, re.MULTILINE)
    assert found, text
    return text[: found.start()], int(found[1]), text[found.end() :]
