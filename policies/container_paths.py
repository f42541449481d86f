"""Where files that clients put into a container lie, and how files are named in a zip."""

from collections.abc import Collection

from policies.file_names import ShownNames, shown_name
from policies.workspace import INPUT_DIR, WORKING_DIR

MAX_NAME_BYTES = 200
"""Less than file systems allow: room for a number."""


def input_path(filename: str, taken: Collection[str]) -> str:
    """A path of its own for a file that a client has named."""
    bare = filename.replace("\\", "/").rpartition("/")[2]
    clean = "".join(each if each.isprintable() else "_" for each in bare)
    name = "file" if clean.strip(". ") == "" else clean
    stem, dot, extension = name.rpartition(".")
    if not stem:
        stem, dot, extension = name, "", ""
    ending = _cut(dot + extension, MAX_NAME_BYTES // 2)
    stem = _cut(stem, MAX_NAME_BYTES - len(ending.encode()))
    path, number = f"{INPUT_DIR}/{stem}{ending}", 1
    while path in taken:
        number += 1
        path = f"{INPUT_DIR}/{stem}-{number}{ending}"
    return path


class ArchiveNames(ShownNames):
    """The names of one zip's files: relative, and never a way out of where it is unpacked."""

    def first_choice(self, path: str) -> str:
        inside = path.removeprefix(f"{WORKING_DIR}/")
        parts = [part for part in inside.split("/") if part not in ("", "..", ".")]
        return "/".join(map(shown_name, parts)) or "file"


def _cut(text: str, max_bytes: int) -> str:
    return text.encode()[:max_bytes].decode(errors="ignore")
