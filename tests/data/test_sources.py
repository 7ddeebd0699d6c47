"""Reading data sets: local copies of hub data, folders of images, the paper's special cases, and what goes wrong."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from pfedvem.data import DataSettings, load_federation, sun397
from pfedvem.data.catalogue import CATALOGUE, DIGIT_FIVE, find, locate
from pfedvem.data.images import decode
from pfedvem.data.reading import Table, read
from pfedvem.data.settings import defaults_for
from pfedvem.data.sources import Source, load_source
from pfedvem.errors import UserError
from tests.data.conftest import Writer, labels, png


def settings(root: Path | None = None, dataset: str = "me/pets", **values: Any) -> DataSettings:
    return DataSettings.model_validate({"dataset": dataset, "root": root, "partition": "iid", "clients": 2} | values)


@pytest.fixture
def pets(write_split: Writer) -> Path:
    write_split("me/pets", "train", {"label": labels(10, 2)}, {"label": ["cat", "dog"]})
    return write_split("me/pets", "test", {"label": labels(3, 2)}, {"label": ["cat", "dog"]})


# Reading


def test_a_hub_copy_is_read_pixel_by_pixel_with_its_class_names(pets: Path, root: Path) -> None:
    source = load_source(settings(root))
    assert source.classes == ("cat", "dog")
    assert source.train.x.shape == (20, 1, 6, 6)
    assert source.train.x.dtype == torch.uint8
    assert source.train.x[:, 0, 0, 0].tolist() == list(range(20))
    assert source.train.y.tolist() == labels(10, 2)
    assert source.test is not None
    assert len(source.test) == 6
    assert source.notes == ()


def test_a_folder_may_be_named_directly(pets: Path) -> None:
    assert len(load_source(settings(dataset=str(pets))).train) == 20


def test_a_folder_may_have_brackets_and_stars_in_its_name(tmp_path: Path) -> None:
    for name in ("a", "[b]"):
        (tmp_path / "mine [1] {é}*?" / name).mkdir(parents=True)
        for i in range(5):
            Image.new("L", (6, 6), i).save(tmp_path / "mine [1] {é}*?" / name / f"{i} [x].png")
    source = load_source(settings(dataset=str(tmp_path / "mine [1] {é}*?")))
    assert source.classes == ("[b]", "a")
    assert len(source.train) == 8


def test_a_folder_of_images_has_its_directories_as_classes(tmp_path: Path) -> None:
    for split, n in (("train", 4), ("test", 2)):
        for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
            (tmp_path / "mine" / split / name).mkdir(parents=True)
            for i in range(n):
                Image.new("RGB", (5, 5), colour).save(tmp_path / "mine" / split / name / f"{i}.png")
    source = load_source(settings(dataset=str(tmp_path / "mine")))
    assert source.classes == ("blue", "red")
    assert source.train.x.shape == (8, 3, 5, 5)
    assert source.test is not None
    assert len(source.test) == 4
    assert source.train.x[torch.from_numpy(source.train.y == 1), :, 2, 2].tolist() == [[255, 0, 0]] * 4


def test_labels_that_are_words_or_any_numbers_become_classes_in_sorted_order(write_split: Writer, root: Path) -> None:
    write_split("me/words", "train", {"label": ["pear", "apple", "fig", "fig"], "age": [7, 3, 7, 3]})
    write_split("me/words", "test", {"label": ["kiwi", "apple"], "age": [3, 3]})
    source = load_source(settings(root, "me/words"))
    assert source.classes == ("apple", "fig", "kiwi", "pear")
    assert source.train.y.tolist() == [3, 0, 1, 1]
    assert load_source(settings(root, "me/words", label_column="age")).classes == ("3", "7")


def test_without_a_test_split_a_fixed_part_of_every_label_is_held_out_and_said_so(
    write_split: Writer, root: Path
) -> None:
    write_split("me/one", "train", {"label": labels(10, 2)})
    source = load_source(settings(root, "me/one", holdout=0.3))
    assert source.test is not None
    assert np.bincount(source.test.y).tolist() == [3, 3]
    assert np.bincount(source.train.y).tolist() == [7, 7]
    assert "6 of 20 samples are held out" in source.notes[0]


def test_a_validation_split_serves_as_test_data_where_there_is_no_other(write_split: Writer, root: Path) -> None:
    write_split("me/val", "train", {"label": labels(4, 2)})
    write_split("me/val", "validation", {"label": labels(1, 2)})
    source = load_source(settings(root, "me/val"))
    assert source.test is not None
    assert len(source.test) == 2
    assert "validation" in source.notes[0]


def test_digits_ship_with_the_library_and_their_test_data_does_not_depend_on_the_run() -> None:
    one, two = (load_federation(DataSettings(dataset="digits"), seed) for seed in (1, 2))
    assert one.shape == (1, 8, 8)
    assert int(one.train.x.max()) == 16
    assert torch.equal(one.test.x, two.test.x)
    assert len(one.test) / (len(one.test) + len(one.train)) == pytest.approx(0.2, abs=0.01)


def test_normalised_training_data_has_mean_zero_and_spread_one() -> None:
    federation = load_federation(DataSettings(dataset="digits"), 0)
    x = federation.inputs(federation.train.x)
    assert x.mean().item() == pytest.approx(0, abs=1e-4)
    assert x.std().item() == pytest.approx(1, abs=1e-3)


# Images


def test_one_image_of_colour_makes_all_of_them_colour() -> None:
    x = decode([png(7), png(200, mode="RGB")])
    assert x.shape == (2, 3, 6, 6)
    assert x[0, :, 0, 0].tolist() == [7, 7, 7]
    assert x[1, :, 0, 0].tolist() == [200, 0, 55]


def test_an_image_size_takes_the_centre_square() -> None:
    wide = Image.new("L", (30, 10), 0)
    wide.paste(255, (10, 0, 20, 10))
    x = decode([_png(wide), png(9, (4, 4))], size=5)
    assert x.shape == (2, 1, 5, 5)
    assert (x[0] == 255).all()


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


# The cache


def test_a_second_load_comes_from_the_cache_and_is_the_same(
    pets: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_source(settings(root))
    monkeypatch.setattr("pfedvem.data.sources.read", lambda *_: pytest.fail("the data was read again"))
    second = load_source(settings(root))
    assert _same(first, second)


def test_a_damaged_cache_file_is_made_again_with_a_note(pets: Path, root: Path, own_cache: Path) -> None:
    first = load_source(settings(root))
    (file,) = own_cache.iterdir()
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[-40] ^= 4  # a pixel
    for damage in (whole[:100], b"", whole[:-5], bytes(flipped)):
        file.write_bytes(damage)
        again = load_source(settings(root))
        assert "is damaged" in again.notes[-1]
        assert again.notes[-1].endswith("the data set was read again.")
        assert _same(first, dataclasses.replace(again, notes=again.notes[:-1]))
        assert file.read_bytes() == whole


def test_a_cache_file_is_made_again_and_replaced_when_the_data_changed(
    pets: Path, root: Path, write_split: Writer, own_cache: Path
) -> None:
    load_source(settings(root))
    write_split("me/pets", "train", {"label": labels(7, 2)}, {"label": ["cat", "dog"]})
    assert len(load_source(settings(root)).train) == 14
    assert len(list(own_cache.iterdir())) == 1


def test_a_cache_that_cannot_be_written_does_not_stop_a_run(
    pets: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("PFEDVEM_CACHE", str(tmp_path / "file"))
    assert len(load_source(settings(root)).train) == 20


def test_a_cached_load_imports_no_slow_library() -> None:
    load_source(DataSettings(dataset="digits"))
    code = (
        "import sys; from pfedvem.data import DataSettings, load_federation;"
        "load_federation(DataSettings(dataset='digits'), 0);"
        "print([name for name in ('datasets', 'pandas', 'pyarrow', 'sklearn') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _same(one: Source, two: Source) -> bool:
    assert one.test is not None
    assert two.test is not None
    arrays = torch.equal(one.train.x, two.train.x) and torch.equal(one.test.x, two.test.x)
    about = (one.classes, one.mean, one.std, one.notes) == (two.classes, two.mean, two.std, two.notes)
    return arrays and about and np.array_equal(one.train.y, two.train.y)


# CIFAR-100, SUN397, Digit-Five


def test_cifar_100_predicts_superclasses_and_is_dealt_by_subclass(write_split: Writer, root: Path) -> None:
    fine = labels(12, 4)
    columns = {"fine_label": fine, "coarse_label": [f // 2 for f in fine]}
    names = {"fine_label": ["apple", "pear", "bear", "lion"], "coarse_label": ["fruit", "animals"]}
    for split in ("train", "test"):
        images = [png(i, mode="RGB") for i in range(48)]
        write_split("uoft-cs/cifar100", split, columns, names, images, "img")
    federation = load_federation(DataSettings(dataset="cifar100", root=root, clients=4), 0)
    assert federation.classes == ("fruit", "animals")
    assert federation.mean == (0.5074, 0.4867, 0.4411)
    for j, shard in enumerate(federation.shards):
        assert len(shard.owns) == 2
        ids = [names["fine_label"].index(name) for name in shard.owns]
        assert sorted(federation.test_indices(j).tolist()) == [i for i, f in enumerate(fine) if f in ids]


def test_the_published_flaw_looks_for_superclasses_among_subclasses(write_split: Writer, root: Path) -> None:
    fine = labels(12, 4)
    columns = {"fine_label": fine, "coarse_label": [f // 2 for f in fine]}
    for split in ("train", "test"):
        write_split("uoft-cs/cifar100", split, columns, image_column="img")
    data = DataSettings(dataset="cifar100", root=root, clients=4, pm_test="published")
    federation = load_federation(data, 0)
    for j, shard in enumerate(federation.shards):
        ids = {int(name) for name in shard.owns}
        expected = [i for i, f in enumerate(fine) if f in ids and f // 2 in ids]
        assert sorted(federation.test_indices(j).tolist()) == expected


def test_the_hierarchy_of_sun397_ships_and_has_fifty_categories_of_each_superclass() -> None:
    assert files("pfedvem.data").joinpath("sun397_hierarchy.tsv").is_file()
    known = sun397.hierarchy()
    assert len(known) == 397
    assert all(list(known.values()).count(s) >= 50 for s in range(3))


def test_sun397_takes_the_first_fifty_categories_of_one_superclass_and_their_first_hundred_images() -> None:
    known = list(sun397.hierarchy().items())
    order = np.random.default_rng(0).permutation(len(known))
    names = [known[i][0] for i in order]
    y = np.tile(np.arange(len(names)), 103)
    chosen = sun397.choose(names, y)
    for s in range(3):
        expected = [name for name, superclass in known if superclass == s][:50]
        mine = [chosen.names[c] for c in np.unique(chosen.category[chosen.superclass == s])]
        assert mine == expected
    assert set(np.bincount(chosen.category)) == {100}
    first = chosen.samples[chosen.category == 0]
    assert first.tolist() == np.flatnonzero(y == y[first[0]])[:100].tolist()
    assert chosen.notes == ()


@pytest.mark.parametrize(
    "name", ["/c/church/outdoor", "church outdoor", "church_outdoor", "outdoor church", "c/church/outdoor"]
)
def test_sun397_categories_are_known_by_any_spelling(name: str) -> None:
    assert sun397.choose([name], np.zeros(3, dtype=np.int64)).superclass.tolist() == [2, 2, 2]


def test_a_part_of_sun397_is_used_as_it_is_and_said_so(write_split: Writer, root: Path) -> None:
    names = ["kitchen", "desert", "highway", "abbey", "no such place"]  # a highway is natural and man-made
    for split in ("train", "test"):
        write_split("tanganke/sun397", split, {"label": labels(5, 5)}, {"label": names})
    federation = load_federation(DataSettings(dataset="sun397", root=root, clients=3), 0)
    assert federation.classes == ("indoor", "outdoor natural", "outdoor man-made")
    assert federation.shape == (3, 64, 64)
    assert {name for shard in federation.shards for name in shard.owns} == {"kitchen", "desert", "abbey"}
    assert (len(federation.train), len(federation.test)) == (24, 6)
    assert "3 of its 150 categories; 147 are missing" in federation.notes[0]


def test_digit_five_uses_the_domains_that_are_there_and_names_the_missing(write_split: Writer, root: Path) -> None:
    for split in ("train", "test"):
        write_split("ylecun/mnist", split, {"label": labels(3, 10)})
        images = [png(i, (9, 9), "RGB") for i in range(30)]
        write_split("ufldl-stanford/svhn/cropped_digits", split, {"label": labels(3, 10)}, images=images)
    federation = load_federation(DataSettings(dataset="digit5", root=root, clients=4), 0)
    assert federation.shape == (3, 32, 32)
    assert len(federation.train) == 60
    assert "2 of its 5 domains; missing: usps, mnist-m, synthetic-digits" in federation.notes[0]
    for shard in federation.shards:
        assert len({name.split(" of ")[1] for name in shard.owns}) == 1
        assert len(shard.owns) == 5


# Presets


def test_every_preset_is_a_valid_setting() -> None:
    for name in CATALOGUE:
        chosen = DataSettings(dataset=name)
        assert {key: getattr(chosen, key) for key in defaults_for(name)} == defaults_for(name)


def test_what_is_given_wins_over_the_preset_and_a_hub_id_has_the_preset_of_its_name() -> None:
    assert DataSettings(dataset="cifar100").partition == "subclasses"
    assert DataSettings(dataset="uoft-cs/cifar100").subclass_column == "fine_label"
    assert DataSettings(dataset="cifar100", clients=7).clients == 7
    entry = find("ylecun/mnist")
    assert entry is not None
    assert entry.name == "mnist"


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match="use 'owned'"):
        DataSettings(dataset="cifar10", pm_test="published")
    with pytest.raises(ValidationError, match="2 weights for 3 clients"):
        DataSettings(dataset="digits", clients=3, sizes=(1.0, 2.0))


# What goes wrong


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        ("cifar", "the nearest known name is cifar10"),
        ("zebras", "known names are digits"),
        ("no/such/folder", "no data set or folder"),
    ],
)
def test_an_unknown_data_set_is_answered_by_the_nearest_name(dataset: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        locate(dataset, None)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"label_column": "kind"}, "no column 'kind'; the columns are image, label"),
        ({"image_column": "photo"}, "no column 'photo'"),
        ({"image_column": "label"}, "does not hold images"),
        ({"partition": "subclasses"}, "needs the column of the subclasses; name it as subclass_column"),
        ({"partition": "natural"}, "needs the column of the client ids; name it as client_column"),
        ({"partition": "domains", "domain_column": "style"}, "no column 'style'"),
        ({"partition": "labels", "labels_per_client": 3}, "take 1 to 2"),
        ({"clients": 30}, "20 samples for 30 clients"),
        ({"dataset": "me/dogs"}, "has no folder me/dogs"),
        ({"dataset": "cifar10"}, "has no folder uoft-cs/cifar10"),
        ({"dataset": "digit5", "partition": "domains"}, "none of the data sets of Digit-Five"),
        ({"dataset": "digits", "partition": "natural"}, "digits has no client ids"),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_sentence(
    pets: Path, root: Path, values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        load_federation(settings(root, **values), 0)


def test_a_data_root_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        load_source(settings(tmp_path / "nowhere"))


def test_a_folder_without_images_is_refused(root: Path) -> None:
    (root / "me" / "pets").mkdir(parents=True)
    with pytest.raises(UserError, match="has no images that can be read"):
        load_source(settings(root))


def test_images_of_different_sizes_ask_for_an_image_size(write_split: Writer, root: Path) -> None:
    write_split("me/pets", "train", {"label": [0, 1]}, images=[png(1, (4, 6)), png(2, (5, 5))])
    with pytest.raises(UserError, match=r"6x4 and 5x5.*image_size"):
        load_source(settings(root))
    assert load_source(settings(root, image_size=4, partition="natural", client_column="label")).train.x.shape[2:] == (
        4,
        4,
    )


def test_an_image_that_is_damaged_is_named(write_split: Writer, root: Path) -> None:
    write_split("me/pets", "train", {"label": [0, 1]}, images=[png(1), b"not an image"])
    with pytest.raises(UserError, match="Image 1 of the data set cannot be read"):
        load_source(settings(root))


def test_samples_without_a_label_are_refused(write_split: Writer, root: Path) -> None:
    write_split("me/pets", "train", {"label": [0, 1, 0]}, {"label": ["cat", "dog"]})
    write_split("me/pets", "test", {"label": [-1, -1]}, {"label": ["cat", "dog"]})
    with pytest.raises(UserError, match="have no value in column 'label'"):
        load_source(settings(root))


def test_without_a_network_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", refuse)
    with pytest.raises(UserError, match=r"uoft-cs/cifar10 could not be fetched .* --data-root DIR reads a local copy"):
        load_source(DataSettings(dataset="cifar10"))
    with pytest.raises(UserError, match="none of the data sets of Digit-Five"):
        load_source(DataSettings(dataset="digit5"))


def test_a_hub_id_may_name_a_configuration(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []
    local = datasets.load_dataset(str(pets), cache_dir=str(pets.parent / "scratch"))

    def load(identity: str, config: str | None) -> datasets.DatasetDict:
        asked.append((identity, config))
        if config == "none":
            raise ValueError("BuilderConfig 'none' not found. Available: ['small']")
        return local

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    monkeypatch.setattr("datasets.load_dataset", load)
    assert len(load_source(settings(dataset="you/pets:small")).train) == 20
    assert len(load_source(settings(dataset="you/pets")).train) == 20
    assert asked == [("you/pets", "small"), ("you/pets", None)]
    with pytest.raises(UserError, match=r"you/pets:NAME.*Available: \['small'\]"):
        load_source(settings(dataset="you/pets:none"))


def test_a_download_that_failed_is_tried_again_and_not_kept(
    write_split: Writer, root: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "test"):
        write_split("ylecun/mnist", split, {"label": labels(3, 10)})

    def read_mnist_only(where: str) -> Table:
        if where != DIGIT_FIVE["mnist"]:
            raise UserError("not now")
        return read(root / where)

    monkeypatch.setattr("pfedvem.data.sources.read", read_mnist_only)
    assert load_source(DataSettings(dataset="digit5")).groups == ("mnist",)
    assert not own_cache.exists()
