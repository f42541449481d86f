"""The editor shows files and directories, within its limits."""

import pytest

from policies.observation import DEFAULT_LIMITS, ObservationLimits
from sandbox_runtime.errors import SandboxLostError
from sandbox_runtime.tools.editor import MAX_FILE_BYTES, StrReplaceEditor
from tests.fakes.memory_sandbox import MemoryLease, MemorySandbox
from tests.sandbox_runtime.transfer import PLENTY_S, output

FILE = "/testbed/file"


async def _view(
    sandbox: MemorySandbox,
    path: str = FILE,
    view_range: object = None,
    limits: ObservationLimits = DEFAULT_LIMITS,
) -> str:
    arguments = {"command": "view", "path": path, "view_range": view_range}
    observation = await StrReplaceEditor(limits).run(
        MemoryLease(sandbox), arguments, timeout_s=PLENTY_S
    )
    assert (observation.exit_code, observation.finished) == (None, False)
    return observation.text


@pytest.mark.parametrize("name", ["notes.txt", "data.json", "Makefile", "no_ending", "a.py"])
async def test_text_files_of_all_kinds_are_shown_with_line_numbers(name: str) -> None:
    sandbox = MemorySandbox({f"/testbed/{name}": b"first\n\n\tindented\nlast"})
    shown = "     1\tfirst\n     2\t\n     3\t\tindented\n     4\tlast"
    assert await _view(sandbox, f"/testbed/{name}") == shown


async def test_relative_path_is_taken_from_testbed_after_a_cd() -> None:
    sandbox = MemorySandbox({"/testbed/sub/file": b"x\n"})
    await output(sandbox, "cd /tmp")
    assert await _view(sandbox, "sub/file") == "     1\tx"


@pytest.mark.parametrize(
    ("view_range", "shown"),
    [
        ([2, 3], "     2\tb\n     3\tc\n[lines 2-3 of 4]"),
        ([3, -1], "     3\tc\n     4\td\n[lines 3-4 of 4]"),
        ([4, 4], "     4\td\n[lines 4-4 of 4]"),
        ([3, 99], "     3\tc\n     4\td\n[lines 3-4 of 4]"),
        ("[2, 2]", "     2\tb\n[lines 2-2 of 4]"),
    ],
)
async def test_a_range_of_lines_is_shown(view_range: object, shown: str) -> None:
    assert await _view(MemorySandbox({FILE: b"a\nb\nc\nd\n"}), FILE, view_range) == shown


@pytest.mark.parametrize(
    ("view_range", "problem"),
    [
        ([0, 2], "begins at line 0, but the file has lines 1 to 4"),
        ([5, -1], "begins at line 5, but the file has lines 1 to 4"),
        ([3, 2], "ends at line 2, before it begins (3)"),
        ([3, -2], "ends at line -2, before it begins (3)"),
        ([3], "must be two integers"),
        ([1, 2, 3], "must be two integers"),
    ],
)
async def test_invalid_view_range_is_explained(view_range: object, problem: str) -> None:
    assert problem in await _view(MemorySandbox({FILE: b"a\nb\nc\nd\n"}), FILE, view_range)


async def test_view_of_an_empty_file_says_that_it_is_empty() -> None:
    assert await _view(MemorySandbox({FILE: b""})) == "/testbed/file is empty."


async def test_long_file_is_shown_in_part_with_the_range_of_the_rest() -> None:
    sandbox = MemorySandbox({FILE: b"x\n" * 5000})
    text = await _view(sandbox)
    assert "  2000\tx\n[lines 1-2000 of 5000 shown; go on with view_range" in text
    assert "[2001, 5000], or search with grep -n]" in text
    rest = await _view(sandbox, FILE, [2001, 5000], ObservationLimits(max_chars=100))
    assert rest.startswith("  2001\tx\n")
    assert "[lines 2001-2011 of 5000 shown; go on with view_range [2012, 5000]" in rest


async def test_a_very_long_line_is_cut() -> None:
    text = await _view(MemorySandbox({FILE: b"x" * 300_000 + b"\nend\n"}))
    assert text == (
        f"     1\t{'x' * 2000} [... 298000 characters of this line left out]\n     2\tend"
    )


