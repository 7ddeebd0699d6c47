"""Whatever comes off the wire is used or refused as malformed: no other error, nothing infinite, no unpickling."""

from __future__ import annotations

import io
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pfedvem import tree
from pfedvem.algorithms import METHODS
from pfedvem.flower import wire
from pfedvem.flower.server import start
from pfedvem.flower.settings import Settings
from pfedvem.flower.strategy import FederatedStrategy
from pfedvem.simulation import rounds
from pfedvem.simulation.work import Job, Setup, perform
from tests.conftest import blobs, small_network

texts = st.text(st.characters(codec="utf-8"), max_size=8)
numbers = st.one_of(
    st.floats(),
    st.integers(-(2**63), 2**63 - 1),
    st.lists(st.floats(), max_size=2),
    st.lists(st.integers(0, 9), max_size=2),
)
scalars = st.one_of(st.floats(), st.integers(-(2**63), 2**63 - 1), st.booleans(), texts, st.binary(max_size=4))
said = (
    scalars | st.lists(st.integers(-3, 9), max_size=4) | st.lists(texts, max_size=2) | st.lists(st.floats(), max_size=2)
)
DTYPES: list[Any] = [
    "<f4",
    ">f4",
    "<f8",
    "<f2",
    "<i8",
    "<u8",
    "|u1",
    "|b1",
    "<c8",
    "<U2",
    "|S3",
    "<M8[s]",
    [("a", "<f4")],
]


def encoded(value: Any, pickled: bool = False) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value, allow_pickle=pickled)
    return buffer.getvalue()


def upload(method: str) -> tuple[wire.Layout, dict[str, Array], dict[str, Any], Any]:
    algorithm, model, data = METHODS[method](), small_network(), blobs((5, 6))
    setup = Setup(algorithm, model, data, 0)
    state = rounds.start(setup)
    down = algorithm.down(state.server)
    outcome = perform(setup, down, tree.take(state.clients, [0]), Job(0, (0,), upload=True))
    layout = wire.Layout.of(algorithm, down, outcome.up)
    arrays, found = layout.write(outcome.up)
    return layout, dict(arrays), dict(found), down


LAYOUT, ARRAYS, NUMBERS, DOWN = upload("pfedvem")
NAMES = sorted(ARRAYS)


@st.composite
def sent(draw: st.DrawFn) -> Array:
    """An array that somebody sends in the place of a good one."""
    good = ARRAYS[draw(st.sampled_from(NAMES))]
    kind = draw(st.integers(0, 4))
    if kind == 0:  # values of the right shape, or nearly, of any type
        shape = draw(st.sampled_from([good.shape, good.shape[::-1], (), (0,), (1, *good.shape)]))
        values = draw(hnp.arrays(draw(st.sampled_from(DTYPES)), shape))
        return Array(str(values.dtype), tuple(values.shape), "numpy.ndarray", encoded(values))
    if kind == 1:  # bytes that are cut, turned or lengthened
        place, noise = draw(st.integers(0, len(good.data))), draw(st.binary(max_size=6))
        keep = draw(st.integers(0, 20))
        return Array("float32", good.shape, "numpy.ndarray", good.data[:place] + noise + good.data[place + keep :])
    if kind == 2:
        return Array("float32", good.shape, draw(texts), good.data)
    if kind == 3:  # a header that promises more than there is
        length = draw(st.sampled_from([10**6, 10**12, 10**18]))
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({length},), }}".ljust(117).encode() + b"\n"
        return Array("float32", good.shape, "numpy.ndarray", b"\x93NUMPY\x01\x00" + b"\x76\x00" + header)
    return Array("float32", good.shape, "numpy.ndarray", draw(st.binary(max_size=200)))


@given(changed=st.dictionaries(st.sampled_from(NAMES) | texts.filter(bool), sent(), max_size=2), gone=st.booleans(),
       told=st.dictionaries(st.sampled_from(sorted(NUMBERS)) | texts.filter(bool), numbers, max_size=2))  # fmt: skip
def test_an_upload_is_finite_and_of_the_right_shape_or_malformed(
    changed: dict[str, Array], gone: bool, told: dict[str, Any]
) -> None:
    arrays = ArrayRecord({**(dict(list(ARRAYS.items())[1:]) if gone else ARRAYS), **changed})
    try:
        up = LAYOUT.read(arrays, MetricRecord({**NUMBERS, **told}))
    except wire.Malformed as refused:
        assert str(refused)
        return
    for leaf, like in zip(tree.leaves(up), tree.leaves(LAYOUT.like), strict=True):
        assert leaf.shape == like.shape
        assert leaf.dtype == like.dtype
        assert bool(leaf.isfinite().all())


