"""Whatever a user types, no traceback comes back: one sentence, and exit code 2 or 1."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.test_cli import call

BIG = str(10**9)
HUGE = str(10**12)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, and things that a user may point at by mistake."""
    place = tmp_path_factory.mktemp("bad")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PFEDVEM_CACHE", str(place / "cache"))
        words = "--clients 4 --participation 1 --rounds 1 --set train_samples=100 --set alone=false"
        assert call("run", *words.split(), "--out", place / "run") == 0
    (place / "empty").mkdir()
    (place / "file").write_text("no run")
    (place / "nothing").write_bytes(b"")
    for name in ("bytes.toml", "bytes.csv", "bytes.parquet", "bytes.npz", "bytes.safetensors", "bytes.json"):
        (place / name).write_bytes(bytes(range(256)))
    for name in ("nothing.toml", "nothing.csv", "nothing.parquet", "nothing.npz", "nothing.safetensors"):
        (place / name).write_bytes(b"")
    np.savez(place / "objects.npz", x=np.array([{"a": 1}, None], dtype=object), allow_pickle=True)
    np.savez(place / "numbers.npz", x=np.zeros((3, 7)), y=np.zeros(3))
    np.savez(place / "wrong.npz", x=np.zeros((3, 1, 8, 8), np.uint8), y=np.array([10**9, 0, 1]))
    (place / "wrong.csv").write_text("a,a,label\n1,nan,x\n,2\n")
    for label in "ab":
        (place / "pictures [1] {é}" / label).mkdir(parents=True)
        for i in range(6):
            Image.new("L", (8, 8), 10 * i).save(place / "pictures [1] {é}" / label / f"{i}.png")
    (place / "foreign").mkdir()
    (place / "foreign" / "config.toml").write_text('title = "my own project"\n')
    (place / "foreign" / "checkpoint").mkdir()
    (place / "foreign" / "checkpoint" / "round-00001").mkdir()
    (place / "foreign" / "summary.json").write_text(json.dumps(["not", "ours"]))
    return place


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFEDVEM_CACHE", str(place / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


