"""What a run has produced, where earlier ones have left files of theirs."""

import json
import shlex
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from policies.artifacts import Contents, LeftOut, Produced, changed, output_path
from policies.workspace import ANSWER_FILES, INPUT_DIR, OUTPUT_DIR
from proxy.agent.task import InputFile
from sandbox_runtime.errors import FileTimeoutError, SandboxFileError
from sandbox_runtime.sandbox import LIST_S, Entry, HashLimits, Listing, Sandbox

TIDY_S = 10.0
LINKABLE_S = 10.0
"""How long an answer waits for the names of the files that it may link to."""
MAX_HASH_S, HASH_PART = 15.0, 0.25
"""How long files are hashed at most, and which part of the time that is left."""
_GIVEN = f"{INPUT_DIR}/.given"
_OUTPUTS = f"{OUTPUT_DIR}/"
_MAX_GIVEN_BYTES = 1 << 20
_UNLISTED = Listing((), truncated=True)


@dataclass(frozen=True, slots=True)
class Found:
    """What lies in the output directory at the end of a run."""

    is_whole: bool
    """False if there are more files than can be listed, or not all could be named in time."""
    produced: list[Produced] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    """Files of which it was not found out in time whether they have changed."""


class Outputs:
    """The output directory of one run.

    Whether a file of an earlier run has changed is told by its hash. One that is larger than
    `max_file_bytes` cannot be handed back, so its size alone is looked at.
    """

    def __init__(self, inputs: Sequence[InputFile], max_file_bytes: int) -> None:
        given = {
            file.path: Contents(None, file.identity)
            for file in inputs
            if file.path.startswith(_OUTPUTS)
        }
        self._max_file_bytes = max_file_bytes
        self._before = given or None
        """What lay there before."""
        self._is_before_known = True

    async def begin(self, sandbox: Sandbox, seconds: float) -> None:
        """Remember what lies there from earlier runs, as far as `seconds` allow."""
        listing = await self._hashed(sandbox, seconds)
        self._is_before_known = listing is not _UNLISTED
        left = {output_path(entry.path): _contents(entry) for entry in listing.entries}
        self._before = {**left, **(self._before or {})}

    async def produced(self, sandbox: Sandbox, again: Collection[str], seconds: float) -> Found:
        """Return the regular files that are new, have changed, or are to be handed back `again`."""
        if self._before is None:
            listing = await _listing(sandbox, None, seconds)
        else:
            listing = await self._hashed(sandbox, seconds)
        found = Found(is_whole=not listing.truncated)
        before, wanted = self._before or {}, set(again)
        for entry in listing.entries:
            if entry.kind != "file":
                continue
            path = output_path(entry.path)
            is_unknown = path not in before and not self._is_before_known
            has_changed = path in wanted or (
                None if is_unknown else changed(before.get(path), _contents(entry))
            )
            if has_changed:
                found.produced.append(Produced(path, entry.bytes))
            elif has_changed is None and entry.bytes <= self._max_file_bytes:
                found.left_out.append(LeftOut(path, entry.bytes, "no_time"))
        return found

    async def _hashed(self, sandbox: Sandbox, seconds: float) -> Listing:
        hash_s = min(MAX_HASH_S, seconds * HASH_PART)
        return await _listing(sandbox, HashLimits(self._max_file_bytes, hash_s), seconds)


async def remove_answers(sandbox: Sandbox) -> None:
    """Remove what earlier runs have answered: it is no answer of this one."""
    files = shlex.join(ANSWER_FILES)
    await sandbox.exec(f"rm -rf {files}", timeout_s=TIDY_S, shell_state="none")


async def given_files(sandbox: Sandbox) -> dict[str, str]:
    """What clients gave to earlier runs, as `remember_given` was told."""
    pieces: list[bytes] = []

    async def keep(piece: bytes) -> None:
        pieces.append(piece)

    try:
        await sandbox.get(_GIVEN, keep, max_bytes=_MAX_GIVEN_BYTES)
        given = json.loads(b"".join(pieces))
    except (SandboxFileError, ValueError, RecursionError):
        return {}  # there is none, or the model has changed it: then all is given anew
    found = given.items() if isinstance(given, dict) else ()
    return {path: identity for path, identity in found if isinstance(identity, str)}


async def remember_given(sandbox: Sandbox, given: Mapping[str, str]) -> None:
    """Note in the workspace itself, which is kept, what was given: paths and identities."""

    async def written() -> AsyncIterator[bytes]:
        yield json.dumps(given).encode()

    with suppress(SandboxFileError):  # it is given once more then
        await sandbox.put(_GIVEN, written())


async def all_files(sandbox: Sandbox) -> list[Produced]:
    """Return the regular files in the output directory, as far as they can be named in time."""
    listing = await _listing(sandbox, None, LINKABLE_S)
    return [
        Produced(output_path(entry.path), entry.bytes)
        for entry in listing.entries
        if entry.kind == "file"
    ]


async def _listing(sandbox: Sandbox, hashes: HashLimits | None, seconds: float) -> Listing:
    try:
        return await sandbox.list(OUTPUT_DIR, hashes=hashes, timeout_s=min(LIST_S, seconds))
    except FileTimeoutError:
        return _UNLISTED
    except SandboxFileError:
        return Listing((), truncated=False)


def _contents(entry: Entry) -> Contents:
    return Contents(entry.bytes, entry.sha256)
