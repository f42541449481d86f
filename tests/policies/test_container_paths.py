"""Where files that clients put into a container lie."""

import pytest

from policies.container_paths import MAX_NAME_BYTES, archive_name, input_path


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
    ],
)
def test_no_name_in_a_zip_leads_out_of_it(path: str, name: str) -> None:
    assert archive_name(path) == name
