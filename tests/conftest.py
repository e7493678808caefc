"""Settings of all tests: property tests never fail because a machine is slow."""

from hypothesis import HealthCheck, settings

settings.register_profile("kvoy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvoy")
