"""Which produced files go back, how many, how large."""

from collections.abc import Iterable
from dataclasses import dataclass

from policies.workspace import ANSWER_FILES, OUTPUT_DIR


@dataclass(frozen=True, slots=True)
class ArtifactLimits:
    """What one run may hand back."""

    max_files: int = 100
    max_file_mib: int = 256
    max_total_mib: int = 512
    inline_image_kib: int = 512
    """Pictures up to this size also travel inside the message, as data URLs."""
    keep_hours: float = 24.0
    """How long files and their links live."""


@dataclass(frozen=True, slots=True)
class Produced:
    """A regular file that lies in the output directory."""

    path: str
    """Absolute, inside the sandbox."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Selection:
    """What is handed back and what is not."""

    chosen: tuple[Produced, ...]
    left_out: tuple[Produced, ...]


def select(files: Iterable[Produced], limits: ArtifactLimits) -> Selection:
    """Take files in the order of their paths while the limits allow; the answer file is no file."""
    chosen: list[Produced] = []
    left_out: list[Produced] = []
    room = limits.max_total_mib << 20
    for file in files:
        if file.path in ANSWER_FILES:
            continue
        fits = file.bytes <= min(room, limits.max_file_mib << 20)
        if fits and len(chosen) < limits.max_files:
            chosen.append(file)
            room -= file.bytes
        else:
            left_out.append(file)
    return Selection(tuple(chosen), tuple(left_out))


def output_path(relative: str) -> str:
    """A listed name of the output directory as an absolute path."""
    return f"{OUTPUT_DIR}/{relative}"
