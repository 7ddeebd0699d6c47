"""The methods, by name."""

from __future__ import annotations

import difflib

from pfedvem.algorithms.base import Algorithm, AnyAlgorithm
from pfedvem.algorithms.fedavg import FedAvg
from pfedvem.algorithms.fedper import FedPer
from pfedvem.algorithms.fedprox import FedProx
from pfedvem.algorithms.fedrep import FedRep
from pfedvem.algorithms.ifca import IFCA
from pfedvem.algorithms.local import Local
from pfedvem.algorithms.perfedavg import PerFedAvg
from pfedvem.algorithms.pfedbayes import PFedBayes
from pfedvem.algorithms.pfedme import PFedMe
from pfedvem.algorithms.pfedvem import PFedVEM
from pfedvem.algorithms.scaffold import Scaffold
from pfedvem.errors import UserError

__all__ = [
    "IFCA",
    "METHODS",
    "Algorithm",
    "AnyAlgorithm",
    "FedAvg",
    "FedPer",
    "FedProx",
    "FedRep",
    "Local",
    "PFedBayes",
    "PFedMe",
    "PFedVEM",
    "PerFedAvg",
    "Scaffold",
    "method",
]

# In the order of the paper's tables.
METHODS: dict[str, type[AnyAlgorithm]] = {
    cls.name: cls
    for cls in (Local, FedAvg, FedProx, Scaffold, FedPer, FedRep, IFCA, PerFedAvg, PFedMe, PFedBayes, PFedVEM)
}


def method(name: str) -> type[AnyAlgorithm]:
    """The class of a method by its name."""
    if name not in METHODS:
        near = difflib.get_close_matches(name.lower(), METHODS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(f"There is no method {name!r}; there are {', '.join(METHODS)}.{hint}")
    return METHODS[name]
