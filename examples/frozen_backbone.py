"""A frozen backbone: its features are computed once, and a federation over them takes seconds.

The backbone here is trained on a third of scikit-learn's digits, so that nothing is downloaded; any ``nn.Module``
without its own classifier will do, such as a ResNet whose ``fc`` is ``nn.Identity()``.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

from pfedvem import Federation, PFedVEM, fit


def pretrained(x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    """A network that has learned to tell digits apart, without its last layer."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
    network = nn.Sequential(body, nn.Linear(32, 10))
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimiser.step()
    return body


def main() -> float:
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    backbone = pretrained(x[:600], y[:600])
    clients = {f"reader {j}": (x[600 + j :: 8], y[600 + j :: 8]) for j in range(8)}
    federation = Federation.from_datasets(clients).through(backbone)
    method = PFedVEM(lr_head=3e-3, scale=0.1)
    result = fit(method, nn.Linear(32, 10), federation, rounds=20, participation=0.5)
    print(result.clients[["n_train", "pm", "tau"]])
    print(result.predict("reader 0", x[:3]).frame().round(3).to_string())  # takes images, not features
    return float(result.summary["pm"])


if __name__ == "__main__":
    main()
