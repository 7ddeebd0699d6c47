"""A table with a column that says whose row it is: breast cancer, from scikit-learn, at six made-up hospitals.

The rows are real; which hospital a row belongs to is drawn here, so that sizes and the share of benign cases differ.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer
from torch import nn

from pfedvem import Federation, PFedVEM, fit

HOSPITALS = ("Aachen", "Bern", "Cork", "Delft", "Espoo", "Faro")


def table(seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    data = load_breast_cancer(as_frame=True)
    frame = data.frame.drop(columns="target")
    frame["diagnosis"] = data.target_names[data.target]
    share = {name: rng.dirichlet(np.full(len(HOSPITALS), 2.0)) for name in data.target_names}
    frame["hospital"] = [rng.choice(HOSPITALS, p=share[name]) for name in frame["diagnosis"]]
    return frame


def main() -> float:
    frame = table()
    federation = Federation.from_frame(frame, client="hospital", label="diagnosis", holdout=0.3)
    network = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))
    result = fit(PFedVEM(lr_head=1e-2, lr_base=1e-2, scale=0.1), network, federation, rounds=20, participation=0.5)
    print(result.clients[["n_train", "pm", "tau", "deviation"]])
    print(result.predict("Cork", frame.head(3)).frame().round(3).to_string())
    return float(result.summary["pm"])


if __name__ == "__main__":
    main()
