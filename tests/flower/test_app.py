"""The app that ``pfedvem flower new`` writes, its keys, and the view of a running federation."""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
import stat
import subprocess
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import flatten_dict, validate_config
from rich.console import Console

from pfedvem.errors import UserError
from pfedvem.flower import Settings, serve
from pfedvem.flower.keys import make_keys
from pfedvem.flower.local import LocalGrid
from pfedvem.flower.new import new_app
from pfedvem.flower.watch import view, watch
from tests.flower.conftest import Place
from tests.test_cli import call

ROOT = Path(__file__).parents[2]


def loaded(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("mysite", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config(app: Path) -> dict[str, Any]:
    found = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
    return dict(flatten_dict(found["tool"]["flwr"]["app"]["config"]))


@pytest.fixture(params=["new", "examples/hospitals"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "My app"
    if request.param == "new":
        new_app(folder, 3)
    else:
        shutil.copytree(ROOT / request.param, folder)
    return folder


def test_an_app_is_one_that_flower_accepts(app: Path) -> None:
    project = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
    valid, errors, warnings = validate_config(project, check_module=True, project_dir=app)
    assert valid, errors
    assert warnings == []


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # in Flower's own code
def test_no_key_and_no_result_goes_into_what_is_sent_to_the_sites(app: Path) -> None:
    make_keys(app / "keys", 2)
    (app / "out").mkdir()
    (app / "out" / "summary.json").write_text("{}")
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as sent:
        names = {name for name in sent.namelist() if not name.startswith(".info")}
    assert names == {"pyproject.toml", "mysite.py", "README.md"}


def test_an_app_runs_and_its_site_needs_no_more_than_its_file(app: Path, tmp_path: Path) -> None:
    module, values = loaded(app / "mysite.py"), config(app)
    values |= {"rounds": 1, "wait": 1.0, "out": str(tmp_path / "out")}
    nodes = [{"partition-id": j, "state-dir": str(tmp_path / str(j))} for j in range(3)]
    result = serve(Settings.read(values), module.network, LocalGrid(module.client, values, nodes))
    assert result.summary["pm"] > 50


def test_an_app_is_not_written_over(tmp_path: Path) -> None:
    new_app(tmp_path / "a", 2)
    with pytest.raises(UserError, match="is not empty"):
        new_app(tmp_path / "a", 2)


def test_a_folder_whose_path_cannot_stand_in_a_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="choose one without quotes"):
        new_app(tmp_path / 'a"b', 2)
    assert not (tmp_path / 'a"b').exists()


def test_an_address_of_the_newer_kind_stands_in_brackets(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 1, hosts=["::1"])
    link = tomllib.loads((tmp_path / "keys" / "home" / "config.toml").read_text())["superlink"]["federation"]
    assert link["address"].startswith("[::1]:")


def test_the_commands_make_an_app_and_keys_and_show_a_federation(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("flower", "new", str(tmp_path / "app")) == 0
    assert call("flower", "keys", str(tmp_path / "keys"), "--sites", "2") == 0
    assert call("flower", "keys", str(tmp_path / "keys")) == 2
    place.run()
    assert call("flower", "watch", str(tmp_path / "out")) == 0
    shown = capsys.readouterr().out
    assert "round 3 of 3" in shown
    assert "site 2" in shown
    assert call("flower", "watch", str(tmp_path / "nowhere")) == 2


def test_only_the_owner_can_read_keys(tmp_path: Path) -> None:
    for file in make_keys(tmp_path / "keys", 2):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_accepts_the_servers_certificate_for_its_hosts_only(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 1, hosts=["fed.example.org"])

    def verified(*options: str) -> bool:
        files = ["-CAfile", str(tmp_path / "keys" / "ca.pem"), str(tmp_path / "keys" / "server.pem")]
        ran = subprocess.run(["openssl", "verify", "-x509_strict", *options, *files], capture_output=True)
        return ran.returncode == 0

    assert verified("-verify_hostname", "fed.example.org")
    assert verified("-verify_ip", "127.0.0.1")
    assert not verified("-verify_hostname", "other.example.org")


def test_node_keys_are_pairs_and_the_server_has_a_key_of_its_own(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 1)
    private = serialization.load_ssh_private_key((tmp_path / "keys" / "site-0.key").read_bytes(), None)
    public = serialization.load_ssh_public_key((tmp_path / "keys" / "site-0.pub").read_bytes())
    assert private.public_key() == public
    certificate = x509.load_pem_x509_certificate((tmp_path / "keys" / "server.pem").read_bytes())
    server = serialization.load_pem_private_key((tmp_path / "keys" / "server.key").read_bytes(), None)
    assert server.public_key() == certificate.public_key()


def test_the_view_follows_a_federation_to_its_end_and_names_faults(tmp_path: Path) -> None:
    site = {
        "name": "A [b]",
        "client": 0,
        "n": 5,
        "connected": True,
        "replied": 1,
        "tau": 0.25,
        "faults": 1,
        "last_fault": "Oh.",
    }
    away = {**site, "name": "C", "n": 0, "connected": False, "replied": 0, "tau": None, "faults": 0, "last_fault": ""}
    status = {"experiment": "e", "method": "pFedVEM", "round": 1, "rounds": 2, "sites": [site, away]}
    status |= {"asked": 2, "replies": 1, "uploads": 1, "pm": 90.0, "gm": None, "notes": []}

    def step(seconds: float) -> None:
        current = json.loads((tmp_path / "federation.json").read_text()) if waits else None
        waits.append(seconds)
        (tmp_path / "federation.json").write_text(json.dumps({**status, "round": 2} if current else status))

    waits: list[float] = []
    screen = Console(file=io.StringIO(), width=120)
    watch(tmp_path, screen, once=False, pause=step)
    assert len(waits) == 2
    drawn = Console(file=io.StringIO(), width=120)
    drawn.print(view(status))
    text = drawn.file.getvalue()  # type: ignore[attr-defined]
    for words in ("round 1 of 2", "A [b]", "0.250", "Oh.", "C (away)", "1 of 2 replies", "PM 90.0%"):
        assert words in text
