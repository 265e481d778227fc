"""Progress on stderr: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from k3convert.cli.console import Console
from k3convert.execution.events import Advanced, Ended, Event, Noted, Started
from k3convert.execution.memory import format_size

LINE_INTERVAL_S = 10.0
BAR_INTERVAL_S = 0.1


class ProgressSink:
    """An event sink for people."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Any = None
        self._task: Any = None
        self._total = self._resumed = 0
        self._started = self._shown = 0.0

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if isinstance(event, Noted):
            self._console.note(event.text)
        elif self._console.quiet:
            return
        elif isinstance(event, Started):
            self._start(event)
        elif isinstance(event, Advanced):
            self._advance(event.done_bytes)
        elif isinstance(event, Ended):
            self.close()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _start(self, event: Started) -> None:
        self.close()
        self._total, self._resumed = event.total_bytes, event.resumed_bytes
        self._started = self._shown = time.monotonic()
        if event.resumed_bytes:
            self._console.note(
                f"going on with an earlier run: {format_size(event.resumed_bytes)} of "
                f"{format_size(event.total_bytes)} are there"
            )
        if sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task(event.job, total=event.total_bytes, completed=event.resumed_bytes)
            self._bar.start()

    def _advance(self, done: int) -> None:
        now = time.monotonic()
        if self._bar is not None:
            if now - self._shown >= BAR_INTERVAL_S:
                self._shown = now
                self._bar.update(self._task, completed=done)
        elif now - self._shown >= LINE_INTERVAL_S:
            self._shown = now
            rate = (done - self._resumed) / max(1e-9, now - self._started)
            left = (self._total - done) / rate if rate > 0 else float("inf")
            print(
                f"{format_size(done)} of {format_size(self._total)} ({100 * done / max(1, self._total):.1f} %), "
                f"{format_size(rate)}/s, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )


def _bar() -> Any:
    from rich.console import Console as RichConsole
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=RichConsole(stderr=True),
        auto_refresh=False,
    )
