"""A user's own data: whatever clients have becomes a federation, and what cannot is refused with what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from pfedvem import Federation, UserError, from_arrays
from pfedvem.data.inputs import Inputs
from pfedvem.data.labels import label_numbers


def pair(n: int, features: int = 4, classes: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(n, features, generator=rng), torch.arange(n) % classes


def own(federation: Federation, client: str | int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A client's training inputs and labels, in some fixed order."""
    shard = federation.shards[federation.place(client)]
    index = torch.from_numpy(shard.train)
    x, y = federation.train.x[index].numpy(), federation.train.y[index].numpy()
    order = np.lexsort(x.reshape(len(x), -1).T)
    return x[order], y[order]


class Pairs(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def table(x: torch.Tensor, y: torch.Tensor) -> pd.DataFrame:
    return pd.DataFrame(x.numpy(), columns=["a", "b", "c", "d"]).assign(label=y.numpy())


def hub(frame: pd.DataFrame) -> Any:
    import datasets

    return datasets.Dataset.from_pandas(frame, preserve_index=False)


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tensors": lambda x, y: (x, y),
    "arrays": lambda x, y: (x.numpy(), y.numpy()),
    "lists": lambda x, y: [x.tolist(), y.tolist()],
    "a tensor dataset": TensorDataset,
    "a dataset of pairs": lambda x, y: Pairs(list(zip(x, y, strict=True))),
    "a dataset of arrays": lambda x, y: Pairs([(a.numpy(), int(b)) for a, b in zip(x, y, strict=True)]),
    "a table": table,
    "a hub dataset": lambda x, y: hub(table(x, y)),
    "a hub dataset of lists": lambda x, y: hub(pd.DataFrame({"x": x.tolist(), "label": y.tolist()})),
}


@pytest.mark.parametrize("form", list(FORMS))
def test_all_forms_of_the_same_data_make_the_same_federation(form: str) -> None:
    expected = Federation.from_datasets([pair(20), pair(9, seed=1)])
    found = Federation.from_datasets([FORMS[form](*pair(20)), FORMS[form](*pair(9, seed=1))])
    assert found.sizes == expected.sizes == (16, 7)
    assert found.classes == ("0", "1", "2")
    for client in ("0", "1"):
        for a, b in zip(own(found, client), own(expected, client), strict=True):
            np.testing.assert_allclose(a, b)


def test_clients_keep_their_names_and_order_and_what_is_held_out_is_their_own() -> None:
    federation = Federation.from_datasets({"10": pair(10), "2": pair(20, seed=1)}, holdout=0.5)
    assert [shard.id for shard in federation.shards] == ["10", "2"]
    assert federation.sizes == (5, 10)
    x, _ = pair(10)
    tested = federation.test.x[federation.test_indices(0)]
    assert len(tested) == 5
    assert sorted([*tested[:, 0].tolist(), *own(federation, 10)[0][:, 0].tolist()]) == sorted(x[:, 0].tolist())


def test_a_client_without_test_data_holds_some_out_and_the_others_do_not() -> None:
    federation = Federation.from_datasets({"a": pair(10), "b": pair(10, seed=1)}, tests={"b": pair(6, seed=2)})
    assert federation.sizes == (8, 10)
    assert [len(federation.test_indices(j)) for j in range(2)] == [2, 6]


def test_words_are_classes_in_alphabetic_order() -> None:
    x, y = pair(9)
    words = np.array(["cat", "ant", "bee"])[y.numpy()]
    federation = Federation.from_datasets([(x, words)])
    assert federation.classes == ("ant", "bee", "cat")
    assert set(federation.shards[0].owns) == {"ant", "bee", "cat"}
    renamed = Federation.from_datasets([(x, words)], classes=("cat", "bee", "ant"))
    assert sorted(own(renamed, 0)[1]) != sorted(own(federation, 0)[1]) or renamed.classes[0] == "cat"


