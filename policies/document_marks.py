"""The ways in which a text shows where its documents begin and end.

Every way takes time linear in the text, whoever wrote it: patterns look at one line or one tag, and
no further than its end.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice


@dataclass(frozen=True, slots=True)
class Span:
    """A document within a text, without the marks around it."""

    start: int
    end: int
    title: str
    is_open: bool = False
    """Whether nothing says where it ends, so that what follows it may be in it."""
    parts: int = 1
    """How many documents were put together in it."""


Way = Callable[[str], Sequence[Span]]

_WORDS = "document|doc|file|article|attachment|passage|page|chapter|email|item|search_result"
_WRAPPERS = (
    "documents|context|transcript|text|contents?|data|paper|log|logs|report|book|code|input"
    "|reference|source|sources|notes|contract|instructions_data|files|excerpt|story|conversation"
)
_ATTRIBUTE = re.compile(
    r"(?<![\w:-])([\w:-]{1,40})\s{0,5}=\s{0,5}(?:\"([^\"]{1,300})\"|'([^']{1,300})')"
)
_NAMING = ("path", "filename", "file", "name", "title", "source", "src", "url", "href", "id")
_CHILD = re.compile(r"\s{0,50}<(\w{1,30})>([^<]{0,300})</\1>")
_CHILDREN = 8
_BODY = re.compile(r"\s{0,50}<((?:document_|page_)?(?:contents?|text|body))>[ \t]{0,50}\n?")
_NUMBER = r"(?:\d{1,5}|[A-Z]|[IVXLC]{1,7})"
_CHINESE = r"(?:文档|文件|文章|资料|資料|文書|第)[ \t]{0,3}\d{1,5}章?"
_NUMBERED = re.compile(
    r"^[#*\[ \t]{0,8}((?:(?i:document|doc|file|article|source|passage|text|chapter|exhibit|appendix"
    r"|report|paper|transcript|part|section|search result|email|message)[ \t]{0,3}"
    rf"(?:#|no\.)?[ \t]{{0,3}}{_NUMBER}|{_CHINESE})(?![^\W_]))"
    r"[\]*]{0,3}[ \t]{0,3}(?:$|[:\uff1a.)\u2013\u2014-]([^\n]{0,150}+)$)"
    r"|^\[?(?i:document|file|filename|search result|article)[ \t]{0,3}:[ \t]{0,3}"
    r"(\S[^\n]{0,200}+)$",
    re.MULTILINE,
)
_RULED = re.compile(
    r"^(?:([=*#~/<>_-]{3,40}+)[ \t]{0,5}(\S[^\n]{0,200}+)"
    r"|((?:BEGIN|START|END)[ _](?:OF[ _])?(?:DOCUMENT|FILE|TEXT|ARTICLE)[^\n]{0,200}+))$",
    re.MULTILINE,
)
_RULES = "=*#~/<>_-"
_BEGINNING = re.compile(
    r"(?:(?:BEGIN|START)[ _]?)?(?:OF[ _])?(?:(?:DOCUMENT|FILE|TEXT|ARTICLE)\b)?[ \t:#-]{0,5}", re.I
)
_ENDING = re.compile(r"(?:END|EOF)\b", re.I)
_BANNER = re.compile(
    r"^([=*#_-])\1{3,200}+[ \t]{0,5}\n[ \t]{0,5}(?:(?:FILE(?:NAME)?|DOCUMENT|PATH|SOURCE|TITLE)"
    r"[ \t]{0,3}[:#]?[ \t]{1,5})(\S[^\n]{0,200}+)\n\1{4,200}+[ \t]{0,5}\n",
    re.MULTILINE | re.IGNORECASE,
)
_FENCE = re.compile(r"^ {0,3}(`{3,40}+|~{3,40}+)([^\n]{0,300}+)$", re.MULTILINE)
_FILE_NAME = re.compile(r"[\w@+.-][\w @+./\\-]{0,200}\.\w{1,8}")
_HEADING = re.compile(r"(?:\A|(?<=\n\n)|(?<=\n\r\n))(#{1,4}) {1,4}(\S[^\n]{0,200}+)\n(?=\r?\n)")
_PAGE = re.compile(
    r"\f|^[ \t=\u2013\u2014-]{0,10}\[?(?:Page|PAGE|page|Seite|p\.)[ \t]{0,3}(\d{1,5})"
    r"(?:[ \t]{0,3}(?:of|/|von)[ \t]{0,3}\d{1,5})?\]?[ \t=\u2013\u2014-]{0,10}$",
    re.MULTILINE,
)
_MAX_MARKS = 50_000
"""What follows the last of them is not looked at."""
LARGE_CHARS = 4000
"""A part of a text that has no name of its own is worth a file from this size on."""


def _all(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    return islice(pattern.finditer(text), _MAX_MARKS)


def _tags(names: str) -> re.Pattern[str]:
    return re.compile(rf"<(/?)({names})((?:\s[^<>]*+)?)>", re.IGNORECASE)


def _tagged(tags: re.Pattern[str], text: str) -> list[Span]:
    """What stands between tags of one name; the outermost, and of one name the innermost."""
    opened: dict[str, re.Match[str]] = {}
    found: list[Span] = []
    for mark in _all(tags, text):
        name = mark[2].lower()
        if not mark[1]:
            opened[name] = mark
        elif begun := opened.pop(name, None):
            while found and found[-1].start > begun.start():
                found.pop()
            found.append(_inside(text, begun, mark.start()))
    return found


def _inside(text: str, begun: re.Match[str], end: int) -> Span:
    """What a tag holds: without child tags that tell of it, which may give its title."""
    told = {key.lower(): one or two for key, one, two in _ATTRIBUTE.findall(begun[3][:1000])}
    at = begun.end()
    for _ in range(_CHILDREN):
        if not (child := _CHILD.match(text, at, end)):
            break
        told.setdefault(child[1].lower(), child[2].strip())
        at = child.end()
    title = next((told[key] for key in _NAMING if told.get(key)), "")
    if body := _BODY.match(text, at, end):
        closing = text.rfind("</", body.end(), end)
        if closing >= 0 and text[closing:end].strip() == f"</{body[1]}>":
            return Span(body.end(), closing, title)
    return Span(_next_line(text, at, end), end, title)


def _next_line(text: str, at: int, end: int) -> int:
    return at + 1 if text.startswith("\n", at, end) else at


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where a document begins, or, without a title, where the one before ends."""

    start: int
    end: int
    title: str | None


