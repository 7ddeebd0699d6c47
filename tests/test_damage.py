"""Damaged files: cut off, with a bit flipped, of another version or of something else. Nothing is read as if it were
whole: each is refused in a sentence, or passed over with the reason."""

from __future__ import annotations

import ast
import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pfedvem
from pfedvem import Federation, Local, Model, PFedVEM, UserError, fit, load
from pfedvem.data import DataSettings, cache, load_federation
from pfedvem.data.sources import load_source
from pfedvem.errors import Damaged
from pfedvem.experiments import compare
from pfedvem.experiments import config as configs
from pfedvem.experiments.plan import plan
from pfedvem.experiments.reproduce import finished, run_one
from pfedvem.experiments.sweep import sweep
from pfedvem.experiments.trials import Trials
from pfedvem.flower.keeping import Keeping
from pfedvem.flower.sites import SiteStatus, Status
from pfedvem.flower.watch import STATUS
from pfedvem.flower.watch import read as read_status
from pfedvem.report.html import make
from pfedvem.report.html.folders import read_run
from pfedvem.report.inspect import inspection
from pfedvem.simulation import checkpoints
from pfedvem.simulation.rounds import Progress, State
from tests.conftest import blobs, small_network

FOREIGN = (b"", b"beach", b"\0" * 100, b"{}", b"[]", b"null", b"3", b'{"format": 1}', b'{"format": 99}', b"[" * 100_000)
TINY = {"rounds": 1, "eval_every": 1, "alone": False, "data": {"dataset": "digits", "clients": 4, "train_samples": 100}}
Read = Callable[[], object]


def cut(content: bytes, seed: int, count: int = 20) -> Iterator[bytes]:
    """A file that ends too early, at many places."""
    rng = random.Random(seed)
    for length in {0, 1, len(content) - 1, *(rng.randrange(len(content)) for _ in range(count))}:
        yield content[:length]


