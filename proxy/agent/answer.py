"""The answer as the client receives it: streamed piece by piece, with paths of produced files
rewritten to links. Also the reader of a sandbox's answer file."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from policies.artifacts import select_files
from policies.file_names import display_name
from policies.workspace import ANSWER_FILES, MAX_ANSWER_BYTES, OUTPUT_DIR, WORKING_DIR
from proxy.agent.artifacts import list_output_files
from proxy.agent.events import AnswerDelta, AnswerRestarted, Emit
from proxy.agent.result import Artifact
from proxy.agent.task import AgentTask
from proxy.agent.tool_calls import TextArgumentReader
from sandbox_runtime.errors import SandboxFileError, SandboxLostError
from sandbox_runtime.sandbox import Sandbox

SEPARATOR = "\n\n"
"""Separates narration from the text that follows it in a stream."""
ANSWER_FILE_S = 10.0
"""Timeout of reading one answer file, in seconds."""
_GUESSED_DIRS = ("/mnt/data", OUTPUT_DIR)
"""Directories in which models claim to have saved a file. Models know `/mnt/data` from other
services."""
_RELATIVE_OUTPUT_DIR = OUTPUT_DIR.removeprefix(f"{WORKING_DIR}/")
_PATH_END = r"(?![\w/-]|\.\w)"
_PATH_START = r"(?<![\w./\\\"'-])"
"""Matches at the start of a relative path, unless the path is the end of a longer path or follows a
quotation mark, as in code."""
_LOOKBEHIND_CHARS = 2
"""Number of characters before a path that decide how the path is rewritten."""


class AnswerWriter:
    """Streams the answer of one run.

    Text that was sent cannot be withdrawn: if it turns out to be narration, it stays in the stream,
    and the answer follows after an empty line.
    """

    def __init__(self, task: AgentTask, emit: Emit) -> None:
        self._emit = emit
        self._artifact_store = task.artifact_store
        self._profile = task.profile
        self._rewrite_links = task.request.rewrite_links
        self._link_rewriter: LinkRewriter | None = None
        self._submit_reader = TextArgumentReader("answer")
        self._held_submission = ""
        """The beginning of a submitted answer, which is held back while it repeats the narration
        sent before."""
        self._linked_paths = set[str]()
        self._narration: _AnswerPart | None = None
        """The text that was sent as an answer and turned out to be narration; None once other text
        was sent."""
        self.source_text = ""
        """The answer so far, with paths as the model wrote them."""
        self.text = ""
        """The answer so far, as it was sent to the client."""
        self.answer_offset = 0
        """Number of characters that were streamed before the answer."""

    async def begin_answer(self) -> None:
        """Begin a new answer. Text of an earlier answer becomes narration."""
        await self._flush_links()
        if self.text:
            self._narration = _AnswerPart(self.source_text, self.text)
        self._submit_reader, self._held_submission = TextArgumentReader("answer"), ""
        self.source_text = self.text = ""

    async def mark_text_as_narration(self) -> None:
        """Turn the text sent so far into narration, because the client sees other output next."""
        await self.begin_answer()
        await self._restart_after_narration()

    async def write(self, piece: str, sandbox: Sandbox | None, logprobs: Any = None) -> None:
        """Send a piece of the answer. Paths of produced files in `sandbox` are rewritten to links,
        if the request allows that."""
        if self._link_rewriter is None:
            await self._restart_after_narration()
            self._link_rewriter = LinkRewriter(
                await self._linkable_paths(sandbox), self._record_link
            )
        self.source_text += piece
        await self._send(self._link_rewriter.feed(piece), logprobs)

    async def write_submit(self, arguments: str, sandbox: Sandbox | None) -> None:
        """Process a streamed piece of the JSON arguments of a `submit` call, and send the answer
        text in it. The answer is held back as long as it only repeats the narration that was sent
        before it."""
        piece = self._held_submission + self._submit_reader.feed(arguments)
        self._held_submission = ""
        before = _without_space(self._narration.source_text) if self._narration else None
        if before is not None and before.startswith(_without_space(piece)):
            self._held_submission = piece
        elif piece:
            await self.write(piece, sandbox)

    async def finish(self, answer: str, sandbox: Sandbox | None) -> None:
        """Send the part of `answer` that has not been sent yet. If `answer` does not begin with the
        text sent so far, send all of it, as a new answer. Send nothing if the narration sent last
        is the same text, except for white space."""
        if not answer.startswith(self.source_text.rstrip()):
            await self.begin_answer()
        if self._narration and not self.source_text and self._narration.matches(answer):
            self.source_text, self.text = self._narration.source_text, self._narration.text
            self._narration = None
        elif missing := answer[len(self.source_text) :]:
            # Text without a slash cannot contain a path, so the files need not be listed.
            await self.write(missing, sandbox if "/" in answer else None)
        await self._flush_links()

    async def append_file_links(self, artifacts: Iterable[Artifact]) -> None:
        """Append links to the files that the answer does not link to. Do nothing if the request
        rules out links, or if the profile's `artifacts.list_files` is not "always"."""
        unnamed = [artifact for artifact in artifacts if artifact.url not in self.text]
        if self._rewrite_links and unnamed and self._profile.artifacts.list_files == "always":
            separator = SEPARATOR if self.text else ""
            await self._send(separator + "\n".join(map(_link_item, unnamed)), None)

    async def unsaved_linked_paths(self) -> list[str]:
        """Return the linked paths whose files are not in the store: files that were not saved yet,
        and files of earlier runs that have expired."""
        return [path for path in self._linked_paths if not await self._artifact_store.has(path)]

    async def _linkable_paths(self, sandbox: Sandbox | None) -> list[str]:
        """Return the paths of the files that will become artifacts. Links to other files would be
        dead."""
        if sandbox is None or not self._rewrite_links:
            return []
        try:
            files = await list_output_files(sandbox)
        except SandboxLostError:
            return []  # the answer is still valid without links
        withheld = self._profile.watch.withheld_files(file.path for file in files)
        allowed = (file for file in files if file.path not in withheld)
        return [file.path for file in select_files(allowed, self._profile.artifacts).chosen]

    def _record_link(self, path: str) -> str:
        self._linked_paths.add(path)
        return self._artifact_store.artifact_url(path)

    async def _restart_after_narration(self) -> None:
        """If narration was sent as the answer, send a separator after it and report that the answer
        starts again."""
        narration, self._narration = self._narration, None
        if narration is not None:
            await self._emit(AnswerDelta(SEPARATOR))
            await self._emit(AnswerRestarted())
            self.answer_offset += len(narration.text) + len(SEPARATOR)

    async def _flush_links(self) -> None:
        if self._link_rewriter is not None:
            links, self._link_rewriter = self._link_rewriter, None
            await self._send(links.finish(), None)

    async def _send(self, text: str, logprobs: Any) -> None:
        if text:
            text = text.encode(errors="replace").decode()  # replaces lone surrogates
            self.text += text
            await self._emit(AnswerDelta(text, logprobs))


