"""Finds the documents inside a long text, and offloads them to files that the model can read.

Each search takes time linear in any text: every pattern matches within one tag or a few lines.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

# Finding documents


@dataclass(frozen=True, slots=True)
class _Span:
    """The position of a document within a text, without the marks around it."""

    start: int
    end: int
    title: str
    is_open_ended: bool = False
    """True if no mark ends the document. The text after the document may be part of it."""
    merged_count: int = 1
    """Number of documents that were merged into this document."""


_FindDocuments = Callable[[str], Sequence[_Span]]

_DOCUMENT_TAG_NAMES = (
    "document|doc|file|article|attachment|passage|page|chapter|email|item|search_result"
)
_WRAPPER_TAG_NAMES = (
    "documents|context|transcript|text|contents?|data|paper|log|logs|report|book|code|input"
    "|reference|source|sources|notes|contract|instructions_data|files|excerpt|story|conversation"
)
_ATTRIBUTE = re.compile(
    r"(?<![\w:-])([\w:-]{1,40})\s{0,5}=\s{0,5}(?:\"([^\"]{1,300})\"|'([^']{1,300})')"
)
_TITLE_ATTRIBUTES = (
    "path",
    "filename",
    "file",
    "name",
    "title",
    "source",
    "src",
    "url",
    "href",
    "id",
)
_METADATA_TAG = re.compile(r"\s{0,50}<(\w{1,30})>([^<]{0,300})</\1>")
_MAX_METADATA_TAGS = 8
_BODY_TAG = re.compile(r"\s{0,50}<((?:document_|page_)?(?:contents?|text|body))>[ \t]{0,50}\n?")
_NUMBER = r"(?:\d{1,5}|[A-Z]|[IVXLC]{1,7})"
_CHINESE_LABEL = r"(?:文档|文件|文章|资料|資料|文書|第)[ \t]{0,3}\d{1,5}章?"
_NUMBERED_TITLE = re.compile(
    r"^[#*\[ \t]{0,8}((?:(?i:document|doc|file|article|source|passage|text|chapter|exhibit|appendix"
    r"|report|paper|transcript|part|section|search result|email|message)[ \t]{0,3}"
    rf"(?:#|no\.)?[ \t]{{0,3}}{_NUMBER}|{_CHINESE_LABEL})(?![^\W_]))"
    r"[\]*]{0,3}[ \t]{0,3}(?:$|[:\uff1a.)\u2013\u2014-]([^\n]{0,150}+)$)"
    r"|^\[?(?i:document|file|filename|search result|article)[ \t]{0,3}:[ \t]{0,3}"
    r"(\S[^\n]{0,200}+)$",
    re.MULTILINE,
)
_RULED_TITLE = re.compile(
    r"^(?:([=*#~/<>_-]{3,40}+)[ \t]{0,5}(\S[^\n]{0,200}+)"
    r"|((?:BEGIN|START|END)[ _](?:OF[ _])?(?:DOCUMENT|FILE|TEXT|ARTICLE)[^\n]{0,200}+))$",
    re.MULTILINE,
)
_RULE_SIGNS = "=*#~/<>_-"
_BEGIN_WORDS = re.compile(
    r"(?:(?:BEGIN|START)[ _]?)?(?:OF[ _])?(?:(?:DOCUMENT|FILE|TEXT|ARTICLE)\b)?[ \t:#-]{0,5}", re.I
)
_END_WORDS = re.compile(r"(?:END|EOF)\b", re.I)
_BANNER = re.compile(
    r"^([=*#_-])\1{3,200}+[ \t]{0,5}\n[ \t]{0,5}(?:(?:FILE(?:NAME)?|DOCUMENT|PATH|SOURCE|TITLE)"
    r"[ \t]{0,3}[:#]?[ \t]{1,5})(\S[^\n]{0,200}+)\n\1{4,200}+[ \t]{0,5}\n",
    re.MULTILINE | re.IGNORECASE,
)
_FENCE = re.compile(r"^ {0,3}(`{3,40}+|~{3,40}+)([^\n]{0,300}+)$", re.MULTILINE)
_FILE_NAME = re.compile(r"[\w@+.-][\w @+./\\-]{0,200}\.\w{1,8}")
_HEADING = re.compile(r"(?:\A|(?<=\n\n)|(?<=\n\r\n))(#{1,4}) {1,4}(\S[^\n]{0,200}+)\n(?=\r?\n)")
_PAGE_BREAK = re.compile(
    r"\f|^[ \t=\u2013\u2014-]{0,10}\[?(?:Page|PAGE|page|Seite|p\.)[ \t]{0,3}(\d{1,5})"
    r"(?:[ \t]{0,3}(?:of|/|von)[ \t]{0,3}\d{1,5})?\]?[ \t=\u2013\u2014-]{0,10}$",
    re.MULTILINE,
)
_MAX_MARK_CHARS = 4096
"""Maximum length of a match of these patterns, with the text that their look-arounds read."""
_PIECE_CHARS = 1 << 16
_MAX_MARKS = 50_000
"""Maximum number of marks; further marks are ignored."""
LARGE_CHARS = 4000
"""Minimum length, in characters, of a code fence without a file name that counts as a document.
Markdown sections and pages below this length are merged. Text between documents stays in the prompt
up to this length."""


def _find_all(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    return islice(_find_in_pieces(pattern, text), _MAX_MARKS)


def _find_in_pieces(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Yield all matches of a pattern that matches at most _MAX_MARK_CHARS characters. A search of a
    whole text would hold the GIL for a second."""
    start = 0
    while start < len(text):
        end = start + _PIECE_CHARS
        for found in pattern.finditer(text, start, end + _MAX_MARK_CHARS):
            if found.start() >= end:
                break
            yield found
            start = found.end()
        start = max(start, end)


