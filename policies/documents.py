"""The documents inside a long text: how they are found, and what stands for them in the prompt once
they are files.

Each way of finding them takes time linear in the text, whoever wrote it: patterns look at one line
or one tag, and no further than its end.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

# Ways of finding documents


@dataclass(frozen=True, slots=True)
class _Span:
    """The place of a document within a text, without the marks around it."""

    start: int
    end: int
    title: str
    is_open: bool = False
    """True if nothing says where it ends, so that what follows it may be part of it."""
    parts: int = 1
    """How many documents were put together in it."""


_FindDocuments = Callable[[str], Sequence[_Span]]

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
"""Marks beyond so many are not looked at."""
LARGE_CHARS = 4000
"""A part of a text that has no name of its own is worth a file from this size on."""


def _find_all(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    return islice(pattern.finditer(text), _MAX_MARKS)


def _tags(names: str) -> re.Pattern[str]:
    return re.compile(rf"<(/?)({names})((?:\s[^<>]*+)?)>", re.IGNORECASE)


def _find_tagged(tags: re.Pattern[str], text: str) -> list[_Span]:
    """Return what stands between tags of one name: the outermost, and of one name the innermost."""
    opened: dict[str, re.Match[str]] = {}
    found: list[_Span] = []
    for mark in _find_all(tags, text):
        name = mark[2].lower()
        if not mark[1]:
            opened[name] = mark
        elif begun := opened.pop(name, None):
            while found and found[-1].start > begun.start():
                found.pop()
            found.append(_tag_content(text, begun, mark.start()))
    return found


def _tag_content(text: str, begun: re.Match[str], end: int) -> _Span:
    """Return what a tag contains, without the child tags that describe it, which may have its
    title."""
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
            return _Span(body.end(), closing, title)
    return _Span(_next_line(text, at, end), end, title)


def _next_line(text: str, at: int, end: int) -> int:
    return at + 1 if text.startswith("\n", at, end) else at


@dataclass(frozen=True, slots=True)
class _Mark:
    """The mark of a document's beginning, or, without a title, of the end of the one before."""

    start: int
    end: int
    title: str | None


def _between(text: str, marks: Iterable[_Mark]) -> list[_Span]:
    """Return the documents from each mark to the next; the last one is open."""
    found: list[_Span] = []
    begun: _Mark | None = None
    for mark in marks:
        if begun and begun.title is not None:
            found.append(_Span(begun.end, mark.start, begun.title))
        begun = mark
    if begun and begun.title is not None:
        found.append(_Span(begun.end, len(text), begun.title, is_open=True))
    return found


def _line_end(text: str, mark: re.Match[str]) -> int:
    return _next_line(text, mark.end(), len(text))


def _find_ruled(text: str) -> list[_Span]:
    """Find `=== a.txt ===`, `--- FILE: a.txt ---`, `==> a <==`, `BEGIN DOCUMENT a`."""
    return _between(text, _ruled_marks(text))


def _ruled_marks(text: str) -> Iterator[_Mark]:
    for mark in _find_all(_RULED, text):
        rule, rest, words = mark.groups()
        if rule:
            rest = rest.rstrip()
            words = rest.rstrip(_RULES).strip()
            if len(rest) - len(rest.rstrip(_RULES)) < 3 or not any(map(str.isalnum, words)):
                continue
        title = _BEGINNING.sub("", words, count=1).strip(" \t()\"'")
        ends = _ENDING.match(words) is not None
        yield _Mark(mark.start(), _line_end(text, mark), None if ends else title)


def _find_bannered(text: str) -> list[_Span]:
    """Find titles between two rulers."""
    marks = (_Mark(mark.start(), mark.end(), mark[2].strip()) for mark in _find_all(_BANNER, text))
    return _between(text, marks)


def _find_numbered(text: str) -> list[_Span]:
    """Find `Document 1: Title`, `[Document 3]`, `File: a.txt`."""

    def marks() -> Iterator[_Mark]:
        for mark in _find_all(_NUMBERED, text):
            title = (mark[2] or "").strip(" \t*]") or mark[1] or mark[3].strip(" \t*]")
            yield _Mark(mark.start(), _line_end(text, mark), title)

    return _between(text, marks())


def _find_fenced(text: str) -> list[_Span]:
    """Find fences of Markdown that have a file's name, or are large."""
    found = []
    for opening, span in _fences(text):
        title = _fence_title(text, opening)
        if title or span.end - span.start >= LARGE_CHARS:
            found.append(replace(span, title=title))
    return found


def _fences(text: str) -> Iterator[tuple[re.Match[str], _Span]]:
    """Yield each fence with its opening line."""
    opening: re.Match[str] | None = None
    for mark in _find_all(_FENCE, text):
        if opening is None:
            opening = mark
        elif mark[1].startswith(opening[1]) and not mark[2].strip():
            yield opening, _Span(_line_end(text, opening), mark.start(), "")
            opening = None
    if opening is not None:
        yield opening, _Span(_line_end(text, opening), len(text), "", is_open=True)


