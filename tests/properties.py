"""Seeds hypothesis: property tests whose examples depend on the run's seed."""

import os

import hypothesis


def fresh(**options):
    """Decorates a property test whose data depend on the run's seed, without a deadline."""

    def decorate(test):
        test = hypothesis.settings(
            deadline=None,
            database=None,
            suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
            **options,
        )(test)
        return hypothesis.seed(int(os.environ["SELECTIVE_SCAN_TEST_SEED"]))(test)

    return decorate
