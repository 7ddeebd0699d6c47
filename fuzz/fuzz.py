"""Fuzzes everything that parses bytes which somebody else may have written.

python fuzz/fuzz.py TARGET [-max_total_time=120] [FOLDER]    by Atheris, from FOLDER or fuzz/corpus/TARGET
python fuzz/fuzz.py --seeds                                  writes the good files into fuzz/corpus

A target is a folder of good files, of which one is replaced by what the fuzzer makes up: the first byte says which.
Reading the folder then gives a value, or an error that is meant: UserError, Malformed or Damaged. All else is found.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

CORPUS = Path(__file__).parent / "corpus"
MODULES = ("cli", "experiments.reproduce", "flower.strategy", "flower.watch", "report.html", "report.inspect")

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    if "--seeds" not in sys.argv:
        import importlib

        import atheris

        with atheris.instrument_imports(include=["pfedvem", "tomllib"]):  # what is imported here is followed
            for module in MODULES:
                importlib.import_module(f"pfedvem.{module}")

import numpy as np
import pandas as pd
import safetensors.torch
import tomli_w
import torch
from flwr.app import Array, ArrayRecord
from PIL import Image
from rich.console import Console

from pfedvem import Federation, PFedVEM, UserError, fit, load, tree
from pfedvem.benchmarks.measure import regressions
from pfedvem.benchmarks.run import read_figures
from pfedvem.data.files import read_samples
from pfedvem.data.inputs import Inputs
from pfedvem.experiments import reproduce
from pfedvem.experiments.config import Config
from pfedvem.experiments.config import load as load_config
from pfedvem.experiments.studies import Cell, grid, study
from pfedvem.flower import keeping, watch, wire
from pfedvem.networks import build
from pfedvem.report.html import folders, make
from pfedvem.report.inspect import inspection, inspection_view
from pfedvem.report.reproduction import reproduction_view, table_csv
from pfedvem.rng import START, Rng
from pfedvem.simulation import checkpoints
from pfedvem.simulation.rounds import start
from pfedvem.simulation.work import Job, Setup, perform
from tests.conftest import blobs
from tests.report.folders import clients, write_comparison, write_reproduction, write_run

MEANT = (UserError, wire.Malformed, checkpoints.Damaged)
METHOD = PFedVEM(head_epochs=1)
ZEROS = "0" * 64  # stands where a checksum is: whoever writes a file can write its checksum as well
STUDY = study("table1", ["digits"], ["fedavg"], [5])


@dataclass(frozen=True)
class Target:
    """What makes a good folder, the files in it that are replaced, and what reads it."""

    make: Callable[[Path], object]
    files: tuple[str, ...]
    read: Callable[[Path], object]


class Ready:
    """A target with its good folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.target, self.folder = TARGETS[name], folder / name
        self.target.make(self.folder)
        self.good = {name: (self.folder / name).read_bytes() for name in self.target.files}

    def __call__(self, data: bytes) -> None:
        """Tries one input; whatever is neither a value nor an error that is meant is raised."""
        if not data:
            return
        name = self.target.files[data[0] % len(self.target.files)]
        (self.folder / name).write_bytes(data[1:])
        try:
            self.target.read(self.folder)
        except MEANT as error:
            assert str(error).strip()
        finally:
            (self.folder / name).write_bytes(self.good[name])


# A run: its checkpoints, its model, and what a site keeps of it


@cache
def small() -> Setup:
    data = blobs((3, 5), classes=2, features=3)
    return Setup(METHOD, build("mlp", data.shape, len(data.classes), 0), data, 0)


def train(folder: Path) -> None:
    setup = small()
    fit(METHOD, setup.model, setup.federation, rounds=2, participation=1.0, out=folder, keep_models=True, workers=1)
    manifest = folder / "checkpoint" / "round-00002" / "manifest.json"
    said = json.loads(manifest.read_bytes())
    (folder / "identity.json").write_text(json.dumps(said["identity"]))
    manifest.write_text(json.dumps({**said, "sha256": ZEROS}))


def read_checkpoint(folder: Path) -> object:
    place = folder / "checkpoint" / "round-00002"
    digest = hashlib.sha256((place / "state.safetensors").read_bytes()).hexdigest()
    manifest = place / "manifest.json"
    manifest.write_bytes((before := manifest.read_bytes()).replace(ZEROS.encode(), digest.encode()))
    try:
        identity = json.loads((folder / "identity.json").read_bytes())
        return checkpoints.load(folder / "checkpoint", start(small()), identity)
    finally:
        manifest.write_bytes(before)


def read_model(folder: Path) -> object:
    trained = load(folder)
    return trained.predict("0", torch.zeros(1, 3)), trained.general()


def read_clients(folder: Path) -> None:
    Console(quiet=True).print(inspection_view(inspection(folder), every=True))


@cache
def kept(folder: Path) -> tuple[keeping.Keeping, object]:
    setup = small()
    down = METHOD.down(start(setup).server)
    return keeping.Keeping(folder, "one", 0, METHOD.name), METHOD.client_init(setup.model, down, Rng(0, START, [0]))


