"""Detection of documents in a prompt, in each notation that users write."""

import random
from collections.abc import Iterator

import pytest

from policies.documents import MAX_DOCUMENTS, offload_documents, split_documents

ONE = "".join(f"Line {number} of the first.\n" for number in range(300))
TWO = "".join(f"Line {number} of the second.\n" for number in range(300))
ASK = "Which of the two is longer?\n"

CLOSED = {
    "tags with attributes": (
        '<document index="1" title="a.txt">\n{}</document>\n'
        '<document source="b.txt">\n{}</document>\n'
    ),
    "tags on one line": "<DOC name='a.txt'>{}</DOC><DOC path='x/b.txt'>{}</DOC>",
    "tags with tags inside": (
        "<documents>\n<document index=\"1\">\n<source>a.txt</source>\n<document_content>\n{}"
        "</document_content>\n</document>\n<document index=\"2\">\n<title> b.txt </title>\n"
        "<document_content>\n{}</document_content>\n</document>\n</documents>\n"
    ),
    "fences with names": "```python a.txt\n{}```\nand\n```txt title=\"b.txt\"\n{}```\n",
    "fences below names": "### a.txt\n```\n{}```\n\n**`b.txt`**:\n\n~~~~\n{}~~~~\n",
    "begin and end": (
        "BEGIN DOCUMENT a.txt\n{}END DOCUMENT\n\n--- BEGIN FILE: b.txt ---\n{}--- END FILE ---\n"
    ),
}  # fmt: skip
OPEN = {
    "rules": "=== a.txt ===\n{}--- FILE: b.txt ---\n{}",
    "head of many files": "==> a.txt <==\n{}==> b.txt <==\n{}",
    "banners": "=====\nFile: a.txt\n=====\n{}=====\nFile: b.txt\n=====\n{}",
    "numbers": "Document 1: a.txt\n{}Document 2: b.txt\n{}",
    "bold numbers": "**Document A: a.txt**\n{}## Document B - b.txt\n{}",
    "brackets": "[Document: a.txt]\n{}\n[Document: b.txt]\n{}",
    "names": "File: a.txt\n{}File: b.txt\n{}",
}


@pytest.mark.parametrize("notation", CLOSED)
def test_text_between_markers_is_a_document(notation: str) -> None:
    pieces = split_documents("Read these.\n" + CLOSED[notation].format(ONE, TWO) + ASK)
    found = [(piece.title.rpartition("/")[2], piece.text) for piece in pieces if piece.is_document]
    assert found == [("a.txt", ONE), ("b.txt", TWO)]
    assert not any(piece.is_open_ended for piece in pieces)
    assert pieces[0].text.startswith("Read these.\n")
    assert pieces[-1].text.endswith(ASK)


@pytest.mark.parametrize("notation", OPEN)
def test_last_document_without_an_end_marker_extends_to_the_end_of_the_text(notation: str) -> None:
    pieces = split_documents("Read these.\n" + OPEN[notation].format(ONE, TWO) + ASK)
    found = [(piece.title, piece.text.lstrip("\n")) for piece in pieces if piece.is_document]
    assert [(title, text.rstrip("\n") + "\n") for title, text in found] == [
        ("a.txt", ONE),
        ("b.txt", TWO + ASK),
    ]
    assert [piece.is_open_ended for piece in pieces if piece.is_document] == [False, True]
    assert pieces[0].text.startswith("Read these.\n")


@pytest.mark.parametrize(
    ("text", "titles"),
    [
        ("Document 1\n{}[Document 2]\n{}", ["Document 1", "Document 2"]),
        ("文档1\uff1a\n{}文档 2\n{}", ["文档1", "文档 2"]),
        ("Chapter I\n{}Chapter II. Home\n{}", ["Chapter I", "Home"]),
        ("<article>\n{}</article><article>\n{}</article>", ["", ""]),
        ("Here is the log:\n```\n{}{}```\nWhy?", [""]),
        ("<transcript>\n{}{}</transcript>\nWhy?", [""]),
        ("# One\n\n{0}{0}{0}\n# Two\n\n{1}{1}{1}", ["One", "Two"]),
        ("# Book\n\nAbout it.\n\n## One\n\n{0}{0}{0}\n## Two\n\n{1}{1}{1}", ["One", "Two"]),
        ("{0}{0}{0}\f{1}{1}{1}", ["page 1", "page 2"]),
        ("{0}{0}{0}\n- Page 7 of 9 -\n{1}{1}{1}", ["page 1", "page 7"]),
        ("<document>{}{}", []),
        ("In <document> tags: <document>\n{}</document><document>\n{}</document>", ["", ""]),
        ("{}\n\n# a remark\n\nin code\n{}", []),
        ("The first is this.\n{}Document 1 says more than I do.\n{}", []),
        ("{}```\nls\n```\n{}", []),
        ("| a | b |\n| --- | --- |\n{}{}", []),
    ],
)
def test_documents_are_found_in_unusual_notations_but_not_in_prose(
    text: str, titles: list[str]
) -> None:
    pieces = split_documents(text.format(ONE, TWO))
    assert [piece.title for piece in pieces if piece.is_document] == titles


