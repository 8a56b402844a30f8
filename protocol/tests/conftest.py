"""How hypothesis runs here."""

from hypothesis import HealthCheck, settings

# An example takes as long as the machine lets it; no test judges that.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