def _tag_pattern(names: str) -> re.Pattern[str]:
    return re.compile(rf"<(/?)({names})((?:\s[^<>]{{0,2000}}+)?)>", re.IGNORECASE)


def _find_tag_contents(tags: re.Pattern[str], text: str) -> list[_Span]:
    """Return the contents of tags. Of nested tags with different names, only the outermost counts.
    Of nested tags with the same name, only the innermost counts. A tag that opens inside another
    tag and ends after it does not count."""
    opened: dict[str, re.Match[str]] = {}
    found: list[_Span] = []
    for tag in _find_all(tags, text):
        name = tag[2].lower()
        if not tag[1]:
            opened[name] = tag
        elif opening := opened.pop(name, None):
            while found and found[-1].start > opening.start():
                found.pop()
            if found and found[-1].end > opening.start():
                continue
            found.append(_tag_content(text, opening, tag.start()))
    return found


def _tag_content(text: str, opening: re.Match[str], end: int) -> _Span:
    """Return the content of a tag without its leading metadata tags, such as `<title>`."""
    metadata = _attributes(opening[3][:1000])
    at = opening.end()
    for _ in range(_MAX_METADATA_TAGS):
        if not (child := _METADATA_TAG.match(text, at, end)):
            break
        metadata.setdefault(child[1].lower(), child[2].strip())
        at = child.end()
    title = _title(metadata)
    if body := _BODY_TAG.match(text, at, end):
        closing = text.rfind("</", body.end(), end)
        if closing >= 0 and text[closing:end].strip() == f"</{body[1]}>":
            return _Span(body.end(), closing, title)
    return _Span(_skip_newline(text, at, end), end, title)


def _attributes(text: str) -> dict[str, str]:
    return {key.lower(): one or two for key, one, two in _ATTRIBUTE.findall(text)}


def _title(metadata: Mapping[str, str]) -> str:
    return next((metadata[key] for key in _TITLE_ATTRIBUTES if metadata.get(key)), "")


def _skip_newline(text: str, position: int, end: int) -> int:
    return position + 1 if text.startswith("\n", position, end) else position


@dataclass(frozen=True, slots=True)
class _Mark:
    """A mark that begins a document, or, if `title` is None, ends the previous document."""

    start: int
    end: int
    title: str | None


def _spans_between(text: str, marks: Iterable[_Mark]) -> list[_Span]:
    """Return the text between each mark and the next as a document, except after an end mark. A
    document that no mark ends runs to the end of the text and is open-ended."""
    found: list[_Span] = []
    opening: _Mark | None = None
    for mark in marks:
        if opening and opening.title is not None:
            found.append(_Span(opening.end, mark.start, opening.title))
        opening = mark
    if opening and opening.title is not None:
        found.append(_Span(opening.end, len(text), opening.title, is_open_ended=True))
    return found


