"""Throttling of frequent log lines and events."""

from proxy.agent.guard import Throttle


def told(throttle: Throttle, now: float, count: int) -> list[object]:
    """Of so many at one time: those that are told, and the sums."""
    heard: list[object] = []
    for _ in range(count):
        if more := throttle.start_period(now):
            heard.append(f"and {more} more")
        if throttle.allows():
            heard.append(now)
    return heard


def test_throttle_allows_a_few_in_a_period_and_counts_the_others() -> None:
    throttle = Throttle(2, 10.0)
    assert told(throttle, 0, 5) == [0, 0]
    assert told(throttle, 9.9, 1) == []
    assert told(throttle, 10, 3) == ["and 4 more", 10, 10]
    assert throttle.take_held_back() == 1
    assert throttle.take_held_back() == 0
    assert told(throttle, 19, 2) == []
    assert throttle.take_held_back() == 2


def test_rare_lines_are_all_allowed() -> None:
    throttle = Throttle(1, 10.0)
    assert [told(throttle, now, 1) for now in (0, 10, 100)] == [[0], [10], [100]]
    assert throttle.take_held_back() == 0
