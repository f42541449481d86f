"""The answer on its way to the client: links made good, pieces passed on as they come."""

from typing import Any

from policies.artifacts import select
from policies.profile import Profile
from policies.workspace import ANSWER_FILES, MAX_ANSWER_BYTES
from proxy.agent.events import AnswerDelta, Emit
from proxy.agent.links import LinkWriter
from proxy.agent.outputs import all_files
from proxy.agent.submit_stream import SubmitStream
from proxy.agent.task import Outbox
from sandbox_runtime.errors import SandboxFileError, SandboxLostError
from sandbox_runtime.sandbox import Sandbox


class AnswerWriter:
    """Writes one answer, at once or piece by piece.

    What was sent cannot be taken back: where a begun answer is given up, the next one follows it,
    set apart by an empty line.
    """

    def __init__(
        self, emit: Emit, outbox: Outbox, profile: Profile, *, rewrite_links: bool
    ) -> None:
        self._emit = emit
        self._outbox = outbox
        self._profile = profile
        self._rewrite = rewrite_links
        self._links: LinkWriter | None = None
        self._submit = SubmitStream()
        self._linked = set[str]()
        self.given = ""
        """The answer so far, before its links are made good."""
        self.text = ""
        """What the client has been sent."""

    async def begin(self) -> None:
        """Make ready for an answer, giving up one that was begun."""
        await self._end()
        self._submit = SubmitStream()
        self.given = ""

    async def write(self, piece: str, sandbox: Sandbox | None, logprobs: Any = None) -> None:
        """Pass a piece of the answer on."""
        if self._links is None:
            self._links = LinkWriter(await self._linkable(sandbox), self._url)
            await self._send("\n\n" if self.text else "", None)
        self.given += piece
        await self._send(self._links.feed(piece), logprobs)

    async def write_submit(self, arguments: str, sandbox: Sandbox | None) -> None:
        """Pass on the answer inside a piece of submit's arguments."""
        if piece := self._submit.feed(arguments):
            await self.write(piece, sandbox)

    async def finish(self, answer: str, sandbox: Sandbox | None) -> None:
        """Pass on what is missing of `answer`."""
        if not answer.startswith(self.given.rstrip()):
            await self.begin()
        if missing := answer[len(self.given) :]:
            # Without a path in it there is nothing to look for in the sandbox.
            await self.write(missing, sandbox if "/" in answer else None)
        await self._end()

    async def dead_links(self) -> list[str]:
        """The files that it links to and that cannot be found: not yet, or, where an earlier run
        has made them, no more."""
        return [path for path in self._linked if not await self._outbox.has(path)]

    async def _linkable(self, sandbox: Sandbox | None) -> list[str]:
        """The files that will be handed back: a link to any other would be dead."""
        if sandbox is None or not self._rewrite:
            return []
        try:
            files = await all_files(sandbox)
        except SandboxLostError:
            return []  # the files are; the answer need not be
        withheld = self._profile.watch.withheld(file.path for file in files)
        allowed = (file for file in files if file.path not in withheld)
        return [file.path for file in select(allowed, self._profile.artifacts).chosen]

    def _url(self, path: str) -> str:
        self._linked.add(path)
        return self._outbox.url(path)

    async def _end(self) -> None:
        if self._links is not None:
            links, self._links = self._links, None
            await self._send(links.finish(), None)

    async def _send(self, text: str, logprobs: Any) -> None:
        if text:
            text = text.encode(errors="replace").decode()  # half a surrogate pair is no text
            self.text += text
            await self._emit(AnswerDelta(text, logprobs))


async def answer_file(sandbox: Sandbox) -> str:
    """The text of the first answer file that has any; only a regular file of sane size counts."""
    for path in ANSWER_FILES:
        pieces: list[bytes] = []

        async def keep(piece: bytes, into: list[bytes] = pieces) -> None:
            into.append(piece)

        try:
            await sandbox.get(path, keep, max_bytes=MAX_ANSWER_BYTES)
        except SandboxFileError:
            continue
        except SandboxLostError:
            return ""
        text = b"".join(pieces).decode(errors="replace").strip("\n")
        if text.strip():
            return text
    return ""