def flipped(content: bytes, seed: int, count: int = 60) -> Iterator[bytes]:
    """A file with one wrong bit, at many places."""
    rng = random.Random(seed)
    for _ in range(count):
        wrong, bit = bytearray(content), rng.randrange(8 * len(content))
        wrong[bit // 8] ^= 1 << bit % 8
        yield bytes(wrong)


def every(content: bytes, seed: int = 0) -> Iterator[bytes]:
    yield from cut(content, seed)
    yield from flipped(content, seed)
    yield from (foreign for foreign in FOREIGN if foreign != content)


def refused(path: Path, read: Read, error: type[Exception] = UserError) -> None:
    """Every damage to a file is noticed; the file is as before in the end."""
    whole = path.read_bytes()
    for number, damaged in enumerate(every(whole)):
        path.write_bytes(damaged)
        with suppress(error):
            read()
            pytest.fail(f"damage {number} to {path.name} was not noticed: {len(whole)} bytes, now {damaged[:80]!r}")
    path.unlink()
    path.write_bytes(whole)
    read()


def survived(path: Path, read: Read) -> None:
    """No damage to a file leads to anything but a sentence."""
    whole = path.read_bytes()
    for damaged in every(whole):
        path.write_bytes(damaged)
        with suppress(UserError):
            read()
    path.write_bytes(whole)
    read()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    out = tmp_path_factory.mktemp("damage") / "run"
    algorithm = PFedVEM(head_epochs=1, base_epochs=1)
    options: dict[str, Any] = {"rounds": 3, "eval_every": 1, "keep_models": True, "executor": "vectorised"}
    fit(algorithm, small_network(), blobs((7, 12, 1, 23)), out=out, alone=Local(), **options)
    return out


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.fixture
def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


# Checkpoints


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
def test_damage_to_a_checkpoint_is_noticed_and_the_one_before_is_taken(
    name: str, copy: Path, model: Model, federation: Federation
) -> None:
    folder = copy / "checkpoint"
    state = fit(PFedVEM(head_epochs=1, base_epochs=1), model, federation, rounds=1, executor="vectorised").state
    identity = json.loads((folder / "round-00003" / "manifest.json").read_bytes())["identity"]

    def newest() -> State:
        found, warnings = checkpoints.load(folder, state, identity)
        if warnings:
            assert "the checkpoint round-00003 is damaged" in warnings[0]
            assert found is not None
            assert found.round == 2
            raise Damaged(warnings[0])
        assert found is not None
        return found

    refused(folder / "round-00003" / name, newest, Damaged)
    shutil.rmtree(folder / "round-00002")
    refused(folder / "round-00003" / name, lambda: checkpoints.load(folder, state, identity))


def test_a_history_is_noticed_to_be_wrong_wherever_a_digit_is(copy: Path) -> None:
    path = copy / "checkpoint" / "round-00003"
    whole = (path / "manifest.json").read_bytes()
    for place, byte in enumerate(whole):
        if chr(byte).isdecimal():
            (path / "manifest.json").write_bytes(whole[:place] + b"%d" % (9 - byte % 16) + whole[place + 1 :])
            with pytest.raises(Damaged):
                checkpoints._read(path)


def test_a_foreign_folder_among_checkpoints_is_passed_over(copy: Path, model: Model, federation: Federation) -> None:
    (copy / "checkpoint" / "round-of-applause").mkdir()
    identity = json.loads((copy / "checkpoint/round-00003/manifest.json").read_bytes())["identity"]
    state = fit(PFedVEM(), model, federation, rounds=1, executor="vectorised").state
    found, _ = checkpoints.load(copy / "checkpoint", state, identity)
    assert found is not None
    assert found.round == 3


# Models


@pytest.mark.parametrize(
    "name", ["model.json", "server.safetensors", "clients.safetensors", "personal/00003.safetensors"]
)
def test_damage_to_a_model_is_refused(name: str, copy: Path, network: nn.Module) -> None:
    refused(copy / "model" / name, lambda: load(copy, network).client("3"))


def test_a_model_without_checksums_is_still_read(copy: Path, network: nn.Module) -> None:
    path = copy / "model" / "model.json"
    card = json.loads(path.read_bytes())
    del card["seal"], card["sha256"]
    path.write_text(json.dumps({**card, "format": 1}))
    load(copy, network).client("3")


def test_a_model_whose_writing_was_interrupted_is_refused(
    copy: Path, network: nn.Module, model: Model, federation: Federation
) -> None:
    other = fit(PFedVEM(), model, federation, rounds=1, executor="vectorised").save(copy.parent / "other")
    (copy / "model" / "server.safetensors").write_bytes((other / "model" / "server.safetensors").read_bytes())
    with pytest.raises(UserError, match=r"does not match model.json.*--resume"):
        load(copy, network)


# What sites keep


def test_damage_to_what_a_site_keeps_is_passed_over_with_the_reason(tmp_path: Path) -> None:
    keeping = Keeping(tmp_path, "e", 3, "pfedvem")
    state = {"mu": torch.arange(6.0).view(1, 6), "count": torch.tensor([3])}
    keeping.save(1, {**state, "count": torch.tensor([1])})
    keeping.save(2, state)
    (keeping.place / "round-trip.safetensors").write_bytes(b"beach")

    def read() -> None:
        found, warnings = keeping.load(2, state)
        assert found is not None
        if warnings:
            assert "round-00002.safetensors cannot be used" in warnings[0]
            assert int(found["count"]) == 1
            raise Damaged(warnings[0])
        assert torch.equal(found["mu"], state["mu"])

    refused(keeping.place / "round-00002.safetensors", read, Damaged)


def test_damage_to_what_a_server_says_of_itself_is_a_sentence(tmp_path: Path) -> None:
    site = SiteStatus("a", 0, 3, True, 1, 1.5, 0, "")
    (tmp_path / STATUS).write_bytes(Status("e", "pfedvem", 1, 2, 1, 1, 1, 90.1, None, (site,), ()).dump())
    survived(tmp_path / STATUS, lambda: read_status(tmp_path))


# Data


def test_damage_to_a_cached_data_set_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFEDVEM_CACHE", str(tmp_path))
    settings = DataSettings(dataset="digits", clients=4)
    first = load_source(settings)
    (path,) = tmp_path.iterdir()
    made_from = "[]"

    def read() -> None:
        found = cache.load(path, made_from)
        if found is None:  # of another layout or other data, by what it says
            raise Damaged("it is to be made again")
        assert torch.equal(found[0]["train.x"], first.train.x)

    refused(path, read, Damaged)
    path.write_bytes(path.read_bytes()[:-1])
    again = load_federation(settings, 0)
    assert "is damaged" in again.notes[-1]


# Experiments


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> configs.Config:
    return configs.load(flags={**TINY, "method": "fedavg", "executor": "vectorised"})


def test_damage_to_a_run_of_a_reproduction_is_refused(digits: configs.Config, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one.json"
    run_one(digits, path, tmp_path / "unfinished", Progress())
    refused(path, lambda: finished(digits, path))
    record = json.loads(path.read_bytes())
    del record["seal"], record["format"]
    path.write_text(json.dumps(record))
    assert finished(digits, path) == record  # of a version that had no checksums


def test_damage_to_the_journal_of_a_sweep_is_refused_and_a_cut_off_end_is_run_again(
    digits: configs.Config, tmp_path: Path
) -> None:
    searched = plan(digits, space=("lr=0.1,0.01",))
    sweep(searched, tmp_path / "s")
    path, data = tmp_path / "s" / "trials.journal", searched.data(load_federation(digits.data, digits.seed))
    whole = path.read_bytes()

    def scores() -> list[float | None]:
        return [row.score for row in Trials(tmp_path / "s", searched, data).found().rows]

    right = scores()
    assert len(right) == 2
    noticed = 0
    for damaged in flipped(whole, 0, 150):
        path.write_bytes(damaged)
        try:
            found = scores()
        except UserError:
            noticed += 1
        else:  # the name of a checksum was hit, or the last end of a line
            assert set(found) <= set(right)
    assert noticed > 100
    for damaged in cut(whole, 1):
        path.write_bytes(damaged)
        assert set(scores()) <= set(right)
    for foreign in FOREIGN:
        path.write_bytes(foreign + b"\n")
        if foreign:
            with pytest.raises(UserError, match=r"trials.journal.*Choose another --out"):
                scores()


def test_damage_to_the_summary_of_a_cell_is_a_sentence(digits: configs.Config, tmp_path: Path) -> None:
    from pfedvem.experiments.run import train

    train(digits, out=tmp_path / "cell")
    survived(tmp_path / "cell" / "summary.json", lambda: compare.finished(digits, tmp_path / "cell"))
    survived(tmp_path / "cell" / "config.toml", lambda: compare.finished(digits, tmp_path / "cell"))


# Reports


FILES = ("summary.json", "clients.csv", "calibration.json", "metrics.jsonl", "config.toml")


@pytest.mark.parametrize("name", FILES)
def test_no_damage_keeps_a_report_from_being_read(name: str, copy: Path) -> None:
    survived(copy / name, lambda: read_run(copy))
    (copy / name).write_bytes(b"\xff" + (copy / name).read_bytes()[:20])
    assert any(name in problem for problem in read_run(copy).problems)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_no_damage_keeps_a_report_from_being_drawn(name: str, copy: Path) -> None:
    for damaged in itertools.islice(every((copy / name).read_bytes()), 0, None, 6):
        (copy / name).write_bytes(damaged)
        make(copy)


def test_damage_to_the_table_of_clients_is_a_sentence_of_inspect(copy: Path) -> None:
    survived(copy / "clients.csv", lambda: inspection(copy))


# Nothing is loaded by pickle

UNSAFE = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle", "yaml"}


def unsafe_loads(tree: ast.AST) -> Iterator[str]:
    """What could run code that a file holds: modules that unpickle, and loaders that do so unless told not to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.partition(".")[0] in UNSAFE)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UNSAFE:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            called, given = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            if called in ("np.load", "numpy.load") and given.get("allow_pickle") != "False":
                yield called
            if called == "torch.load" and given.get("weights_only") != "True":
                yield called
            if called in ("torch.export.load", "torch.jit.load", "torch.package.PackageImporter", "eval", "exec"):
                yield called
            if called.endswith(("read_pickle", "from_pickle", "load_from_disk", "unpickle")):
                yield called
            if given.get("trust_remote_code", "False") != "False":
                yield called


def test_nothing_is_loaded_by_pickle() -> None:
    folder = Path(pfedvem.__file__).parent
    found = {
        str(path.relative_to(folder)): loads
        for path in sorted(folder.rglob("*.py"))
        if (loads := list(unsafe_loads(ast.parse(path.read_text(encoding="utf-8")))))
    }
    # The process executor pickles what it sends between processes that it has started itself, through pipes that no
    # one else can write to: that is our own memory and never a file or the network.
    assert found == {"simulation/workers.py": ["pickle"]}


LINES = ["import pickle", "from joblib import load", "torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f)"]
LINES += [
    "np.load(f, allow_pickle=True)",
    "pd.read_pickle(f)",
    "torch.export.load(f)",
    "get(n, trust_remote_code=True)",
]


@pytest.mark.parametrize("line", LINES)
def test_what_loads_by_pickle_is_found(line: str) -> None:
    assert list(unsafe_loads(ast.parse(line)))


def test_a_pickle_in_the_place_of_a_file_is_not_run(copy: Path, network: nn.Module, tmp_path: Path) -> None:
    import pickle

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "exploded",)

    bomb = pickle.dumps(Bomb())
    for path in [*(copy / "model").rglob("*.*"), *(copy / "checkpoint").rglob("*.*")]:
        path.write_bytes(bomb)
    with pytest.raises(UserError):
        load(copy, network)
    with pytest.raises(UserError, match="No checkpoint"):
        fit(PFedVEM(), network, blobs((7, 12, 1, 23)), out=copy, resume=True)
    assert not (tmp_path / "exploded").exists()
