"""The answer on its way to the client: links made good, pieces passed on as they come."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from policies.artifacts import select
from policies.file_names import shown_name
from policies.profile import Profile
from policies.workspace import ANSWER_FILES, MAX_ANSWER_BYTES
from proxy.agent.artifacts import all_files
from proxy.agent.events import AnswerDelta, AnswerRestarted, Emit
from proxy.agent.links import LinkWriter
from proxy.agent.task import Artifact, Outbox
from proxy.agent.text_argument import TextArgument
from sandbox_runtime.errors import SandboxFileError, SandboxLostError
from sandbox_runtime.sandbox import Sandbox

APART = "\n\n"
"""Between narration and what follows it in a stream."""
ANSWER_FILE_S = 10.0
"""How long one answer file may take to be read."""


class AnswerWriter:
    """Writes one answer, at once or piece by piece.

    What was sent cannot be taken back: where a begun answer turns out to be narration, it stays in
    the stream, and the answer follows it, set apart by an empty line.
    """

    def __init__(
        self, emit: Emit, outbox: Outbox, profile: Profile, *, rewrite_links: bool
    ) -> None:
        self._emit = emit
        self._outbox = outbox
        self._profile = profile
        self._rewrite = rewrite_links
        self._links: LinkWriter | None = None
        self._submit = TextArgument("answer")
        self._submit_held = ""
        """The beginning of a submitted answer that repeats the narration before it."""
        self._linked = set[str]()
        self._narration: _Part | None = None
        """What was begun and given up, as long as nothing has followed it."""
        self.given = ""
        """The answer so far, before its links are made good."""
        self.text = ""
        """The same as the client has been sent it."""
        self.streamed_before = 0
        """How many characters the client has been sent before that."""

    async def begin(self) -> None:
        """Make ready for an answer, giving up one that was begun."""
        await self._end()
        if self.text:
            self._narration = _Part(self.given, self.text)
        self._submit, self._submit_held = TextArgument("answer"), ""
        self.given = self.text = ""

    async def set_aside(self) -> None:
        """What was begun is narration: something else is shown before the answer."""
        await self.begin()
        await self._restart()

    async def write(self, piece: str, sandbox: Sandbox | None, logprobs: Any = None) -> None:
        """Pass a piece of the answer on."""
        if self._links is None:
            await self._restart()
            self._links = LinkWriter(await self._linkable(sandbox), self._url)
        self.given += piece
        await self._send(self._links.feed(piece), logprobs)

    async def write_submit(self, arguments: str, sandbox: Sandbox | None) -> None:
        """Pass on the answer inside a piece of submit's arguments, unless it only repeats what was
        written before."""
        piece = self._submit_held + self._submit.feed(arguments)
        self._submit_held = ""
        if self._narration and _squeezed(self._narration.given).startswith(_squeezed(piece)):
            self._submit_held = piece
        elif piece:
            await self.write(piece, sandbox)

    async def finish(self, answer: str, sandbox: Sandbox | None) -> None:
        """Pass on what is missing of `answer`."""
        if not answer.startswith(self.given.rstrip()):
            await self.begin()
        if self._narration and not self.given and self._narration.says(answer):
            self.given, self.text = self._narration.given, self._narration.text
            self._narration = None
        elif missing := answer[len(self.given) :]:
            # Without a path in it there is nothing to look for in the sandbox.
            await self.write(missing, sandbox if "/" in answer else None)
        await self._end()

    async def list_files(self, artifacts: Iterable[Artifact]) -> None:
        """Pass on links to the files that the answer does not name, below it."""
        unnamed = [each for each in artifacts if each.url not in self.text]
        if self._rewrite and unnamed and self._profile.artifacts.list_files == "always":
            apart = APART if self.text else ""
            await self._send(apart + "\n".join(map(_listed, unnamed)), None)

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

    async def _restart(self) -> None:
        """Set what follows apart from what was given up."""
        narration, self._narration = self._narration, None
        if narration is not None:
            await self._emit(AnswerDelta(APART))
            await self._emit(AnswerRestarted())
            self.streamed_before += len(narration.text) + len(APART)

    async def _end(self) -> None:
        if self._links is not None:
            links, self._links = self._links, None
            await self._send(links.finish(), None)

    async def _send(self, text: str, logprobs: Any) -> None:
        if text:
            text = text.encode(errors="replace").decode()  # half a surrogate pair is no text
            self.text += text
            await self._emit(AnswerDelta(text, logprobs))


@dataclass(frozen=True, slots=True)
class _Part:
    """Text that was sent for an answer and given up."""

    given: str
    text: str

    def says(self, answer: str) -> bool:
        """Whether it is that answer, but for white space."""
        return _squeezed(self.given) == _squeezed(answer)


def _listed(artifact: Artifact) -> str:
    """Return a file's line of the list."""
    name = artifact.filename or shown_name(artifact.path)
    shown = "!" if artifact.mime_type.startswith("image/") else ""
    return f"- {shown}[{name}]({artifact.url})"


def _squeezed(text: str) -> str:
    return "".join(text.split())


async def answer_file(sandbox: Sandbox) -> str:
    """The text of the first answer file that has any; only a regular file of sane size counts."""
    for path in ANSWER_FILES:
        pieces: list[bytes] = []

        async def keep(piece: bytes, into: list[bytes] = pieces) -> None:
            into.append(piece)

        try:
            await sandbox.get(path, keep, max_bytes=MAX_ANSWER_BYTES, timeout_s=ANSWER_FILE_S)
        except SandboxFileError:
            continue
        except SandboxLostError:
            return ""
        text = b"".join(pieces).decode(errors="replace").strip("\n")
        if text.strip():
            return text
    return ""
