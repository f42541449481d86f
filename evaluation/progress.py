"""The progress bar of an evaluation, with the totals so far."""

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from evaluation.results import Result

if TYPE_CHECKING:
    from rich.progress import Progress

Prices = Mapping[str, tuple[float, float]]
"""US dollars for a million prompt tokens and a million completion tokens, by model."""

REFRESHES_PER_S = 2
"""Number of times per second that the progress bar is drawn. rich's default of 10 takes 1.5 % of a
core."""


class ProgressBar:
    """Shows results, errors, tokens and cost on standard error, and one line at the end. The bar is
    shown on a terminal only.

    Errors, tokens and cost are those of this `sandbox-eval run`, without earlier runs that it
    continues. The cost is shown if there are prices.
    """

    def __init__(self, total: int, done: int, prices: Prices) -> None:
        self._total = total
        self._done = done
        self._prices = prices
        self._infra_errors = 0
        self._tokens = 0
        self._cost_usd = 0.0
        self._has_unpriced_model = False
        self._bar = _rich_progress() if sys.stderr.isatty() else None
        if self._bar:
            self._task = self._bar.add_task(self._totals_text(), total=total, completed=done)

    def __enter__(self) -> "ProgressBar":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()
        print(
            f"{self._done} of {self._total} requests; in this run: {self._totals_text()}",
            file=sys.stderr,
        )

    def add(self, result: Result) -> None:
        """Count a result."""
        self._infra_errors += result.status == "infra_error"
        self._done += result.status != "infra_error"
        self._tokens += result.prompt_tokens + result.completion_tokens
        if price := self._prices.get(result.model):
            per_prompt, per_completion = price
            spent = result.prompt_tokens * per_prompt + result.completion_tokens * per_completion
            self._cost_usd += spent / 1e6
        else:
            self._has_unpriced_model = True
        if self._bar:
            self._bar.update(self._task, completed=self._done, description=self._totals_text())

    def _totals_text(self) -> str:
        totals = f"{self._infra_errors} infra errors, {self._tokens:,} tokens"
        if not self._prices:
            return totals
        cost = "cost unknown" if self._has_unpriced_model else f"{self._cost_usd:.4f} USD"
        return f"{totals}, {cost}"


def _rich_progress() -> "Progress":
    """Return a progress bar that is not started. The import of rich takes 30 ms."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        refresh_per_second=REFRESHES_PER_S,
    )
