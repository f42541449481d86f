"""Writes the answer to the client: piece by piece, paths of produced files turned into links."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from policies.artifacts import select_files
from policies.file_names import display_name
from policies.profile import Profile
from policies.workspace import ANSWER_FILES, MAX_ANSWER_BYTES, OUTPUT_DIR, WORKING_DIR
from proxy.agent.artifacts import all_files
from proxy.agent.events import AnswerDelta, AnswerRestarted, Emit
from proxy.agent.result import Artifact
from proxy.agent.task import ArtifactStore
from proxy.agent.tool_calls import TextArgument
from sandbox_runtime.errors import SandboxFileError, SandboxLostError
from sandbox_runtime.sandbox import Sandbox

APART = "\n\n"
"""Between narration and what follows it in a stream."""
ANSWER_FILE_S = 10.0
"""How long one answer file may take to be read."""
_GUESSED_DIRS = ("/mnt/data", OUTPUT_DIR)
"""Where models say that their files are: `/mnt/data` is known from other services."""
_RELATIVE_DIR = OUTPUT_DIR.removeprefix(f"{WORKING_DIR}/")
_NAME_ENDS = r"(?![\w/-]|\.\w)"
_NAME_BEGAN = r"(?<![\w./\\\"'-])"
"""Matches before a relative path that is neither the rest of another path nor a string in code."""
_SEEN_BEFORE = 2
"""How many characters before a path decide how it is rewritten."""


class AnswerWriter:
    """Writes one answer, at once or piece by piece.

    What was sent cannot be taken back: if a begun answer turns out to be narration, it stays in the
    stream, and the answer follows it, set apart by an empty line.
    """

    def __init__(
        self, emit: Emit, artifact_store: ArtifactStore, profile: Profile, *, rewrite_links: bool
    ) -> None:
        self._emit = emit
        self._artifact_store = artifact_store
        self._profile = profile
        self._rewrite = rewrite_links
        self._links: LinkWriter | None = None
        self._submit = TextArgument("answer")
        self._submit_held = ""
        """The beginning of a submitted answer that repeats the narration before it."""
        self._linked = set[str]()
        self._narration: _Part | None = None
        """An answer that was begun and given up, as long as nothing has followed it."""
        self.given = ""
        """The answer so far, its paths as the model wrote them."""
        self.text = ""
        """The answer so far, as the client was sent it."""
        self.streamed_before = 0
        """How many characters the client was sent before it."""

    async def begin(self) -> None:
        """Begin an answer. One that was begun before is given up."""
        await self._end()
        if self.text:
            self._narration = _Part(self.given, self.text)
        self._submit, self._submit_held = TextArgument("answer"), ""
        self.given = self.text = ""

    async def set_aside(self) -> None:
        """Treat what was begun as narration: something else is shown before the answer."""
        await self.begin()
        await self._restart()

    async def write(self, piece: str, sandbox: Sandbox | None, logprobs: Any = None) -> None:
        """Send a piece of the answer."""
        if self._links is None:
            await self._restart()
            self._links = LinkWriter(await self._linkable(sandbox), self._url)
        self.given += piece
        await self._send(self._links.feed(piece), logprobs)

    async def write_submit(self, arguments: str, sandbox: Sandbox | None) -> None:
        """Send the answer inside a piece of submit's arguments, unless it only repeats the
        narration before it."""
        piece = self._submit_held + self._submit.feed(arguments)
        self._submit_held = ""
        before = _without_space(self._narration.given) if self._narration else None
        if before is not None and before.startswith(_without_space(piece)):
            self._submit_held = piece
        elif piece:
            await self.write(piece, sandbox)

    async def finish(self, answer: str, sandbox: Sandbox | None) -> None:
        """Send what is missing of `answer`."""
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
        """Send links to the files that the answer does not name, below it."""
        unnamed = [each for each in artifacts if each.url not in self.text]
        if self._rewrite and unnamed and self._profile.artifacts.list_files == "always":
            apart = APART if self.text else ""
            await self._send(apart + "\n".join(map(_listed, unnamed)), None)

    async def dead_links(self) -> list[str]:
        """Return the paths that the answer links to and that are not saved: not yet, or, if an
        earlier run has made the files, no more."""
        return [path for path in self._linked if not await self._artifact_store.has(path)]

    async def _linkable(self, sandbox: Sandbox | None) -> list[str]:
        """Return the paths of the files that will be handed back: other links would be dead."""
        if sandbox is None or not self._rewrite:
            return []
        try:
            files = await all_files(sandbox)
        except SandboxLostError:
            return []  # the files are lost; the answer need not be
        withheld = self._profile.watch.withheld_files(file.path for file in files)
        allowed = (file for file in files if file.path not in withheld)
        return [file.path for file in select_files(allowed, self._profile.artifacts).chosen]

    def _url(self, path: str) -> str:
        self._linked.add(path)
        return self._artifact_store.url(path)

    async def _restart(self) -> None:
        """Set what follows apart from an answer that was given up."""
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
    """Text that was sent as an answer and given up."""

    given: str
    text: str

    def says(self, answer: str) -> bool:
        """Return whether the text is that answer, but for white space."""
        return _without_space(self.given) == _without_space(answer)


def _listed(artifact: Artifact) -> str:
    """Return a file's line of the list."""
    name = artifact.filename or display_name(artifact.path)
    shown = "!" if artifact.mime_type.startswith("image/") else ""
    return f"- {shown}[{name}]({artifact.url})"


