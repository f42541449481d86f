"""Editor of the reference style. The expected texts equal those of the reference implementation."""

import pytest

from policies.reference_style import (
    EditResult,
    directory_observation,
    file_creation_result,
    file_observation,
    insert_text,
    replace_text,
)

CLIPPED = (
    "<response clipped><NOTE>To save on context only part of this file has been shown to you."
    " You should retry this tool after you have searched inside the file with `grep -n` in order to"
    " find the line numbers of what you are looking for.</NOTE>"
)
TEN = "\n".join(f"line {n}" for n in range(1, 11))


def test_view_numbers_all_lines_including_the_empty_last_line() -> None:
    assert file_observation("/a.py", "def f():\n\treturn 1\n", None) == (
        "Here's the result of running `cat -n` on /a.py:\n"
        "     1\tdef f():\n     2\t        return 1\n     3\t"
    )


@pytest.mark.parametrize(
    ("view_range", "shown"),
    [
        ([2, 3], "     2\tb\n     3\tc"),
        ([3, -1], "     3\tc\n     4\t"),
        ([], "     1\ta\n     2\tb\n     3\tc\n     4\t"),
        ([1], "     1\ta\n     2\tb\n     3\tc\n     4\t"),
    ],
)
def test_view_of_a_range_shows_its_lines(view_range: list[int], shown: str) -> None:
    heading = "Here's the result of running `cat -n` on /a.py:\n"
    assert file_observation("/a.py", "a\nb\nc\n", view_range) == heading + shown


@pytest.mark.parametrize(
    ("view_range", "complaint"),
    [
        ([0, 2], "Error: Invalid view_range [0, 2]: start line must be in [1, 4]"),
        ([9, 9], "Error: Invalid view_range [9, 9]: start line must be in [1, 4]"),
        (
            [3, 2],
            "Error: Invalid view_range [3, 2]: end must be >= start and <= 4, or -1 to view until"
            " end.",
        ),
        (
            [1, 9],
            "Error: Invalid view_range [1, 9]: end must be >= start and <= 4, or -1 to view until"
            " end.",
        ),
    ],
)
def test_view_of_an_invalid_range_is_an_error(view_range: list[int], complaint: str) -> None:
    assert file_observation("/a.py", "a\nb\nc\n", view_range) == complaint


def test_long_view_is_clipped_with_its_heading_counted_in_the_limit() -> None:
    heading = "Here's the result of running `cat -n` on /a.py:\n     1\t"
    shown = heading + "x" * (10_000 - len(heading)) + CLIPPED
    assert file_observation("/a.py", "x" * 20_000, None) == shown


def test_empty_file_and_directory_are_reported_as_empty() -> None:
    assert file_observation("/a.py", "", None) == "(empty file: /a.py)"
    assert directory_observation("/d", "") == "(empty directory: /d)"
    assert directory_observation("/d", "/d\n/d/a.py\n") == (
        "Here's the files and directories up to 2 levels deep in /d, excluding hidden:\n"
        "/d\n/d/a.py\n"
    )


def test_created_file_gets_a_newline_and_keeps_its_tabs() -> None:
    assert file_creation_result("/a.py", "def f():\n\treturn 1\n") == EditResult(
        "def f():\n\treturn 1\n\n",
        "File created at /a.py. Here's the result of running `cat -n` on /a.py:\n"
        "     1\tdef f():\n     2\t        return 1\n     3\t\n"
        "Review the file and make sure that it is as expected. Edit the file if necessary.",
    )


def test_view_of_a_created_file_is_clipped() -> None:
    assert file_creation_result("/a.py", "x" * 10_001).observation == (
        "File created at /a.py. Here's the result of running `cat -n` on /a.py:\n"
        f"     1\t{'x' * 10_000}{CLIPPED}\n"
        "Review the file and make sure that it is as expected. Edit the file if necessary."
    )


def test_replacement_shows_four_lines_of_context_and_expands_tabs() -> None:
    assert replace_text("/a.py", f"\tindented\n{TEN}\n", "line 5", "five\n5") == EditResult(
        "        indented\nline 1\nline 2\nline 3\nline 4\nfive\n5\nline 6\nline 7\nline 8\nline 9"
        "\nline 10\n\n",
        "The file /a.py has been edited. Here's the result of running `cat -n` on a snippet of"
        " /a.py:\n     2\tline 1\n     3\tline 2\n     4\tline 3\n     5\tline 4\n     6\tfive\n"
        "     7\t5\n     8\tline 6\n     9\tline 7\n    10\tline 8\n    11\tline 9\n"
        "Review the changes and make sure they are as expected. Edit the file again if necessary.",
    )


@pytest.mark.parametrize(
    ("content", "old", "complaint"),
    [
        ("a\n", "", "Error: old_str is required for str_replace."),
        ("", "a", "Error: Could not read file /a.py"),
        ("a\n", "b", "Error: No occurrences of old_str found in /a.py for replacement."),
        (None, "b", "Error: No occurrences of old_str found in /a.py for replacement."),
        (
            "a\na\n",
            "a",
            "Error: Multiple occurrences (2) of old_str found in /a.py. Please ensure it is unique"
            " before using str_replace.",
        ),
    ],
)
def test_impossible_replacement_is_an_error(content: str | None, old: str, complaint: str) -> None:
    assert replace_text("/a.py", content, old, "x") == complaint


def test_insertion_shows_four_lines_of_context() -> None:
    assert insert_text("/a.py", f"{TEN}\n", 6, "new\n\tlines") == EditResult(
        "line 1\nline 2\nline 3\nline 4\nline 5\nline 6\nnew\n        lines\nline 7\nline 8\nline 9"
        "\nline 10\n\n",
        "The file /a.py has been edited. Here's the result of running `cat -n` on a snippet of the"
        " edited file:\n     3\tline 3\n     4\tline 4\n     5\tline 5\n     6\tline 6\n"
        "     7\tnew\n     8\t        lines\n     9\tline 7\n    10\tline 8\n    11\tline 9\n"
        "    12\tline 10\nReview the changes and make sure they are as expected (correct"
        " indentation, no duplicate lines, etc). Edit the file again if necessary.",
    )


def test_text_is_inserted_at_the_start_and_into_an_empty_file() -> None:
    at_start, into_empty = insert_text("/a.py", "a", 0, "b"), insert_text("/a.py", "", 0, "b")
    assert isinstance(at_start, EditResult)
    assert isinstance(into_empty, EditResult)
    assert (at_start.text, into_empty.text) == ("b\na\n", "b\n")
    assert "\n     1\tb\n     2\ta\nReview" in at_start.observation


@pytest.mark.parametrize(
    ("content", "line", "new", "complaint"),
    [
        ("a\n", 3, "x", "Error: Invalid insert_line 3. Must be in [0, 2]."),
        ("a\n", -1, "x", "Error: Invalid insert_line -1. Must be in [0, 2]."),
        ("", 1, "x", "Error: Invalid insert_line 1. Must be in [0, 0]."),
        ("a\n", 0, "", "Error: new_str is required for insert."),
        (None, 0, "x", "Error: Could not read file /a.py"),
    ],
)
def test_impossible_insertion_is_an_error(
    content: str | None, line: int, new: str, complaint: str
) -> None:
    assert insert_text("/a.py", content, line, new) == complaint


def test_edit_keeps_bytes_that_are_not_utf_8() -> None:
    content = b"\xff a\n".decode(errors="surrogateescape")
    edited = replace_text("/a.py", content, "a", "b")
    assert isinstance(edited, EditResult)
    assert edited.text.encode(errors="surrogateescape") == b"\xff b\n\n"
