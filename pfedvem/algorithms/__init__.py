"""The methods, by name."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import Any

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
    "imported",
    "method",
]

# In the order of the paper's tables.
METHODS: dict[str, type[AnyAlgorithm]] = {
    cls.name: cls
    for cls in (Local, FedAvg, FedProx, Scaffold, FedPer, FedRep, IFCA, PerFedAvg, PFedMe, PFedBayes, PFedVEM)
}


def method(name: str) -> type[AnyAlgorithm]:
    """The class of a method by its name, or of your own method by where it is: ``mypackage.mymodule:MyMethod``."""
    if ":" in name:
        found = imported(name, "method")
        if not (isinstance(found, type) and issubclass(found, Algorithm)):
            raise UserError(f"The method {name!r} is no subclass of pfedvem.algorithms.Algorithm.")
        lacking = [word for word in ("name", "title", "reference", "keeps", "sends") if not hasattr(found, word)]
        lacking += sorted(found.__abstractmethods__)
        for flag, part in (("personalised", "personal"), ("global_model", "general")):
            if getattr(found, flag) and getattr(found, part) is getattr(Algorithm, part):
                lacking.append(f"{part} (or {flag} = False)")
        if lacking:
            raise UserError(f"The method {name!r} lacks {', '.join(lacking)}; docs/own-method.md says what they are.")
        return found
    if name not in METHODS:
        near = difflib.get_close_matches(name.lower(), METHODS, n=1)
        nearest = (
            f"the nearest is {near[0]} (there are {', '.join(METHODS)})" if near else f"there are {', '.join(METHODS)}"
        )
        raise UserError(f"There is no method {name!r}; {nearest}.")
    return METHODS[name]


def imported(name: str, what: str) -> Any:
    """The object at ``package.module:name``, which is to be a method, a network or the like."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:  # a file beside the user is found, as with python -m
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UserError(f"The {what} {name!r} cannot be imported: {error}.") from error
