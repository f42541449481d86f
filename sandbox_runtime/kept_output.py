"""The files inside one computer that have whole what its commands printed."""

import uuid
from dataclasses import dataclass

from policies.workspace import OBSERVATION_DIR
from sandbox_runtime.sandbox import OutputCap, StreamName

MAX_KEPT_BYTES = 32 << 20
"""Of all of them: the disk may be memory."""
PRUNE = f"""export LC_ALL=C
find {OBSERVATION_DIR} -type f ! -path '*
*' -printf '%T@ %s %p\\n' 2>/dev/null | sort -rn | {{
kept=0
while read -r _ size path; do
    if [ $((kept + size)) -le {MAX_KEPT_BYTES // 2} ]; then
        kept=$((kept + size))
    else
        rm -f -- "$path"
    fi
done
echo "$kept"
}}"""
"""Remove the oldest that came with a workspace, and say how much is left: new ones need room,
and a conversation has many computers."""


class KeptOutput:
    """How much of them there is. What a command may keep is set aside while it runs."""

    def __init__(self) -> None:
        self._bytes = 0

    def begin(self, cap: OutputCap) -> "KeptFiles":
        """Set aside room for a command's."""
        room = min(cap.max_kept_bytes, MAX_KEPT_BYTES - self._bytes) if cap.keep_in else 0
        if room <= 0:
            return KeptFiles(None, 0)
        self._bytes += room
        # A name of its own: files of an earlier computer may have come with its workspace.
        return KeptFiles(f"{cap.keep_in}/{uuid.uuid4().hex[:8]}", room)

    def end(self, files: "KeptFiles") -> None:
        """Nothing is added to a command's any more."""
        self._bytes -= files.left

    def found(self, size: bytes) -> None:
        """So much came with a workspace, as PRUNE says; where it does not, nothing is kept."""
        self._bytes += int(size) if size.strip().isdigit() else MAX_KEPT_BYTES


@dataclass(slots=True, eq=False)
class KeptFiles:
    """Those of one command."""

    name: str | None
    """What their paths begin with; None: nothing is kept."""
    left: int
    """How much may be added."""

    def path(self, stream: StreamName, reading: int, size: int) -> str:
        """Where a stream of a reading is, of which so much is kept; empty: nowhere."""
        if self.name is None or size <= 0:
            return ""
        self.left = max(0, self.left - size)
        return f"{self.name}-{reading}.{stream}"