async def test_binary_file_is_described_and_not_shown() -> None:
    text = await _view(MemorySandbox({FILE: b"\x89PNG\r\n\x1a\n" + bytes(5000)}))
    assert text.startswith("/testbed/file is a binary file of 5008 bytes. It begins 89 50 4e 47")
    assert "(.PNG...." in text


async def test_file_that_is_not_utf_8_is_shown_with_a_note() -> None:
    text = await _view(MemorySandbox({FILE: b"caf\xe9\nok\n"}))
    assert text == ("     1\tcaf\ufffd\n     2\tok\n[not UTF-8: \ufffd stands for other bytes]")


async def test_crlf_line_ends_are_reported_in_a_note() -> None:
    assert await _view(MemorySandbox({FILE: b"a\r\nb\r\n"})) == (
        "     1\ta\n     2\tb\n[lines end in CRLF]"
    )
    assert "[some lines end in CRLF]" in await _view(MemorySandbox({FILE: b"a\r\nb\n"}))


async def test_view_of_a_file_beyond_ten_mebibytes_advises_bash() -> None:
    sandbox = MemorySandbox({FILE: b"x" * (MAX_FILE_BYTES + 1)})
    text = await _view(sandbox)
    assert "is larger than this tool's 10485760 bytes. Use bash" in text


async def test_missing_path_is_reported_with_similar_names() -> None:
    sandbox = MemorySandbox({"/testbed/report.txt": b"", "/testbed/zzz": b""})
    assert await _view(sandbox, "/testbed/reprot.txt") == (
        "/testbed/reprot.txt does not exist. There is /testbed/report.txt."
    )
    assert await _view(sandbox, "/testbed/other") == "/testbed/other does not exist."
    assert await _view(sandbox, "/nowhere/file") == (
        "/nowhere/file does not exist, nor does the directory /nowhere."
    )


async def test_symbolic_link_or_special_file_is_not_viewed_but_explained() -> None:
    sandbox = MemorySandbox({"/testbed/target": b"x"})
    await output(sandbox, "ln -s target file; ln -s output directory; mkfifo fifo")
    for name in ("file", "directory", "fifo"):
        text = await _view(sandbox, f"/testbed/{name}")
        assert text.startswith(f"/testbed/{name} is a link or a special file")
        assert f"readlink -f /testbed/{name}" in text


async def test_a_directory_is_shown_two_levels_deep_without_hidden_entries() -> None:
    sandbox = MemorySandbox(
        {
            "/testbed/d/a.txt": b"12345",
            "/testbed/d/sub/b.md": b"",
            "/testbed/d/sub/deep/c": b"",
            "/testbed/d/sub-1/x": b"1",
            "/testbed/d/.git/config": b"",
            "/testbed/d/new\nline": b"",
        }
    )
    await output(sandbox, "ln -s a.txt d/link")
    assert await _view(sandbox, "/testbed/d/") == "\n".join(
        [
            "/testbed/d, two levels deep, hidden entries left out:",
            "a.txt (5 bytes)",
            "link (link or special file)",
            "new\\nline (0 bytes)",
            "sub/",
            "sub/b.md (0 bytes)",
            "sub/deep/",
            "sub-1/",
            "sub-1/x (1 bytes)",
        ]
    )


async def test_view_of_an_empty_directory_says_that_it_has_no_entries() -> None:
    text = await _view(MemorySandbox(), "/testbed/output")
    assert text.endswith("left out:\n(nothing)")


async def test_large_directory_is_truncated_with_a_note() -> None:
    sandbox = MemorySandbox({f"/testbed/d/{n:04}": b"" for n in range(600)})
    lines = (await _view(sandbox, "/testbed/d")).splitlines()
    assert (len(lines), lines[500]) == (502, "0499 (0 bytes)")
    assert lines[501] == "[there is more; view a subdirectory or use find]"


async def test_file_name_that_is_not_utf_8_is_shown_as_valid_text() -> None:
    sandbox = MemorySandbox({"/testbed/d/caf\udce9": b""})
    text = await _view(sandbox, "/testbed/d")
    assert text.encode().decode().endswith("caf\ufffd (0 bytes)")


async def test_view_in_a_lost_sandbox_raises_sandbox_lost_error() -> None:
    sandbox = MemorySandbox()
    await sandbox.close()
    with pytest.raises(SandboxLostError):
        await _view(sandbox)
