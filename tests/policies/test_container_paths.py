"""Where files that clients put into a container lie."""

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
def test_a_file_lies_among_the_documents_under_its_own_name(filename: str, path: str) -> None:
    assert input_path(filename, ()) == path


def test_a_name_that_is_taken_gets_a_number() -> None:
    taken: list[str] = []
    for _ in range(3):
        taken.append(input_path("a.tar.gz", taken))
    assert [path.rpartition("/")[2] for path in taken] == ["a.tar.gz", "a.tar-2.gz", "a.tar-3.gz"]
    assert input_path(".env", ["/testbed/documents/.env"]) == "/testbed/documents/.env-2"


@pytest.mark.parametrize("filename", ["\N{SNOWMAN}" * 500, "a." + "x" * 500, "x" * 500 + ".csv"])
def test_a_long_name_is_cut_to_what_a_disk_takes(filename: str) -> None:
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
def test_a_name_in_a_zip_leads_nowhere_else_and_hides_nothing(path: str, name: str) -> None:
    assert ArchiveNames().assign(path) == name


def test_each_name_in_a_zip_is_given_once() -> None:
    names = ArchiveNames()
    paths = ["output/a.csv", "output/a\n.csv", "output/a\t.csv", "output/A.csv", "other/a.csv"]
    assert [names.assign(f"/testbed/{path}") for path in paths] == [
        "output/a.csv",
        "output/a_.csv",
        "output/a_-2.csv",
        "output/A-2.csv",
        "other/a.csv",
    ]
