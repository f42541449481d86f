"""The rate of small frames from one guest, beyond which the host reads it more slowly."""

FRAMES_PER_S = 50_000
BURST_FRAMES = 8192
"""Small frames cost their number of times a constant: about 1.5 µs each on a machine of 2024. A
guest that sends more of them is read more slowly, which is all that happens to it."""
FREE_BYTES = 1024
"""The bytes of data that pay for one frame."""


class FrameRate:
    """How many small frames one guest may still send."""

    def __init__(self) -> None:
        self._frames = float(BURST_FRAMES)
        self._at_s = 0.0

    def pause_s(self, frames: int, size: int, now_s: float) -> float:
        """How long the guest should not be read after so many frames of `size` bytes together."""
        frames -= size // FREE_BYTES
        if frames <= 0:
            return 0.0
        earned = (now_s - self._at_s) * FRAMES_PER_S
        self._frames = min(BURST_FRAMES, self._frames + earned) - frames
        self._at_s = now_s
        return max(0.0, -self._frames / FRAMES_PER_S)
