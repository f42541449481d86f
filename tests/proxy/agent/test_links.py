"""Rewriting of paths in streamed answers as links, for any pieces."""

import random

import pytest

from proxy.agent.answer import LinkRewriter
from tests.proxy.agent.random_pieces import random_pieces

OUT = "/testbed/output"
PATHS = [f"{OUT}/plot.png", f"{OUT}/a b.csv", f"{OUT}/sub/plot.png", f"{OUT}/plot", f"{OUT}/ü.txt"]


def url(path: str) -> str:
    return f"https://x/{PATHS.index(path)}"


def linked(text: str, paths: list[str] = PATHS) -> str:
    writer = LinkRewriter(paths, url)
    return writer.feed(text) + writer.finish()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{OUT}/plot.png", "[plot.png](https://x/0)"),
        (f"See {OUT}/plot.png.", "See [plot.png](https://x/0)."),
        (f"See `{OUT}/plot.png`!", "See [plot.png](https://x/0)!"),
        (f"({OUT}/plot.png)", "([plot.png](https://x/0))"),
        (f"**{OUT}/plot.png**", "**[plot.png](https://x/0)**"),
        (f"[the plot]({OUT}/plot.png)", "[the plot](https://x/0)"),
        (f"![the plot](sandbox:{OUT}/plot.png)", "![the plot](https://x/0)"),
        ("[the plot](sandbox:/mnt/data/plot.png)", "[the plot](https://x/0)"),
        ("at /mnt/data/plot.png", "at [plot.png](https://x/0)"),
        (f'<img src="{OUT}/plot.png">', '<img src="https://x/0">'),
        (f"<{OUT}/plot.png>", "<https://x/0>"),
        (f"{OUT}/a b.csv", "[a b.csv](https://x/1)"),
        (f"[t](sandbox:{OUT}/a%20b.csv)", "[t](https://x/1)"),
        (f"{OUT}/sub/plot.png", "[plot.png](https://x/2)"),
        (f"{OUT}/plot, {OUT}/plot.", "[plot](https://x/3), [plot](https://x/3)."),
        (f"{OUT}/ü.txt and {OUT}/%C3%BC.txt", "[ü.txt](https://x/4) and [ü.txt](https://x/4)"),
        ("See output/sub/plot.png.", "See [plot.png](https://x/2)."),
        ("./output/plot.png", "[plot.png](https://x/0)"),
        ("in `output/plot.png`", "in [plot.png](https://x/0)"),
        ("(output/plot.png)", "([plot.png](https://x/0))"),
        ("![the plot](output/plot.png)", "![the plot](https://x/0)"),
        ("![the plot](./output/sub/plot.png)", "![the plot](https://x/2)"),
        ("[t](output/a%20b.csv)", "[t](https://x/1)"),
        ("![the plot](plot.png)", "![the plot](https://x/0)"),
        ("[both](./sub/plot.png)s", "[both](https://x/2)s"),
        (f"{OUT}/plot.png\n{OUT}/plot.png", "[plot.png](https://x/0)\n[plot.png](https://x/0)"),
    ],
)
def test_every_spelling_of_a_produced_path_becomes_a_link(text: str, expected: str) -> None:
    assert linked(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        f"{OUT}/plot.png.gz",
        f"{OUT}/plot.pngx",
        f"{OUT}/plot-2",
        f"{OUT}/plot/x",
        f"{OUT}/other.png",
        f"{OUT}/",
        OUT,
        "plot.png",
        "myoutput/plot.png",
        "other/output/plot.png",
        "../output/plot.png",
        "/output/plot.png",
        "C:\\output/plot.png",
        "https://example.com/output/plot.png",
        'savefig("output/plot.png")',
        "output/plot.png.gz",
        "output/other.png",
        "(plot.png)",
        "[plot.png](https://example.com/plot.png)",
        "[plot.png](plot.png.gz)",
        "sandbox:/etc/passwd",
        "/testbed/documents/plot.png",
        "",
    ],
)
def test_paths_of_other_files_are_unchanged(text: str) -> None:
    assert linked(text) == text


@pytest.mark.parametrize("seed", range(40))
def test_links_do_not_depend_on_the_pieces_in_which_the_text_arrives(seed: int) -> None:
    rng = random.Random(seed)
    words = [
        *PATHS,
        "sandbox:",
        "/mnt/data/plot.png",
        "output/plot.png",
        "./output/sub/plot.png",
        "](plot.png)",
        "](./sub/plot.png)",
        f"`{OUT}/plot.png`",
        "`",
        "](",
        "[x](",
        ")",
        " ",
        "\n",
        ".",
        "<",
        '"',
        OUT,
        "/testbed/out",
        "/plot.png",
        ".gz",
        "-",
        "sandbox",
        "s",
        "😀",
    ]
    text = "".join(rng.choice(words) for _ in range(rng.randint(1, 25)))
    writer = LinkRewriter(PATHS, url)
    written = [writer.feed(piece) for piece in random_pieces(text, seed)]
    assert "".join([*written, writer.finish()]) == linked(text)


def test_streamed_text_that_cannot_become_a_path_is_not_held_back() -> None:
    writer = LinkRewriter(PATHS, url)
    assert writer.feed("There are 42 of them, see /") == "There are 42 of them, see "
    assert writer.feed("dev/null") == "/dev/null"
    assert writer.feed(f" or {OUT}/plo") == " or "
    assert writer.feed("t.png") == ""
    assert writer.feed(", that it") == "[plot.png](https://x/0), that it"
    assert writer.finish() == ""


def test_text_that_only_begins_like_a_path_becomes_no_link() -> None:
    writer = LinkRewriter(PATHS, url)
    written = [writer.feed(piece) for piece in (f"{OUT}/plot", "s", "a", "lad")]
    assert "".join([*written, writer.finish()]) == f"{OUT}/plotsalad"


def test_text_is_unchanged_if_there_are_no_produced_files() -> None:
    writer = LinkRewriter([], url)
    assert [writer.feed(piece) for piece in ("a /testbed/outp", "ut/x")] == [
        "a /testbed/outp",
        "ut/x",
    ]
    assert writer.finish() == ""


def test_file_names_that_are_not_utf_8_or_contain_symbols_become_links() -> None:
    for name in ("caf\udce9.csv", "a+b (1) [2] $x.csv", "100%.csv", "'q'.csv"):
        writer = LinkRewriter([f"{OUT}/{name}"], lambda path: "https://x")
        assert writer.feed(f"{OUT}/{name} ") + writer.finish() == f"[{name}](https://x) "


def test_link_has_the_longest_file_name_that_matches() -> None:
    paths = [f"{OUT}/a", f"{OUT}/a b", f"{OUT}/a b c"]
    writer = LinkRewriter(paths, lambda path: path[-5:].replace("/", ""))
    text = writer.feed(f"{OUT}/a b c.") + writer.finish()
    assert text == "[a b c](a b c)."
