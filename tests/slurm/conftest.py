"""Fixtures that lend tests a throw-away Slurm; one cluster serves all modules that want the same settings.

Tests are skipped, with the reason, where it cannot run; with TULA_REQUIRE_SLURM=1 in the environment they fail instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator

import pytest

from .cluster import SlurmSettings, ThrowawaySlurm, missing_reason


@pytest.fixture(scope="package")
def slurm_cluster() -> Iterator[Callable[[SlurmSettings], ThrowawaySlurm]]:
    """Give the running cluster if it has the wanted settings, else replace it; SLURM_CONF points to it.

    Modules that need other settings override the fixture `slurm_settings`. Call this one directly only from a fixture
    or a test whose module does not use `slurm`, because the cluster that others hold ends with the replacement. The
    last one ends with this package: the tests after it find no Slurm, as where they run alone.
    """
    running: list[ThrowawaySlurm] = []
    environment = pytest.MonkeyPatch()

    def cluster(settings: SlurmSettings) -> ThrowawaySlurm:
        if not running or running[0].settings != settings:
            _skip_or_fail(missing_reason(settings))
            while running:
                running.pop().stop()
            replacement = ThrowawaySlurm(settings, lock_wait_s=1800)  # another test run may hold it until its end
            replacement.start()
            running.append(replacement)
            environment.setenv("SLURM_CONF", str(replacement.conf_file))
            environment.setenv("XDG_CACHE_HOME", str(replacement.folder / "cache"))  # goes with the cluster
        return running[0]

    yield cluster
    environment.undo()
    while running:
        running.pop().stop()


@pytest.fixture(scope="module")
def slurm_settings() -> SlurmSettings:
    """What the module's cluster looks like; override it in a module that wants another one."""
    return SlurmSettings()


@pytest.fixture(scope="module")
def slurm(
    slurm_cluster: Callable[[SlurmSettings], ThrowawaySlurm], slurm_settings: SlurmSettings
) -> Iterator[ThrowawaySlurm]:
    """A real Slurm of four hosts with accounting, unless the module overrides `slurm_settings`; left without jobs."""
    cluster = slurm_cluster(slurm_settings)
    yield cluster
    cluster.cancel_all()


@pytest.fixture(autouse=True)
def _mended(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test may end in the middle of an outage; the next one starts with all daemons and hosts up."""
    yield
    if "slurm" in request.fixturenames:
        request.getfixturevalue("slurm").heal()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the ends of the daemons' logs below a failed test."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("slurm")
    if report.failed and isinstance(cluster, ThrowawaySlurm):
        report.sections.append(("Slurm's logs", cluster.logs_tail()))
    return report


def _skip_or_fail(reason: str | None) -> None:
    if reason is None:
        return
    if os.environ.get("TULA_REQUIRE_SLURM") == "1":
        pytest.fail(f"{reason} (and TULA_REQUIRE_SLURM=1 forbids to skip)")
    pytest.skip(reason)
