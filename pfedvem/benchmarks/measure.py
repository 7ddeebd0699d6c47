"""The measurements of ``pfedvem bench``: seconds a round, as ratios of ways that are timed in the same run.

Data is random, of the shape and number of the real data: what a round costs does not depend on it.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from pfedvem import tree
from pfedvem.algorithms import METHODS
from pfedvem.benchmarks import plain
from pfedvem.data import from_arrays
from pfedvem.data.federation import Federation
from pfedvem.experiments.presets import preset
from pfedvem.networks import build
from pfedvem.rng import Rng, uploaders
from pfedvem.simulation.executors import Processes, Sequential, Vectorised, cohorts, one_thread
from pfedvem.simulation.rounds import Progress, State, perform_all, plan, play, start
from pfedvem.simulation.work import Job, Setup

PARTICIPATION = 0.1
# The data set whose published settings a network has, its shape, its training and test samples, labels, and labels a
# client (so many that it has as much test data as in the paper).
NETWORKS: dict[str, tuple[str, tuple[int, ...], int, int, int, int]] = {
    "mlp": ("fmnist", (1, 28, 28), 60_000, 10_000, 10, 5),
    "lenet": ("cifar10", (3, 32, 32), 50_000, 10_000, 10, 5),
    "cnn6": ("cifar100", (3, 32, 32), 50_000, 10_000, 20, 4),
}
METHOD_CLIENTS = 100
GROWTH = (100, 1_000, 10_000)
Step = Callable[[str], None]


def machine() -> dict[str, Any]:
    """What the figures were measured on, with the matrix-product peak of one core in GFLOP/s."""
    a, b = torch.rand(1024, 1024), torch.rand(1024, 1024)
    with one_thread():
        seconds = min(timed(torch.mm, a, b) for _ in range(10))
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "peak_gflops": round(2 * 1024**3 / seconds / 1e9, 1),
    }


def network_costs(name: str, clients: int, workers: int, peak: float, step: Step) -> dict[str, Any]:
    """pFedVEM with one network at its published settings: the plain way against each executor."""
    setup = make_setup(name, "pfedvem", clients)
    state, total = start(setup), sum(setup.federation.sizes)
    sample = spread_over(setup.federation, 5)
    step(f"{name}: the plain way")
    before = plain_costs(setup, state, sample)
    ways = {"sequential": Sequential(setup), "vectorised": Vectorised(setup), "processes": Processes(setup, workers)}
    out: dict[str, Any] = {"clients": clients, "samples": total}
    for way, place in ways.items():
        step(f"{name}: {way}")
        with place, memory() as peak_memory:
            again = "ab" if way == "processes" else "a"
            rounds = min(timed(play, state, PARTICIPATION, None, place, Progress()) for _ in again)
            if way == "processes":
                evaluated = timed(play, state, PARTICIPATION, range(clients), place, Progress())
            else:  # slow: on every twentieth client, scaled to all
                tested = spread_over(setup.federation, max(1, clients // 20))
                job = [Job(0, tuple(tested), upload=True, evaluate=True)]
                evaluated = timed(perform_all, place, state.server, state.clients, job, Progress())
                evaluated *= total / sum(setup.federation.sizes[j] for j in tested)
        every_5, at_end = (4 * rounds + evaluated) / 5, (99 * rounds + evaluated) / 100
        out[way] = {"round": rounds, "evaluated_round": evaluated, "every_5": every_5, "at_end": at_end}
        out[way]["peak_mb"] = peak_memory[0]
    step(f"{name}: the plain way again")  # the better of two, since machines have slow moments
    trained, scored = map(min, before, plain_costs(setup, state, sample))
    out["plain"] = {"round": trained, "evaluation": scored}
    for way in ways:
        out[way]["ratio_every_5"] = (trained + scored / 5) / out[way]["every_5"]
        out[way]["ratio_at_end"] = (trained + scored / 100) / out[way]["at_end"]
    step(f"{name}: base training")
    out["base"] = base_speed(setup, state, peak)
    out["difference"] = difference(setup, state, sample[0])
    return out


def method_costs(method: str, workers: int, step: Step) -> dict[str, Any]:
    """One method with the MLP: a round of the plain way against processes, on every tenth client."""
    setup = make_setup("mlp", method, METHOD_CLIENTS)
    state, sample = start(setup), spread_over(setup.federation, 10)
    step(f"{method}: the plain way")
    down = setup.algorithm.down(state.server)
    few = spread_over(setup.federation, 3)
    scale = sum(setup.federation.sizes[j] for j in sample) / sum(setup.federation.sizes[j] for j in few)
    trained = scale * timed(lambda: [plain.train(setup, down, state.clients, j, 0) for j in few])
    step(f"{method}: processes")
    chosen = uploaders(0, 0, len(sample), PARTICIPATION)
    jobs = [replace(job, clients=tuple(sample[i] for i in job.clients)) for job in plan_of(setup, chosen, len(sample))]
    with Processes(setup, workers) as place:
        perform_all(place, down, state.clients, jobs[:1], Progress())  # workers are started by their first job
        seconds = min(timed(perform_all, place, down, state.clients, jobs, Progress()) for _ in "ab")
    return {"plain": trained, "processes": seconds, "ratio": trained / seconds}


def growth(method: str, clients: Sequence[int], workers: int, step: Step) -> dict[str, Any]:
    """Seconds a round and memory of the MLP with the same data in the hands of more and more clients."""
    out: dict[str, Any] = {}
    for count in clients:
        step(f"{method}: {count:,} clients")
        with memory() as peak_memory:
            setup = make_setup("mlp", method, count)
            state = start(setup)
            with Processes(setup, workers) as place:
                for train in ("all", "uploaders"):
                    seconds = [timed(play, state, PARTICIPATION, None, place, Progress(), train) for _ in "abc"]
                    out.setdefault(str(count), {})[train] = min(seconds)
        out[str(count)]["peak_mb"] = peak_memory[0]
    least = out[str(clients[0])]
    for row in out.values():
        row["growth_all"], row["growth_uploaders"] = row["all"] / least["all"], row["uploaders"] / least["uploaders"]
    return out


def plan_of(setup: Setup, uploading: list[int], total: int) -> list[Job]:
    """The jobs of a round of so many clients."""
    few = replace(setup, federation=replace(setup.federation, shards=setup.federation.shards[:total]))
    return plan(few, 0, uploading, ())


def make_setup(network: str, method: str, clients: int) -> Setup:
    """A federation of random data, as large as the network's data set, and the method's settings for that."""
    dataset, shape, train, test, labels, owned = NETWORKS[network]
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (train + test, *shape), dtype=np.uint8)
    y = np.arange(train + test) % labels
    federation = from_arrays(
        x[:train], y[:train], x[train:], y[train:], clients=clients, labels_per_client=owned, name=dataset
    )
    algorithm = METHODS[method](**preset(dataset, METHODS[method])["algorithm"])
    return Setup(algorithm, build(network, shape, labels, 0), federation, 0)


def spread_over(federation: Federation, count: int) -> list[int]:
    """So many clients, evenly over the order of sizes."""
    ordered = sorted(range(len(federation)), key=lambda j: federation.sizes[j])
    return [ordered[int((i + 0.5) * len(ordered) / count)] for i in range(count)]


def plain_costs(setup: Setup, state: State, sample: Sequence[int]) -> tuple[float, float]:
    """Seconds of a round and of an evaluation the plain way: timed on some clients and scaled to all by their data."""
    sizes, down = setup.federation.sizes, setup.algorithm.down(state.server)
    trained = tested = 0.0
    for j in sample:
        began = time.perf_counter()
        own = plain.pfedvem(setup, down, state.clients, j, 0)
        trained += time.perf_counter() - began
        tested += timed(plain.evaluate, setup, own.network, j)
    tests = [len(setup.federation.test_indices(j)) for j in range(len(sizes))]
    return (
        trained * sum(sizes) / sum(sizes[j] for j in sample),
        tested * sum(tests) / sum(tests[j] for j in sample),
    )


def base_speed(setup: Setup, state: State, peak: float) -> dict[str, float]:
    """GFLOP/s of base training in one thread, in a cohort as the engine makes them, and its share of the peak."""
    everyone = [Job(0, tuple(range(len(setup.federation))), upload=True)]
    sizes = setup.federation.sizes
    clients = min(
        (job.clients for job in cohorts(setup, everyone)), key=lambda job: abs(sum(sizes[j] for j in job) - 1000)
    )
    algorithm, model, down = setup.algorithm, setup.model, setup.algorithm.down(state.server)
    data, rng = setup.federation.cohort(clients), Rng(0, 0, clients)
    with one_thread():
        kept, carry = algorithm.adapt(model, down, tree.take(state.clients, clients), data, rng)
        with FlopCounterMode(display=False) as counter:
            algorithm.contribute(model, down, kept, carry, data, rng)
        seconds = min(timed(algorithm.contribute, model, down, kept, carry, data, rng) for _ in "abc")
    flops = counter.get_total_flops()
    return {"gflops": flops / seconds / 1e9, "share_of_peak": flops / seconds / 1e9 / peak, "cohort": len(clients)}


def difference(setup: Setup, state: State, j: int) -> float:
    """The largest difference between the weights of a client trained the plain way and by the engine."""
    down = setup.algorithm.down(state.server)
    own = plain.pfedvem(setup, down, state.clients, j, 0)
    (outcome,) = Sequential(setup).run(down, state.clients, [Job(0, (j,), upload=True)])
    pairs = [(own.mu, outcome.up.mu[0])]
    pairs += [(own.network.state_dict()[name], value[0]) for name, value in outcome.up.theta.items()]
    return max(float((a - b).abs().max()) for a, b in pairs)


def timed(work: Callable[..., Any], *args: Any) -> float:
    """Seconds on the wall."""
    began = time.perf_counter()
    work(*args)
    return time.perf_counter() - began


@contextmanager
def memory() -> Iterator[list[float | None]]:
    """The most memory in MB that this process and its workers had together; None where the system does not tell."""
    peak: list[float | None] = [None]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            now = _resident()
            if now is not None:
                peak[0] = max(peak[0] or 0.0, now)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def _resident() -> float | None:
    """Memory of this process and its children in MB; what they share counts once."""
    try:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        total = 0
        for pid in ("self", *children):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    except (OSError, ValueError):  # another system, or a worker that has just ended
        return None
    return total / 1024


def regressions(now: Any, before: Any, floor: float, path: str = "") -> list[str]:
    """Which ratios have fallen below ``floor`` of what they were. Seconds are never compared."""
    found: list[str] = []
    for key, value in now.items():
        was = before.get(key) if isinstance(before, dict) else None
        if isinstance(value, dict):
            found += regressions(value, was or {}, floor, f"{path}{key}.")
        elif key.startswith("ratio") and isinstance(was, float) and value < floor * was:
            found.append(f"{path}{key} was {was:.1f} and is {value:.1f}")
    return found