def keep(folder: Path) -> None:
    place, client = kept(folder)
    with patch.object(keeping, "digest", lambda about, tensors: ZEROS):
        place.save(1, client)


def read_kept(folder: Path) -> object:
    place, client = kept(folder)
    with patch.object(keeping, "digest", lambda about, tensors: ZEROS):
        return place.load(1, client)


# Messages


@cache
def layout() -> tuple[wire.Layout, ArrayRecord, dict[str, float]]:
    setup = small()
    state = start(setup)
    down = METHOD.down(state.server)
    outcome = perform(setup, down, tree.take(state.clients, [0]), Job(0, (0,), upload=True))
    found = wire.Layout.of(METHOD, down, outcome.up)
    return found, *found.write(outcome.up)


def write_array(folder: Path) -> None:
    folder.mkdir()
    (folder / "w.npy").write_bytes(layout()[1]["w"].data)


def read_array(folder: Path) -> None:
    """An upload of which one array is what somebody sends."""
    found, arrays, numbers = layout()
    sent = Array("float32", (2, 3), "numpy.ndarray", (folder / "w.npy").read_bytes())
    up = found.read(ArrayRecord({**arrays, "w": sent}), numbers)
    assert all(leaf.isfinite().all() for leaf in tree.leaves(up))


# Settings and data


