"""The configuration: what wins over what, what is saved, and how mistakes are answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import tomli_w
from pydantic import Field, ValidationError

from pfedvem.algorithms import METHODS, Algorithm, FedAvg, PFedVEM, method
from pfedvem.data import DataSettings
from pfedvem.errors import UserError
from pfedvem.experiments.config import Config, load
from pfedvem.experiments.presets import preset


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def complaint(file: Path | None = None, flags: dict[str, Any] | None = None, *assignments: str) -> str:
    with pytest.raises(UserError) as caught:
        load(file, flags, assignments)
    return str(caught.value)


def test_without_a_word_pfedvem_runs_on_digits() -> None:
    config = load()
    assert (config.method, config.data.dataset, config.network) == ("pfedvem", "digits", "mlp")
    assert config.algorithm == PFedVEM(**preset("digits", PFedVEM)["algorithm"])


def test_file_wins_over_preset_flags_over_file_and_assignments_over_flags(file: Path) -> None:
    file.write_text(
        'rounds = 7\nseed = 7\nparticipation = 0.7\nnetwork = "lenet"\n'
        '[data]\ndataset = "cifar100"\n[algorithm]\nhead_epochs = 7\nbase_epochs = 7\nsamples = 7'
    )
    flags = {"seed": 8, "participation": 0.8, "algorithm": {"base_epochs": 8, "samples": 8}}
    config = load(file, flags, ["participation=0.9", "samples=8", "samples=9"])
    assert preset("cifar100", PFedVEM)["network"] == "cnn6"
    assert (config.network, config.rounds, config.seed, config.participation) == ("lenet", 7, 8, 0.9)
    assert isinstance(config.algorithm, PFedVEM)
    assert (config.algorithm.batch_size, config.algorithm.lr_base) == (50, 1e-2), "the preset of cifar100"
    assert config.algorithm.head_epochs == 7
    assert config.algorithm.base_epochs == 8
    assert config.algorithm.samples == 9


def test_a_flag_in_a_section_leaves_the_rest_of_the_section_to_the_file(file: Path) -> None:
    file.write_text("[data]\nclients = 30\nlabels_per_client = 3")
    config = load(file, {"data": {"clients": 40}})
    assert (config.data.clients, config.data.labels_per_client) == (40, 3)


def test_the_data_set_decides_the_preset_wherever_it_is_named(file: Path) -> None:
    file.write_text('[data]\ndataset = "cifar10"')
    by_file, by_flag = load(file), load(None, {"data": {"dataset": "cifar10"}})
    assert by_file == by_flag == load(None, None, ["dataset=cifar10"])
    assert (by_file.network, by_file.data.clients, by_file.data.image_column) == ("lenet", 100, "img")


@pytest.mark.parametrize(
    ("text", "section", "key", "value"),
    [
        ("rounds=3", "", "rounds", 3),
        ("lr_head=0.02", "algorithm", "lr_head", 0.02),
        ("algorithm.lr_head = 2e-2", "algorithm", "lr_head", 0.02),
        ("clients=12", "data", "clients", 12),
        ("data.clients=12", "data", "clients", 12),
        ("alone=false", "", "alone", False),
        ("data.sizes=" + str([2] * 20), "data", "sizes", (2.0,) * 20),
        ('dataset="my folder"', "data", "dataset", "my folder"),
        ("dataset=a=b", "data", "dataset", "a=b"),
        ("partition=iid", "data", "partition", "iid"),
        ("confidence=deviation", "algorithm", "confidence", "deviation"),
    ],
)
def test_assignments_take_bare_and_dotted_keys_and_typed_values(text: str, section: str, key: str, value: Any) -> None:
    config = load(None, None, [text])
    found = getattr(getattr(config, section) if section else config, key)
    assert found == value
    assert type(found) is type(value)


def test_the_method_decides_which_keys_exist_even_if_it_is_named_last() -> None:
    assert load(None, None, ["lr=0.5", "method=fedavg"]).algorithm == FedAvg(lr=0.5)
    assert load(None, {"method": "local"}, ["method=fedavg", "lr=0.5"]).algorithm == FedAvg(lr=0.5)


def test_a_bare_key_of_two_sections_must_be_dotted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sharp(FedAvg):
        name: ClassVar[str] = "sharp"
        holdout: float = Field(default=1.0)

    monkeypatch.setitem(METHODS, "sharp", Sharp)
    wrong = complaint(None, {"method": "sharp"}, "holdout=2")
    assert wrong == "There is more than one holdout: write data.holdout or algorithm.holdout."
    assert load(None, {"method": "sharp"}, ["algorithm.holdout=2"]).algorithm == Sharp(holdout=2)


@pytest.mark.parametrize(
    ("method", "assignment", "sentence"),
    [
        ("pfedme", "lam=-1", "algorithm.lam should be greater than 0, not -1."),
        ("ifca", "clusters=0", "algorithm.clusters should be greater than or equal to 1, not 0."),
        ("fedavg", "batch_size=0", "algorithm.batch_size should be greater than or equal to 1, not 0."),
        ("local", "lr=-1", "each of algorithm.lr should be greater than 0, not -1."),
        ("local", "batch_size=[10, 0]", "each of algorithm.batch_size should be greater than or equal to 1, not 0."),
        ("scaffold", "weights=tau", "algorithm.weights should be 'size' or 'uniform', not 'tau'."),
    ],
)
def test_hyper_parameters_out_of_range_are_refused_with_the_range(method: str, assignment: str, sentence: str) -> None:
    assert complaint(None, {"method": method}, assignment) == sentence


class Unfinished(FedAvg):
    """It says that it has personalised models, and makes none."""

    personalised: ClassVar[bool] = True
    must: int


class Nameless(Algorithm[None, None, None, None, None]):
    pass


@pytest.mark.parametrize("name", [f"pfedvem.algorithms:{cls.__name__}" for cls in METHODS.values()])
def test_every_method_may_be_given_by_where_it_is(name: str) -> None:
    assert method(name) in METHODS.values()


def test_a_method_that_lacks_a_part_is_refused_before_anything_runs() -> None:
    with pytest.raises(UserError, match=r"Unfinished' lacks personal \(or personalised = False\); docs/own-method.md"):
        method(f"{__name__}:Unfinished")
    with pytest.raises(UserError, match=r"Nameless' lacks name, title, reference, keeps, sends, client_init"):
        method(f"{__name__}:Nameless")


def test_a_hyper_parameter_without_a_default_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unfinished, "personalised", False)
    with pytest.raises(UserError, match=r"algorithm.must has no default: give it a value, as by --set must=VALUE\."):
        load(flags={"method": f"{__name__}:Unfinished"})


def test_alpha_on_fedavg_is_refused_as_a_setting_of_another_method() -> None:
    assert complaint(None, {"method": "fedavg"}, "alpha=0.1").startswith(
        "'alpha' is a setting of perfedavg, not of fedavg"
    )


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("dataset", ["digits", "cifar10", "cifar100"])
def test_a_saved_configuration_is_read_back_as_it_was(file: Path, method: str, dataset: str) -> None:
    config = load(None, {"method": method, "seed": 2**63 - 1, "data": {"dataset": dataset, "root": "some/where"}})
    file.write_text(tomli_w.dumps(config.dump()))
    assert load(file) == config


def test_a_saved_configuration_keeps_a_list_of_sizes_and_odd_texts(file: Path) -> None:
    sizes = "sizes=[1, 2.5, 1e-3]"
    config = load(None, {"data": {"clients": 3, "dataset": 'a "b"\\c\n\u00e9'}}, [sizes, "lr_head=0.1", "workers=3"])
    file.write_text(tomli_w.dumps(config.dump()), encoding="utf-8")
    assert load(file) == config
    assert load(file).data.sizes == (1, 2.5, 0.001)


def test_a_saved_configuration_does_not_depend_on_presets(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(None, {"data": {"dataset": "cifar100"}})
    file.write_text(tomli_w.dumps(config.dump()))
    changed = {"network": "mlp", "rounds": 5, "algorithm": {"lr_head": 1.0}}
    monkeypatch.setattr("pfedvem.experiments.config.preset", lambda dataset, method: changed)
    assert load().rounds == 5
    assert load(file) == config


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("round = 5", "There is no setting 'round'; the nearest is 'rounds'."),
        ("lr_head = 0.1", "There is no setting 'lr_head'; the nearest is 'algorithm.lr_head'."),
        ("[data]\nclient = 5", "There is no setting 'data.client'; the nearest is 'data.clients'."),
        ("[data]\nrounds = 5", "There is no setting 'data.rounds'; the nearest is 'rounds'."),
        ("[algorithm]\nlr_haed = 1", "There is no setting 'algorithm.lr_haed'; the nearest is 'algorithm.lr_head'."),
        ("[algoritm]\nlr_head = 1", "There is no section 'algoritm'; the nearest is 'algorithm'."),
        ("[date]\nclients = 5", "There is no section 'date'; the nearest is 'data'."),
        ("[rounds]\nclients = 5", "rounds should be a whole number greater than or equal to 1, not {'clients': 5}."),
    ],
)
def test_unknown_keys_in_a_file_are_answered_by_the_nearest(file: Path, text: str, sentence: str) -> None:
    file.write_text(text)
    assert complaint(file) == sentence


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("round=5", "There is no setting 'round'; the nearest is 'rounds'."),
        ("lr_haed=1", "There is no setting 'lr_haed'; the nearest is 'algorithm.lr_head'."),
        ("data.label=5", "There is no setting 'data.label'; the nearest is 'data.label_column'."),
        ("dat.clients=5", "There is no section 'dat'; the nearest is 'data'."),
        ("data.clients.x=5", "There is no section 'data.clients'; the nearest is 'data'."),
        ("rounds", "--set takes key=value, not 'rounds'."),
        ("=5", "--set takes key=value, not '=5'."),
    ],
)
def test_wrong_assignments_are_answered_by_what_is_right(assignment: str, sentence: str) -> None:
    assert complaint(None, None, assignment) == sentence


@pytest.mark.parametrize("section", ["", "algorithm."])
@pytest.mark.parametrize(
    ("method", "key", "owner", "near"), [("fedavg", "lr_head", "pfedvem", "lr"), ("pfedvem", "lr", "fedavg", "lr_head")]
)
def test_a_key_of_another_method_is_said_to_be_one(section: str, method: str, key: str, owner: str, near: str) -> None:
    start, _, end = complaint(None, {"method": method}, f"{section}{key}=1").partition(", not of ")
    assert start.startswith(f"{key!r} is a setting of ")
    assert owner in start
    assert end == f"{method}; the nearest is 'algorithm.{near}'."


def test_a_section_that_is_a_value_is_refused_even_if_a_later_layer_would_hide_it(file: Path) -> None:
    file.write_text("data = 5")
    assert complaint(file).startswith("data is a section of settings, not a value; its keys are dataset, root,")
    assert complaint(file, {"data": {"clients": 5}}).startswith("data is a section of settings, not a value")
    assert complaint(None, {"method": "fedavg"}, "algorithm=5") == (
        f"algorithm is a section of settings, not a value; its keys are {', '.join(FedAvg.model_fields)}."
    )


def test_a_file_that_cannot_be_read_is_named(file: Path, tmp_path: Path) -> None:
    assert complaint(file) == f"There is no configuration file {file}."
    file.write_text("rounds 5")
    assert complaint(file).startswith(f"{file} is no readable TOML file: ")
    assert "line 1" in complaint(file)
    file.write_bytes(b"\xff\xfe")
    assert complaint(file).startswith(f"{file} is no readable TOML file: ")
    assert complaint(tmp_path) == f"{tmp_path} is no readable TOML file: Is a directory."


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("rounds=-1", "rounds should be greater than or equal to 1, not -1."),
        ("data.clients=0", "data.clients should be greater than or equal to 1, not 0."),
        ("participation=0", "participation should be greater than 0 and less than or equal to 1, not 0."),
        ("participation=1.5", "participation should be greater than 0 and less than or equal to 1, not 1.5."),
        ("algorithm.lr_head=-1", "algorithm.lr_head should be greater than 0, not -1."),
        ("lr_head=nan", "algorithm.lr_head should be a finite number greater than 0, not nan."),
        ("batch_size=0", "algorithm.batch_size should be greater than or equal to 1, not 0."),
        ("seed=-1", f"seed should be greater than or equal to 0 and less than {2**63}, not -1."),
        ("workers=0", "workers should be greater than or equal to 1, not 0."),
    ],
)
def test_values_out_of_range_are_answered_by_the_range(assignment: str, sentence: str) -> None:
    assert complaint(None, None, assignment) == sentence


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ('rounds="many"', "rounds should be a whole number greater than or equal to 1, not 'many'."),
        ("rounds=1.5", "rounds should be a whole number greater than or equal to 1, not 1.5."),
        ("lr_head=fast", "algorithm.lr_head should be a number greater than 0, not 'fast'."),
        ("alone=perhaps", "alone should be true or false, not 'perhaps'."),
        ("data.dataset=5", "data.dataset should be text, not 5."),
        ("data.root=5", "data.root should be a path, not 5."),
        ("sizes=large", "data.sizes should be 'slices' or 'equal', or a list, not 'large'."),
        ('sizes=[1, "two"]', "each of data.sizes should be a number, not 'two'."),
        ("executor=gpu", "executor should be 'auto', 'sequential', 'vectorised' or 'processes', not 'gpu'."),
        ("confidence=none", "algorithm.confidence should be 'both', 'uncertainty' or 'deviation', not 'none'."),
        (
            "partition=label",
            "data.partition should be 'labels', 'subclasses', 'domains', 'dirichlet', 'iid' or 'natural', not 'label'.",
        ),
    ],
)
def test_values_of_a_wrong_type_are_answered_by_what_is_allowed(assignment: str, sentence: str) -> None:
    assert complaint(None, None, assignment) == sentence


def test_values_that_do_not_go_together_are_refused() -> None:
    wrong = complaint(None, {"executor": "sequential", "workers": 2})
    assert wrong == "The sequential executor has one worker, not 2."
    assert complaint(None, None, "sizes=[1, 2]") == "sizes has 2 weights for 20 clients; give one for each."
    with pytest.raises(ValidationError, match="The method is 'fedavg', but its settings are those of 'pfedvem'"):
        Config(method="fedavg", data=DataSettings(), algorithm=PFedVEM())


def test_several_mistakes_are_told_together() -> None:
    wrong = complaint(None, {"rounds": 0, "seed": "now"})
    assert wrong.startswith("rounds should be greater than or equal to 1, not 0. seed should be a whole number")


def test_unknown_methods_and_networks_are_answered_by_what_there_is() -> None:
    wrong = complaint(None, {"method": "fedavgg"})
    assert wrong.startswith("There is no method 'fedavgg'")
    assert "the nearest is fedavg (there are" in wrong
    assert complaint(None, None, "method=3").startswith("There is no method '3'")
    assert complaint(None, None, "network=vgg") == "There is no network 'vgg'; there are mlp, lenet, cnn6."
