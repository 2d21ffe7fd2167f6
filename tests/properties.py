"""Property tests whose examples are drawn by the run's seed."""

import os

import hypothesis


def fresh(**options):
    """A property test on data that depend on the run's seed, without a deadline."""

    def decorate(test):
        test = hypothesis.settings(
            deadline=None,
            database=None,
            suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
            **options,
        )(test)
        return hypothesis.seed(int(os.environ["SELECTIVE_SCAN_TEST_SEED"]))(test)

    return decorate
