"""Paths of uploaded files in a container, and names of files in a ZIP archive."""

import pytest

from policies.workspace import MAX_NAME_BYTES, ArchiveNames, input_path


@pytest.mark.parametrize(
    ("filename", "path"),
    [
        ("a.csv", "/testbed/documents/a.csv"),
        ("my data (1).csv", "/testbed/documents/my data (1).csv"),
        ("../../etc/passwd", "/testbed/documents/passwd"),
        ("C:\\Users\\me\\a.csv", "/testbed/documents/a.csv"),
        ("a\nb\0c.csv", "/testbed/documents/a_b_c.csv"),
        ("", "/testbed/documents/file"),
        ("..", "/testbed/documents/file"),
        ("dir/", "/testbed/documents/file"),
        (".env", "/testbed/documents/.env"),
        ("gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n.txt", "/testbed/documents/gr\xfcn.txt"),
    ],
)
def test_uploaded_file_gets_a_safe_name_in_the_input_directory(filename: str, path: str) -> None:
    assert input_path(filename, ()) == path


def test_uploaded_file_with_a_taken_name_gets_a_number() -> None:
    taken: list[str] = []
    for _ in range(3):
        taken.append(input_path("a.tar.gz", taken))
    assert [path.rpartition("/")[2] for path in taken] == ["a.tar.gz", "a.tar-2.gz", "a.tar-3.gz"]
    assert input_path(".env", ["/testbed/documents/.env"]) == "/testbed/documents/.env-2"


@pytest.mark.parametrize("filename", ["\N{SNOWMAN}" * 500, "a." + "x" * 500, "x" * 500 + ".csv"])
def test_long_name_is_truncated_to_the_limit_of_file_systems(filename: str) -> None:
    name = input_path(filename, ()).rpartition("/")[2]
    assert 0 < len(name.encode()) <= MAX_NAME_BYTES
    assert name.endswith(".csv") == filename.endswith(".csv")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/testbed/output/a/b.csv", "output/a/b.csv"),
        ("/tmp/a.csv", "tmp/a.csv"),
        ("/testbed/output/../../a", "output/a"),
        ("/testbed/output/..\\..\\a", "output/.._.._a"),
        ("//a", "a"),
        ("/..", "file"),
        ("/testbed/output/a\x1b[31m\nb.csv", "output/a_[31m_b.csv"),
        ("/testbed/output/d\tir/a\x7f\x85.csv", "output/d_ir/a__.csv"),
        ("/testbed/output/a\N{RIGHT-TO-LEFT OVERRIDE}vsc.exe", "output/a_vsc.exe"),
    ],
)
def test_archive_name_is_relative_and_has_no_control_characters(path: str, name: str) -> None:
    assert ArchiveNames().assign(path) == name


def test_archive_names_are_unique() -> None:
    names = ArchiveNames()
    paths = ["output/a.csv", "output/a\n.csv", "output/a\t.csv", "output/A.csv", "other/a.csv"]
    assert [names.assign(f"/testbed/{path}") for path in paths] == [
        "output/a.csv",
        "output/a_.csv",
        "output/a_-2.csv",
        "output/A-2.csv",
        "other/a.csv",
    ]