def _between(text: str, marks: Iterable[_Mark]) -> list[Span]:
    """From each mark to the next; the last one is open."""
    found: list[Span] = []
    begun: _Mark | None = None
    for mark in marks:
        if begun and begun.title is not None:
            found.append(Span(begun.end, mark.start, begun.title))
        begun = mark
    if begun and begun.title is not None:
        found.append(Span(begun.end, len(text), begun.title, is_open=True))
    return found


def _line_end(text: str, mark: re.Match[str]) -> int:
    return _next_line(text, mark.end(), len(text))


def _ruled(text: str) -> list[Span]:
    """`=== a.txt ===`, `--- FILE: a.txt ---`, `==> a <==`, `BEGIN DOCUMENT a`, `END DOCUMENT`."""
    return _between(text, _ruled_marks(text))


def _ruled_marks(text: str) -> Iterator[_Mark]:
    for mark in _all(_RULED, text):
        rule, rest, words = mark.groups()
        if rule:
            rest = rest.rstrip()
            words = rest.rstrip(_RULES).strip()
            if len(rest) - len(rest.rstrip(_RULES)) < 3 or not any(map(str.isalnum, words)):
                continue
        title = _BEGINNING.sub("", words, count=1).strip(" \t()\"'")
        ends = _ENDING.match(words) is not None
        yield _Mark(mark.start(), _line_end(text, mark), None if ends else title)


