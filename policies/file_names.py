"""File names and media types: safe and unique names for files that a client or a model has named,
and media types by file extension."""

import re
import unicodedata
from collections.abc import Collection

UNKNOWN_TYPE = "application/octet-stream"
_MAX_NAME_BYTES = 120
_SAFE_SIGNS = frozenset("._-+,=@")
_JOINERS = "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
"""Hidden characters that some writing systems need."""
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Zl", "Zp"})
_EXTENSION = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,7}")
_STRIPPED_CHARACTERS = "".join(filter(str.isspace, map(chr, range(0x3001)))) + "."
"""Characters that many programs remove from the end of a name when they save the file."""
_MIME_TYPE = re.compile(r"[a-z0-9.+-]{1,60}/[a-z0-9.+-]{1,100}")

# The module `mimetypes` is not used, because it reads the machine's tables. A file without an
# extension gets the first extension of its type.
_MIME_TYPES = {
    ".txt": "text/plain",
    ".log": "text/plain",
    ".csv": "text/csv",
    ".tsv": "text/tab-separated-values",
    ".md": "text/markdown",
    ".html": "text/html",
    ".htm": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".py": "text/x-python",
    ".xml": "application/xml",
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
    ".toml": "application/toml",
    ".sql": "application/sql",
    ".pdf": "application/pdf",
    ".rtf": "application/rtf",
    ".doc": "application/msword",
    ".docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    ".xls": "application/vnd.ms-excel",
    ".xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
    ".ppt": "application/vnd.ms-powerpoint",
    ".pptx": "application/vnd.openxmlformats-officedocument.presentationml.presentation",
    ".odt": "application/vnd.oasis.opendocument.text",
    ".ods": "application/vnd.oasis.opendocument.spreadsheet",
    ".epub": "application/epub+zip",
    ".parquet": "application/vnd.apache.parquet",
    ".sqlite": "application/vnd.sqlite3",
    ".zip": "application/zip",
    ".gz": "application/gzip",
    ".tgz": "application/gzip",
    ".tar": "application/x-tar",
    ".7z": "application/x-7z-compressed",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".bmp": "image/bmp",
    ".tiff": "image/tiff",
    ".tif": "image/tiff",
    ".svg": "image/svg+xml",
    ".heic": "image/heic",
    ".wav": "audio/wav",
    ".mp3": "audio/mpeg",
    ".flac": "audio/flac",
    ".ogg": "audio/ogg",
    ".opus": "audio/opus",
    ".m4a": "audio/mp4",
    ".aac": "audio/aac",
    ".mid": "audio/midi",
    ".midi": "audio/midi",
    ".mp4": "video/mp4",
    ".webm": "video/webm",
    ".mov": "video/quicktime",
    ".mkv": "video/x-matroska",
    ".avi": "video/x-msvideo",
}
_EXTENSIONS = {mime_type: extension for extension, mime_type in reversed(_MIME_TYPES.items())} | {
    "audio/mp3": ".mp3",
    "audio/x-wav": ".wav",
    "image/jpg": ".jpg",
    "text/xml": ".xml",
    "text/json": ".json",
    "application/csv": ".csv",
    "application/javascript": ".js",
    "application/x-yaml": ".yaml",
    "application/x-zip-compressed": ".zip",
}


def guess_mime_type(filename: str) -> str:
    """Return the media type of a file by its extension, or UNKNOWN_TYPE for an unknown
    extension."""
    _, extension = _split_extension(strip_trailing_dots_and_spaces(filename))
    return _MIME_TYPES.get(extension.lower(), UNKNOWN_TYPE)


def strip_trailing_dots_and_spaces(filename: str) -> str:
    """Return a name without the spaces and dots at its end, which many programs remove when a user
    saves the file."""
    return filename.rstrip(_STRIPPED_CHARACTERS)


def normalize_mime_type(mime_type: str) -> str:
    """Return a media type without its parameters; UNKNOWN_TYPE if it is malformed."""
    bare = mime_type.partition(";")[0].strip().lower()
    return bare if _MIME_TYPE.fullmatch(bare) else UNKNOWN_TYPE


def safe_name(wanted_name: str, mime_type: str) -> str:
    """Return a file's name without directories, at most 120 bytes long; empty if nothing is left.

    Characters that may have a meaning in a shell become `_`. A name without an extension gets the
    extension of its media type.
    """
    bare = unicodedata.normalize("NFC", wanted_name).replace("\\", "/").rpartition("/")[2]
    clean = re.sub("_{2,}", "_", "".join(map(_safe_character, bare.strip(". "))))
    stem, extension = _split_extension(clean)
    if not (stem := stem.lstrip("._-").rstrip("._")):
        return ""
    extension = extension or _EXTENSIONS.get(mime_type, "")
    room = _MAX_NAME_BYTES - len(extension)
    return stem.encode()[:room].decode(errors="ignore") + extension