def write_config(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.toml").write_text(tomli_w.dumps(load_config(flags={"data": {"clients": 4}}).dump()))


def read_config(folder: Path) -> None:
    found = load_config(folder / "config.toml")
    (folder / "again.toml").write_text(tomli_w.dumps(found.dump()), encoding="utf-8")
    again: Config = load_config(folder / "again.toml")
    assert again == found


def write_data(folder: Path) -> None:
    folder.mkdir()
    frame = pd.DataFrame({"a": [1.0, 2.5, 3.0], "b": [0, 1, 2], "label": ["x", "y", "x"]})
    frame.to_csv(folder / "data.csv", index=False)
    frame.to_parquet(folder / "data.parquet", compression=None)
    x, y = np.ascontiguousarray(frame[["a", "b"]], dtype=np.float32), np.array([0, 1, 0])
    np.savez(folder / "data.npz", x=x, y=y)
    tensors = {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}
    (folder / "data.safetensors").write_bytes(safetensors.torch.save(tensors))


def read_data(file: str, folder: Path) -> None:
    x, y = read_samples(folder / file, Inputs((2,), images=False, columns=("a", "b")))
    assert x.isfinite().all()
    if y is not None:
        assert Federation.from_datasets([(x, y)]).train.x.isfinite().all()


def read_table(folder: Path) -> None:
    try:
        frame = pd.read_csv(folder / "data.csv")
    except (ValueError, Warning):  # is between the user and pandas
        return
    federation = Federation.from_frame(frame, client="b", label="label")
    assert federation.train.x.isfinite().all()


def write_image(folder: Path) -> None:
    (folder / "images" / "one").mkdir(parents=True)
    for name in ("a.png", "b.jpg", "c.bmp"):
        Image.new("L", (2, 2), 7).save(folder / "images" / "one" / name)


def read_image(folder: Path) -> object:
    return read_samples(folder / "images", Inputs((1, 2, 2), images=True))


# What reports and figures are made of


def read_folder(kind: str, folder: Path) -> object:
    return folders.read(folder / kind)


def write_pages(folder: Path) -> None:
    folder.mkdir()
    write_run(folder / "run", clients(4))
    bins = {"count": [3.0, 0.0], "confidence": [0.4, None], "accuracy": [0.5, None]}
    (folder / "run" / "calibration.json").write_text(json.dumps({"pm": bins}))
    write_comparison(folder / "comparison", ("fedavg", "pfedvem"), 1)
    write_reproduction(folder / "reproduction")


@cache
def planned() -> Cell:
    (cell,) = grid(STUDY, seeds=1)
    return cell


def write_record(folder: Path) -> None:
    (folder / "runs").mkdir(parents=True)
    cell = planned()
    summary = {"pm": None, "gm": 71.25, "small_clients_pm": None, "rounds": 100, "seconds": 3.5}
    record = {"config": cell.configs[0].dump(), "summary": summary, "history": [], "snapshots": {}}
    record |= {"clients": {"n_train": [5, 6], "pm": [None, None]}}
    (folder / "runs" / "run.json").write_text(json.dumps(record))


def read_record(folder: Path) -> None:
    cell = planned()
    record = reproduce.finished(cell.configs[0], folder / "runs" / "run.json")
    if record is not None:
        done = reproduce.Reproduction(STUDY, (cell,), {cell.names[0]: record})
        Console(quiet=True).print(reproduction_view(done))
        table_csv(done)


def write_status(folder: Path) -> None:
    folder.mkdir()
    site = {"name": "a", "client": 0, "n": 5, "connected": True, "replied": 1, "tau": 1.5, "faults": 0}
    status = {"experiment": "one", "method": "pFedVEM", "round": 2, "rounds": 2, "asked": 1, "replies": 1, "uploads": 1}
    status |= {"pm": 50.0, "gm": None, "sites": [{**site, "last_fault": ""}], "notes": []}
    (folder / "federation.json").write_text(json.dumps(status))


def read_status(folder: Path) -> None:
    watch.watch(folder, Console(quiet=True), once=True)


def write_figures(folder: Path) -> None:
    folder.mkdir()
    (folder / "bench.json").write_text(json.dumps({"networks": {"mlp": {"plain": {"ratio": 1.5}}}}))


def read_bench(folder: Path) -> object:
    return regressions({"networks": {"mlp": {"plain": {"ratio": 1.0}}}}, read_figures(folder / "bench.json"), 0.7)


RUN = tuple(f"run/{name}" for name in (*folders.FILES, "calibration.json"))
COMPARED = ("comparison/comparison.csv", "comparison/comparison.json", "comparison/cells/pfedvem-0/clients.csv")
REPRODUCED = ("reproduction/reproduction.json", "reproduction/table1.csv", "reproduction/size.png")
STATE = tuple(f"checkpoint/round-00002/{name}" for name in ("manifest.json", "state.safetensors"))
MODEL = ("model/model.json", "model/server.safetensors", "model/personal/00000.safetensors")

TARGETS = {
    "array": Target(write_array, ("w.npy",), read_array),
    "bench": Target(write_figures, ("bench.json",), read_bench),
    "checkpoint": Target(train, STATE, read_checkpoint),
    "clients": Target(train, ("clients.csv", "model/model.json"), read_clients),
    "config": Target(write_config, ("config.toml",), read_config),
    "image": Target(write_image, tuple(f"images/one/{name}" for name in ("a.png", "b.jpg", "c.bmp")), read_image),
    "kept": Target(keep, ("one/client-00000/round-00001.safetensors",), read_kept),
    "model": Target(train, MODEL, read_model),
    "drawn": Target(write_pages, RUN, lambda folder: make(folder / "run").html),
    "record": Target(write_record, ("runs/run.json",), read_record),
    "status": Target(write_status, ("federation.json",), read_status),
    "table": Target(write_data, ("data.csv",), read_table),
    **{
        form: Target(write_data, (f"data.{form}",), partial(read_data, f"data.{form}"))
        for form in ("csv", "parquet", "npz", "safetensors")
    },
    **{
        kind: Target(write_pages, files, partial(read_folder, kind))
        for kind, files in (("run", RUN), ("comparison", COMPARED), ("reproduction", REPRODUCED))
    },
}


# Values that are wrong in ways that bytes alone seldom find

NASTY: list[Any] = [
    None,
    True,
    -1,
    0,
    0.5,
    1e308,
    10**400,
    math.nan,
    math.inf,
    "",
    "x",
    "é\u2028[b]",
    [],
    [[]],
    {},
    {"x": 1},
]


def swapped(value: Any, random: Random) -> Any:
    """JSON with one value or key exchanged, or one gone."""
    if not isinstance(value, dict | list) or not value or random.random() < 0.1:
        return random.choice(NASTY)
    if isinstance(value, list):
        place = random.randrange(len(value))
        rest = [swapped(value[place], random)] if random.random() < 0.8 else []
        return [*value[:place], *rest, *value[place + 1 :]]
    key = random.choice(list(value))
    if random.random() < 0.8:
        return {**value, key: swapped(value[key], random)}
    new = {random.choice(["", "x", "é"]): value[key]} if random.random() < 0.5 else {}
    return {**{name: one for name, one in value.items() if name != key}, **new}


def mutated(data: bytes, most: int, seed: int) -> bytes:
    """Half of the time a value of JSON or of a safetensors header, else whatever bytes libFuzzer changes."""
    random, content, rest = Random(seed), data[1:], b""
    length = int.from_bytes(content[:8], "little")
    if content[8:9] == b"{" and length <= len(content):
        content, rest = content[8 : 8 + length], content[8 + length :]
    try:
        assert random.random() < 0.5
        text = json.dumps(swapped(json.loads(content), random)).encode()
    except (AssertionError, ValueError, RecursionError):
        changed: bytes = atheris.Mutate(data, most)
        return changed
    head = len(text).to_bytes(8, "little") if rest else b""
    return (data[:1] + head + text + rest)[:most]


def main() -> None:
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    with tempfile.TemporaryDirectory(prefix="pfedvem-fuzz-") as scratch:
        if "--seeds" in sys.argv:
            for name in TARGETS:
                (CORPUS / name).mkdir(parents=True, exist_ok=True)
                for number, content in enumerate(Ready(name, Path(scratch)).good.values()):
                    (CORPUS / name / f"good-{number}").write_bytes(bytes([number]) + content)
            return
        words, ready = sys.argv, Ready(sys.argv[1], Path(scratch))
        given = [word for word in words[2:] if not word.startswith("-")]
        # What is new goes into the first folder, which is kept only where one is given.
        (new := Path(scratch) / "new").mkdir()
        places = [] if given else [str(new), str(CORPUS / words[1])]
        atheris.Setup([words[0], *words[2:], *places], ready, custom_mutator=mutated)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