def _bannered(text: str) -> list[Span]:
    """A title between two rulers."""
    marks = (_Mark(mark.start(), mark.end(), mark[2].strip()) for mark in _all(_BANNER, text))
    return _between(text, marks)


def _numbered(text: str) -> list[Span]:
    """`Document 1: Title`, `[Document 3]`, `File: a.txt`."""

    def marks() -> Iterator[_Mark]:
        for mark in _all(_NUMBERED, text):
            title = (mark[2] or "").strip(" \t*]") or mark[1] or mark[3].strip(" \t*]")
            yield _Mark(mark.start(), _line_end(text, mark), title)

    return _between(text, marks())


def _fenced(text: str) -> list[Span]:
    """Fences of Markdown that have a file's name, or are large."""
    found = []
    for opening, span in _fences(text):
        title = _fence_title(text, opening)
        if title or span.end - span.start >= LARGE_CHARS:
            found.append(replace(span, title=title))
    return found


def _fences(text: str) -> Iterator[tuple[re.Match[str], Span]]:
    """Each with its opening line."""
    opening: re.Match[str] | None = None
    for mark in _all(_FENCE, text):
        if opening is None:
            opening = mark
        elif mark[1].startswith(opening[1]) and not mark[2].strip():
            yield opening, Span(_line_end(text, opening), mark.start(), "")
            opening = None
    if opening is not None:
        yield opening, Span(_line_end(text, opening), len(text), "", is_open=True)


def _fence_title(text: str, opening: re.Match[str]) -> str:
    """The file's name in a fence's own line, or in the one before."""
    info = opening[2].strip()
    told = {key.lower(): one or two for key, one, two in _ATTRIBUTE.findall(info)}
    for key in _NAMING:
        if told.get(key):
            return str(told[key])
    words = info.replace(":", " ").split()
    before = text[max(0, opening.start() - 250) : opening.start()].rstrip().rpartition("\n")[2]
    before = before.strip("#*`_: \t").removeprefix("File").lstrip(":* `")
    return next((word for word in (*words, before) if _FILE_NAME.fullmatch(word)), "")


def _headed(text: str) -> list[Span]:
    """Sections of Markdown, by the highest headings of which there are several."""
    levels: dict[int, list[_Mark]] = {}
    fences = (span for _, span in _fences(text))
    fence = next(fences, None)
    for mark in _all(_HEADING, text):
        while fence and fence.end < mark.start():
            fence = next(fences, None)
        if fence and fence.start <= mark.start():
            continue  # a remark in a program
        found = _Mark(mark.start(), mark.start(), mark[2].strip(" #\t\r"))
        levels.setdefault(len(mark[1]), []).append(found)
    several = [marks for _, marks in sorted(levels.items()) if len(marks) > 1]
    return _between(text, several[0]) if several else []


def _paged(text: str) -> list[Span]:
    """Pages: what form feeds or page numbers on lines of their own divide."""
    marks = [_Mark(0, 0, "page 1")]
    for number, mark in enumerate(_all(_PAGE, text), 2):
        marks.append(_Mark(mark.start(), _line_end(text, mark), f"page {mark[1] or number}"))
    return _between(text, marks) if len(marks) > 1 else []


def _by_words(text: str) -> list[Span]:
    return _tagged(_WORD_TAGS, text)


def _by_wrappers(text: str) -> list[Span]:
    return _tagged(_WRAPPER_TAGS, text)


_WORD_TAGS, _WRAPPER_TAGS = _tags(_WORDS), _tags(_WRAPPERS)
WAYS: Sequence[Way] = (_by_words, _bannered, _ruled, _numbered, _fenced, _by_wrappers)
"""What says that a document begins, the plainest first."""
SECTIONS: Sequence[Way] = (_headed, _paged)
"""What divides one text."""
