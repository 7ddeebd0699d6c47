"""pfedvem: personalised federated learning by variational expectation maximisation."""

from pfedvem.algorithms import FedAvg, Local, PFedVEM
from pfedvem.data import DataSettings, Federation, from_arrays, load_federation
from pfedvem.errors import UserError
from pfedvem.models import Model
from pfedvem.simulation.fit import fit
from pfedvem.simulation.results import Result
from pfedvem.simulation.rounds import Progress

__all__ = [
    "DataSettings",
    "FedAvg",
    "Federation",
    "Local",
    "Model",
    "PFedVEM",
    "Progress",
    "Result",
    "UserError",
    "fit",
    "from_arrays",
    "load_federation",
]
