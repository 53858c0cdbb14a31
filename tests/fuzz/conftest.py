"""Settings of the fuzzed tests: the same calls in every run, others with `--hypothesis-seed N`."""

from hypothesis import HealthCheck, Phase, settings


def pytest_configure(config):
    settings.register_profile(
        "fuzz",
        deadline=None,  # a call may compile
        derandomize=config.getoption("--hypothesis-seed") is None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
