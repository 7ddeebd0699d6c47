"""What goes wrong at a site is counted and named, and the round goes on."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from pfedvem import tree
from pfedvem.errors import UserError
from pfedvem.flower import wire
from pfedvem.flower.keeping import KEPT, Keeping
from pfedvem.flower.local import LocalGrid
from pfedvem.flower.server import only_server, start
from pfedvem.flower.settings import Settings
from pfedvem.simulation.results import Result
from tests.flower.conftest import SIZES, Place

Change = Callable[[Message], list[Message]]


class Unruly(LocalGrid):
    """A grid in which one node's uploads are changed on their way."""

    change: Change
    node = 1001

    def answer(self, message: Message) -> list[Message]:
        replies = super().answer(message)
        changed = message.metadata.dst_node_id == self.node and message.metadata.message_type == "train.upload"
        return self.change(replies[0]) if changed else replies


def unruly(place: Place, change: Change) -> Unruly:
    place.config |= {"participation": 1.0, "rounds": 2}
    made = place.grid()
    made.__class__ = Unruly
    assert isinstance(made, Unruly)
    made.change = change
    return made


def status(place: Place) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place.folder / "out" / "federation.json").read_text())
    return found


def faults(place: Place) -> list[str]:
    """The last fault of each site, without the round."""
    return [site["last_fault"].partition(": ")[2] for site in status(place)["sites"]]


def finite(result: Result) -> bool:
    return all(bool(leaf.isfinite().all()) for leaf in tree.leaves(result.state.server))


def with_array(name: str, make: Callable[[Any], Any]) -> Change:
    def change(reply: Message) -> list[Message]:
        arrays = reply.content.array_records[wire.UP]
        values = {key: value.numpy() for key, value in arrays.items()}
        values[name] = make(values[name])
        reply.content[wire.UP] = ArrayRecord({key: Array(np.asarray(value)) for key, value in values.items()})
        return [reply]

    return change


def with_number(name: str, value: float) -> Change:
    def change(reply: Message) -> list[Message]:
        reply.content.metric_records[wire.NUMBERS][name] = value
        return [reply]

    return change


def without(record: str) -> Change:
    def change(reply: Message) -> list[Message]:
        del reply.content[record]
        return [reply]

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_array("w", lambda w: w * np.nan), "its reply was left out: its array 'w' is not finite"),
        (with_array("w", lambda w: w[:, :-1]), "its reply was left out: its array 'w' has shape (3, 5), not (3, 6)"),
        (with_array("w", lambda w: w.astype(np.int64)), "its reply was left out: its array 'w' is of type"),
        (with_number("up.tau", -1.0), "its reply was left out: its number 'up.tau' is -1.0, not a weight above 0"),
        (with_number("up.n", float("nan")), "its reply was left out: its number 'up.n' is nan"),
        (without(wire.UP), "its reply was left out: it has no record 'up'"),
        (without(wire.NUMBERS), "its reply was left out: it has no record 'numbers'"),
        (lambda reply: [], "its reply did not come in time"),
    ],
    ids=["nan", "shape", "type", "negative tau", "nan size", "no arrays", "no numbers", "nothing"],
)
def test_a_bad_upload_is_left_out_and_named_and_the_others_are_merged(place: Place, change: Change, said: str) -> None:
    result = place.run(unruly(place, change))
    assert result.state.round == 2
    assert finite(result)
    found = faults(place)
    assert found[1].startswith(said)
    assert [found[0], found[2], found[3]] == ["", "", ""]
    assert status(place)["sites"][1]["faults"] == 2
    assert status(place)["uploads"] == 3


def test_a_claim_that_cannot_be_believed_is_capped_and_named(place: Place) -> None:
    result = place.run(unruly(place, with_number("up.tau", 1e30)))
    found = faults(place)
    assert found[1].startswith("its upload claims tau = 1e+30 (counts as")
    assert [found[0], found[2], found[3]] == ["", "", ""]
    assert result.state.counts.capped.tolist() == [0, 2, 0, 0]
    assert status(place)["uploads"] == 4


def test_merging_without_a_bad_upload_is_merging_the_others(place: Place) -> None:
    grid = unruly(place, with_array("w", lambda w: w * np.nan))
    place.config |= {"rounds": 1}
    merged = place.run(grid).state.server
    down = place.settings.algorithm.down(start(place.settings, place.model).server)
    job = ConfigRecord({"format": wire.FORMAT, "round": 0, "evaluate": False})
    asked = RecordDict({wire.DOWN: wire.pack(down), wire.JOB: job})
    sent = [grid.answer(Message(asked, 1000 + j, "train.upload"))[0].content for j in (0, 2, 3)]
    weights = torch.tensor([float(str(up.metric_records[wire.NUMBERS]["up.tau"])) for up in sent])
    heads = torch.stack([torch.from_numpy(up.array_records[wire.UP]["w"].numpy().copy()) for up in sent])
    torch.testing.assert_close(merged.w, tree.weighted_mean(heads, weights))


