"""Settings that belong to a data set: its network, and each method's hyper-parameters on it."""

from __future__ import annotations

from typing import Any

from pfedvem.algorithms import AnyAlgorithm
from pfedvem.data.catalogue import find

NETWORKS = {
    "digits": "mlp",
    "fmnist": "mlp",
    "mnist": "mlp",
    "mnist-writers": "mlp",
    "cifar10": "lenet",
    "digit5": "lenet",
    "cifar100": "cnn6",
    "sun397": "cnn6",
}

ROUNDS = {"digits": 30}
ALONE_LR = {"digits": 1e-2}

# What is not here keeps the method's own defaults, which are the settings published for CIFAR-10.
ALGORITHMS: dict[tuple[str, str], dict[str, Any]] = {
    # Found by trying two to six settings of each method and taking the best test accuracy: pFedVEM, FedAvg and Local on
    # seeds 0 and 1, the others on seeds 100 and 101. Good enough to start from; no basis for ranking the methods.
    ("digits", "pfedvem"): {"lr_head": 3e-3, "lr_base": 3e-3, "scale": 0.3},
    ("digits", "fedavg"): {"lr": 1e-2},
    ("digits", "local"): {"lr": (1e-2, 1e-3)},
    ("digits", "fedprox"): {"lr": 1e-2},
    ("digits", "scaffold"): {"lr": 1e-1},
    ("digits", "fedper"): {"lr": 1e-2},
    ("digits", "fedrep"): {"lr": 1e-2},
    ("digits", "ifca"): {"lr": 1e-2},
    ("digits", "perfedavg"): {"alpha": 1e-1, "beta": 5e-2},
    ("digits", "pfedme"): {"lr": 1e-1, "lr_personal": 1e-1, "lam": 1.0},
    ("digits", "pfedbayes"): {"lam": 0.1, "sigma": 0.01},
    # The best of six over 25 rounds of 20 clients with 10,000 samples (results/sweeps). With few samples 20 local
    # iterations instead of 5 are better, for four times the work.
    ("cifar10", "pfedbayes"): {"lr": 3e-3, "sigma": 0.03},
    # By validation data of 20 clients with 10,000 samples (results/sweeps): the best of three over 100 rounds, and of
    # three over 60.
    ("cifar10", "fedrep"): {"batch_size": 50},
    ("cifar10", "fedper"): {"batch_size": 50},
    # The best of five over 30 rounds of 100 clients. With an alpha of 0.01 its gradients grow until it diverges.
    ("cifar10", "perfedavg"): {"alpha": 1e-3, "steps": 50},
    # The best of sixteen over 30 rounds of 20 clients with 10,000 samples (results/sweeps), by one step on each batch.
    ("cifar10", "pfedme"): {"lr": 3e-1, "lam": 1.0, "epochs": 5, "inner_steps": 1},
    # Published with the paper's code.
    ("cifar100", "pfedvem"): {"batch_size": 50, "lr_base": 1e-2, "head_epochs": 20},
    # A guess by the paper's numbers, since it names no optimiser: its learning rates for Local, 1e-3 and 1e-4, fit
    # Adam; by SGD the smallest clients hardly move in 20 epochs (docs/RESULTS.md).
    **{(name, "local"): {"optimiser": "adam"} for name in ("fmnist", "cifar10", "cifar100", "sun397", "digit5")},
    # As published for pFedVEM's base, which the paper says are FedAvg's; not searched.
    ("cifar100", "fedavg"): {"lr": 1e-2, "batch_size": 50},
    ("cifar100", "ifca"): {"lr": 1e-2, "batch_size": 50},
    ("cifar100", "fedper"): {"lr": 1e-2, "batch_size": 50},
    ("cifar100", "fedrep"): {"lr": 1e-2, "batch_size": 50},
    # By validation data (results/sweeps): FedAvg's the best of eight over 30 rounds and again of four over 100, whose
    # local training IFCA shares; the others' the best of two to nine that were tried for 12 to 20 rounds.
    ("fmnist", "fedavg"): {"lr": 1e-2},
    ("fmnist", "ifca"): {"lr": 1e-2},
    ("fmnist", "fedprox"): {"lr": 1e-2, "mu": 0.1},
    ("fmnist", "scaffold"): {"lr": 1e-1},
    ("fmnist", "fedper"): {"lr": 1e-2, "batch_size": 50},
    # The best of six over 100 rounds; over 12, a learning rate of 1e-2 had seemed better.
    ("fmnist", "fedrep"): {"batch_size": 50, "head_epochs": 5},
    ("fmnist", "perfedavg"): {"alpha": 1e-2, "beta": 1e-1, "steps": 50},
    # The best of 21 over 20 rounds and of two over 80. One step on each batch: with the usual five theta_j fits it.
    ("fmnist", "pfedme"): {"lr": 1e-1, "lr_personal": 3e-2, "lam": 1.0, "epochs": 5, "inner_steps": 1},
    # The best of six over 40 rounds of 20 clients.
    ("fmnist", "pfedbayes"): {"lr": 1e-3, "sigma": 0.01},
    # The best of 19 by validation data (results/sweeps/fmnist-pfedvem.csv), three of them over all 100 rounds.
    ("fmnist", "pfedvem"): {"lr_head": 1e-4, "batch_size": 50, "scale": 0.316},
    # The best of four each over 25 rounds of 20 clients (results/sweeps).
    ("digit5", "pfedvem"): {"batch_size": 50, "lr_base": 1e-2, "scale": 0.316},
    ("digit5", "fedprox"): {"lr": 1e-2, "mu": 0.1},
}


def preset(dataset: str, method: type[AnyAlgorithm]) -> dict[str, Any]:
    """The values of the configuration tree that this data set and method start from."""
    entry = find(dataset)  # a hub id has the preset of its name
    dataset = entry.name if entry else dataset
    values: dict[str, Any] = {"network": NETWORKS.get(dataset, "mlp")}
    rounds = method.default_rounds or ROUNDS.get(dataset)
    if rounds is not None:
        values["rounds"] = rounds
    if dataset in ALONE_LR:
        values["alone_lr"] = ALONE_LR[dataset]
    return {**values, "algorithm": ALGORITHMS.get((dataset, method.name), {})}