def _next_line_start(text: str, mark: re.Match[str]) -> int:
    return _skip_newline(text, mark.end(), len(text))


def _find_by_ruled_titles(text: str) -> list[_Span]:
    """Find documents after titles such as `=== a.txt ===`, `--- FILE: a.txt ---`, `==> a <==` and
    `BEGIN DOCUMENT a`."""
    return _spans_between(text, _ruled_marks(text))


def _ruled_marks(text: str) -> Iterator[_Mark]:
    for mark in _find_all(_RULED_TITLE, text):
        rule, rest, words = mark.groups()
        if rule:
            rest = rest.rstrip()
            words = rest.rstrip(_RULE_SIGNS).strip()
            if len(rest) - len(rest.rstrip(_RULE_SIGNS)) < 3 or not any(map(str.isalnum, words)):
                continue
        title = _BEGIN_WORDS.sub("", words, count=1).strip(" \t()\"'")
        ends = _END_WORDS.match(words) is not None
        yield _Mark(mark.start(), _next_line_start(text, mark), None if ends else title)


def _find_by_banners(text: str) -> list[_Span]:
    """Find documents whose titles stand between two rules, such as lines of `=`."""
    marks = (_Mark(mark.start(), mark.end(), mark[2].strip()) for mark in _find_all(_BANNER, text))
    return _spans_between(text, marks)


def _find_by_numbered_titles(text: str) -> list[_Span]:
    """Find documents after titles such as `Document 1: Title`, `[Document 3]` and `File: a.txt`."""

    def marks() -> Iterator[_Mark]:
        for mark in _find_all(_NUMBERED_TITLE, text):
            title = (mark[2] or "").strip(" \t*]") or mark[1] or mark[3].strip(" \t*]")
            yield _Mark(mark.start(), _next_line_start(text, mark), title)

    return _spans_between(text, marks())


def _find_code_fences(text: str) -> list[_Span]:
    """Find Markdown code fences that have a file name, or are large."""
    found = []
    for opening, span in _fences(text):
        title = _fence_title(text, opening)
        if title or span.end - span.start >= LARGE_CHARS:
            found.append(replace(span, title=title))
    return found


def _fences(text: str) -> Iterator[tuple[re.Match[str], _Span]]:
    """Yield the opening line and the content of each code fence."""
    opening: re.Match[str] | None = None
    for mark in _find_all(_FENCE, text):
        if opening is None:
            opening = mark
        elif mark[1].startswith(opening[1]) and not mark[2].strip():
            yield opening, _Span(_next_line_start(text, opening), mark.start(), "")
            opening = None
    if opening is not None:
        yield opening, _Span(_next_line_start(text, opening), len(text), "", is_open_ended=True)


def _fence_title(text: str, opening: re.Match[str]) -> str:
    """Return the file name in a fence's opening line or in the line before, or an empty string."""
    info = opening[2].strip()
    if title := _title(_attributes(info)):
        return title
    words = info.replace(":", " ").split()
    before = text[max(0, opening.start() - 250) : opening.start()].rstrip().rpartition("\n")[2]
    before = before.strip("#*`_: \t").removeprefix("File").lstrip(":* `")
    return next((word for word in (*words, before) if _FILE_NAME.fullmatch(word)), "")


def _find_markdown_sections(text: str) -> list[_Span]:
    """Find Markdown sections, divided at the highest heading level that occurs at least twice."""
    levels: dict[int, list[_Mark]] = {}
    fences = (span for _, span in _fences(text))
    fence = next(fences, None)
    for mark in _find_all(_HEADING, text):
        while fence and fence.end < mark.start():
            fence = next(fences, None)
        if fence and fence.start <= mark.start():
            continue  # a comment in code
        found = _Mark(mark.start(), mark.start(), mark[2].strip(" #\t\r"))
        levels.setdefault(len(mark[1]), []).append(found)
    several = [marks for _, marks in sorted(levels.items()) if len(marks) > 1]
    return _spans_between(text, several[0]) if several else []


def _find_pages(text: str) -> list[_Span]:
    """Find pages, separated by form feeds or by page numbers on lines of their own."""
    marks = [_Mark(0, 0, "page 1")]
    for number, mark in enumerate(_find_all(_PAGE_BREAK, text), 2):
        marks.append(_Mark(mark.start(), _next_line_start(text, mark), f"page {mark[1] or number}"))
    return _spans_between(text, marks) if len(marks) > 1 else []


