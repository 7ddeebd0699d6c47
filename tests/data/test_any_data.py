"""Whatever data there is, it is dealt as it should be or refused in a sentence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import ValidationError

from pfedvem.data.federation import Federation
from pfedvem.data.files import read_samples
from pfedvem.data.inputs import Inputs
from pfedvem.data.loading import from_arrays
from pfedvem.errors import UserError

seeds = st.integers(0, 2**63 - 1)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)
cells = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.integers(-(10**6), 10**6),
    st.sampled_from([np.nan, np.inf, 1e300, 10**25, None, "x", "é", "", True, b"x", (1, 2)]),
)


def check(federation: Federation, samples: int | None = None) -> None:
    """Every sample is some client's, once; what a network sees are numbers."""
    dealt = np.concatenate([shard.train for shard in federation.shards])
    assert np.array_equal(np.sort(dealt), np.arange(len(federation.train.y)))
    assert all(shard.n for shard in federation.shards)
    assert bool(federation.inputs(federation.train.x).isfinite().all())
    assert 0 <= int(federation.train.y.min()) <= int(federation.train.y.max()) < len(federation.classes)
    if samples is not None:
        assert len(federation.train.y) + len(federation.test.y) == samples


@given(
    seed=seeds,
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    clients=st.integers(1, 9) | st.integers(-1, 40),
    partition=st.sampled_from(["labels", "subclasses", "domains", "dirichlet", "iid", "natural"]),
    each=st.integers(1, 7),
    groups=st.integers(1, 4),
    sizes=st.sampled_from(["slices", "equal"]) | st.lists(st.floats(0, 9) | st.floats(), max_size=5),
    alpha=st.sampled_from([0.1, 1.0, 100.0]) | st.floats(),
    holdout=st.sampled_from([0.2, 0.5]) | st.floats(),
)
def test_a_partition_deals_every_sample_once_and_the_same_again_or_is_refused(
    seed: int,
    counts: list[int],
    clients: int,
    partition: Any,
    each: int,
    groups: int,
    sizes: Any,
    alpha: float,
    holdout: float,
) -> None:
    y = np.repeat(np.arange(len(counts)), counts)
    x = np.arange(len(y), dtype=np.float32)[:, None]

    def deal() -> Federation:
        return from_arrays(
            x, y, clients=clients, partition=partition, group=np.arange(len(y)) % groups, seed=seed,
            classes=[f"class {c}" for c in range(len(counts))], labels_per_client=each, subclasses_per_client=each,
            sizes=sizes, dirichlet_alpha=alpha, holdout=holdout,
        )  # fmt: skip

    try:
        found = deal()
    except (UserError, ValidationError) as error:
        assert str(error).strip()
        return
    assert len(found) == clients
    if partition != "natural":  # which may leave out some of the natural clients
        check(found, len(y))
    again = deal()
    for one, other in zip(found.shards, again.shards, strict=True):
        assert np.array_equal(one.train, other.train)
        assert one.owns == other.owns


@st.composite
def frames(draw: st.DrawFn) -> pd.DataFrame:
    """Tables of which many could be used: numbers mostly, with clients and labels, or something that is amiss."""
    rows = draw(st.integers(0, 12))
    table: dict[Any, Any] = {}
    kinds: list[Callable[[], st.SearchStrategy[Any]]] = [
        lambda: st.floats(-1e6, 1e6),
        lambda: st.integers(-9, 9),
        lambda: st.floats(),
        lambda: cells,
    ]
    for name in ("a", "b", "label", "site"):
        if draw(st.integers(0, 7)):
            kind = draw(st.sampled_from(kinds[:2] if draw(st.booleans()) else kinds))
            table[name] = draw(st.lists(kind(), min_size=rows, max_size=rows))
    if draw(st.booleans()):
        table[draw(names)] = [1.0] * rows
    return pd.DataFrame(table)


def try_each(makers: list[Callable[[], Federation]]) -> None:
    """Each makes a federation that is as it should be, or says in words why not; a warning is neither."""
    for make in makers:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                found = make()
            except UserError as error:
                assert str(error).strip()
            else:
                check(found)


@given(frame=frames())
def test_a_table_is_a_federation_or_is_refused(frame: pd.DataFrame) -> None:
    makers: list[Callable[[], Federation]] = [
        lambda: Federation.from_frame(frame, client="site", label="label"),
        lambda: Federation.from_datasets({"one": frame}),
        lambda: Federation.from_datasets([frame, frame], label="label", standardise=True),
    ]
    try_each(makers)


TYPES: list[Any] = [np.float32, np.float64, np.float16, np.int64, np.uint8, np.bool_, np.complex64, ">f4", "U3"]
KINDS: list[Any] = [np.int64, np.float64, np.uint64, np.bool_, "U2"]
arrays: st.SearchStrategy[Any] = st.one_of(
    hnp.arrays(
        st.sampled_from(TYPES),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    ),
    st.lists(cells, max_size=5),
    st.lists(st.lists(st.floats(-9, 9), max_size=3), max_size=4),
    st.sampled_from(
        [None, 3, "text", {}, np.array([None, {}], dtype=object), torch.zeros(3, 2), torch.zeros(2).bool()]
    ),
)
labels = st.one_of(
    st.lists(st.integers(0, 3), max_size=5),
    hnp.arrays(st.sampled_from(KINDS), st.integers(0, 5)),
    arrays,
)


@given(x=arrays, y=labels)
def test_arrays_are_a_federation_or_are_refused(x: Any, y: Any) -> None:
    makers: list[Callable[[], Federation]] = [
        lambda: Federation.from_datasets([(x, y)]),
        lambda: Federation.from_clients([(x, y, x, y)]),
        lambda: from_arrays(x, y, x, y, clients=1, partition="iid"),
    ]
    try_each(makers)


def test_a_file_without_samples_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "none.npz", x=np.empty((0, 2), dtype=np.float32), y=np.empty(0, dtype=np.int64))
    with pytest.raises(UserError, match=r"none.npz has no samples"):
        read_samples(tmp_path / "none.npz", Inputs((2,), images=False))


@given(frame=frames(), form=st.sampled_from(["csv", "parquet"]), label=st.sampled_from(["label", "site", "nowhere"]))
def test_a_file_of_a_table_is_read_or_refused(frame: pd.DataFrame, form: str, label: str, tmp_path: Path) -> None:
    path = tmp_path / f"some.{form}"
    try:
        frame.to_csv(path, index=False) if form == "csv" else frame.to_parquet(path)
    except Exception:  # what pandas cannot write cannot come from it
        return
    try:
        x, y = read_samples(path, Inputs((2,), images=False, columns=("a", "b")), label)
    except UserError as error:
        assert str(error).strip()
    else:
        assert bool(x.isfinite().all())
        assert y is None or len(y) == len(x)


@given(stored=st.dictionaries(st.sampled_from(["x", "y", "z"]), arrays, max_size=3))
def test_a_file_of_arrays_is_read_or_refused_and_never_unpickled(stored: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    try:
        np.savez(path, **stored)
    except ValueError:  # ragged
        return
    try:
        x, _ = read_samples(path, Inputs((2,), images=False))
    except UserError as error:
        assert str(error).strip()
    else:
        assert bool(x.isfinite().all())
