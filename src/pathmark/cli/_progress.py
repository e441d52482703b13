"""One progress bar for every long command: on stderr, silent where nobody watches."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from pathmark.cli._options import is_quiet


class Bar:
    """Satisfies `pathmark.progress.Progress`; use as a context manager."""

    def __init__(self, *, quiet: bool = False) -> None:
        console, quiet = Console(stderr=True), quiet or is_quiet()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._plain = None if quiet or console.is_terminal else console
        self._task: TaskID | None = None

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stage(self, name: str, total: int | None) -> None:
        """The last bar is complete, a new one begins. Without a terminal: one line per stage."""
        if self._task is not None:
            done = self._progress.tasks[-1]
            self._progress.update(self._task, total=done.completed or 1, completed=done.completed or 1, note="")
        self._task = self._progress.add_task(name, total=total, note="")
        if self._plain is not None:
            self._plain.print(f"... {name}", highlight=False)

    def advance(self, units: int, note: str = "") -> None:
        """Move the bar of the current stage."""
        if self._task is not None:
            self._progress.update(self._task, advance=units)
            if note:
                self._progress.update(self._task, note=note)


def training_bar(*, quiet: bool = False) -> Bar:
    """A bar for a command that trains: from here on the process keeps the memory that it frees."""
    from pathmark.training import keep_freed_memory

    keep_freed_memory()
    return Bar(quiet=quiet)
