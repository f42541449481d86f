"""What a run has produced, where earlier ones have left files of theirs."""

import json
import shlex
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress

from policies.artifacts import Produced, output_path
from policies.workspace import ANSWER_FILES, INPUT_DIR, OUTPUT_DIR
from proxy.agent.task import InputFile
from sandbox_runtime.errors import SandboxFileError
from sandbox_runtime.sandbox import Listing, Sandbox

TIDY_S = 10.0
_GIVEN = f"{INPUT_DIR}/.given"
_OUTPUTS = f"{OUTPUT_DIR}/"
_MAX_GIVEN_BYTES = 1 << 20


class Outputs:
    """The output directory of one run."""

    def __init__(self, inputs: Sequence[InputFile]) -> None:
        given = {file.path: file.identity for file in inputs if file.path.startswith(_OUTPUTS)}
        self._before = given or None
        """What lay there before, with its digest."""

    async def begin(self, sandbox: Sandbox) -> None:
        """Remember what lies there from earlier runs."""
        listing = await _listing(sandbox, hashes=True)
        left = {output_path(entry.path): entry.sha256 for entry in listing.entries}
        self._before = {**left, **(self._before or {})}

    async def produced(self, sandbox: Sandbox, again: Collection[str]) -> list[Produced]:
        """The regular files that are new, have changed, or are to be handed back `again`."""
        if self._before is None:
            return await all_files(sandbox)
        listing = await _listing(sandbox, hashes=True)
        before, wanted = self._before, set(again)
        return [
            Produced(path, entry.bytes)
            for entry in listing.entries
            if entry.kind == "file"
            for path in [output_path(entry.path)]
            if path in wanted or before.get(path) != entry.sha256
        ]


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
    """The regular files in the output directory."""
    listing = await _listing(sandbox)
    return [
        Produced(output_path(entry.path), entry.bytes)
        for entry in listing.entries
        if entry.kind == "file"
    ]


async def _listing(sandbox: Sandbox, *, hashes: bool = False) -> Listing:
    try:
        return await sandbox.list(OUTPUT_DIR, hashes=hashes)
    except SandboxFileError:
        return Listing((), truncated=False)