SETTINGS = [
    "--clients 0", "--clients -1", f"--clients {BIG}", f"--clients {10**30}", "--clients 1.5", "--clients many",
    "--clients ''", "--seed -1", f"--seed {2**63}", f"--seed {10**40}", "--dataset ''", "--dataset .",
    "--dataset file", "--dataset nothing", "--dataset empty", "--dataset foreign", "--dataset a/b/c", "--dataset [/x]",
    "--dataset é/ü","--data-root file --dataset cifar10",
    "--config empty", "--config run", "--config bytes.toml", "--config file", "--config foreign/config.toml",
    "--partition nothing", "--partition ''", "--partition natural", "--partition subclasses", "--partition domains",
    "--set", "--set =", "--set a", "--set =1", "--set clients=", "--set clients=[1]", "--set clients=true",
    "--set data=1", "--set algorithm=[]", "--set data.clients.x=1", "--set sizes=[1,2]", "--set sizes=[]",
    "--set sizes=[nan,1] --clients 2", "--set sizes=[-1,1] --clients 2", "--set sizes=[1e308,1e308] --clients 2",
    "--set holdout=0", "--set holdout=1", "--set holdout=nan", "--set holdout=1e-320 --set holdout=x",
    f"--set train_samples={BIG}", "--set train_samples=1", f"--set labels_per_client={BIG}", "--set image_size=0",
    f"--set image_size={BIG} --dataset PICTURES", "--set dirichlet_alpha=0", "--set dirichlet_alpha=inf",
    "--label-column nothing --dataset PICTURES", "--image-column label --dataset PICTURES", "--set seed=[]",
    "--set dataset=3", "--set root=3 --dataset cifar10", "--nonsense", "surplus", "--clients",
]  # fmt: skip
RUNS = [
    "--rounds 0", "--rounds -5", "--rounds x", "--participation 0", "--participation 1.5", "--participation nan",
    "--participation -1", "--executor x", "--workers 0", "--workers -3", "--cohort 0", "--device tpu", "--train x",
    "--device cuda", "--executor sequential --workers 4", "--executor sequential --cohort 4", "--set network=x",
    "--set network=3", "--set network=lenet", "--set lr_head=0", "--set lr_head=nan", "--set lr_head=x",
    "--set batch_size=0", "--set batch_size=-9", "--set confidence=x", "--set head_epochs=1.5",
    "--out file", "--out file/x", "--out LONG", "--out 'nul\0byte'",
]  # fmt: skip
LINES = [
    *(f"data show {words}" for words in SETTINGS),
    *(f"run {words}" for words in RUNS),
    *(f"{command} {words}" for command in ("run", "compare", "sweep") for words in (*SETTINGS[:10], *RUNS[:6])),
    "run --method ''", "run --method x", "run --method x:y", "run --method :", "run --method .x:y", "run --method os:path",
    "run --method json:JSONDecoder", "run --resume", "run --resume --out file", "run --resume --out foreign",
    "run --resume --out run --clients 7", "run --resume --out run --seed 1", "run --resume --out run --method fedavg",
    "run --out run", "run --resume --out run --rounds 0", "run --eval-every -1", "run --eval-clients 0",
    "run --checkpoint-every 0", "run --alone --no-alone --alone=3",
    "compare --methods x", "compare --methods ''", "compare --methods ,", "compare --seeds 0", "compare --seeds -1",
    f"compare --seed {2**63 - 1} --seeds 2", "compare --set nothing.lr=1", "compare --set fedavg.x=1",
    "compare --methods fedavg,fedavg,x", "compare --out foreign --methods fedavg,x",
    "sweep --space", "sweep --space x", "sweep --space =", "sweep --space lr_head=", "sweep --space x=1",
    "sweep --space lr_head=0", "sweep --space lr_head=a,b", "sweep --space lr_head=[1]", "sweep --space lr_head=nan",
    "sweep --space lr_head=1 --space lr_head=2", "sweep --sampler x", "sweep --trials 3", "sweep --jobs 0",
    "sweep --trials 0 --sampler random", "sweep --objective x", "sweep --objective gm --method local",
    "sweep --select-on x", "sweep --share 0", "sweep --share 1", "sweep --share nan", "sweep --share -1",
    "sweep --ray nowhere --prune", "sweep --method x",
    "data", "data nothing", "data list x", "data show --plot empty", "data show --plot nowhere/x.txt",
    "data show --plot x.nonsense", "data show --plot file/x.png",
    "bench --networks x", "bench --methods x", "bench --growth x", "bench --against nothing", "bench --against empty",
    "bench --against bytes.json", "bench --against missing", "bench --against run/summary.json",
    "bench --networks mlp --methods none --growth none --clients 0", "bench --workers 0",
    "bench --networks mlp --methods none --growth none --clients -5", "bench --growth-to -1 --networks x",
    "flower", "flower nothing", "flower new", "flower new file", "flower new run", "flower new x --sites 0",
    "flower new x --sites -1", "flower new 'a b/[c]' --sites 0", "flower keys run", "flower keys file",
    "flower keys x --sites 0", "flower keys x --port 0", "flower keys x --port 70000", "flower keys x --days 0",
    f"flower keys x --days {HUGE}", "flower keys x --host ''", "flower keys x --host é..", "flower watch nowhere",
    "flower watch file", f"flower keys x --sites {-10**9}", "flower keys x --host [b]",
    "reproduce", "reproduce x", "reproduce table1 --datasets x --rounds 0", "reproduce table1 --methods x",
    "reproduce table1 --clients x", "reproduce table1 --clients 0 --datasets digits", "reproduce table1 --seeds 0",
    "reproduce table1 --rounds 0 --datasets digits", "reproduce table1 --seed -1 --datasets digits",
    "reproduce table1 --datasets digits --finished", "reproduce limited-data --columns x",
    "reproduce table1 --datasets digits --out file", "reproduce fig-partition-sizes --draws 0",
    "reproduce fig-partition-sizes --datasets digits --clients 0 --draws 1",
    f"reproduce fig-partition-sizes --datasets digits --clients {BIG} --draws 1",
    "reproduce table1 --set x=1 --datasets digits", "reproduce fig-partition-sizes --datasets x",
    "report", "report nowhere", "report file", "report empty", "report foreign/checkpoint", "report run --out empty",
    "report run --nonsense",
    "predict", "predict run", "predict nowhere --data numbers.npz --general", "predict run --data numbers.npz --general",
    "predict run --data nowhere --general", "predict run --data empty --general", "predict run --data bytes.csv --general",
    "predict run --data bytes.parquet --general", "predict run --data bytes.npz --general",
    "predict run --data bytes.safetensors --general", "predict run --data nothing.csv --general",
    "predict run --data nothing.parquet --general", "predict run --data nothing.npz --general",
    "predict run --data nothing.safetensors --general", "predict run --data objects.npz --general",
    "predict run --data wrong.csv --general", "predict run --data wrong.npz --general", "predict run --data run --general",
    "predict run --data PICTURES --general --samples -1", "predict run --data PICTURES --client x",
    "predict run --data PICTURES --client ''", "predict run --data PICTURES", "predict file --data PICTURES --general",
    "predict run --data PICTURES --general --out empty", "predict run --data PICTURES --general --out file/x",
    "predict run --data PICTURES --general --network x", "predict run --data PICTURES --general --network x:y",
    "predict run --data PICTURES --general --network os:getcwd", "predict run --data PICTURES --general --network os:sep",
    "personalize", "personalize run --client new", "personalize run --data PICTURES", "personalize empty --data x --client y",
    "personalize run --client new --data numbers.npz", "personalize run --client new --data wrong.npz",
    "personalize run --client new --data objects.npz", "personalize run --client new --data PICTURES --rounds 0",
    "personalize run --client 0 --data wrong.npz", "personalize run --client new --data bytes.csv",
    "export", "export run", "export run --client x", "export run --general --client 0", "export nowhere --general",
    "export run --general --format x", "export run --general --samples -1", "export run --general --out empty",
    "export run --general --out file/x", "export run --general --format '' ",
    "inspect", "inspect nowhere", "inspect file", "inspect empty", "inspect run --plot empty",
    "inspect run --plot x.nonsense", "inspect run --plot file/x.png",
    "nothing", "''", "--nonsense", "version x",
    # Nobody may write there, nor read that.
    "run --out /proc/x", "compare --methods fedavg --out /proc/x", "sweep --method fedavg --space lr=1 --out /proc/x",
    "flower new /proc/x", "flower keys /proc/x",
    "run --config /proc/self/mem", "predict run --data PICTURES --general --out /proc/x.csv",
    "bench --against /proc/self/mem", "inspect run --plot /proc/x.png", "data show --plot /proc/x.png",
]  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_bad_command_line_is_answered_by_a_sentence(
    line: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = []
    for word in split(line):
        first = word.split("/")[0]
        word = "pictures [1] {é}" if word == "PICTURES" else "x" * 5000 if word == "LONG" else word
        there = word and first not in ("", ".", "..") and "\0" not in word and first in os.listdir(place)
        words.append(str(place / word) if there or word.startswith("pictures") else word)
    code = call(*words)
    said = capsys.readouterr()
    assert code in (1, 2), said
    assert "Traceback" not in said.out + said.err
    assert said.err.strip() or said.out.strip()
    sentences = [text for text in said.err.splitlines() if text.startswith("error ")]
    assert len(sentences) <= 1
    if sentences:
        assert said.err.count("\n") == 1
        assert sentences[0].endswith((".", "?", ")"))


def split(line: str) -> list[str]:
    """Words with spaces between them; '' is an empty one."""
    words = []
    for word in line.replace("'a b/[c]'", "a\0b/[c]").split():
        words.append(word.replace("\0", " ").strip("'") if word != "''" else "")
    return words
