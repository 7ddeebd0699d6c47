"""A real deployment on loopback: a SuperLink and three SuperNodes with TLS and node keys, and what happens to them.

Minutes long, so ``make test`` leaves it out and ``make test-flower`` runs it.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from pfedvem.algorithms import PFedVEM
from pfedvem.data import load_federation
from pfedvem.data.settings import DataSettings
from pfedvem.flower.keys import make_keys
from pfedvem.flower.new import new_app
from pfedvem.networks import build
from pfedvem.simulation.fit import fit

pytestmark = pytest.mark.deployment
BIN = Path(sys.executable).parent
SITES = 3
GUIDE = Path(__file__).parents[2] / "docs" / "deployment.md"


def documented(start: str) -> list[list[str]]:
    """The words of the guide's commands that start so."""
    lines = GUIDE.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith(start)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Waits for a condition, and fails with what was waited for."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.2)
    raise AssertionError(f"{what}: not within {seconds:g} s")


def descendants(pid: int) -> list[int]:
    """All processes that this one has started, and those that they have."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in table.splitlines():
        child, parent = (int(word) for word in line.split())
        children.setdefault(parent, []).append(child)
    found, todo = [], [pid]
    while todo:
        more = children.get(todo.pop(), [])
        found += more
        todo += more
    return found


class Deployment:
    """The processes of a federation; each has its log beside the app."""

    def __init__(self, folder: Path) -> None:
        self.app = folder / "app"
        new_app(self.app, SITES)
        self.keys = self.app / "keys"
        self.port = free_port()
        make_keys(self.keys, SITES, port=self.port)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(self.keys / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with open(self.log(name), "ab") as log:
            process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                cwd=self.app,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running[name] = process
        return process

    def log(self, name: str) -> Path:
        return self.app / f"{name}.log"

    def kill(self, name: str) -> None:
        """Kills a process with all that it has started, as a machine that fails does."""
        process = self.running.pop(name)
        started = descendants(process.pid)
        with suppress(ProcessLookupError):  # it may have ended by itself, and left others behind
            os.killpg(process.pid, signal.SIGKILL)
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def superlink(self, *options: str) -> None:
        command = ["flower-superlink", *options] if options else documented("flower-superlink")[0]
        self.start("superlink", *command, "--port", str(self.port))

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        until(listens, 60, "the SuperLink listens")

    def supernode(self, site: int, name: str = "", *changes: str) -> None:
        """The guide's node of this site, at ports that are free; of an option that comes twice, the last one counts."""
        here = ["--superlink", f"127.0.0.1:{self.port}", "--port", str(free_port())]
        self.start(name or f"node-{site}", *documented("flower-supernode")[site], *here, *changes)

    def flwr(self, *words: str) -> str:
        ran = subprocess.run(
            [str(BIN / "flwr"), *words], cwd=self.app, env=self.environment, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    def status(self) -> dict[str, Any]:
        file = self.app / "out" / "federation.json"
        status: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"round": 0}
        return status

    def round(self, number: int, seconds: float = 120) -> None:
        until(lambda: self.status()["round"] >= number, seconds, f"round {number} is complete")

    def accepted(self, site: int, seconds: float = 120) -> None:
        """Starts a killed node again and again, as a supervisor does: at first the SuperLink holds it for alive."""

        def activated() -> int:
            return self.log("superlink").read_text(errors="replace").count("Activated node_id")

        def back() -> bool:
            name = f"node-{site}"
            if name in self.running and self.running[name].poll() is not None:
                self.kill(name)
            if name not in self.running:
                self.supernode(site)
            return activated() > before

        before = activated()
        until(back, seconds, f"site {site} is accepted again")


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path)
    try:
        yield made
    finally:
        for name in list(made.running):
            made.kill(name)
        for log in sorted(made.app.glob("*.log")):  # shown by pytest where a test has failed
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")


def test_a_federation_survives_a_killed_node_and_a_killed_server_and_turns_strangers_away(
    deployment: Deployment, tmp_path: Path
) -> None:
    strangers = tmp_path / "strangers"
    make_keys(strangers, 1)
    deployment.superlink()
    for site, (_, *register) in enumerate(documented("flwr supernode register")):
        deployment.flwr(*register)
        deployment.supernode(site)
    deployment.supernode(0, "unregistered", "--auth-supernode-private-key", str(strangers / "site-0.key"))
    deployment.supernode(0, "deceived", "--root-certificates", str(strangers / "ca.pem"), "--max-retries", "2")
    run = [*documented("flwr run")[0], "--run-config", "eval-every=0 round-timeout=60.0"]
    deployment.start("run", *run)

    deployment.round(2)
    deployment.kill("node-0")  # in the middle of round 3
    kept = sorted((deployment.app / "kept" / "0").rglob("round-*.safetensors"))
    assert {"round-00001", "round-00002"} <= {file.stem for file in kept}
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in kept)
    deployment.accepted(0)
    deployment.round(3)
    for name in ("unregistered", "deceived"):
        assert until(lambda name=name: deployment.running[name].poll(), 5, f"{name} has given up") != 0  # type: ignore[misc]
    deployment.kill("superlink")
    before = deployment.status()

    deployment.superlink()
    deployment.start("run again", *run)
    deployment.round(5, 180)
    until((deployment.app / "out" / "summary.json").is_file, 30, "the summary is written")
    summary = json.loads((deployment.app / "out" / "summary.json").read_text())
    assert (summary["method"], summary["clients"], summary["rounds"]) == ("pfedvem", SITES, 5)
    assert summary["pm"] > 90
    assert before["round"] < 5
    assert not [note for note in (*before["notes"], *deployment.status()["notes"]) if "anew" in note]
    sites = deployment.status()["sites"]
    assert [site["replied"] for site in sites] == [5, 5, 5]
    assert all(site["connected"] and site["tau"] > 0 for site in sites)


def test_flowers_own_simulation_runs_the_app_to_the_numbers_of_our_simulator(
    deployment: Deployment, tmp_path: Path
) -> None:
    link = {"address": f"127.0.0.1:{deployment.port}", "insecure": True}
    ray = {"num-supernodes": SITES, "backend": {"client-resources": {"num-cpus": 1}}}
    config = {"superlink": {"default": "simulation", "simulation": {**link, "options": ray}}}
    (deployment.keys / "home" / "config.toml").write_text(tomli_w.dumps(config))
    deployment.environment |= {"PFEDVEM_STATE": str(tmp_path / "kept"), "RAY_USAGE_STATS_ENABLED": "0"}
    options = ["--insecure", "--simulation", "--disable-runtime-dependency-installation"]
    deployment.superlink(*options)
    deployment.flwr("run", ".", "--run-config", "rounds=2 eval-every=0")
    until((deployment.app / "out" / "summary.json").is_file, 120, "the simulation is complete")
    found = json.loads((deployment.app / "out" / "summary.json").read_text())

    federation = load_federation(DataSettings(dataset="digits", clients=SITES), seed=0)
    model = build("mlp", federation.shape, 10, seed=0)
    algorithm = PFedVEM(lr_head=0.01, lr_base=0.01)
    expected = fit(algorithm, model, federation, rounds=2, participation=1.0, eval_every=0).summary
    assert found["pm"] == pytest.approx(expected["pm"], abs=0.2)
    assert found["rounds"] == 2
