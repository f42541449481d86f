"""Which produced files go back."""

from typing import Any

import pytest

from policies.artifacts import (
    ArtifactLimits,
    ProducedFile,
    SavedFile,
    SkippedFile,
    is_changed,
    output_path,
    select_files,
)

MIB = 1 << 20


def file(name: str, size: int = 1) -> ProducedFile:
    return ProducedFile(f"/testbed/output/{name}", size)


def outcome(files: list[ProducedFile], **limits: Any) -> tuple[list[str], list[str]]:
    """The names of those that go back, and of the others with the reason."""
    selection = select_files(files, ArtifactLimits(**limits))
    names = [each.path.removeprefix("/testbed/output/") for each in selection.chosen]
    sizes = {each.path: each.bytes for each in files}
    assert all(each.bytes == sizes[each.path] for each in selection.skipped)
    left = [f"{each.path.rpartition('/')[2]}: {each.why}" for each in selection.skipped]
    return names, left


def test_files_within_the_limits_all_go_back_in_their_order() -> None:
    assert outcome([file("b"), file("a", 0), file("c", MIB)]) == (["b", "a", "c"], [])


def test_the_answer_file_is_no_file() -> None:
    files = [file("answer.txt"), ProducedFile("/testbed/answer.txt", 1), file("sub/answer.txt")]
    assert outcome(files) == (["sub/answer.txt"], [])


def test_too_large_file_is_skipped_and_others_are_returned() -> None:
    files = [file("a", MIB), file("b", MIB + 1), file("c", 1)]
    assert outcome(files, max_file_mib=1) == (["a", "c"], ["b: too_large"])


def test_together_they_stay_within_the_total() -> None:
    files = [file("a", 2 * MIB), file("b", 2 * MIB), file("c", MIB), file("d", 1), file("e", 0)]
    left = ["b: no_room", "d: no_room"]
    assert outcome(files, max_file_mib=2, max_total_mib=3) == (["a", "c", "e"], left)


def test_beyond_their_number_they_are_left_out() -> None:
    files = [file("a"), file("b"), file("c")]
    assert outcome(files, max_files=2) == (["a", "b"], ["c: too_many"])
    assert outcome(files[:1], max_files=0) == ([], ["a: too_many"])


def test_the_answer_file_takes_no_room() -> None:
    files = [file("answer.txt", MIB), file("b", MIB)]
    assert outcome(files, max_files=1, max_total_mib=1) == (["b"], [])


@pytest.mark.parametrize(
    ("limits", "chosen"),
    [
        ({}, "page.html a.PNG b.csv run.sh c"),
        ({"allow_types": ()}, ""),
        ({"allow_types": (".csv", "image/*")}, "a.PNG b.csv"),
        ({"allow_types": ("text/csv", "text/html")}, "page.html b.csv"),
        ({"allow_types": ("application/octet-stream",)}, "run.sh c"),
        ({"deny_types": ("text/html", ".sh")}, "a.PNG b.csv c"),
        ({"deny_types": (".html", ".png")}, "b.csv run.sh c"),
        ({"allow_types": ("text/*",), "deny_types": ("text/html",)}, "b.csv"),
    ],
)
def test_only_those_of_a_type_that_is_allowed_go_back(limits: Any, chosen: str) -> None:
    files = [file(name) for name in ["page.html", "a.PNG", "b.csv", "run.sh", "c"]]
    names, left = outcome(files, **limits)
    assert names == chosen.split()
    assert {each.partition(": ")[2] for each in left} <= {"type_not_allowed"}
    assert len(names) + len(left) == len(files)


@pytest.mark.parametrize("end", [" ", ".", "...", ". .", "\t", "\n", "\N{NO-BREAK SPACE}"])
@pytest.mark.parametrize("pattern", [".html", "text/html", "text/*"])
def test_type_ignores_characters_that_saving_strips(end: str, pattern: str) -> None:
    page = file(f"page.HTML{end}")
    assert outcome([page], deny_types=(pattern,))[0] == []
    assert len(outcome([page], allow_types=(pattern,))[0]) == 1


def test_file_of_a_denied_type_uses_no_quota() -> None:
    files = [file("a.html", MIB), file("b.csv", MIB)]
    assert outcome(files, max_total_mib=1, max_files=1, deny_types=(".html",))[0] == ["b.csv"]


@pytest.mark.parametrize("pattern", ["html", "*", "*/*", ".", "text/", "T/HTML", ".a b", "text/h*"])
@pytest.mark.parametrize("name", ["allow_types", "deny_types"])
def test_a_type_that_means_nothing_is_refused(name: str, pattern: str) -> None:
    with pytest.raises(ValueError, match="neither an extension"):
        ArtifactLimits(**{name: (pattern,)})


def test_reasons_are_told_by_what_a_file_lacks_first() -> None:
    large = SkippedFile("/testbed/output/a.html", 9 * MIB, "type_not_allowed")
    limits = ArtifactLimits(max_files=0, max_file_mib=1, deny_types=(".html",))
    assert select_files([file("a.html", 9 * MIB)], limits).skipped == (large,)


def test_a_listed_name_lies_in_the_output_directory() -> None:
    assert output_path("sub/a b.csv") == "/testbed/output/sub/a b.csv"


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (None, SavedFile(1, "a"), True),
        (None, SavedFile(1, ""), True),
        (SavedFile(1, "a"), SavedFile(1, "a"), False),
        (SavedFile(1, "a"), SavedFile(1, "b"), True),
        (SavedFile(None, "a"), SavedFile(1, "a"), False),
        (SavedFile(None, "a"), SavedFile(1, ""), None),
        (SavedFile(1, "a"), SavedFile(1, ""), None),
        (SavedFile(1, ""), SavedFile(1, "a"), None),
        (SavedFile(1, ""), SavedFile(2, ""), True),
        (SavedFile(1, "a"), SavedFile(2, ""), True),
    ],
)
def test_a_file_has_changed_if_its_hash_or_else_its_size_has(
    before: SavedFile | None, now: SavedFile, expected: bool | None
) -> None:
    assert is_changed(before, now) is expected