@dataclass(frozen=True, slots=True)
class _AnswerPart:
    """Text that was sent as an answer and turned out to be narration."""

    source_text: str
    text: str

    def matches(self, answer: str) -> bool:
        """Return True if the text equals `answer` except for white space."""
        return _without_space(self.source_text) == _without_space(answer)


def _link_item(artifact: Artifact) -> str:
    """Return the Markdown list item that links to a file."""
    name = artifact.filename or display_name(artifact.path)
    image = "!" if artifact.mime_type.startswith("image/") else ""
    return f"- {image}[{name}]({artifact.url})"


def _without_space(text: str) -> str:
    return "".join(text.split())


async def read_answer_file(sandbox: Sandbox) -> str:
    """Return the text of the first answer file that is not empty, or "". A file is ignored if it is
    not a regular file, or if it is larger than MAX_ANSWER_BYTES."""
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


class LinkRewriter:
    """Rewrites the paths of produced files in streamed text to links. Recognizes `sandbox:/…`,
    absolute and relative paths."""

    def __init__(self, paths: Iterable[str], url_of: Callable[[str], str]) -> None:
        self._url_of = url_of
        self._paths_by_spelling = _paths_by_spelling(paths)
        self._sorted_spellings = sorted(self._paths_by_spelling)
        longest_first = sorted(self._paths_by_spelling, key=len, reverse=True)
        alternatives = "|".join(map(_spelling_pattern, longest_first))
        self._pattern = re.compile(alternatives)
        self._max_match_chars = len(longest_first[0]) + 2 if longest_first else 0
        self._pending = ""
        self._lookbehind = ""

    def feed(self, piece: str) -> str:
        """Add a piece of text. Return the text that is ready to send."""
        self._pending += piece
        if not self._paths_by_spelling:
            return self._release(len(self._pending))
        return self._release(self._ready_chars())

    def finish(self) -> str:
        """Return the rest of the text, with its paths rewritten."""
        return self._release(len(self._pending))

    def _ready_chars(self) -> int:
        """Return the number of pending characters that are ready to send, because no later text can
        make them the beginning of a path."""
        text = self._pending
        for index in range(max(0, len(text) - self._max_match_chars), len(text)):
            if self._may_become_path(text[index:]):
                return index
        return len(text)

    def _may_become_path(self, ending: str) -> bool:
        """Return True if `ending` is the beginning of a spelling of a path, or a whole spelling and
        one more character: if that is a dot, only the next character shows whether the path has
        ended."""
        at = bisect_left(self._sorted_spellings, ending)
        begins = at < len(self._sorted_spellings) and self._sorted_spellings[at].startswith(ending)
        return begins or ending[:-1] in self._paths_by_spelling

    def _release(self, end: int) -> str:
        """Return the pending text up to `end`, with paths rewritten to links. A path that begins
        before `end` is included even if it extends beyond `end`."""
        text = self._lookbehind + self._pending
        out: list[str] = []
        position = len(self._lookbehind)
        end += position
        for match in self._pattern.finditer(text, position) if self._paths_by_spelling else ():
            if match.start() >= end:
                break
            out += [text[position : match.start()], self._link(match)]
            position = match.end()
        end = max(end, position)
        out.append(text[position:end])
        self._lookbehind = text[max(0, end - _LOOKBEHIND_CHARS) : end]
        self._pending = text[end:]
        return "".join(out)

    def _link(self, match: "re.Match[str]") -> str:
        path = self._paths_by_spelling[match.group()]
        url = self._url_of(path)
        if match.group().startswith("]("):
            return f"]({url})"
        before = match.string[max(0, match.start() - _LOOKBEHIND_CHARS) : match.start()]
        if before.endswith(("](", "<", '"', "'", "=")):
            return url
        return f"[{path.rpartition('/')[2]}]({url})"