def _fence_title(text: str, opening: re.Match[str]) -> str:
    """Return the file's name in a fence's own line or in the line before, or an empty string."""
    info = opening[2].strip()
    told = {key.lower(): one or two for key, one, two in _ATTRIBUTE.findall(info)}
    for key in _NAMING:
        if told.get(key):
            return str(told[key])
    words = info.replace(":", " ").split()
    before = text[max(0, opening.start() - 250) : opening.start()].rstrip().rpartition("\n")[2]
    before = before.strip("#*`_: \t").removeprefix("File").lstrip(":* `")
    return next((word for word in (*words, before) if _FILE_NAME.fullmatch(word)), "")


def _find_headed(text: str) -> list[_Span]:
    """Find sections of Markdown, by the highest headings of which there are several."""
    levels: dict[int, list[_Mark]] = {}
    fences = (span for _, span in _fences(text))
    fence = next(fences, None)
    for mark in _find_all(_HEADING, text):
        while fence and fence.end < mark.start():
            fence = next(fences, None)
        if fence and fence.start <= mark.start():
            continue  # a remark in a program
        found = _Mark(mark.start(), mark.start(), mark[2].strip(" #\t\r"))
        levels.setdefault(len(mark[1]), []).append(found)
    several = [marks for _, marks in sorted(levels.items()) if len(marks) > 1]
    return _between(text, several[0]) if several else []


def _find_paged(text: str) -> list[_Span]:
    """Find pages, which form feeds or page numbers on lines of their own divide."""
    marks = [_Mark(0, 0, "page 1")]
    for number, mark in enumerate(_find_all(_PAGE, text), 2):
        marks.append(_Mark(mark.start(), _line_end(text, mark), f"page {mark[1] or number}"))
    return _between(text, marks) if len(marks) > 1 else []


def _find_word_tags(text: str) -> list[_Span]:
    return _find_tagged(_WORD_TAGS, text)


def _find_wrapper_tags(text: str) -> list[_Span]:
    return _find_tagged(_WRAPPER_TAGS, text)


_WORD_TAGS, _WRAPPER_TAGS = _tags(_WORDS), _tags(_WRAPPERS)
_DOCUMENT_FINDERS: Sequence[_FindDocuments] = (
    _find_word_tags,
    _find_bannered,
    _find_ruled,
    _find_numbered,
    _find_fenced,
    _find_wrapper_tags,
)
"""Ways of finding several documents, the least ambiguous first."""
_SECTION_FINDERS: Sequence[_FindDocuments] = (_find_headed, _find_paged)
"""Ways of finding the sections of a single document."""


# Dividing a text

MAX_DOCUMENTS = 200
"""The most documents that one text is divided into; beyond that, neighbours are put together."""
_LEAST_CHARS = 2000
"""The documents of a text have so many characters on average, and joined neighbours at least."""
_MAX_CHARS = 1 << 24
"""A longer text is not searched for documents."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a text: one document, or what stands outside of them."""

    text: str
    title: str = ""
    is_document: bool = False
    is_open_ended: bool = False
    """True if what follows the document may be part of it."""
    merged_count: int = 1
    """How many documents were put together in it."""


def split_documents(text: str) -> list[Segment]:
    """Divide a text into pieces that put together are the text; one piece if it shows no
    documents."""
    pieces: list[Segment] = []
    at = 0
    for span in _spans(text):
        if at < span.start:
            pieces.append(Segment(text[at : span.start]))
        body = text[span.start : span.end]
        pieces.append(Segment(body, span.title, True, span.is_open, span.parts))
        at = span.end
    if at < len(text):
        pieces.append(Segment(text[at:]))
    return pieces


