"""Safe and unique names of files, and MIME types."""

import pytest

from policies.file_names import (
    UniqueDisplayNames,
    UniqueNames,
    display_name,
    guess_mime_type,
    normalize_mime_type,
    safe_name,
)

PDF = "application/pdf"


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("report.csv", "report.csv"),
        ("../../etc/passwd", "passwd.pdf"),
        ("C:\\Users\\me\\plan.docx", "plan.docx"),
        ("/testbed/output/answer.txt", "answer.txt"),
        ("my report (final).csv", "my_report_final.csv"),
        ("a\nb\x00c\u202e\u2028d.txt", "a_b_c_d.txt"),
        ("$(rm -rf ~).txt", "rm_-rf.txt"),
        ("-rf.txt", "rf.txt"),
        (".bashrc", "bashrc.pdf"),
        ("\ud800.txt", ""),
        ("..", ""),
        ("", ""),
        ("Bericht Übersicht.csv", "Bericht_Übersicht.csv"),
        ("u\u0308ber.csv", "über.csv"),
        ("報告書.csv", "報告書.csv"),
        ("हिन्दी.csv", "हिन्दी.csv"),
        ("v1.tar.gz", "v1.tar.gz"),
        ("2601.16206", "2601.16206.pdf"),
        ("paper", "paper.pdf"),
        ("paper.TXT", "paper.TXT"),
        ("x" * 300 + ".csv", "x" * 116 + ".csv"),
        ("ü" * 300 + ".csv", "ü" * 58 + ".csv"),
    ],
)
def test_safe_name_has_no_paths_spaces_and_control_characters(wanted: str, name: str) -> None:
    assert safe_name(wanted, PDF) == name


def test_assigned_file_names_are_unique() -> None:
    names = UniqueNames()
    wanted = ["a.csv", "a.csv", "a-2.csv", "b/a.csv", "", "", "a"]
    assigned = [names.assign(name, kind="image", mime_type="image/png") for name in wanted]
    assert assigned == [
        "a.csv",
        "a-2.csv",
        "a-2-2.csv",
        "a-3.csv",
        "image-1.png",
        "image-2.png",
        "a.png",
    ]


@pytest.mark.parametrize(
    ("written", "clean"),
    [
        ("text/csv", "text/csv"),
        ("Text/HTML; charset=utf-8", "text/html"),
        ("x]\n[y/z", "application/octet-stream"),
        ("", "application/octet-stream"),
    ],
)
def test_mime_type_is_normalized_and_unknown_if_malformed(written: str, clean: str) -> None:
    assert normalize_mime_type(written) == clean


def test_mime_type_is_guessed_from_the_name() -> None:
    assert guess_mime_type("b.PDF") == PDF
    assert guess_mime_type("b.pdf. .") == guess_mime_type("b.pdf\N{NO-BREAK SPACE}") == PDF
    assert guess_mime_type("b.unheard-of") == guess_mime_type("b") == "application/octet-stream"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/testbed/output/a b.csv", "a b.csv"),
        ("/testbed/output/sub/gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n.csv", "gr\u00fcn.csv"),
        ("/testbed/output/in\N{RIGHT-TO-LEFT OVERRIDE}fdp.exe", "in_fdp.exe"),
        ("/testbed/output/a\N{ZERO WIDTH SPACE}.csv", "a_.csv"),
        ("/testbed/output/a\N{LINE SEPARATOR}\r\n\0.csv", "a____.csv"),
        ("/testbed/output/a\N{ZERO WIDTH NON-JOINER}b.csv", "a\N{ZERO WIDTH NON-JOINER}b.csv"),
        ("/testbed/output/..\\..\\x.csv", ".._.._x.csv"),
        ("/testbed/output/. .", "file"),
    ],
)
def test_display_name_has_no_control_characters(path: str, name: str) -> None:
    assert display_name(path) == name


def test_display_names_are_unique() -> None:
    names = UniqueDisplayNames()
    paths = ["x/same.csv", "y/same.csv", "z/SAME.csv", "same-2.csv", "README", "a/README"]
    assert [names.assign(path) for path in paths] == [
        "same.csv",
        "same-2.csv",
        "SAME-3.csv",
        "same-2-2.csv",
        "README",
        "README-2",
    ]