def _find_document_tags(text: str) -> list[_Span]:
    return _find_tag_contents(_DOCUMENT_TAGS, text)


def _find_wrapper_tags(text: str) -> list[_Span]:
    return _find_tag_contents(_WRAPPER_TAGS, text)


_DOCUMENT_TAGS, _WRAPPER_TAGS = _tag_pattern(_DOCUMENT_TAG_NAMES), _tag_pattern(_WRAPPER_TAG_NAMES)
_DOCUMENT_FINDERS: Sequence[_FindDocuments] = (
    _find_document_tags,
    _find_by_banners,
    _find_by_ruled_titles,
    _find_by_numbered_titles,
    _find_code_fences,
    _find_wrapper_tags,
)
"""Functions that find documents, the least ambiguous first."""
_SECTION_FINDERS: Sequence[_FindDocuments] = (_find_markdown_sections, _find_pages)
"""Functions that find the sections of a single document."""


# Splitting a text

MAX_DOCUMENTS = 200
"""Maximum number of documents of one text; beyond that, neighbours are merged."""
_MIN_CHARS = 2000
"""Minimum average length of the documents of a text, and minimum length of merged documents."""
_MAX_CHARS = 1 << 24
"""Maximum length of a text that is searched for documents."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a text: one document, or text outside the documents."""

    text: str
    title: str = ""
    is_document: bool = False
    is_open_ended: bool = False
    """True if the text after the document may be part of it."""
    merged_count: int = 1
    """Number of documents that were merged into this document."""


def split_documents(text: str) -> list[Segment]:
    """Split a text into segments. Joined together, the segments' texts are the original text. A
    text without documents is one segment."""
    segments: list[Segment] = []
    at = 0
    for span in _find_documents(text):
        if at < span.start:
            segments.append(Segment(text[at : span.start]))
        body = text[span.start : span.end]
        segments.append(Segment(body, span.title, True, span.is_open_ended, span.merged_count))
        at = span.end
    if at < len(text):
        segments.append(Segment(text[at:]))
    return segments