def _spans(text: str) -> list[_Span]:
    """Return the documents, found in the first way by which they are half the text or more."""
    if len(text) > _MAX_CHARS:
        return []
    most = min(MAX_DOCUMENTS, max(1, len(text) // _LEAST_CHARS))
    for way in _DOCUMENT_FINDERS:
        if found := _most_of(text, way):
            return _merge_short(found) if len(found) > most else found
    for way in _SECTION_FINDERS:
        if len(found := _most_of(text, way)) > 1:
            return _merge_short(found, LARGE_CHARS)
    return []


def _most_of(text: str, way: _FindDocuments) -> list[_Span]:
    found = [span for span in way(text) if span.start < span.end]
    return found if 2 * sum(span.end - span.start for span in found) >= len(text) else []


def _merge_short(found: Sequence[_Span], least: int = _LEAST_CHARS) -> list[_Span]:
    """Return fewer documents: neighbours put together with what stands between them."""
    least = max(least, -(-(found[-1].end - found[0].start) // MAX_DOCUMENTS))
    few: list[_Span] = []
    for span in found:
        if few and few[-1].end - few[-1].start < least:
            few[-1] = _merge(few[-1], span)
        else:
            few.append(span)
    if len(few) > 1 and few[-1].end - few[-1].start < least:
        few[-2:] = [_merge(few[-2], few[-1])]
    return few


def _merge(one: _Span, next: _Span) -> _Span:
    return _Span(one.start, next.end, one.title, next.is_open, one.parts + next.parts)


# What stands in the prompt

KEPT_CHARS = 1000
"""How much of a moved text stays in the prompt, from its start and from its end: people put
instructions there."""
_SHORT_CHARS = 400
"""A document up to this size takes hardly more than the note that would stand for it."""
_HEAD_CHARS = 160
_HEADS_CHARS = 6000
"""The heads of all documents together."""
_KEPT_PART = 4
"""If more than one part in so many of a divided text would stay, all of it becomes one file."""

SaveFile = Callable[[str, str], str]
"""Called with a text and its title, which may be empty; makes it a file and returns its path."""


def offload_documents(text: str, place: SaveFile) -> str:
    """Make the documents of a text files, or the whole text if it shows none. Return what stands
    for it: a note in the place of each document, and what is outside of them, if it is short."""
    parts = [_part(piece) for piece in split_documents(text)]
    kept = sum(part.kept_chars for part in parts)
    if len(parts) == 1 or kept * _KEPT_PART > len(text):
        return offload_as_one_file(text, place)
    files = [part for part in parts if not isinstance(part, _Inline)]
    head_chars = min(_HEAD_CHARS, _HEADS_CHARS // len(files))
    moved = sum(len(part.text) for part in files)
    intro = (
        f"[Of this message {moved:,} characters are in files ({len(files)}), each named below where"
        " it stood: search them (grep -n) and read them there.]\n"
    )
    return intro + "".join(part.words(place, head_chars) for part in parts)


def offload_as_one_file(text: str, place: SaveFile) -> str:
    """Make a text one file. Return its start, a note and its end."""
    return _OneFile(text).words(place, 0)


@dataclass(frozen=True, slots=True)
class _Inline:
    """A piece that stays as it is."""

    text: str

    @property
    def kept_chars(self) -> int:
        return len(self.text)

    def words(self, place: SaveFile, head_chars: int) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class _OneFile:
    """A text without documents, of which start and end stay."""

    text: str

    @property
    def kept_chars(self) -> int:
        return 2 * KEPT_CHARS

    def words(self, place: SaveFile, head_chars: int) -> str:
        path, head, tail = place(self.text, ""), _head(self.text), _tail(self.text)
        left_out = len(self.text) - len(head) - len(tail)
        return (
            f"{head}\n[... {left_out:,} characters are left out here. The whole text,"
            f" {_size(self.text)}, is the file {path}: search and read it there. Its end"
            f" follows ...]\n{tail}"
        )


@dataclass(frozen=True, slots=True)
class _Document:
    """One document, or neighbours put together. An open one shows its end too."""

    piece: Segment

    @property
    def text(self) -> str:
        return self.piece.text

    @property
    def kept_chars(self) -> int:
        return KEPT_CHARS if self.piece.is_open_ended else 0

    def words(self, place: SaveFile, head_chars: int) -> str:
        path = place(self.text, self.piece.title or "document")
        head = " ".join(self.text[: 2 * head_chars].split())[:head_chars]
        told = f"{path}: {_size(self.text)}"
        if self.piece.merged_count > 1:
            told += f"; {self.piece.merged_count} parts of the message"
        head = head.replace("[", "(").replace("]", ")")  # a bracket would end the note
        told = f"[{told}. It begins: {head} ...]\n"
        return f"{told}[It ends:]\n{_tail(self.text)}" if self.piece.is_open_ended else told


_Part = _Inline | _OneFile | _Document


def _part(piece: Segment) -> _Part:
    size = len(piece.text)
    if not piece.is_document:
        return _OneFile(piece.text) if size > LARGE_CHARS else _Inline(piece.text)
    is_short = size <= (2 * KEPT_CHARS if piece.is_open_ended else _SHORT_CHARS)
    return _Inline(piece.text) if is_short else _Document(piece)


def _size(text: str) -> str:
    lines = text.count("\n") + (not text.endswith("\n"))
    return f"{lines:,} lines, {len(text):,} characters"


def _head(text: str) -> str:
    """Return the first lines."""
    head = text[:KEPT_CHARS]
    end = head.rfind("\n")
    return head[:end] if end > KEPT_CHARS // 2 else head


def _tail(text: str) -> str:
    """Return the last lines."""
    tail = text[-KEPT_CHARS:]
    start = tail.find("\n") + 1
    return tail[start:] if 0 < start < KEPT_CHARS // 2 else tail
