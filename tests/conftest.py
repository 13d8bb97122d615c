import collections
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import pytest


def pytest_terminal_summary(terminalreporter):
    """Say what was skipped and why, such as the tests of a suite that isn't installed."""
    skipped = terminalreporter.stats.get("skipped", ())
    for reason, number in sorted(collections.Counter(one.longrepr[2] for one in skipped).items()):
        terminalreporter.write_line(f"{reason} ({number} tests)")


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Let go of a file's compiled programs: Linux allows a process 65,530 mappings in memory.

    With those of all files, a worker came to that limit, and XLA crashed while it compiled.
    """
    yield
    jax.clear_caches()
