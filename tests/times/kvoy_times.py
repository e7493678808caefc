"""pytest plugin: says at the end where a run's time went.

Seconds by folder of tests, and by fixture where one takes long to set up (a cluster, images). Tests
that run side by side count side by side: the seconds are the tests' own, the run's are the clock's.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import pytest

_PROPERTY = "kvoy_fixture_s"
"""Of a test's report: the name and seconds of a fixture that it was the first to ask for."""
_LONG_FIXTURE_S = 5.0


@dataclass(slots=True)
class Times:
    """Sums of seconds."""

    by_folder: dict[str, float] = field(default_factory=dict)
    by_fixture: dict[str, float] = field(default_factory=dict)

    def add_phase(self, nodeid: str, seconds: float) -> None:
        """A test's setup, call or teardown."""
        folder = folder_of(nodeid)
        self.by_folder[folder] = self.by_folder.get(folder, 0.0) + seconds

    def add_fixture(self, name: str, seconds: float) -> None:
        self.by_fixture[name] = self.by_fixture.get(name, 0.0) + seconds

    def lines(self) -> list[str]:
        """A table, the longest first."""
        return [
            *_rows(self.by_folder, "{}"),
            *_rows(self.by_fixture, "  to set up {}"),
        ]


def folder_of(nodeid: str) -> str:
    """`tests/router` of `tests/router/test_pool.py::test_x`; `tests` of what lies there itself."""
    parts = nodeid.partition("::")[0].split("/")
    return "/".join(parts[: min(2, len(parts) - 1)]) or "."


def _rows(seconds: dict[str, float], label: str) -> Iterator[str]:
    for name, value in sorted(seconds.items(), key=lambda each: -each[1]):
        yield f"{value:8.1f} s  {label.format(name)}"


class _Recorder:
    """In the process that runs tests: what their fixtures take goes into their reports."""

    def __init__(self) -> None:
        self._item: pytest.Item | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        self._item = item
        try:
            yield
        finally:
            self._item = None

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        start_s = time.perf_counter()
        try:
            return (yield)
        finally:
            seconds = time.perf_counter() - start_s
            if self._item is not None and seconds >= _LONG_FIXTURE_S:
                name = " of ".join(filter(None, (fixturedef.argname, fixturedef.baseid)))
                self._item.user_properties.append((_PROPERTY, [name, seconds]))


class _Reporter:
    """In the process that talks with the user; other processes' reports come here as well."""

    def __init__(self) -> None:
        self.times = Times()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.times.add_phase(report.nodeid, report.duration)
        if report.when == "setup":
            for name, value in report.user_properties:
                if name == _PROPERTY and isinstance(value, list):
                    self.times.add_fixture(*value)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if lines := self.times.lines():
            terminalreporter.section("seconds by folder of tests", sep="-")
            for line in lines:
                terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Recorder(), "kvoy times: recorder")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Reporter(), "kvoy times: reporter")