def _find_documents(text: str) -> list[_Span]:
    """Return the documents of the first finder whose documents make up at least half of the text,
    or else the sections of the text. Return nothing for a text longer than _MAX_CHARS.

    Short documents are merged if there are too many documents. Short sections are always merged.
    """
    if len(text) > _MAX_CHARS:
        return []
    max_documents = min(MAX_DOCUMENTS, max(1, len(text) // _MIN_CHARS))
    for find in _DOCUMENT_FINDERS:
        if found := _find_if_majority(text, find):
            return _merge_short_spans(found) if len(found) > max_documents else found
    for find in _SECTION_FINDERS:
        if len(found := _find_if_majority(text, find)) > 1:
            return _merge_short_spans(found, LARGE_CHARS)
    return []


def _find_if_majority(text: str, find: _FindDocuments) -> list[_Span]:
    """Return the documents if they make up at least half of the text, else none."""
    found = [span for span in find(text) if span.start < span.end]
    return found if 2 * sum(span.end - span.start for span in found) >= len(text) else []


def _merge_short_spans(spans: Sequence[_Span], min_chars: int = _MIN_CHARS) -> list[_Span]:
    """Merge short documents with their neighbours, including the text between them."""
    min_chars = max(min_chars, -(-(spans[-1].end - spans[0].start) // MAX_DOCUMENTS))
    merged: list[_Span] = []
    for span in spans:
        if merged and merged[-1].end - merged[-1].start < min_chars:
            merged[-1] = _merge_spans(merged[-1], span)
        else:
            merged.append(span)
    if len(merged) > 1 and merged[-1].end - merged[-1].start < min_chars:
        merged[-2:] = [_merge_spans(merged[-2], merged[-1])]
    return merged


def _merge_spans(first: _Span, second: _Span) -> _Span:
    merged_count = first.merged_count + second.merged_count
    return _Span(first.start, second.end, first.title, second.is_open_ended, merged_count)


# Offloading

KEPT_CHARS = 1000
"""Maximum number of characters that stay in the prompt at each end of an offloaded text, because
users write instructions there."""
_SHORT_CHARS = 400
"""Maximum length of a document that stays in the prompt: a note on a file would hardly be
shorter."""
_HEAD_CHARS = 160
"""Maximum number of characters that the note on a document quotes from the document's beginning."""
_TOTAL_HEAD_CHARS = 6000
"""Maximum number of quoted characters in the notes on all documents together."""
_KEPT_DIVISOR = 4
"""A text becomes one file if more than 1 / `_KEPT_DIVISOR` of it would stay in the prompt."""

SaveFile = Callable[[str, str], str]
"""Writes a text to a file and returns the path. The second argument is the title, or empty."""


def offload_documents(text: str, save_file: SaveFile) -> str:
    """Write the long documents of a text, and other long parts, to files. Return the text for the
    prompt, in which a note stands for each file. Short documents stay in the prompt.

    The whole text becomes one file if it contains no documents, or if too much of it would stay in
    the prompt.
    """
    segments = split_documents(text)
    kept = sum(map(_kept_chars, segments))
    if len(segments) == 1 or kept * _KEPT_DIVISOR > len(text):
        return offload_as_one_file(text, save_file)
    offloaded = [len(segment.text) for segment in segments if not _stays_in_prompt(segment)]
    head_chars = min(_HEAD_CHARS, _TOTAL_HEAD_CHARS // len(offloaded))
    intro = (
        f"[Of this message {sum(offloaded):,} characters are in files ({len(offloaded)}), each"
        " named below where it stood: search them (grep -n) and read them there.]\n"
    )
    return intro + "".join(_offload_segment(segment, save_file, head_chars) for segment in segments)


def offload_as_one_file(text: str, save_file: SaveFile) -> str:
    """Write a text to one file. Return its start, a note and its end."""
    path, head, tail = save_file(text, ""), _head(text), _tail(text)
    left_out = len(text) - len(head) - len(tail)
    return (
        f"{head}\n[... {left_out:,} characters are left out here. The whole text,"
        f" {_size_text(text)}, is the file {path}: search and read it there. Its end follows"
        f" ...]\n{tail}"
    )


def _stays_in_prompt(segment: Segment) -> bool:
    """Return True if a segment stays in the prompt as it is."""
    if not segment.is_document:
        return len(segment.text) <= LARGE_CHARS
    return len(segment.text) <= (2 * KEPT_CHARS if segment.is_open_ended else _SHORT_CHARS)


def _kept_chars(segment: Segment) -> int:
    """Return how many characters of a segment stay in the prompt."""
    if _stays_in_prompt(segment):
        return len(segment.text)
    if not segment.is_document:
        return 2 * KEPT_CHARS
    return KEPT_CHARS if segment.is_open_ended else 0


def _offload_segment(segment: Segment, save_file: SaveFile, head_chars: int) -> str:
    """Return the text that replaces a segment in the prompt. A long segment is written to a
    file."""
    text = segment.text
    if _stays_in_prompt(segment):
        return text
    if not segment.is_document:
        return offload_as_one_file(text, save_file)
    path = save_file(text, segment.title or "document")
    head = " ".join(text[: 2 * head_chars].split())[:head_chars]
    head = head.replace("[", "(").replace("]", ")")  # a bracket would end the note
    merged = f"; {segment.merged_count} parts of the message" if segment.merged_count > 1 else ""
    note = f"[{path}: {_size_text(text)}{merged}. It begins: {head} ...]\n"
    return f"{note}[It ends:]\n{_tail(text)}" if segment.is_open_ended else note


def _size_text(text: str) -> str:
    starts = range(0, len(text), _PIECE_CHARS)
    lines = sum(text.count("\n", start, start + _PIECE_CHARS) for start in starts)
    lines += not text.endswith("\n")
    return f"{lines:,} lines, {len(text):,} characters"


def _head(text: str) -> str:
    """Return the start of a text, at most KEPT_CHARS characters, without an incomplete last line
    unless that line is long."""
    head = text[:KEPT_CHARS]
    end = head.rfind("\n")
    return head[:end] if end > KEPT_CHARS // 2 else head


def _tail(text: str) -> str:
    """Return the end of a text, at most KEPT_CHARS characters, without an incomplete first line
    unless that line is long."""
    tail = text[-KEPT_CHARS:]
    start = tail.find("\n") + 1
    return tail[start:] if 0 < start < KEPT_CHARS // 2 else tail