@given(changed=st.dictionaries(st.sampled_from(NAMES) | texts.filter(bool), sent(), max_size=2))
def test_what_is_sent_down_is_unpacked_or_malformed(changed: dict[str, Array]) -> None:
    try:
        found = wire.unpack(ArrayRecord({**dict(wire.pack(DOWN)), **changed}), DOWN)
    except wire.Malformed as refused:
        assert str(refused)
    else:
        assert [leaf.shape for leaf in tree.leaves(found)] == [leaf.shape for leaf in tree.leaves(DOWN)]


class Trap:
    """What is run where it is unpickled."""

    sprung: list[int] = []  # noqa: RUF012 - that all share it is the point

    def __reduce__(self) -> Any:
        return Trap.sprung.append, (1,)


@pytest.mark.parametrize("stype", ["numpy.ndarray", "pickle", "torch.tensor", ""])
def test_nothing_that_is_sent_is_unpickled(stype: str) -> None:
    objects = np.array([Trap()], dtype=object)
    for data in (encoded(objects, pickled=True), pickle.dumps(objects), pickle.dumps(Trap())):
        arrays = {**ARRAYS, "w": Array("object", (1,), stype, data)}
        with pytest.raises(wire.Malformed):
            LAYOUT.read(ArrayRecord(arrays), NUMBERS)
    assert Trap.sprung == []


def reply(node: int, records: RecordDict, group: str) -> Any:
    """A message as the strategy sees it."""
    metadata = SimpleNamespace(src_node_id=node, group_id=group)
    return SimpleNamespace(metadata=metadata, content=records, has_error=lambda: False)


def strategy() -> FederatedStrategy:
    chosen, model = Settings.read({"experiment": "any", "clients": 3, "min-sites": 1, "out": "out"}), small_network()
    return FederatedStrategy(chosen, model, start(chosen, model), lambda *_: None)


GREETING: dict[str, Any] = {"format": wire.FORMAT, "client": 0, "name": "a", "n": 5, "shape": [4]}


@given(changed=st.dictionaries(st.sampled_from(sorted(GREETING)), said, max_size=2), gone=st.sets(
    st.sampled_from(sorted(GREETING)), max_size=1))  # fmt: skip
def test_a_site_is_known_by_numbers_that_can_be_or_turned_away(changed: dict[str, Any], gone: set[str]) -> None:
    server = strategy()
    about = ConfigRecord({key: value for key, value in {**GREETING, **changed}.items() if key not in gone})
    try:
        server._meet(7, about)
    except wire.Malformed as refused:
        assert str(refused)
        assert not server.known
        assert not server.met
        return
    (site,) = server.known.values()
    assert 0 <= site.client < 3
    assert site.n >= 1
    assert isinstance(site.name, str)
    assert server.status().dump()


REPORTED = ["pm.accuracy", "pm.nll", "seen.tau", "anew", *NUMBERS]


@given(told=st.dictionaries(st.sampled_from(REPORTED), numbers, max_size=4),
       changed=st.dictionaries(st.sampled_from(NAMES), sent(), max_size=1), group=st.sampled_from(["0", "1", ""]),
       missing=st.sampled_from(["", "", wire.UP, wire.NUMBERS]))  # fmt: skip
@example(told={"up.tau": 1e-187}, changed={}, group="0", missing="")  # 0 as a float32
@example(told={"pm.nll": 3.5e38}, changed={}, group="0", missing="")  # infinite as one
@example(told={"up.n": 3.5e38}, changed={}, group="0", missing="")
def test_a_reply_is_used_or_left_out_and_never_an_error(
    told: dict[str, Any], changed: dict[str, Array], group: str, missing: str
) -> None:
    server = strategy()
    server._layout = LAYOUT  # as the server would imagine it
    server._meet(7, ConfigRecord(GREETING))
    server._meet(8, ConfigRecord({**GREETING, "client": 1, "name": "b"}))
    server._asked = {7: True, 8: True}
    records = RecordDict({wire.UP: ArrayRecord({**ARRAYS, **changed}), wire.NUMBERS: MetricRecord({**NUMBERS, **told})})
    if missing:
        del records[missing]
    good = RecordDict({wire.UP: ArrayRecord(ARRAYS), wire.NUMBERS: MetricRecord(NUMBERS)})
    _, metrics = server.aggregate_train(1, [reply(7, records, group), reply(8, good, "0")])
    assert metrics is None
    assert server._merged is not None
    assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves(server._merged.server))
    noted = torch.cat([values[~values.isnan()] for values in server._merged.clients.values()])
    assert bool(noted.isfinite().all())
