"""Throttling of frequent log lines and events."""

from proxy.agent.guard import Throttle


def emitted_lines(throttle: Throttle, now: float, count: int) -> list[object]:
    """Return the allowed lines among `count` lines at one time, and the sums of earlier periods."""
    lines: list[object] = []
    for _ in range(count):
        if suppressed := throttle.start_period_if_due(now):
            lines.append(f"and {suppressed} more")
        if throttle.try_acquire():
            lines.append(now)
    return lines


def test_throttle_allows_a_few_events_in_each_period_and_counts_the_others() -> None:
    throttle = Throttle(2, 10.0)
    assert emitted_lines(throttle, 0, 5) == [0, 0]
    assert emitted_lines(throttle, 9.9, 1) == []
    assert emitted_lines(throttle, 10, 3) == ["and 4 more", 10, 10]
    assert throttle.take_suppressed_count() == 1
    assert throttle.take_suppressed_count() == 0
    assert emitted_lines(throttle, 19, 2) == []
    assert throttle.take_suppressed_count() == 2


def test_throttle_allows_all_events_that_are_a_period_apart() -> None:
    throttle = Throttle(1, 10.0)
    assert [emitted_lines(throttle, now, 1) for now in (0, 10, 100)] == [[0], [10], [100]]
    assert throttle.take_suppressed_count() == 0
