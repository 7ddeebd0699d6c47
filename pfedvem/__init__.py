"""pfedvem: personalised federated learning by variational expectation maximisation."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pfedvem.algorithms import FedAvg, Local, PFedVEM
    from pfedvem.data import DataSettings, Federation, from_arrays, load_federation
    from pfedvem.errors import UserError
    from pfedvem.guard import Guard
    from pfedvem.models import Model
    from pfedvem.saved import load
    from pfedvem.simulation.fit import fit
    from pfedvem.simulation.results import Result
    from pfedvem.simulation.rounds import Progress
    from pfedvem.trained import Trained
    from pfedvem.uncertainty import Prediction
else:
    # The same at run time, but imported when first used: PyTorch takes seconds, and `pfedvem --help` needs none of it.
    _NAMES = {
        "pfedvem.algorithms": ("FedAvg", "Local", "PFedVEM"),
        "pfedvem.data": ("DataSettings", "Federation", "from_arrays", "load_federation"),
        "pfedvem.errors": ("UserError",),
        "pfedvem.guard": ("Guard",),
        "pfedvem.models": ("Model",),
        "pfedvem.saved": ("load",),
        "pfedvem.simulation.fit": ("fit",),
        "pfedvem.simulation.results": ("Result",),
        "pfedvem.simulation.rounds": ("Progress",),
        "pfedvem.trained": ("Trained",),
        "pfedvem.uncertainty": ("Prediction",),
    }

    def __getattr__(name: str) -> Any:
        for module, names in _NAMES.items():
            if name in names:
                globals()[name] = getattr(import_module(module), name)
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "DataSettings",
    "FedAvg",
    "Federation",
    "Guard",
    "Local",
    "Model",
    "PFedVEM",
    "Prediction",
    "Progress",
    "Result",
    "Trained",
    "UserError",
    "fit",
    "from_arrays",
    "load",
    "load_federation",
]
