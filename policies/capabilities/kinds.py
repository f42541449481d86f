"""The paper's three meta-capabilities, and what a piece of code shows of them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Language = Literal["shell", "python"]


class Capability(StrEnum):
    """What a computer gives a model that has none (the paper's section 4)."""

    EXTERNAL_RESOURCES = "external_resources"
    """What comes from elsewhere: packages, pages, data, repositories."""
    FILE_MANAGEMENT = "file_management"
    """Files looked for, read, written, moved."""
    COMPUTATION = "computation"
    """Numbers worked out, and programs run that do."""


@dataclass(frozen=True, slots=True)
class Code:
    """A piece of code inside another."""

    language: Language
    text: str


@dataclass(frozen=True, slots=True)
class Use:
    """What a piece of code uses by itself, and the code in it that is still to be looked at."""

    capabilities: frozenset[Capability] = frozenset()
    code: tuple[Code, ...] = ()


NOTHING = Use()
EXTERNAL = Use(frozenset({Capability.EXTERNAL_RESOURCES}))
FILES = Use(frozenset({Capability.FILE_MANAGEMENT}))
COMPUTATION = Use(frozenset({Capability.COMPUTATION}))


def together(uses: "list[Use]") -> Use:
    """What several pieces use."""
    if len(uses) == 1:
        return uses[0]
    capabilities = frozenset[Capability]().union(*(use.capabilities for use in uses))
    return Use(capabilities, tuple(code for use in uses for code in use.code))


def code_in(path: str, text: str) -> tuple[Code, ...]:
    """What is written into a file, where its name says that it is code."""
    if not text:
        return ()
    if path.endswith(".py"):
        return (Code("python", text),)
    return (Code("shell", text),) if path.endswith((".sh", ".bash")) else ()
