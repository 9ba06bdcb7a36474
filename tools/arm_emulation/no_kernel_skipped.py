"""A pytest plugin: a run in which a test of an Arm kernel was skipped has failed.

    PYTHONPATH=tools/arm_emulation python -m pytest -p no_kernel_skipped ...

For machines that are there to run these tests. Elsewhere the tests that are marked ``arm``
are skipped, and a machine that isn't what it seems would let all of them pass.
"""

from __future__ import annotations

import pytest

MARKER = "arm"
skipped: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember each marked test that was skipped, for whatever reason."""
    # keywords hold the names of markers; an expected failure is reported as skipped, too.
    if report.skipped and MARKER in report.keywords and not hasattr(report, "wasxfail"):
        skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run."""
    if skipped:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why."""
    if skipped:
        terminalreporter.write_line(
            f"no_kernel_skipped: {len(skipped)} tests of Arm kernels were skipped, "
            f"first {skipped[0]}: this run proves nothing",
            red=True,
        )
