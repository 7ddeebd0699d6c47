"""Whatever is asked for is a configuration, which is read back as it was saved, or an error that a user can mend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from pfedvem.algorithms import METHODS
from pfedvem.data.settings import DataSettings
from pfedvem.errors import UserError
from pfedvem.experiments.config import Config, load
from pfedvem.experiments.plan import Plan, plan

texts = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)
numbers = st.integers() | st.floats() | st.sampled_from([0, 1, 2, 5, 10**9, 2**63, 10**30, 0.5, 1e-300, 1e308])
scalars = st.booleans() | numbers | texts | st.sampled_from(["equal", "labels", "iid", "auto", "cpu", "all", "mlp"])
values = st.recursive(
    scalars, lambda some: st.lists(some, max_size=3) | st.dictionaries(texts, some, max_size=3), max_leaves=5
)
own = sorted({key for cls in METHODS.values() for key in cls.model_fields})
top = [key for key in Config.model_fields if key not in ("data", "algorithm", "method")]


def section(keys: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(keys), values, max_size=3)


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of which many could be right: keys that there are, with values of all kinds."""
    tree: dict[str, Any] = draw(section(top))
    chosen = draw(st.sampled_from([*METHODS, "x", "", ":", "json:loads", ".a:b"]))
    if draw(st.booleans()):
        tree["method"] = chosen
    if draw(st.booleans()):
        tree["data"] = draw(section(list(DataSettings.model_fields)) | values)
    if draw(st.booleans()):
        known = list(METHODS[chosen].model_fields) if chosen in METHODS else own
        tree["algorithm"] = draw(section(known or own) | values)
    if draw(st.integers(0, 9)) == 0:
        tree[draw(texts)] = draw(values)
    return tree


def check(found: Config, folder: Path) -> None:
    saved = folder / "saved.toml"
    saved.write_bytes(tomli_w.dumps(found.dump()).encode())
    assert load(saved) == found


@given(flags=trees())
def test_flags_are_a_configuration_or_an_error_that_a_user_can_mend(flags: dict[str, Any], tmp_path: Path) -> None:
    try:
        found = load(flags=flags)
    except UserError as error:
        assert str(error).endswith(".")
    else:
        check(found, tmp_path)


@given(tree=trees(), noise=texts, place=st.integers(0, 200))
def test_a_file_is_a_configuration_or_an_error_that_a_user_can_mend(
    tree: dict[str, Any], noise: str, place: int, tmp_path: Path
) -> None:
    text = tomli_w.dumps(tree)
    file = tmp_path / "some.toml"
    file.write_bytes((text[:place] + noise + text[place:]).encode())
    try:
        found = load(file)
    except UserError as error:
        assert str(error).endswith(".")
    else:
        check(found, tmp_path)


assignments = st.one_of(
    texts,
    st.tuples(st.sampled_from([*top, *own, *DataSettings.model_fields, "data", "algorithm.lr", "a.b.c"]), texts).map(
        "=".join
    ),
    st.tuples(st.sampled_from([*top, *DataSettings.model_fields]), numbers).map(lambda pair: f"{pair[0]}={pair[1]}"),
)


@given(texts=st.lists(assignments, max_size=3))
def test_assignments_are_a_configuration_or_an_error_that_a_user_can_mend(texts: list[str], tmp_path: Path) -> None:
    try:
        found = load(assignments=texts)
    except UserError as error:
        assert str(error).rstrip().endswith(".")
    else:
        check(found, tmp_path)


spaces = st.tuples(
    st.sampled_from(["lr_head", "algorithm.scale", "head_epochs", "confidence", "x", "", "name"]),
    st.sampled_from(["=", "=", "=", "", "=="]),
    st.lists(scalars.map(str) | texts, max_size=3).map(",".join),
).map("".join)


@given(texts=st.lists(spaces, max_size=3))
def test_a_space_is_a_plan_of_settings_that_the_method_takes_or_an_error(texts: list[str]) -> None:
    try:
        found: Plan = plan(load(), space=texts)
    except UserError as error:
        assert str(error).strip()
        return
    assert found.total >= 1
    for settings in found.all[:3]:
        assert found.decoded(found.encoded(settings)) == settings
        assert load(flags={"algorithm": settings}).algorithm