def _without_space(text: str) -> str:
    return "".join(text.split())


async def answer_file(sandbox: Sandbox) -> str:
    """Return the text of the first answer file that has any, or "". Only a regular file of at most
    MAX_ANSWER_BYTES counts."""
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


class LinkWriter:
    """Turns paths of the given files into links that open, also while the text is streamed:
    `sandbox:/…`, absolute and relative paths."""

    def __init__(self, paths: Iterable[str], url_of: Callable[[str], str]) -> None:
        self._url_of = url_of
        self._targets = _spellings(paths)
        self._sorted = sorted(self._targets)
        longest_first = sorted(self._targets, key=len, reverse=True)
        alternatives = "|".join(map(_written, longest_first))
        self._pattern = re.compile(alternatives)
        self._longest = len(longest_first[0]) + 2 if longest_first else 0
        self._pending = ""
        self._before = ""

    def feed(self, piece: str) -> str:
        """Take in a piece of text. Return the text that is certain by now."""
        self._pending += piece
        if not self._targets:
            return self._release(len(self._pending))
        return self._release(self._certain())

    def finish(self) -> str:
        """Return the rest of the text."""
        return self._release(len(self._pending))

    def _certain(self) -> int:
        """Return how much of the pending text no later text can turn into a path."""
        text = self._pending
        for index in range(max(0, len(text) - self._longest), len(text)):
            if self._may_become_path(text[index:]):
                return index
        return len(text)

    def _may_become_path(self, rest: str) -> bool:
        """Return whether `rest` begins a spelling, or is one that the next character may end."""
        at = bisect_left(self._sorted, rest)
        begins = at < len(self._sorted) and self._sorted[at].startswith(rest)
        return begins or rest[:-1] in self._targets

    def _release(self, end: int) -> str:
        """Return the text up to `end`, rewritten. What follows is looked at too: a path's name may
        go on in it."""
        text = self._before + self._pending
        out: list[str] = []
        position = len(self._before)
        end += position
        for match in self._pattern.finditer(text, position) if self._targets else ():
            if match.start() >= end:
                break
            out += [text[position : match.start()], self._link(match)]
            position = match.end()
        end = max(end, position)
        out.append(text[position:end])
        self._before = text[max(0, end - _SEEN_BEFORE) : end]
        self._pending = text[end:]
        return "".join(out)

    def _link(self, match: "re.Match[str]") -> str:
        path = self._targets[match.group()]
        url = self._url_of(path)
        if match.group().startswith("]("):
            return f"]({url})"
        before = match.string[max(0, match.start() - _SEEN_BEFORE) : match.start()]
        if before.endswith(("](", "<", '"', "'", "=")):
            return url
        return f"[{path.rpartition('/')[2]}]({url})"


def _written(spelling: str) -> str:
    """Return the pattern of one spelling."""
    if spelling.startswith("]("):
        return re.escape(spelling)
    is_relative = spelling.lstrip("`").startswith((f"{_RELATIVE_DIR}/", f"./{_RELATIVE_DIR}/"))
    return (_NAME_BEGAN if is_relative else "") + re.escape(spelling) + _NAME_ENDS


def _spellings(paths: Iterable[str]) -> dict[str, str]:
    """Return each path by every spelling that a model may write of it."""
    found: dict[str, str] = {}
    for path in paths:
        relative = path.removeprefix(OUTPUT_DIR + "/")
        for name in {relative, quote(relative, errors="surrogateescape")}:
            absolute = [f"{directory}/{name}" for directory in _GUESSED_DIRS]
            below = f"{_RELATIVE_DIR}/{name}"
            for spelling in (*absolute, *(f"sandbox:{each}" for each in absolute)):
                found[spelling] = found[f"`{spelling}`"] = path
            for spelling in (below, f"./{below}"):
                found[spelling] = found[f"`{spelling}`"] = path
            for target in (name, f"./{name}"):
                found[f"]({target})"] = path
    return found