def display_name(path: str) -> str:
    """Return the last part of a path, or `file` if it consists of dots and spaces.

    `_` replaces hidden characters, which could disguise the name, and `\\`, which Windows takes for
    a separator.
    """
    name = "".join(map(_shown_character, path.rpartition("/")[2]))
    return name if name.strip(". ") else "file"


class UniqueDisplayNames:
    """Assigns unique display names to files of different directories."""

    def __init__(self) -> None:
        self._taken_names: set[str] = set()
        self._last_numbers: dict[str, int] = {}
        """The last number that was appended, by name."""

    def assign(self, path: str) -> str:
        """Return the file's base name, with a number if another file has that name, ignoring
        case."""
        name = first = self.base_name(path)
        stem, extension = _split_extension(first)
        number = self._last_numbers.get(first.casefold(), 1)
        while name.casefold() in self._taken_names:
            number += 1
            name = f"{stem}-{number}{extension}"
        self._last_numbers[first.casefold()] = number
        self._taken_names.add(name.casefold())
        return name

    def base_name(self, path: str) -> str:
        """Return the name of a file without the number that makes it unique."""
        return display_name(path)


class UniqueNames:
    """Assigns unique names to the files of one directory."""

    def __init__(self) -> None:
        self._taken_names: set[str] = set()
        self._unnamed_counts: dict[str, int] = {}
        """The number of files without a name, by kind."""
        self._last_numbers: dict[str, int] = {}
        """The last number that was appended, by name."""

    def assign(self, wanted_name: str, *, kind: str, mime_type: str) -> str:
        """Return a safe and unique form of a name, or `kind-1` and so on for an empty name."""
        name = safe_name(wanted_name, mime_type)
        if not name:
            number = self._unnamed_counts[kind] = self._unnamed_counts.get(kind, 0) + 1
            name = safe_name(f"{kind}-{number}", mime_type)
        stem, extension = _split_extension(name)
        first, number = name, self._last_numbers.get(name, 1)
        while name in self._taken_names:
            number += 1
            name = f"{stem}-{number}{extension}"
        self._last_numbers[first] = number
        self._taken_names.add(name)
        return name


def _safe_character(character: str) -> str:
    # Only letters, marks and numbers of any script: other characters may end a line or a word.
    is_word = unicodedata.category(character)[0] in "LMN"
    return character if is_word or character in _SAFE_SIGNS else "_"


def _shown_character(character: str) -> str:
    if character in _JOINERS:
        return character
    is_hidden = unicodedata.category(character) in _HIDDEN_CATEGORIES or character == "\\"
    return "_" if is_hidden else character


def _split_extension(name: str) -> tuple[str, str]:
    """Return stem and extension. An ending that begins with a digit, as in `tool-1.2`, is not an
    extension."""
    stem, dot, rest = name.rpartition(".")
    if dot and _EXTENSION.fullmatch(dot + rest):
        return stem, dot + rest
    return name, ""


# Type patterns in settings: a media type (text/csv, image/*) or a file extension (.csv)

_TYPE_PATTERN = re.compile(r"\.[a-z0-9]{1,16}|[a-z0-9.+-]{1,60}/(?:\*|[a-z0-9.+-]{1,100})")


def check_type_patterns(patterns: Collection[str]) -> None:
    """Raise ValueError for a pattern that is neither an extension nor a media type."""
    for pattern in patterns:
        if not _TYPE_PATTERN.fullmatch(pattern):
            raise ValueError(
                f"{pattern!r} is neither an extension (.csv) nor a media type (text/csv, image/*)"
            )


def matches_type(path: str, patterns: Collection[str]) -> bool:
    """Return True if one of the type patterns matches the file at `path`."""
    name, mime_type = strip_trailing_dots_and_spaces(path).lower(), guess_mime_type(path)
    return any(
        name.endswith(pattern) if pattern.startswith(".") else _covers(pattern, mime_type)
        for pattern in patterns
    )


def covered_patterns(patterns: Collection[str], others: Collection[str]) -> tuple[str, ...]:
    """Return the patterns that a pattern of `others` covers. A pattern covers another pattern if it
    matches at least the same files."""
    return tuple(
        pattern for pattern in patterns if any(_covers(other, pattern) for other in others)
    )


def _covers(pattern: str, other: str) -> bool:
    prefix, star, _ = pattern.partition("*")
    return pattern == other or bool(star and other.startswith(prefix))