def test_a_label_is_the_same_class_whoever_has_it_where_the_names_are_numbers() -> None:
    x = torch.arange(6.0).unsqueeze(1)
    given: dict[str, list[float]] = {"a": [1, 2, 1, 2, 1, 2], "b": [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]}
    clients = {name: (x, labels) for name, labels in given.items()}
    federation = Federation.from_datasets(clients, tests=clients, classes=["1", "2", "3"])
    for name, labels in given.items():
        assert own(federation, name)[1].tolist() == [label - 1 for label in labels]
    for y in ([1, 2], [2, 1, 3], [3.0, 1.0], ["2", "3"], ["2.0", "1.0"]):
        assert label_numbers(np.array(y), ("1", "2", "3"), "It").tolist() == [int(float(label)) - 1 for label in y]
    for names in (("1", "2", "3"), ("1", "2", "none of them")):
        with pytest.raises(UserError, match=f"Client b has the label '0', which is not among {', '.join(names)}"):
            Federation.from_datasets({"a": (x, [1, 2] * 3), "b": (x, [0, 1, 2] * 2)}, classes=names)


@pytest.mark.parametrize("names", [("0", "1", "2"), ("0.0", "1.0", "2.0"), ("a", "b", "c"), ("0", "1", "many")])
@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.float32])
def test_labels_are_numbers_from_0_where_no_name_is_another_number(names: tuple[str, ...], kind: Any) -> None:
    for y in ([0, 1], [1], [0, 1, 2]):
        assert label_numbers(np.array(y, dtype=kind), names, "It").tolist() == y


def test_numbers_of_one_client_are_the_words_of_another() -> None:
    x = torch.arange(6.0).unsqueeze(1)
    federation = Federation.from_datasets([(x, [0.0, 1.0] * 3), (x, ["0", "1"] * 3)])
    assert federation.classes == ("0", "1")


def test_tables_have_their_columns_in_one_order_whoever_stands_between_them() -> None:
    first = pd.DataFrame({"p": [1.0, 2.0], "q": [10.0, 20.0], "label": [0, 1]})
    clients = {"a": first, "b": (first[["p", "q"]].to_numpy(), first["label"]), "c": first[["q", "p", "label"]]}
    federation = Federation.from_datasets(clients, tests=clients, label="label")
    assert federation.columns == ("p", "q")
    for name in clients:
        assert own(federation, name)[0].tolist() == [[1.0, 10.0], [2.0, 20.0]]


def test_tensors_with_gradients_and_tables_by_index_are_data_like_others() -> None:
    x, y = pair(6)
    assert Federation.from_datasets([(x.requires_grad_(), y)]).train.x.requires_grad is False
    frame = FRAME.set_index("hospital", drop=False)
    assert Federation.from_frame(frame, client="hospital", label="diagnosis").classes == ("1", "2")


def test_words_that_end_like_floats_are_words() -> None:
    names = ("1", "1.0", "v1.0")
    assert label_numbers(np.array(["v1.0", "1.0", "1"]), names, "It").tolist() == [2, 1, 0]
    with pytest.raises(UserError, match="'v1', which is not among"):
        label_numbers(np.array(["v1"]), names, "It")


def test_images_are_normalised_by_channel_and_numbers_only_when_asked() -> None:
    rng = np.random.default_rng(0)
    images = Federation.from_datasets([(rng.integers(0, 256, (30, 8, 8), dtype=np.uint8), np.arange(30) % 2)])
    assert images.shape == (1, 8, 8)
    seen = images.inputs(images.train.x)
    assert abs(float(seen.mean())) < 1e-4
    assert float(seen.std()) == pytest.approx(1, abs=1e-3)
    x = rng.normal(5, 3, (40, 4)).astype(np.float32)
    plain = Federation.from_datasets([(x, np.arange(40) % 2)])
    assert torch.equal(plain.inputs(plain.train.x), plain.train.x)
    scaled = Federation.from_datasets([(x, np.arange(40) % 2)], standardise=True)
    seen = scaled.inputs(scaled.train.x)
    torch.testing.assert_close(seen.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(seen.std(0, correction=0), torch.ones(4), atol=1e-5, rtol=0)


def test_pil_images_of_a_dataset_have_their_channels_first() -> None:
    items = [(Image.new("RGB", (6, 4), (i, 0, 0)), i % 2) for i in range(10)]
    federation = Federation.from_datasets([Pairs(items)])
    assert federation.shape == (3, 4, 6)
    assert federation.train.x.dtype == torch.uint8


def test_a_hub_dataset_of_images_is_decoded() -> None:
    import datasets

    images = [Image.new("L", (5, 5), 10 * i) for i in range(10)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["dark", "light"])})
    data = datasets.Dataset.from_dict({"image": images, "label": [int(i > 4) for i in range(10)]}, features=features)
    federation = Federation.from_datasets({"eye": data})
    assert federation.shape == (1, 5, 5)
    assert federation.classes == ("dark", "light")


