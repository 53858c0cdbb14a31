"""`pytest -q -m fuzz tests/fuzz --fuzz-calls 2000 --fuzz-seed 7`: random calls, reproducible by
seed and number.
"""

import collections

import pytest


def pytest_addoption(parser):
    group = parser.getgroup("fuzz")
    group.addoption(
        "--fuzz-calls", type=int, metavar="N", help="calls of each test, instead of its own number"
    )
    group.addoption(
        "--fuzz-seed", type=int, default=0, metavar="N", help="another seed, other calls"
    )
    group.addoption(
        "--fuzz-first", type=int, default=0, metavar="N", help="number of the first call"
    )


@pytest.fixture
def fuzzed(request, record_property):
    """Runs as many calls as are asked for, and fails with the code of those that went wrong."""
    import fuzzing

    def run(make, calls):
        option = request.config.getoption
        calls = calls if option("--fuzz-calls") is None else option("--fuzz-calls")
        outcomes, found = fuzzing.fuzz(calls, option("--fuzz-seed"), make, option("--fuzz-first"))
        record_property("fuzz", dict(outcomes))
        if found:
            pytest.fail(fuzzing.report(found), pytrace=False)

    return run


def pytest_terminal_summary(terminalreporter):
    reports = [
        r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, [])
    ]
    counted = [
        (r.nodeid, dict(r.user_properties)["fuzz"])
        for r in reports
        if "fuzz" in dict(r.user_properties)
    ]
    total = collections.Counter()
    for name, outcomes in counted:
        total.update(outcomes)
        terminalreporter.write_line(f"{name}: {sum(outcomes.values())} calls, {outcomes}")
    if counted:
        seed = terminalreporter.config.getoption("--fuzz-seed")
        terminalreporter.write_line(
            f"fuzz, seed {seed}: {sum(total.values())} calls, {dict(total)}"
        )
