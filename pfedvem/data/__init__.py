"""Data of federations: sources, partitions and the Federation that they make."""

from pfedvem.data.federation import Federation
from pfedvem.data.loading import from_arrays, load_federation
from pfedvem.data.settings import DataSettings, defaults_for

__all__ = ["DataSettings", "Federation", "defaults_for", "from_arrays", "load_federation"]