def test_an_answer_that_comes_twice_counts_once(place: Place) -> None:
    place.config |= {"participation": 1.0}
    once = place.run().state.server

    class Echo(LocalGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            return [copy for reply in super().pull_messages(message_ids) for copy in (reply, reply)]

    place.config["out"] = str(place.folder / "again")
    grid = place.grid()
    grid.__class__ = Echo
    for j in range(len(SIZES)):
        os.rename(place.folder / f"site-{j}", place.folder / f"old-{j}")
    twice = place.run(grid).state.server
    torch.testing.assert_close(once.w, twice.w)
    notes = json.loads((place.folder / "again" / "federation.json").read_text())["notes"]
    assert any("answered twice" in note for note in notes)


def test_an_answer_for_another_round_is_late_and_left_out(place: Place) -> None:
    def late(reply: Message) -> list[Message]:
        reply.metadata.__dict__["_group_id"] = "7"
        return [reply]

    place.run(unruly(place, late))
    assert faults(place)[1] == "its reply was left out: it answers for round 7"


def test_a_site_whose_app_fails_is_named_with_the_reason(place: Place) -> None:
    original = place.data

    def data(context: Any) -> Any:
        if context.node_config["partition-id"] == 2 and (place.folder / "site-2").exists():
            raise FileNotFoundError("the data are gone")
        return original(context)

    place.data = data  # type: ignore[method-assign]
    place.config |= {"participation": 1.0}
    place.run()
    assert "FileNotFoundError: the data are gone" in faults(place)[2]


def test_scores_that_cannot_be_are_no_scores(place: Place) -> None:
    class Boasting(LocalGrid):
        def answer(self, message: Message) -> list[Message]:
            (reply,) = super().answer(message)
            if message.metadata.dst_node_id == 1001 and not message.metadata.message_type.startswith("query"):
                numbers = reply.content.metric_records[wire.NUMBERS]
                lies = {"pm.accuracy": 7.0, "pm.nll": float("inf"), "gm.accuracy": 9.0, "seen.tau": float("nan")}
                numbers.update(lies)
            return [reply]

    grid = place.grid()
    grid.__class__ = Boasting
    result = place.run(grid)
    assert math.isnan(result.clients["pm"].iloc[1])
    assert all(value is None or 0 <= value <= 100 for value in (result.summary["pm"], result.summary["gm"]))


class Broken(LocalGrid):
    """A grid in which every upload has overflowed."""

    def answer(self, message: Message) -> list[Message]:
        replies = super().answer(message)
        uploads = message.metadata.message_type == "train.upload"
        return with_array("w", lambda w: w * np.inf)(replies[0]) if uploads else replies


def test_when_no_upload_can_be_used_the_server_keeps_what_it_has(place: Place) -> None:
    place.config |= {"participation": 0.01, "rounds": 1}
    grid = place.grid()
    grid.__class__ = Broken
    result = place.run(grid)
    assert torch.equal(result.state.server.w, start(place.settings, place.model).server.w)
    assert any("no upload to merge" in note for note in status(place)["notes"])


def test_a_round_with_too_few_usable_replies_stops_the_run_and_says_how_to_go_on(place: Place) -> None:
    place.config |= {"participation": 0.01, "min-replies": 3}
    grid = place.grid()
    grid.__class__ = Broken
    with pytest.raises(UserError, match="Round 1 has 2 usable replies of 4 where min-replies is 3; run again"):
        place.run(grid)


def test_too_few_sites_are_waited_for_but_not_for_ever(place: Place) -> None:
    place.config |= {"min-sites": 4}
    grid = place.grid()
    del grid.contexts[1003]
    with pytest.raises(UserError, match=r"After 0.2 s, 3 of 4 sites \(min-sites\) are there: site 0, site 1, site 2"):
        place.run(grid)


def test_sites_of_the_same_name_are_told_apart(place: Place) -> None:
    grid = place.grid()
    for context in grid.contexts.values():
        context.node_config["name"] = "clinic"
    assert place.run(grid).clients.index.to_list() == ["clinic", "clinic (1)", "clinic (2)", "clinic (3)"]


def test_a_site_that_leaves_keeps_its_name_and_the_others_go_on(place: Place) -> None:
    class Leaving(LocalGrid):
        def answer(self, message: Message) -> list[Message]:
            if message.metadata.group_id == "1":
                self.contexts.pop(1003, None)
            return super().answer(message)

    grid = place.grid()
    grid.__class__ = Leaving
    result = place.run(grid)
    assert result.clients.index[3] == "site 3"
    assert result.clients["n_train"].iloc[3] == SIZES[3]
    assert [site["connected"] for site in status(place)["sites"]] == [True, True, True, False]
    assert [site["replied"] for site in status(place)["sites"]] == [3, 3, 3, 1]


def test_a_node_that_is_slow_to_say_who_it_is_is_asked_again(place: Place) -> None:
    class Slow(LocalGrid):
        asked = 0

        def answer(self, message: Message) -> list[Message]:
            if message.metadata.message_type == "query" and message.metadata.dst_node_id == 1002:
                self.asked += 1
                if self.asked < 3:
                    return []
            return super().answer(message)

    place.config |= {"min-sites": 4, "wait": 5.0}
    grid = place.grid()
    grid.__class__ = Slow
    assert place.run(grid).clients.index[2] == "site 2"


def test_a_second_node_of_the_same_client_is_turned_away(place: Place) -> None:
    grid = place.grid()
    grid.contexts[1003].node_config["partition-id"] = 0
    place.run(grid)
    notes = status(place)["notes"]
    assert any("node 1003: it was turned away: node 1000 is client 0 already" in note for note in notes)


@pytest.mark.parametrize("number", [None, 4, -1, "x"])
def test_a_node_without_a_place_is_turned_away_and_told_what_is_missing(place: Place, number: Any) -> None:
    grid = place.grid()
    grid.contexts[1003].node_config["partition-id"] = number
    place.run(grid)
    assert any("needs --node-config 'partition-id=N' with N from 0 to 3" in note for note in status(place)["notes"])


def test_a_site_of_another_version_is_turned_away(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(LocalGrid):
        def answer(self, message: Message) -> list[Message]:
            monkeypatch.setattr(wire, "FORMAT", 99 if message.metadata.dst_node_id == 1002 else 1)
            replies = super().answer(message)
            monkeypatch.setattr(wire, "FORMAT", 1)
            return replies

    grid = place.grid()
    grid.__class__ = Old
    place.run(grid)
    assert any("node 1002: it was turned away" in note and "format" in note for note in status(place)["notes"])


# -- what is kept


def test_a_killed_server_goes_on_to_the_same_result(place: Place) -> None:
    whole = place.run()

    class Killed(BaseException):
        pass

    class Dying(LocalGrid):
        def answer(self, message: Message) -> list[Message]:
            # In the third round, after two sites have trained and kept what they learned.
            if message.metadata.group_id == "2" and message.metadata.dst_node_id == 1002:
                raise Killed
            return super().answer(message)

    place.config["out"] = str(place.folder / "again")
    place.config["experiment"] = "again"
    grid = place.grid()
    grid.__class__ = Dying
    with pytest.raises(Killed):
        place.run(grid)
    assert json.loads((place.folder / "again" / "federation.json").read_text())["round"] == 2
    resumed = place.run()
    for a, b in zip(tree.leaves(resumed.state.server), tree.leaves(whole.state.server), strict=True):
        assert torch.equal(a, b)
    assert [r["round"] for r in resumed.history] == [r["round"] for r in whole.history]


def test_a_server_that_is_killed_before_its_last_files_writes_them_when_it_is_run_again(place: Place) -> None:
    place.run()
    out = place.folder / "out"
    before = {name: (out / name).read_bytes() for name in ("summary.json", "clients.csv", "model/model.json")}
    for name in before:
        (out / name).unlink()
    place.run()
    assert before == {name: (out / name).read_bytes() for name in before}


def test_a_site_that_never_came_is_not_among_the_small_ones(place: Place) -> None:
    grid = place.grid()
    grid.contexts.pop(1003)
    result = place.run(grid)
    assert result.clients["n_train"].iloc[3] == 0
    assert result.summary["small_clients_pm"] is not None
    assert 3 not in result.small_clients


def test_a_complete_run_stays_as_it_is_when_it_is_run_again(place: Place) -> None:
    place.run()
    before = {path: path.read_bytes() for path in (place.folder / "out").rglob("*") if path.is_file()}
    place.run()
    assert before == {path: path.read_bytes() for path in (place.folder / "out").rglob("*") if path.is_file()}


def test_a_second_server_in_the_same_folder_is_refused(place: Place) -> None:
    (place.folder / "out").mkdir()
    with only_server(place.folder / "out"), pytest.raises(UserError, match="Another server is at work in"):
        place.run()


def test_a_run_with_other_settings_does_not_go_on(place: Place) -> None:
    place.run()
    place.config |= {"rounds": 5, "seed": 1}
    with pytest.raises(UserError, match=r"other settings: seed \(was 0, now 1\)"):
        place.run()


def test_a_site_that_lost_what_it_kept_starts_anew_and_says_so(place: Place) -> None:
    place.run()
    for file in (place.folder / "site-1").rglob("*.safetensors"):
        file.unlink()
    place.config |= {"rounds": 4}
    place.run()
    notes = status(place)["notes"]
    assert [note for note in notes if "anew" in note] == [
        "Round 4: site 1 had kept nothing and started anew from what was sent."
    ]


def test_a_site_says_when_it_writes_over_an_earlier_run(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.run()
    assert "writes over" not in caplog.text
    place.config["out"] = str(place.folder / "again")
    place.run()
    assert "Client 3 writes over what it kept of an earlier run of this experiment." in caplog.text


def keeping(folder: Path) -> Keeping:
    return Keeping(folder, "e", 3, "pfedvem")


STATE = {"mu": torch.arange(6.0).view(1, 2, 3), "count": torch.tensor([4])}


def test_what_is_kept_can_be_read_again_and_only_by_its_owner(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keeping(tmp_path).save(1, STATE)
    finally:
        os.umask(before)
    (file,) = tmp_path.rglob("*.safetensors")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    found, warnings = keeping(tmp_path).load(1, STATE)
    assert warnings == []
    assert found is not None
    assert torch.equal(found["mu"], STATE["mu"])


def test_a_crash_while_a_file_is_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = keeping(tmp_path)
    place.save(1, STATE)

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            place.save(2, {name: value + 1 for name, value in STATE.items()})
    found, warnings = place.load(2, STATE)
    assert warnings == []
    assert found is not None
    assert torch.equal(found["mu"], STATE["mu"])
    place.save(2, STATE)
    assert place.load(2, STATE)[0] is not None


def test_a_repeated_round_starts_from_what_was_kept_before_it(tmp_path: Path) -> None:
    place = keeping(tmp_path)
    for round in range(1, 6):
        place.save(round, {"mu": torch.tensor([float(round)])})
    like = {"mu": torch.zeros(1)}
    assert len(list(tmp_path.rglob("*.safetensors"))) == KEPT
    assert place.load(4, like)[0] == {"mu": torch.tensor([4.0])}
    place.save(4, {"mu": torch.tensor([44.0])})
    assert place.load(9, like)[0] == {"mu": torch.tensor([44.0])}  # round 5 belonged to the past that is repeated
    assert place.load(1, like) == (None, [])


@pytest.mark.parametrize("where", [0, 60, -1])
def test_a_damaged_file_is_passed_over_for_an_older_one(tmp_path: Path, where: int) -> None:
    place = keeping(tmp_path)
    place.save(1, STATE)
    place.save(2, STATE)
    newest = sorted(tmp_path.rglob("*.safetensors"))[-1]
    content = bytearray(newest.read_bytes())
    content[where] ^= 255
    newest.write_bytes(content)
    found, warnings = place.load(2, STATE)
    assert found is not None
    assert len(warnings) == 1
    assert warnings[0].startswith("round-00002.safetensors cannot be used")


def test_a_file_of_another_version_is_not_used(tmp_path: Path) -> None:
    place = keeping(tmp_path)
    place.save(1, STATE)
    (file,) = tmp_path.rglob("*.safetensors")
    file.write_bytes(safetensors.torch.save(STATE, {"format": "2"}))
    assert place.load(1, STATE) == (None, ["round-00001.safetensors cannot be used (it is of format 2, not 1)"])


def test_what_another_method_kept_is_never_taken_over(tmp_path: Path) -> None:
    keeping(tmp_path).save(1, STATE)
    with pytest.raises(UserError, match="it was pfedvem, now fedper"):
        Keeping(tmp_path, "e", 3, "fedper").load(1, STATE)


# -- settings


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"clients": 2}, "The setting experiment is missing"),
        ({"experiment": "../x", "clients": 2}, "experiment should be"),
        ({"experiment": "x", "clients": 0}, "clients should be greater than or equal to 1, not 0"),
        ({"experiment": "x", "clients": 2, "round": 3}, "There is no setting round; there are experiment, clients"),
        ({"experiment": "x", "clients": 2, "algorithm.lr": 3}, "There is no setting algorithm.lr; there are lr_head"),
        ({"experiment": "x", "clients": 2, "algorithm.lr-head": -1.0}, "algorithm.lr_head should be greater than 0"),
    ],
)
def test_a_mistake_in_the_settings_is_a_sentence(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        Settings.read(values)
    assert said in str(raised.value)
