"""Images with a network of your own: five clinics that look at different shapes, and a small CNN.

The images are drawn here (circles, squares, crosses and triangles on noise), so that nothing is downloaded.
"""

from __future__ import annotations

import numpy as np
from torch import nn

from pfedvem import Federation, PFedVEM, fit

SHAPES = ("circle", "square", "cross", "triangle")


def draw(shape: str, rng: np.random.Generator, side: int = 16) -> np.ndarray:
    """One grey image (side, side) of uint8."""
    x, y = np.meshgrid(np.arange(side), np.arange(side))
    (cx, cy), r = rng.uniform(6, side - 6, 2), rng.uniform(3, 5)
    dx, dy = np.abs(x - cx), np.abs(y - cy)
    inside = {
        "circle": dx**2 + dy**2 < r**2,
        "square": np.maximum(dx, dy) < r,
        "cross": (np.minimum(dx, dy) < 1.2) & (np.maximum(dx, dy) < r),
        "triangle": (y - cy < r) & (y - cy > 2 * dx - r),
    }[shape]
    return (rng.uniform(0, 90, (side, side)) + 140 * inside).astype(np.uint8)


def clinic(shapes: list[str], n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    names = rng.choice(shapes, n)
    return np.stack([draw(name, rng) for name in names]), names


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.ReLU(),
        nn.Linear(32, len(SHAPES)),  # the head
    )


def main() -> float:
    rng = np.random.default_rng(0)
    sizes = {"north": 300, "south": 200, "east": 120, "west": 60, "island": 30}
    owned = {name: rng.permutation(SHAPES)[:3].tolist() for name in sizes}
    federation = Federation.from_datasets(
        {name: clinic(owned[name], n, rng) for name, n in sizes.items()},
        tests={name: clinic(owned[name], 100, rng) for name in sizes},
        classes=SHAPES,
    )
    method = PFedVEM(lr_head=3e-3, lr_base=1e-2, scale=0.1)
    result = fit(method, network(), federation, rounds=10, participation=0.6, eval_every=5)
    print(result.clients[["n_train", "pm", "pm_ece", "tau"]])
    x, names = clinic(owned["island"], 3, rng)
    print(result.predict("island", x).frame().assign(truth=names).round(3).to_string())
    return float(result.summary["pm"])


if __name__ == "__main__":
    main()