FRAME = pd.DataFrame(
    {
        "hospital": ["B"] * 10 + ["A"] * 6,
        "age": np.arange(16.0),
        "smokes": np.arange(16) % 3 == 0,
        "diagnosis": [1, 2] * 8,
    }
)


def test_a_table_is_dealt_by_its_client_column() -> None:
    federation = Federation.from_frame(FRAME, client="hospital", label="diagnosis")
    assert [shard.id for shard in federation.shards] == ["A", "B"]
    assert federation.columns == ("age", "smokes")
    assert federation.classes == ("1", "2")
    assert federation.sizes == (5, 8)
    seen = federation.inputs(federation.train.x)
    torch.testing.assert_close(seen.mean(0), torch.zeros(2), atol=1e-5, rtol=0)


def test_features_can_be_chosen_and_test_rows_given() -> None:
    federation = Federation.from_frame(
        FRAME, client="hospital", label="diagnosis", features=["age"], test=FRAME.head(3), standardise=False
    )
    assert federation.shape == (1,)
    assert [len(federation.test_indices(j)) for j in range(2)] == [1, 3], "A has no test rows and holds one out"
    assert torch.equal(federation.inputs(federation.train.x), federation.train.x)


def test_the_same_seed_holds_out_the_same_rows() -> None:
    first, again, other = (
        Federation.from_frame(FRAME, client="hospital", label="diagnosis", seed=seed) for seed in (1, 1, 2)
    )
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()


def test_columns_may_be_called_by_numbers() -> None:
    frame = table(*pair(20)).set_axis([0, 1, 2, 3, "label"], axis=1)
    federation = Federation.from_datasets([frame, frame.rename(columns=str)])
    assert federation.columns == ("0", "1", "2", "3")
    assert torch.equal(federation.raw.read(frame), torch.tensor(frame[[0, 1, 2, 3]].to_numpy()))
    assert Federation.from_datasets([frame.rename(columns={"label": 4})], label=4).columns == ("0", "1", "2", "3")  # type: ignore[arg-type]
    dealt = frame.assign(site=["a", "b"] * 10).set_axis(range(6), axis=1)
    by_number = Federation.from_frame(dealt, client=5, label=4, features=[0, 2], test=dealt)  # type: ignore[arg-type,list-item]
    by_name = Federation.from_frame(dealt.rename(columns=str), client="5", label="4", features=["0", "2"], test=dealt)
    assert by_number.columns == ("0", "2")
    assert by_number.fingerprint() == by_name.fingerprint()


def test_two_columns_of_the_same_name_as_text_are_refused() -> None:
    frame = table(*pair(6)).rename(columns={"a": 0, "b": "0"})
    for read in (lambda: Federation.from_datasets([frame]), lambda: Inputs((1,), False, columns=("0",)).read(frame)):
        with pytest.raises(UserError, match="Two columns of the table are called '0'; rename one"):
            read()