def test_comments_in_a_fenced_program_are_no_headings() -> None:
    program = f"```\n# one\n\n{ONE[:2000]}\n# two\n\n{TWO[:1500]}\n```\n"
    pieces = split_documents(f"# A\n\n{program}{ONE * 2}\n\n# B\n\n{TWO * 2}")
    assert [piece.title for piece in pieces if piece.is_document] == ["A", "B"]


def test_small_sections_are_merged() -> None:
    text = "".join(f"# Topic {n}\n\n{'word ' * 300}\n\n" for n in range(20))
    pieces = [piece for piece in split_documents(text) if piece.is_document]
    assert [piece.merged_count for piece in pieces] == [3, 3, 3, 3, 3, 5]
    assert pieces[1].title == "Topic 3"


MARKERS = [
    "<doc>",
    "</doc>",
    "<file>",
    "</file>",
    "<title>x</title>",
    "```",
    "```a.py\n",
    "\n",
    "\n\n",
    "# H\n\n",
    "\f",
]
MARKERS += [
    "=== a ===\n",
    "=== END ===\n",
    "Document 1:\n",
    "BEGIN FILE x\n",
    "=====\nFile: x\n=====\n",
]
MARKERS += [
    "word ",
    "word " * 300,
    "Page 3\n",
    "[",
    "é字😀",
    "\r\n",
    "<context>",
    "</context>",
    "\ud800",
]


def random_texts() -> Iterator[str]:
    """Yield texts that consist of markers in random order."""
    rng = random.Random(7)
    for _ in range(500):
        yield "".join(rng.choices(MARKERS, k=rng.randrange(60)))


def test_joined_segments_equal_the_original_text() -> None:
    for text in random_texts():
        assert "".join(piece.text for piece in split_documents(text)) == text


def test_document_that_overlaps_an_earlier_document_is_not_split_off() -> None:
    text = f"<file>{ONE}<doc>{TWO}</file>{ONE}</doc>"
    pieces = split_documents(text)
    assert [piece.text for piece in pieces] == [
        *("<file>", f"{ONE}<doc>{TWO}", f"</file>{ONE}</doc>")
    ]


def test_prompt_and_files_together_contain_the_complete_text() -> None:
    divided_count = 0
    for random_text in random_texts():
        text, files = random_text + "end " * 1000, list[str]()

        def place(content: str, title: str, files: list[str] = files) -> str:
            files.append(content)
            return f"/f/{len(files)}"

        prompt = offload_documents(text, place)
        if files == [text]:
            continue
        divided_count += 1
        at = 0
        for content in files:  # in the order of the text; the text between files is in the prompt
            start = text.index(content, at)
            assert text[at:start] in prompt
            at = start + len(content)
        assert text[at:] in prompt
    assert divided_count > 50


@pytest.mark.parametrize(
    "marker",
    ["<document>", "<document>x</document>", "<document a=\"", "```\n", "=== a ===\n", "\f", "\n",
     "Document 1:\n", "# a\n\n", "=====\nFile: x\n=====\n", "<", "[[[[[[[[\n", "-- " * 60,
     "<doc " + "a" * 990 + "></doc>\n"],
)  # fmt: skip
def test_number_of_documents_in_a_hostile_text_is_limited(marker: str) -> None:
    text = marker * (1_000_000 // len(marker))  # in quadratic time it would take hours
    pieces = split_documents(text)
    assert sum(piece.is_document for piece in pieces) <= MAX_DOCUMENTS
    assert "".join(piece.text for piece in pieces) == text


def test_many_documents_are_merged_with_their_neighbours() -> None:
    text = "".join(f"<doc title='{n}'>\n{n} {'word ' * 100}</doc>\n" for n in range(1000))
    documents = [piece for piece in split_documents(text) if piece.is_document]
    assert 100 < len(documents) <= MAX_DOCUMENTS
    assert sum(piece.merged_count for piece in documents) == 1000
    assert documents[0].text.startswith("0 word")
    assert documents[1].title == str(documents[0].merged_count)


@pytest.mark.parametrize("size", [(1 << 16) - 20, (1 << 16) - 9, (1 << 16) + 3, 200_000])
def test_document_marker_is_found_at_any_position_of_a_long_text(size: int) -> None:
    """Texts are searched in pieces of 64 KiB."""
    first, second = "a" * size + "\n", "b" * size
    text = f"=== a.txt ===\n{first}=== b.txt ===\n{second}"
    assert [(each.title, each.text) for each in split_documents(text) if each.is_document] == [
        ("a.txt", first),
        ("b.txt", second),
    ]
