"""The answer in submit's arguments, read piece by piece."""

import json
import random

import pytest

from proxy.agent.tool_calls import TextArgumentReader, recover_answer
from tests.proxy.agent.random_pieces import random_pieces

ALPHABET = [
    "a",
    " ",
    '"',
    "\\",
    "/",
    "\n",
    "\t",
    "\0",
    "\x1f",
    "é",
    "数",
    "😀",
    "👩‍👩‍👧",
    "u",
    "\ud83d",
    "{",
    "}",
]


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_streamed_answer_argument_is_decoded_as_by_the_json_module_however_it_is_split(
    seed: int, ascii_only: bool
) -> None:
    rng = random.Random(seed)
    answer = "".join(rng.choice(ALPHABET) for _ in range(rng.randint(0, 60)))
    answer = json.loads(json.dumps(answer))  # adjacent surrogate halves become one character
    text = json.dumps({"answer": answer, "more": "x"}, ensure_ascii=ascii_only)
    stream = TextArgumentReader("answer")
    read = "".join(stream.feed(piece) for piece in random_pieces(text, seed))
    assert (read, stream.text) == (answer, answer)


@pytest.mark.parametrize("seed", range(20))
def test_surrogate_pairs_are_never_split(seed: int) -> None:
    text = json.dumps({"answer": "😀" * 20})
    stream = TextArgumentReader("answer")
    for piece in random_pieces(text, seed, max_chars=3):
        stream.feed(piece).encode()
    assert stream.text == "😀" * 20


@pytest.mark.parametrize("seed", range(20))
def test_streamed_text_argument_is_always_a_prefix_of_the_complete_argument(seed: int) -> None:
    answer = 'One "two"\n\\three\\ \u00e9😀 four.'
    stream = TextArgumentReader("answer")
    for piece in random_pieces(json.dumps({"answer": answer}), seed):
        stream.feed(piece)
        assert answer.startswith(stream.text)
    assert stream.text == answer


@pytest.mark.parametrize(
    "head", ['{"answer":"', '{ "answer" : "', ' \n{\n  "answer":\n "', '{"answer": "']
)
def test_blanks_around_argument_names_are_ignored(head: str) -> None:
    for seed in range(10):
        stream = TextArgumentReader("answer")
        for piece in random_pieces(head + 'yes"}', seed, max_chars=4):
            stream.feed(piece)
        assert stream.text == "yes"


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "{",
        "{}",
        '{"answer": 42}',
        '{"answer": null}',
        '{"answer": ["a"]}',
        '{"result": "a"}',
        '["answer", "a"]',
        '"answer"',
        '{"answers": "a"}',
        '{"": "a"}',
        "answer: a",
    ],
)
def test_tool_arguments_without_a_string_answer_yield_no_text(arguments: str) -> None:
    for seed in range(5):
        stream = TextArgumentReader("answer")
        assert (
            "".join(stream.feed(piece) for piece in random_pieces(arguments, seed, max_chars=4))
            == ""
        )


def test_tool_arguments_after_the_answer_argument_are_not_parsed() -> None:
    stream = TextArgumentReader("answer")
    assert stream.feed('{"answer": "a"') == "a"
    assert stream.feed(', "answer": "b"}') == ""


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (r'{"answer": "\(x\) \[y\]"}', r"\(x\) \[y\]"),
        (r'{"answer": "\underline{x} \u12"}', r"\underline{x} \u12"),
        (r'{"answer": "C:\Users\me"}', r"C:\Users\me"),
        ('{"answer": "tab\there, line\nthere"}', "tab\there, line\nthere"),
        ('{"answer": "cut off in the mid', "cut off in the mid"),
        ('{"answer": "cut in an escape \\', "cut in an escape "),
        ('{"answer": "cut in an escape \\u00', "cut in an escape "),
        ('{"answer": "cut in a pair \\ud83d\\ude', "cut in a pair "),
        ('{"answer": "whole"', "whole"),
        ('{"answer": "whole" ', "whole"),
        ('{"answer": "whole", "x": ', "whole"),
        ('{"answer": "whole"}}', "whole"),
        ('{"answer": "a "quoted" word"}', ""),
        ('{"answer": "', ""),
        ('{"ans', ""),
        ("", ""),
    ],
)
def test_answer_is_recovered_from_broken_json(arguments: str, answer: str) -> None:
    assert recover_answer(arguments) == answer
    for seed in range(20):
        stream = TextArgumentReader("answer")
        for piece in random_pieces(arguments, seed):
            stream.feed(piece)
        assert (stream.text if stream.is_complete else "") == answer
