"""The editor changes only the requested bytes, and reports the edit."""

import anyio
import pytest

from policies.observation import ObservationLimits
from sandbox_runtime.sandbox import Sink
from sandbox_runtime.tools.base import Observation
from sandbox_runtime.tools.editor import MAX_FILE_BYTES, StrReplaceEditor
from tests.fakes.memory_sandbox import MemoryLease, MemorySandbox
from tests.sandbox_runtime.transfer import PLENTY_S, output, read, write

FILE = "/testbed/file"


class EditorSession:
    """An editor and its sandbox."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.sandbox = MemorySandbox(files)
        self._editor = StrReplaceEditor(ObservationLimits())

    async def run(self, command: str, path: str = FILE, **arguments: object) -> Observation:
        given = {"command": command, "path": path, **arguments}
        return await self._editor.run(MemoryLease(self.sandbox), given, timeout_s=PLENTY_S)

    async def do(self, command: str, path: str = FILE, **arguments: object) -> str:
        return (await self.run(command, path, **arguments)).text

    async def content(self, path: str = FILE) -> bytes:
        return await read(self.sandbox, path)


@pytest.mark.parametrize(
    "text", ["", "42", "42\n", "all:\n\tcc x.c\n", "a\r\nb\r\n", "ü 数 🎉\n\n", "'$x' `y` \\n"]
)
async def test_create_writes_the_exact_bytes(text: str) -> None:
    session = EditorSession()
    observation = await session.run("create", file_text=text)
    assert observation.text.startswith(f"Created /testbed/file ({len(text.encode())} bytes, ")
    assert await session.content() == text.encode()


@pytest.mark.parametrize(
    "path",
    [
        "/testbed/output/my file.txt",
        "/testbed/x.py; touch PWNED",
        "/testbed/$(touch PWNED)",
        '/testbed/it\'s "quoted".txt',
        "/testbed/new\nline",
        "/testbed/-n",
    ],
)
async def test_special_characters_of_a_path_are_literal(path: str) -> None:
    session = EditorSession()
    await session.do("create", path, file_text="a\n")
    await session.do("str_replace", path, old_str="a", new_str="b")
    await session.do("insert", path, insert_line=1, new_str="c\n")
    assert await session.content(path) == b"b\nc\n"
    for _ in range(3):
        await session.do("undo_edit", path)
    assert "PWNED" not in (await output(session.sandbox, "ls -A; ls -A output")).split()
    assert (await session.do("view", path)).find("does not exist") > 0


async def test_relative_path_is_resolved_against_testbed() -> None:
    session = EditorSession()
    await session.do("create", "sub/dir/file", file_text="x")
    assert await session.content("/testbed/sub/dir/file") == b"x"


async def test_a_text_beyond_128_kib_is_written_whole() -> None:
    session = EditorSession()
    text = "0123456789abcde\n" * 20_000
    await session.do("create", file_text=text)
    assert await session.content() == text.encode()


@pytest.mark.parametrize("making", ["printf old > file", "touch file", "mkdir file", "mkfifo file"])
async def test_create_does_not_overwrite_an_existing_path(making: str) -> None:
    session = EditorSession()
    await output(session.sandbox, making)
    text = await session.do("create", file_text="new")
    assert text.startswith("Nothing was written: /testbed/file exists")
    await output(session.sandbox, "[ ! -f file ] || [ ! -s file ] || [ old = $(cat file) ]")


async def test_create_below_a_file_is_refused_with_a_reason() -> None:
    session = EditorSession({FILE: b"x"})
    assert "Refused by the sandbox" in await session.do("create", f"{FILE}/y", file_text="z")


@pytest.mark.parametrize(
    "before",
    [
        b"all:\n\told x\n",
        b"old\r\nline two\r\n",
        b"no newline old",
        b"\n\n\told\t\n\n\n",
        b"caf\xe9 \xff old \x00 \x80\n",
    ],
)
async def test_str_replace_changes_only_the_single_occurrence(before: bytes) -> None:
    session = EditorSession({FILE: before})
    await session.do("str_replace", old_str="old", new_str="nëw\t")
    assert await session.content() == before.replace(b"old", "nëw\t".encode())


async def test_str_replace_shows_the_edited_lines_with_context() -> None:
    session = EditorSession({FILE: b"".join(b"line %d\n" % n for n in range(1, 21))})
    text = await session.do("str_replace", old_str="line 10\n", new_str="ten\nand a half\n")
    lines = text.splitlines()
    assert lines[0] == "Edited /testbed/file. Lines 6-16 are now:"
    assert lines[1] == "     6\tline 6"
    assert lines[5:7] == ["    10\tten", "    11\tand a half"]
    assert lines[-1] == "    16\tline 15"


async def test_str_replace_without_new_str_deletes_old_str() -> None:
    session = EditorSession({FILE: b"keep drop keep"})
    await session.do("str_replace", old_str=" drop")
    assert await session.content() == b"keep keep"
    assert "The file is now empty." in await session.do("str_replace", old_str="keep keep")


async def test_str_replace_refuses_several_occurrences_and_names_their_lines() -> None:
    session = EditorSession({FILE: b"a\nx\na\nb a\n"})
    text = await session.do("str_replace", old_str="a", new_str="z")
    assert "occurs more than once, at lines 1, 3, 4." in text
    assert await session.content() == b"a\nx\na\nb a\n"


async def test_str_replace_counts_overlapping_occurrences() -> None:
    session = EditorSession({FILE: b"aaa"})
    assert "more than once" in await session.do("str_replace", old_str="aa", new_str="b")
    assert await session.content() == b"aaa"


@pytest.mark.parametrize(
    ("before", "old", "hint"),
    [
        (b"one\n\ttwo\n\tthree\n", "two\n    three", "only in whitespace from the text at line 2"),
        (b"x\nfoo( a )\n", "foo(  a )", "only in whitespace from the text at line 2"),
        (b"a\r\nb\r\n", "a\nb", "lines end in CRLF"),
        (b"a\nb\n", "a\r\nb", "lines end in LF alone"),
        (b"a\nb\n", "     1\ta\n     2\tb", "Leave out the line numbers"),
        (b"x\ndef f():\n    return 1\n", "def f():\n    return 2", "first line is at line 2"),
        (b"nothing like it", "something else", "copy the text exactly"),
    ],
)
async def test_str_replace_without_a_match_hints_at_the_reason(
    before: bytes, old: str, hint: str
) -> None:
    session = EditorSession({FILE: before})
    text = await session.do("str_replace", old_str=old, new_str="z")
    assert text.startswith("Nothing was changed: old_str is not in the file.")
    assert hint in text
    assert await session.content() == before


@pytest.mark.parametrize(("old", "new"), [("", "x"), ("same", "same")])
async def test_str_replace_of_an_empty_or_identical_string_changes_nothing_and_says_why(
    old: str, new: str
) -> None:
    session = EditorSession({FILE: b"same"})
    text = await session.do("str_replace", old_str=old, new_str=new)
    assert text.startswith("Nothing was changed: old_str ")
    assert await session.content() == b"same"


@pytest.mark.parametrize(
    ("before", "line", "text", "after"),
    [
        (b"a\nb\n", 0, "x\n", b"x\na\nb\n"),
        (b"a\nb\n", 1, "x\n", b"a\nx\nb\n"),
        (b"a\nb\n", 2, "x\n", b"a\nb\nx\n"),
        (b"a\nb\n", 1, "x", b"a\nx\nb\n"),
        (b"a\nb\n", 2, "x", b"a\nb\nx"),
        (b"a\nb", 2, "x", b"a\nb\nx"),
        (b"a\nb", 2, "x\n", b"a\nb\nx\n"),
        (b"a\nb", 0, "x", b"x\na\nb"),
        (b"a\r\nb\r\n", 1, "x", b"a\r\nx\r\nb\r\n"),
        (b"a\r\nb", 2, "x", b"a\r\nb\r\nx"),
        (b"", 0, "x", b"x"),
        (b"", 0, "x\n", b"x\n"),
        (b"\n", 1, "x", b"\nx"),
        (b"\n", 0, "\tx\n\ty", b"\tx\n\ty\n\n"),
        (b"caf\xe9\nb\n", 1, "\n", b"caf\xe9\n\nb\n"),
    ],
)
async def test_insert_adds_newlines_only_between_lines(
    before: bytes, line: int, text: str, after: bytes
) -> None:
    session = EditorSession({FILE: before})
    await session.do("insert", insert_line=line, new_str=text)
    assert await session.content() == after


async def test_insert_shows_the_new_lines_with_context() -> None:
    session = EditorSession({FILE: b"a\nb\nc\n"})
    text = await session.do("insert", insert_line="2", new_str="x\ny\n")
    assert text == (
        "Edited /testbed/file. Lines 1-5 are now:\n"
        "     1\ta\n     2\tb\n     3\tx\n     4\ty\n     5\tc"
    )


@pytest.mark.parametrize("line", [-1, 3])
async def test_insert_outside_the_lines_of_the_file_is_refused_with_their_number(line: int) -> None:
    session = EditorSession({FILE: b"a\nb\n"})
    text = await session.do("insert", insert_line=line, new_str="x")
    assert f"insert_line is {line}, but the file has 2 lines: give 0" in text
    assert await session.content() == b"a\nb\n"


@pytest.mark.parametrize(
    "arguments",
    [
        {"command": "str_replace", "old_str": "a", "new_str": "b"},
        {"command": "insert", "insert_line": 0, "new_str": "b"},
    ],
)
async def test_edit_of_a_missing_path_a_directory_or_a_link_changes_nothing(
    arguments: dict[str, object],
) -> None:
    session = EditorSession({"/testbed/real": b"a"})
    await output(session.sandbox, "ln -s real link")
    editor = StrReplaceEditor(ObservationLimits())
    for path, words in (
        ("missing", "/testbed/missing does not exist."),
        ("output", "/testbed/output is a directory."),
        ("link", "readlink -f /testbed/link"),
    ):
        given = {**arguments, "path": path}
        text = (await editor.run(MemoryLease(session.sandbox), given, timeout_s=PLENTY_S)).text
        assert words in text
    assert await output(session.sandbox, "ls; cat real") == "documents\nlink\noutput\nreal\na"


async def test_an_edit_keeps_the_files_mode() -> None:
    session = EditorSession({FILE: b"echo old"})
    await output(session.sandbox, "chmod 755 file")
    await session.do("str_replace", old_str="old", new_str="new")
    assert await output(session.sandbox, "./file") == "new\n"


async def test_undo_restores_the_exact_bytes_before_each_edit() -> None:
    session = EditorSession({FILE: b"caf\xe9\r\n"})
    await session.do("insert", insert_line=1, new_str="two")
    await session.do("str_replace", old_str="two", new_str="three\n")
    await session.do("undo_edit")
    assert await session.content() == b"caf\xe9\r\ntwo"
    assert await session.do("undo_edit") == "The last edit of /testbed/file is undone."
    assert await session.content() == b"caf\xe9\r\n"
    assert (await session.do("undo_edit")).startswith("Nothing was undone")


async def test_undo_of_create_removes_the_file() -> None:
    session = EditorSession()
    await session.do("create", "a b/new file", file_text="x")
    text = await session.do("undo_edit", "a b/new file")
    assert text == "/testbed/a b/new file, which create had made, is removed."
    assert await output(session.sandbox, "ls 'a b'") == ""


async def test_undo_of_create_reports_a_missing_file() -> None:
    session = EditorSession()
    await session.do("create", file_text="x")
    await output(session.sandbox, "rm file")
    assert (await session.do("undo_edit")).startswith("Nothing was undone: rm:")


async def test_undo_reverts_only_the_last_edit_of_its_own_path() -> None:
    session = EditorSession({FILE: b"a", "/testbed/other": b"b"})
    await session.do("str_replace", old_str="a", new_str="A")
    await session.do("str_replace", "/testbed/other", old_str="b", new_str="B")
    await session.do("undo_edit")
    assert (await session.content(), await session.content("/testbed/other")) == (b"a", b"B")


async def test_only_the_last_ten_edits_of_a_path_can_be_undone() -> None:
    session = EditorSession({FILE: b"0"})
    for number in range(12):
        await session.do("str_replace", old_str=str(number), new_str=str(number + 1))
    for _ in range(10):
        assert "is undone" in await session.do("undo_edit")
    assert (await session.do("undo_edit")).startswith("Nothing was undone")
    assert await session.content() == b"2"


async def test_undo_does_not_go_back_beyond_an_edit_that_was_too_large_to_remember() -> None:
    large = b"x" * (9 << 20)
    session = EditorSession({FILE: b"small", "/testbed/other": b"b"})
    await session.do("str_replace", "/testbed/other", old_str="b", new_str="B")
    await session.do("str_replace", old_str="small", new_str="start")
    await write(session.sandbox, FILE, b"start" + large)
    await session.do("str_replace", old_str="start", new_str="again")
    assert (await session.do("undo_edit")).startswith("Nothing was undone")
    assert await session.content() == b"again" + large
    assert "is undone" in await session.do("undo_edit", "/testbed/other")


async def test_undo_history_forgets_the_oldest_versions_beyond_eight_mebibytes() -> None:
    paths = [f"/testbed/{number}" for number in range(3)]
    session = EditorSession(dict.fromkeys(paths, b"old" + b"x" * (3 << 20)))
    for path in paths:
        await session.do("str_replace", path, old_str="old", new_str="new")
    undone = [await session.do("undo_edit", path) for path in paths]
    assert ["is undone" in text for text in undone] == [False, True, True]


async def test_a_file_may_not_grow_beyond_ten_mebibytes() -> None:
    session = EditorSession({FILE: b"start" + b"x" * (MAX_FILE_BYTES - 5)})
    text = await session.do("str_replace", old_str="start", new_str="longer start")
    assert text.startswith(f"Nothing was written: {MAX_FILE_BYTES + 7} bytes are more than")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("view /testbed", "they are a string, not an object"),
        ({"command": "view"}, "'path' is missing"),
        ({"command": "open", "path": "x"}, "must be one of view, create, str_replace, insert"),
        ({"command": "create", "path": "x"}, "create also needs file_text"),
        ({"command": "str_replace", "path": "x"}, "str_replace also needs old_str"),
        ({"command": "insert", "path": "x"}, "insert also needs insert_line and new_str"),
        ({"command": "view", "path": ""}, "path is empty"),
        ({"command": "view", "path": "a\0b"}, "path is empty or holds a NUL"),
        ({"command": "create", "path": "x", "file_text": {"a": 1}}, "must be a string"),
        ({"command": "insert", "path": "x", "insert_line": True, "new_str": ""}, "an integer"),
    ],
)
async def test_editor_call_with_invalid_arguments_does_nothing_and_says_why(
    arguments: object, words: str
) -> None:
    editor = StrReplaceEditor(ObservationLimits())
    observation = await editor.run(MemoryLease(MemorySandbox()), arguments, timeout_s=PLENTY_S)
    assert observation.text.startswith("Nothing was done")
    assert words in observation.text


async def test_sandbox_timeout_is_reported_to_the_model() -> None:
    class Stuck(MemorySandbox):
        async def get(self, path: str, sink: Sink, *, max_bytes: int) -> int:
            await anyio.sleep_forever()
            return 0

    editor = StrReplaceEditor(ObservationLimits())
    arguments = {"command": "view", "path": FILE}
    observation = await editor.run(MemoryLease(Stuck()), arguments, timeout_s=0.01)
    assert observation.text == "Stopped: it took more than 0.01 s."


async def test_hint_for_a_failed_match_takes_bounded_time() -> None:
    session = EditorSession({FILE: b"a " * 400_000})
    with anyio.fail_after(PLENTY_S):
        text = await session.do("str_replace", old_str="a\n" * 2_000 + "b", new_str="c")
        assert "Its first line is at line 1, but what follows there differs." in text
        close = await session.do("str_replace", old_str="a\na\na", new_str="c")
        assert "differs only in whitespace from the text at line 1" in close
