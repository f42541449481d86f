"""Selection of the produced files that become artifacts."""

from typing import Any

import pytest

from policies.artifacts import (
    ArtifactLimits,
    FileVersion,
    ProducedFile,
    SkippedFile,
    is_changed,
    linked_files,
    output_path,
    replace_signed_links,
    select_files,
)

MIB = 1 << 20


def file(name: str, size: int = 1) -> ProducedFile:
    return ProducedFile(f"/testbed/output/{name}", size)


def selected(files: list[ProducedFile], **limits: Any) -> tuple[list[str], list[str]]:
    """Return the names of the chosen files, and those of the skipped files with the reason."""
    selection = select_files(files, ArtifactLimits(**limits))
    names = [file_.path.removeprefix("/testbed/output/") for file_ in selection.chosen]
    sizes = {file_.path: file_.bytes for file_ in files}
    assert all(file_.bytes == sizes[file_.path] for file_ in selection.skipped)
    skipped = [f"{file_.path.rpartition('/')[2]}: {file_.why}" for file_ in selection.skipped]
    return names, skipped


def test_produced_files_within_the_limits_are_returned_in_order() -> None:
    assert selected([file("b"), file("a", 0), file("c", MIB)]) == (["b", "a", "c"], [])


def test_answer_file_is_not_an_artifact() -> None:
    files = [file("answer.txt"), ProducedFile("/testbed/answer.txt", 1), file("sub/answer.txt")]
    assert selected(files) == (["sub/answer.txt"], [])


def test_too_large_file_is_skipped_and_other_files_are_returned() -> None:
    files = [file("a", MIB), file("b", MIB + 1), file("c", 1)]
    assert selected(files, max_file_mib=1) == (["a", "c"], ["b: too_large"])


def test_total_size_of_artifacts_is_limited() -> None:
    files = [file("a", 2 * MIB), file("b", 2 * MIB), file("c", MIB), file("d", 1), file("e", 0)]
    skipped = ["b: no_room", "d: no_room"]
    assert selected(files, max_file_mib=2, max_total_mib=3) == (["a", "c", "e"], skipped)


def test_number_of_artifacts_is_limited() -> None:
    files = [file("a"), file("b"), file("c")]
    assert selected(files, max_files=2) == (["a", "b"], ["c: too_many"])
    assert selected(files[:1], max_files=0) == ([], ["a: too_many"])


def test_answer_file_uses_no_quota() -> None:
    files = [file("answer.txt", MIB), file("b", MIB)]
    assert selected(files, max_files=1, max_total_mib=1) == (["b"], [])


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
def test_only_files_of_allowed_types_are_returned(limits: Any, chosen: str) -> None:
    files = [file(name) for name in ["page.html", "a.PNG", "b.csv", "run.sh", "c"]]
    names, skipped = selected(files, **limits)
    assert names == chosen.split()
    assert {entry.partition(": ")[2] for entry in skipped} <= {"type_not_allowed"}
    assert len(names) + len(skipped) == len(files)


@pytest.mark.parametrize("end", [" ", ".", "...", ". .", "\t", "\n", "\N{NO-BREAK SPACE}"])
@pytest.mark.parametrize("pattern", [".html", "text/html", "text/*"])
def test_type_of_an_artifact_ignores_trailing_dots_and_spaces_of_its_name(
    end: str, pattern: str
) -> None:
    page = file(f"page.HTML{end}")
    assert selected([page], deny_types=(pattern,))[0] == []
    assert len(selected([page], allow_types=(pattern,))[0]) == 1


def test_file_of_a_denied_type_uses_no_quota() -> None:
    files = [file("a.html", MIB), file("b.csv", MIB)]
    assert selected(files, max_total_mib=1, max_files=1, deny_types=(".html",))[0] == ["b.csv"]


@pytest.mark.parametrize("pattern", ["html", "*", "*/*", ".", "text/", "T/HTML", ".a b", "text/h*"])
@pytest.mark.parametrize("name", ["allow_types", "deny_types"])
def test_invalid_type_pattern_is_refused(name: str, pattern: str) -> None:
    with pytest.raises(ValueError, match="neither an extension"):
        ArtifactLimits(**{name: (pattern,)})


def test_denied_type_is_the_reported_reason_even_if_size_and_number_are_exceeded() -> None:
    large = SkippedFile("/testbed/output/a.html", 9 * MIB, "type_not_allowed")
    limits = ArtifactLimits(max_files=0, max_file_mib=1, deny_types=(".html",))
    assert select_files([file("a.html", 9 * MIB)], limits).skipped == (large,)


def test_relative_output_path_is_joined_to_the_output_directory() -> None:
    assert output_path("sub/a b.csv") == "/testbed/output/sub/a b.csv"


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (None, FileVersion(1, "a"), True),
        (None, FileVersion(1, ""), True),
        (FileVersion(1, "a"), FileVersion(1, "a"), False),
        (FileVersion(1, "a"), FileVersion(1, "b"), True),
        (FileVersion(None, "a"), FileVersion(1, "a"), False),
        (FileVersion(None, "a"), FileVersion(1, ""), None),
        (FileVersion(1, "a"), FileVersion(1, ""), None),
        (FileVersion(1, ""), FileVersion(1, "a"), None),
        (FileVersion(1, ""), FileVersion(2, ""), True),
        (FileVersion(1, "a"), FileVersion(2, ""), True),
    ],
)
def test_file_counts_as_changed_if_its_hash_or_its_size_differs(
    before: FileVersion | None, now: FileVersion, expected: bool | None
) -> None:
    assert is_changed(before, now) is expected


@pytest.mark.parametrize("offset", [0, 1, 40, 100, 150])
def test_signed_link_is_found_at_any_position_of_a_long_text(offset: int) -> None:
    """Texts are searched in pieces of 1 MiB."""
    link = f"/v1/containers/c1/files/cfile_1/content?exp=1&sig={'a' * 64}"
    before, after = "data:" + "x" * (MIB - offset - 6), "y" * MIB
    text = f" {before} https://host{link} {after}"
    assert list(linked_files([text])) == [("c1", "cfile_1")]
    assert (
        replace_signed_links(text, {("c1", "cfile_1"): "/a.txt"}.get) == f" {before} /a.txt {after}"
    )
