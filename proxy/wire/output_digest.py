"""What is shown of a command's output among thinking: its beginning as it comes, then its end."""

from policies.observation import readable
from policies.steps import OUTPUT_LEFT_OUT

HEAD_LINES, HEAD_CHARS = 20, 2000
TAIL_LINES, TAIL_CHARS = 10, 1000
MAX_LINE_CHARS = 4000
"""What is kept of a line that is not whole yet."""


class OutputDigest:
    """The output of one command, line by line. What it shows is bounded, however much there is."""

    def __init__(self) -> None:
        self._unfinished: dict[str, str] = {}
        self._lines_left = HEAD_LINES
        self._chars_left = HEAD_CHARS
        self._kept_back: list[str] = []
        self._is_long = False

    def take(self, stream: str, text: str) -> str:
        """The lines of the beginning that this piece completes."""
        *lines, unfinished = (self._unfinished.get(stream, "") + text).split("\n")
        self._unfinished[stream] = unfinished[-MAX_LINE_CHARS:]
        return "".join(map(self._shown, lines))

    def end(self, observation: str) -> str:
        """What is missing of a short output; else the end of what the model was told of it."""
        left = [text for text in self._unfinished.values() if text]
        rest = "".join([*map(self._shown, left), *self._kept_back])
        if not self._is_long:
            return rest
        tail = "\n".join(observation.split("\n")[-TAIL_LINES:])[-TAIL_CHARS:]
        return f"{OUTPUT_LEFT_OUT}\n{tail}\n"

    def _shown(self, line: str) -> str:
        line = readable(line) + "\n"
        if not self._kept_back and self._lines_left and len(line) <= self._chars_left:
            self._lines_left -= 1
            self._chars_left -= len(line)
            return line
        self._keep_back(line)
        return ""

    def _keep_back(self, line: str) -> None:
        if self._is_long:
            return
        self._kept_back.append(line)
        chars = sum(map(len, self._kept_back))
        self._is_long = len(self._kept_back) > TAIL_LINES or chars > TAIL_CHARS