def _spelling_pattern(spelling: str) -> str:
    """Return the regular expression that matches one spelling of a path."""
    if spelling.startswith("]("):
        return re.escape(spelling)
    is_relative = spelling.lstrip("`").startswith(
        (f"{_RELATIVE_OUTPUT_DIR}/", f"./{_RELATIVE_OUTPUT_DIR}/")
    )
    return (_PATH_START if is_relative else "") + re.escape(spelling) + _PATH_END


def _paths_by_spelling(paths: Iterable[str]) -> dict[str, str]:
    """Return a map from each spelling that a model may use for a path to that path."""
    found: dict[str, str] = {}
    for path in paths:
        relative = path.removeprefix(OUTPUT_DIR + "/")
        for name in {relative, quote(relative, errors="surrogateescape")}:
            absolute = [f"{directory}/{name}" for directory in _GUESSED_DIRS]
            below = f"{_RELATIVE_OUTPUT_DIR}/{name}"
            for spelling in (*absolute, *(f"sandbox:{each}" for each in absolute)):
                found[spelling] = found[f"`{spelling}`"] = path
            for spelling in (below, f"./{below}"):
                found[spelling] = found[f"`{spelling}`"] = path
            for target in (name, f"./{name}"):
                found[f"]({target})"] = path
    return found
