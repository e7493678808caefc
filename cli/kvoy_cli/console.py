"""What a command tells its user while it works: spinners and bars on a terminal, else lines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Task:
    """One thing that takes time. `say` changes its words, `fraction` how far it is."""

    def __init__(self, console: Console, progress: Progress | None, text: str) -> None:
        self._console = console
        self._progress = progress
        self._text = ""
        self._id = None if progress is None else progress.add_task(text, total=None)
        self.say(text)

    def say(self, text: str) -> None:
        if text == self._text:
            return
        self._text = text
        if self._progress is None or self._id is None:
            self._console.print(text, markup=False, highlight=False)
        else:
            self._progress.update(self._id, description=text, total=None)

    def note(self, text: str) -> None:
        """A passing detail, for terminals alone: it would fill a log."""
        if self._progress is not None and self._id is not None:
            self._progress.update(self._id, description=f"{self._text} [dim]{text}[/dim]")

    def fraction(self, value: float) -> None:
        if self._progress is not None and self._id is not None:
            self._progress.update(self._id, completed=value, total=1.0)

    def done(self, text: str) -> None:
        """Replace the task by a line that stays."""
        if self._progress is not None and self._id is not None:
            self._progress.remove_task(self._id)
        self._console.print(f"[green]✓[/green] {text}", highlight=False)


class Reporter:
    """Prints to standard output; asks whether that is a terminal once."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(soft_wrap=True)

    def print(self, text: str = "", style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False, highlight=False)

    def stream(self, text: str) -> None:
        """A piece of text as it is, at once."""
        self.console.out(text, end="", highlight=False)
        self.console.file.flush()

    @contextlib.contextmanager
    def tasks(self) -> Iterator[_TaskMaker]:
        """Tasks that may run side by side, each on a line of its own while they last."""
        if not self.console.is_terminal:
            yield _TaskMaker(self.console, None)
            return
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        ) as progress:
            yield _TaskMaker(self.console, progress)


class _TaskMaker:
    def __init__(self, console: Console, progress: Progress | None) -> None:
        self._console = console
        self._progress = progress

    def __call__(self, text: str) -> Task:
        return Task(self._console, self._progress, text)
