"""The search ranges of the paper: for each method the values that its hyper-parameters are chosen from.

They are those of the table of hyper-parameters in the paper's appendix, and for pFedVEM those of its section on the
experiments. Behind each name is the paper's. What is not here stays as the data set's preset has it; so do the settings
of pFedVEM's base, for which the paper takes those that it found for FedAvg.
"""

from __future__ import annotations

from typing import Any

Space = dict[str, tuple[Any, ...]]

TRAINING: Space = {
    "lr": (0.01, 0.001, 0.0001),  # eta
    "epochs": (5, 10, 20),  # R
    "batch_size": (10, 50, 100),  # B
}

SPACES: dict[str, Space] = {
    # Not searched by trials: each client chooses from both lists by itself.
    "local": {"lr": ((0.001, 0.0001),), "batch_size": ((10, 50, 100),)},
    "fedavg": TRAINING,
    "fedprox": {**TRAINING, "mu": (0.1, 1.0, 10.0)},  # mu
    "scaffold": {**TRAINING, "lr": (0.1, 0.01, 0.001)},
    "fedper": TRAINING,
    "fedrep": {**TRAINING, "head_epochs": (5, 10, 20)},  # K
    "ifca": TRAINING,
    "perfedavg": {
        "alpha": (0.1, 0.01, 0.001),  # alpha
        "beta": (0.1, 0.01, 0.001),  # beta
        "steps": (5, 25, 50),  # R
        "batch_size": (10, 50, 100),  # B
    },
    "pfedme": {
        "lr": (0.01, 0.001, 0.0001),  # eta
        "lam": (1.0, 10.0, 15.0),  # lambda
        "steps": (5, 10, 20),  # R
        "batch_size": (10, 50, 100),  # B
    },
    "pfedbayes": {
        "lr": (0.01, 0.001, 0.0001),  # eta
        "lam": (1.0, 10.0, 15.0),  # lambda
        "epochs": (5, 10, 20),  # R
        "sigma": (1.0, 0.1, 0.01, 0.001),  # sigma
    },
    "pfedvem": {
        "lr_head": (0.01, 0.001, 0.0001),  # eta
        "scale": (1.0, 0.316, 0.1),  # rho, the root of the initial variances 1, 0.1 and 0.01
        "head_epochs": (5, 10, 20),  # R
    },
}
