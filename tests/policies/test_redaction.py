"""Which secrets are found, and that none gets through in pieces."""

import random

import pytest

from policies.redaction import (
    BUILT_IN_PATTERNS,
    MAX_HELD_CHARS,
    Redaction,
    SecretFinder,
    SecretPattern,
    StreamRedactor,
)

KEYS = SecretFinder(Redaction(("all",)))
PEM = "-----BEGIN RSA PRIVATE KEY-----\n{}-----END RSA PRIVATE KEY-----"
BODY = "MIIEowIBAAKCAQEA7bq+/Z0\n" * 60
EXAMPLES = {
    "aws": ("id AKIAIOSFODNN7EXAMPLE here", "id [redacted aws] here"),
    "aws_secret": (
        'aws_secret_access_key = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"',
        'aws_secret_access_key = "[redacted aws_secret]"',
    ),
    "github": (f"ghp_{'a1B2' * 9}.", "[redacted github]."),
    "openai": (f"key=sk-proj-{'aB3_-' * 8}", "key=[redacted openai]"),
    "google": (f"AIza{'x' * 35} ", "[redacted google] "),
    "slack": ("xoxb-1234567890-abcdef", "[redacted slack]"),
    "jwt": ("t eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2ln e", "t [redacted jwt] e"),
    "bearer": (
        "Authorization: Bearer abcdefghij0123456789",
        "Authorization: Bearer [redacted bearer]",
    ),
    "url_password": ("postgres://me:hunter2@db/x", "postgres://me:[redacted url_password]@db/x"),
    "private_key": (f"a\n{PEM.format(BODY)}\nb", "a\n[redacted private_key]\nb"),
}
HARMLESS = [
    "The sky is blue.",
    "sk-learn and sk-image are libraries",
    "https://example.com:8080/path@v2",
    "bearer bonds",
    "eyJ is how base64 of JSON begins",
    "git commit 3f786850e387550fdab836ed7e6dc881de23001b",
]


def in_pieces(secrets: SecretFinder, pieces: list[str]) -> list[str]:
    stream = StreamRedactor(secrets)
    return [*map(stream.feed, pieces), stream.finish()]


def cut(text: str, seed: int) -> list[str]:
    chosen = random.Random(seed)
    ends = sorted(chosen.choices(range(len(text) + 1), k=len(text) // 6))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def test_each_built_in_pattern_has_an_example() -> None:
    assert list(EXAMPLES) == list(BUILT_IN_PATTERNS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_kind_of_secret_is_taken_out(name: str) -> None:
    text, shown = EXAMPLES[name]
    assert SecretFinder(Redaction((name,))).redact(text) == shown
    assert KEYS.redact(f"é {text}") == f"é {shown}"


@pytest.mark.parametrize("text", HARMLESS)
def test_text_without_secrets_is_unchanged(text: str) -> None:
    assert KEYS.redact(text) == text


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("before", [0, 230, 1000])
def test_a_secret_that_comes_in_pieces_does_not_get_through(name: str, before: int) -> None:
    text, shown = (f"{'a b ' * (before // 4)}{each}{' é. ' * 200}" for each in EXAMPLES[name])
    for seed in range(10):
        assert "".join(in_pieces(KEYS, cut(text, seed))) == shown
    assert "".join(in_pieces(KEYS, list(text))) == shown


def test_several_are_each_taken_out_and_one_within_another_once() -> None:
    text = " ".join(text for text, _ in EXAMPLES.values())
    assert KEYS.redact(text) == " ".join(shown for _, shown in EXAMPLES.values())
    assert KEYS.redact(f"Bearer sk-{'a' * 30}.") == "Bearer [redacted openai]"


def test_a_text_without_secrets_goes_on_but_for_its_end() -> None:
    told = in_pieces(KEYS, ["word " * 200, "more"])
    assert [len(piece) for piece in told] == [744, 4, 256]


@pytest.mark.parametrize(
    ("end", "shown"), [("", ""), ("\n-----END RSA PRIVATE KEY-----", ""), ("!", "!")]
)
def test_a_key_that_does_not_end_is_neither_told_nor_kept(end: str, shown: str) -> None:
    stream = StreamRedactor(KEYS)
    told = stream.feed("see -----BEGIN RSA PRIVATE KEY-----\n")
    for _ in range(40):
        told += stream.feed("MIIEowIBAAKCAQEA7bq\n" * 300)
        assert len(stream._held) <= MAX_HELD_CHARS
    told += stream.feed(end) + stream.finish()
    assert told == f"see [redacted private_key]{shown}"


def test_own_pattern_redacts_its_group() -> None:
    own = (SecretPattern("pin", r"pin: (\d{4})"), SecretPattern("name", "Rumpel[a-z]+"))
    secrets = SecretFinder(Redaction(patterns=own))
    told = secrets.redact("pin: 1234, Rumpelstiltskin")
    assert told == "pin: [redacted pin], [redacted name]"


def test_unknown_secret_and_invalid_pattern_are_refused() -> None:
    with pytest.raises(ValueError, match="'pins' is not a known secret"):
        Redaction(("pins",))
    with pytest.raises(ValueError, match="is not a valid pattern"):
        SecretPattern("look", "(?=a)")


def test_nothing_is_taken_out_unless_it_is_asked_for() -> None:
    text = EXAMPLES["github"][0]
    assert SecretFinder(Redaction()).redact(text) == text


@pytest.mark.parametrize("between", ["\n", "\n    17\t", "\n  ", "\\n", "\r\n"])
def test_a_key_that_was_cut_in_two_shows_neither_half(between: str) -> None:
    marker = "[... 1000 bytes, 20 lines left out ...]"
    lines = between.join(BODY.split())
    head, tail = (
        f"-----BEGIN PRIVATE KEY-----{between}{lines}",
        f"{lines}{between}-----END PRIVATE KEY-----",
    )
    shown = KEYS.redact(f"a\n{head}\n{marker}\n{tail}\nb")
    assert shown == f"a\n[redacted private_key]{marker}\n[redacted private_key]\nb"
    assert (
        KEYS.redact(f"the rest\n{marker}\n{tail}") == f"the rest\n{marker}\n[redacted private_key]"
    )


def test_lines_that_no_key_ends_stay() -> None:
    text = f"{BODY}\nthat is all -----END CERTIFICATE-----\n"
    assert KEYS.redact(text) == text
