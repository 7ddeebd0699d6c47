"""The methods, by name."""

from __future__ import annotations

import difflib

from pfedvem.algorithms.base import Algorithm, AnyAlgorithm
from pfedvem.algorithms.fedavg import FedAvg
from pfedvem.algorithms.local import Local
from pfedvem.algorithms.pfedvem import PFedVEM
from pfedvem.errors import UserError

__all__ = ["METHODS", "Algorithm", "AnyAlgorithm", "FedAvg", "Local", "PFedVEM", "method"]

METHODS: dict[str, type[AnyAlgorithm]] = {cls.name: cls for cls in (PFedVEM, FedAvg, Local)}


def method(name: str) -> type[AnyAlgorithm]:
    """The class of a method by its name."""
    if name not in METHODS:
        near = difflib.get_close_matches(name.lower(), METHODS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(f"There is no method {name!r}; there are {', '.join(METHODS)}.{hint}")
    return METHODS[name]