def test_labels_of_a_table_may_be_whole_floats_on_one_side() -> None:
    floats = FRAME.assign(diagnosis=FRAME["diagnosis"].astype(float))
    expected = Federation.from_frame(FRAME, client="hospital", label="diagnosis", test=FRAME)
    for train, test in ((FRAME, floats), (floats, FRAME), (floats, floats)):
        for classes in (None, ["1", "2"]):
            found = Federation.from_frame(train, client="hospital", label="diagnosis", test=test, classes=classes)
            assert found.classes == ("1", "2")
            assert found.fingerprint() == expected.fingerprint()


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (FRAME.assign(hospital="C"), "test data for 'C', which is no client"),
        (FRAME.drop(columns="diagnosis"), "no column 'diagnosis'; the columns are hospital, age, smokes"),
        (FRAME.drop(columns="age"), "no column 'age'"),
        (FRAME.assign(diagnosis="ill"), "column 'diagnosis' holds more than words or numbers; make them all of one"),
        (FRAME.assign(diagnosis=[None] + [1] * 15), "Client B has rows without a label"),
        (FRAME.assign(diagnosis=pd.Timestamp("2024-02-29")), "column 'diagnosis' holds more than words or numbers"),
    ],
)
def test_test_rows_that_do_not_fit_the_others_are_refused_with_what_to_do(test: pd.DataFrame, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Federation.from_frame(FRAME, client="hospital", label="diagnosis", test=test)


def labelled(labels: list[int | None], x: Any = ([1.0], [2.0], [3.0])) -> Any:
    """A hub dataset whose labels have names."""
    import datasets

    features = datasets.Features({"x": datasets.List(datasets.Value("float32")), "label": datasets.ClassLabel(2)})
    return datasets.Dataset.from_dict({"x": list(x), "label": labels}, features=features)


X, Y = pair(6)
NAN = X.clone()
NAN[1, 2] = float("nan")


@pytest.mark.parametrize(
    ("clients", "options", "message"),
    [
        ([], {}, "at least one client"),
        ({1: (X, Y), "1": (X, Y), 2: (X, Y)}, {}, "Two clients are called 1; give each a name that differs"),
        ({1: (X, Y)}, {"tests": {1: (X, Y), "1": (X, Y)}}, "Two clients are called 1"),
        ({"a": (X[:0], Y[:0])}, {}, "Client a has no data; leave it out"),
        ([Pairs([])], {}, "Client 0 has no data"),
        ({"a": (X, Y), "b": (NAN, Y)}, {}, "Client b: 1 of the values are missing or infinite; fill them or drop"),
        ([(X, Y + 1)], {"classes": ("x", "y", "z")}, "Client 0 has the label 3; labels are whole numbers from 0 to 2"),
        ([(X, Y - 1)], {}, "has the label -1"),
        ([(X, Y + 0.5)], {}, "no whole numbers; this is for classes, not for regression"),
        ([(X, [float("nan")] * 6)], {}, "Client 0: 6 of the labels are missing; drop those samples"),
        ([(X, [np.inf] * 6)], {}, r"Client 0 \(labels\): 6 of the values are missing or infinite"),
        ([(X, ["a", "b", None, "a", "b", "a"])], {}, "Client 0: 1 of the labels are missing"),
        ([(X, pd.Series(["a", "b"] * 2 + [None] * 2, dtype="category"))], {}, "Client 0: 2 of the labels are missing"),
        ([(X, np.ma.masked_equal([0, 1, 0, 1, 9, 0], 9))], {}, "Client 0: 1 of the labels are missing"),
        ([(np.ma.masked_equal(X.numpy(), X[0, 0].item()), Y)], {}, "Some of the inputs are masked; fill them"),
        ([(X.to_sparse(), Y)], {}, r"a sparse tensor; use x.to_dense\(\)"),
        ([{"x": X, "y": Y}], {}, "Client 0 is a dict; give"),
        ([Pairs([("word", 0)])], {}, "Client 0: each input must be numbers of one shape, or an image"),
        ([Pairs([(X[0], torch.tensor(0.7))])], {}, "no whole numbers; this is for classes"),
        ([Pairs([(X[0], torch.tensor([0.0, 1.0]))])], {}, r"1 inputs but labels of shape \(1, 2\)"),
        ([labelled([0, 1, -1])], {}, r"Client 0: 1 of the labels are missing \(-1\)"),
        ([labelled([0, 1, None])], {}, "Client 0: 1 of the labels are missing"),
        (
            [labelled([0, 1, 1]).to_iterable_dataset()],
            {},
            "Client 0 is an IterableDataset, .*; load it without streaming",
        ),
        ([labelled([0, 1, 1], [[1.0], [1.0, 2.0], None])], {}, "no list of numbers of one shape in each row of 'x'"),
        ([(X, ["a"] * 6)], {"classes": ("b", "c")}, "has the label 'a', which is not among b, c"),
        ([(X, Y[:3])], {}, r"6 inputs but labels of shape \(3,\); give one label for each"),
        ([(X, Y), (X[:, :2], Y)], {}, r"Client 1 has inputs of shape \(2,\) \(numbers\) where others have of shape"),
        ([(X, Y, X, Y)], {}, "4 parts; give a pair"),
        ([7], {}, "Client 0 is a int; give"),
        ([Pairs([1, 2])], {}, "each item of its Dataset must be a pair"),
        ([Pairs([(X[0], 0), (X[0, :2], 1)])], {}, "inputs of different shapes"),
        ([(X, Y)], {"holdout": 1.5}, "holdout is the share"),
        ([(X, Y)], {"tests": {"b": (X, Y)}}, "test data for 'b', which is no client"),
        ([(np.zeros((4, 8, 8, 3), dtype=np.uint8), Y[:4])], {}, r"use x.transpose\(0, 3, 1, 2\)"),
        ([table(X, Y).drop(columns="label")], {}, "Client 0 has no labels; name their column as label="),
        ([table(X, Y)], {"label": "colour"}, "There is no column 'colour'; the columns are a, b, c, d, label"),
    ],
)
def test_data_that_cannot_be_used_is_refused_with_what_to_do(
    clients: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Federation.from_datasets(clients, **options)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"client": "clinic"}, "no column 'clinic'; the columns are hospital, age, smokes, diagnosis"),
        ({}, {"label": "illness"}, "no column 'illness'"),
        ({}, {"features": ["age", "weight"]}, "no column 'weight'"),
        ({"age": [np.nan] + [1.0] * 15}, {}, r"Client B \(column 'age'\): 1 of the values are missing"),
        ({"city": "Leuven"}, {}, "column 'city' holds no numbers; turn it into some"),
        ({"hospital": [None] + ["A"] * 15}, {}, "rows have no client in column 'hospital'"),
        ({"diagnosis": [None] + ["ill"] * 15}, {}, "Client B has rows without a label in column 'diagnosis'"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_what_to_do(
    change: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Federation.from_frame(FRAME.assign(**change), **{"client": "hospital", "label": "diagnosis", **options})


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(UserError, match=r"The table is a str; give a pandas DataFrame \(pandas.read_csv makes one\)"):
        Federation.from_frame("a.csv", client="hospital", label="diagnosis")
    twice = pd.concat([FRAME, FRAME[["age"]]], axis=1)
    with pytest.raises(UserError, match="Two columns of the table are called 'age'; rename one of them"):
        Federation.from_frame(twice, client="hospital", label="diagnosis")


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(UserError, match="no rows"):
        Federation.from_frame(FRAME.head(0), client="hospital", label="diagnosis")


@pytest.mark.parametrize(
    ("inputs", "x", "message"),
    [
        (Inputs((4,), False), torch.zeros(3, 5), r"takes inputs of shape \(N, 4\), not \(3, 5\)"),
        (Inputs((1, 8, 8), True), torch.zeros(3, 1, 8, 8), "pixels from 0 to 255 as uint8"),
        (Inputs((1, 8, 8), False), torch.zeros(3, 1, 8, 8).byte(), "trained on numbers, not on uint8 images"),
        (Inputs((8, 8), False), torch.zeros(3, 8, 8).byte(), "trained on numbers, not on uint8 images"),
        (Inputs((4,), False), NAN, "The inputs: 1 of the values are missing"),
        (Inputs((2,), False, columns=("age", "weight")), FRAME, "no column 'weight'; it was trained on age, weight"),
        (Inputs((2,), False), FRAME, "does not take tables"),
        (Inputs((1,), False), ["a", "b"], "Inputs must be numbers"),
    ],
)
def test_inputs_that_the_model_does_not_take_are_refused(inputs: Inputs, x: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        inputs.read(x)


PIXELS = torch.zeros(6, 1, 2, 2).byte()


@pytest.mark.parametrize(
    ("clients", "classes", "message"),
    [
        ([], None, "at least one client"),
        ([(X, Y)], None, r"Client 0 is not \(x_train, y_train, x_test, y_test\); Federation.from_datasets takes pairs"),
        ({"a": (X, Y, X, Y)}, None, "Client 0 is not .* clients by name"),
        ([(X, Y, X, Y), (X, Y + 0.7, X, Y)], None, "Client 1 has labels that are no whole numbers"),
        ([(X, Y, X, Y + 0.7)], None, "Client 0 has labels that are no whole numbers"),
        ([(X, Y, X, Y), (X, Y - 1, X, Y)], None, "Client 1 has the label -1; labels are whole numbers from 0 to 2"),
        ([(X, Y, X, Y + 1)], ("a", "b", "c"), "Client 0 has the label 3; labels are whole numbers from 0 to 2"),
        ([(X, Y, X, Y), (NAN, Y, X, Y)], None, "Client 1: 1 of the values are missing or infinite"),
        ([(X, Y, NAN, Y)], None, "Client 0: 1 of the values are missing or infinite"),
        ([(X, Y, X, Y + 2_000_000)], None, "The label 2000002 is no number of a class"),
        ([(X, Y, X, Y), (X, Y[:3], X, Y)], None, r"Client 1 has 6 inputs but labels of shape \(3,\)"),
        ([(X, Y, X, Y), (X[:, :2], Y, X, Y)], None, r"Client 1 has inputs of shape \(2,\) \(numbers\) where others"),
        ([(PIXELS, Y, PIXELS, Y), (PIXELS / 255, Y, PIXELS, Y)], None, r"Client 1 .* \(numbers\) where others have of"),
        ([(PIXELS, Y, PIXELS / 255, Y)], None, r"Client 0 has inputs .* \(numbers\) where others have of"),
        ([(torch.zeros(6, 8, 8, 3).byte(), Y, PIXELS, Y)], None, r"use x.transpose\(0, 3, 1, 2\)"),
    ],
)
def test_clients_that_cannot_be_used_are_refused_with_what_to_do(clients: Any, classes: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Federation.from_clients(clients, classes)


def test_clients_that_are_handed_in_keep_their_data_and_may_have_no_test_data() -> None:
    federation = Federation.from_clients([(X, Y, X[:0], Y[:0]), (X[:2].numpy(), Y[:2].numpy(), X[3:], Y[3:])])
    assert federation.sizes == (6, 2)
    assert [federation.test_indices(j).tolist() for j in range(2)] == [[], [0, 1, 2]]
    assert [shard.owns for shard in federation.shards] == [("0", "1", "2"), ("0", "1")]
    assert torch.equal(federation.train.x, torch.cat([X, X[:2]]))
    assert torch.equal(federation.test.y, Y[3:])


@pytest.mark.parametrize("shape", [(6,), (4, 4), (3, 4, 4), (1, 2, 4, 4)])
def test_a_model_takes_the_uint8_inputs_that_it_was_trained_on(shape: tuple[int, ...]) -> None:
    x, y = np.random.default_rng(0).integers(0, 256, (20, *shape), dtype=np.uint8), np.arange(20) % 2
    for federation in (
        from_arrays(x, y, x, y, clients=1, partition="iid"),
        Federation.from_clients([(x, y, x, y)]),
        Federation.from_datasets([(x, y)], tests=[(x, y)]),
    ):
        read = federation.raw.read(x)
        assert torch.equal(read, federation.test.x)
        assert (read.dtype == torch.uint8) == federation.raw.images == (len(shape) in (2, 3))


def test_copies_are_counted_within_a_client() -> None:
    x, y = pair(10)
    federation = Federation.from_clients([(torch.cat([x, x]), torch.cat([y, y]), x, y), (x, y, x, y)])
    assert [federation.copies(j) for j in range(2)] == [0.5, 0.0]


def test_inputs_go_through_a_backbone_once_and_only_once() -> None:
    torch.manual_seed(0)
    backbone = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh())
    federation = Federation.from_datasets([pair(20)], standardise=True)
    through = federation.through(backbone)
    assert through.shape == (6,)
    expected = backbone(federation.inputs(federation.train.x))
    torch.testing.assert_close(through.inputs(through.train.x), expected)
    assert through.raw.shape == (4,)
    with pytest.raises(UserError, match="through a backbone already"):
        through.through(backbone)
    for wrong in (torch.nn.Conv2d(3, 2, 1), torch.nn.LSTM(4, 6)):
        with pytest.raises(UserError, match=r"makes no tensor of features \(N, ...\) of inputs of shape \(4,\)"):
            federation.through(wrong)
    with pytest.raises(UserError, match=r"The backbone must be an nn\.Module, not <function"):
        federation.through(lambda x: x)  # type: ignore[arg-type]
