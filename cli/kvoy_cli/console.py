"""What a command tells its user while it works: spinners and bars on a terminal, else lines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Task as RichTask
from rich.progress_bar import ProgressBar
from rich.text import Text


class Task:
    """One thing that takes time. `say` changes its words, `fraction` how far it is."""

    def __init__(self, console: Console, progress: Progress | None, text: str) -> None:
        self._console = console
        self._progress = progress
        self._text = ""
        self._id = None if progress is None else progress.add_task(escape(text), total=None)
        self.say(text)

    def say(self, text: str) -> None:
        if text == self._text:
            return
        self._text = text
        if self._progress is None or self._id is None:
            self._console.print(text, markup=False, highlight=False)
        else:
            self._progress.update(self._id, description=escape(text), total=None)

    def note(self, text: str) -> None:
        """A passing detail, for terminals alone: it would fill a log."""
        if self._progress is not None and self._id is not None:
            words = f"{escape(self._text)}: [dim]{escape(text)}[/dim]"
            self._progress.update(self._id, description=words)

    def fraction(self, value: float) -> None:
        if self._progress is not None and self._id is not None:
            self._progress.update(self._id, completed=value, total=1.0)

    def done(self, text: str) -> None:
        """Replace the task by a line that stays."""
        if self._progress is not None and self._id is not None:
            self._progress.remove_task(self._id)
        self._console.print(f"[green]✓[/green] {escape(text)}", highlight=False)


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
            _KnownBar(bar_width=24),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        ) as progress:
            yield _TaskMaker(self.console, progress)


class _KnownBar(BarColumn):
    """A bar for tasks that know how far they are; nothing for the others."""

    def render(self, task: RichTask) -> ProgressBar | Text:  # type: ignore[override]
        return Text() if task.total is None else super().render(task)


class _TaskMaker:
    def __init__(self, console: Console, progress: Progress | None) -> None:
        self._console = console
        self._progress = progress

    def __call__(self, text: str) -> Task:
        return Task(self._console, self._progress, text)
