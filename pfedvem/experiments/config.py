"""The configuration: one typed tree, read from presets, a TOML file and flags, in that order of rank."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, SkipValidation, ValidationError, model_validator

from pfedvem.algorithms import AnyAlgorithm, method
from pfedvem.data.settings import DataSettings
from pfedvem.errors import UserError
from pfedvem.experiments.presets import preset

Tree = dict[str, Any]
M = TypeVar("M", bound=BaseModel)


class Config(BaseModel):
    """Everything that a run is made of. What is saved and printed is what ran."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    method: str = Field("pfedvem", description="the federated method")
    rounds: int = Field(100, ge=1, description="communication rounds")
    participation: float = Field(0.1, gt=0, le=1, description="probability that a client uploads in a round")
    seed: int = Field(0, ge=0, lt=2**63, description="drives partition, initial weights and all sampling")
    network: str = Field("mlp", description="mlp, lenet or cnn6")
    eval_every: int = Field(5, ge=0, description="rounds between evaluations; 0 evaluates after the last only")
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints")
    alone: bool = Field(True, description="also train every client alone, to show what the federation is worth")
    executor: Literal["auto", "sequential", "processes"] = Field("auto", description="where clients are trained")
    workers: int | None = Field(None, ge=1, description="processes that train clients; by default one a processor")
    data: DataSettings
    algorithm: SerializeAsAny[SkipValidation[AnyAlgorithm]]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.executor == "sequential" and (self.workers or 1) > 1:
            raise ValueError(f"the sequential executor has one worker, not {self.workers}")
        return self

    def dump(self) -> Tree:
        """The tree as plain values; what is None is left out."""
        return self.model_dump(mode="json", exclude_none=True)

    def toml(self) -> str:
        return tomli_w.dumps(self.dump())


def load(file: Path | None = None, flags: Tree | None = None, assignments: Iterable[str] = ()) -> Config:
    """The configuration of a TOML file, flags and ``key=value`` assignments; the later ones win."""
    tree = _read(file) if file is not None else {}
    tree = merged(tree, flags or {})
    for text in assignments:
        tree = merged(tree, _assignment(text, tree))
    _refuse_unknown(tree)
    data, name = tree.get("data", {}), tree.get("method", "pfedvem")
    tree = merged(preset(data.get("dataset", "digits"), method(name)), tree)
    algorithm = _checked(method(name), tree["algorithm"], "algorithm.")
    return _checked(Config, {**tree, "data": _checked(DataSettings, data, "data."), "algorithm": algorithm})


def _checked(cls: type[M], values: Tree, prefix: str = "") -> M:
    """An object of the tree, or what is wrong with its values as sentences."""
    try:
        return cls(**values)
    except ValidationError as error:
        raise UserError(explain(error, prefix)) from error


def merged(below: Tree, above: Tree) -> Tree:
    """Both trees in one; where they differ, ``above`` wins."""
    out = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merged(out[key], value) if both else value
    return out


def explain(error: ValidationError, prefix: str = "") -> str:
    """What is wrong with the values, as sentences."""
    sentences = []
    for problem in error.errors():
        where, what = ".".join(str(part) for part in problem["loc"]), problem["msg"]
        if where:
            what = what.removeprefix("Input ").removeprefix("Value error, ")
            sentences.append(f"{prefix}{where} {what}, not {problem['input']!r}.")
        else:
            sentences.append(f"{what.removeprefix('Value error, ').rstrip('.')}.")
    return " ".join(sentences)


def _read(file: Path) -> Tree:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"There is no configuration file {file}.") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{file} is no readable TOML file: {error}") from error


def _sections(tree: Tree) -> dict[str, list[str]]:
    """The keys that exist: of the tree itself and of its sections, for the method that the tree names."""
    top = [key for key in Config.model_fields if key not in ("data", "algorithm")]
    algorithm = method(tree.get("method", "pfedvem"))
    return {"": top, "data": list(DataSettings.model_fields), "algorithm": list(algorithm.model_fields)}


def _refuse_unknown(tree: Tree) -> None:
    sections = _sections(tree)
    for section, known in sections.items():
        part = tree.get(section, {}) if section else {k: v for k, v in tree.items() if k not in sections}
        if not isinstance(part, Mapping):
            raise UserError(f"{section} is a section of settings, not a value.")
        for key in part:
            if key not in known:
                raise _unknown(f"{section}.{key}" if section else key, sections)


def _unknown(key: str, sections: dict[str, list[str]]) -> UserError:
    """The error for a key that does not exist, with the nearest that does."""
    full = {f"{section}.{name}" if section else name: name for section, names in sections.items() for name in names}
    wanted = key.rpartition(".")[2]
    near = difflib.get_close_matches(wanted, full.values(), n=1, cutoff=0.5)
    if near:
        return UserError(f"There is no setting {key!r}; the nearest is {next(f for f in full if full[f] == near[0])!r}.")
    return UserError(f"There is no setting {key!r}; there are {', '.join(full)}.")


def _assignment(text: str, tree: Tree) -> Tree:
    """``key=value`` as a tree. A key may be dotted, or bare where only one section has it."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"--set takes key=value, not {text!r}.")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    section, _, name = key.rpartition(".")
    if not section:
        homes = [home for home, names in _sections(tree).items() if name in names]
        if not homes:
            raise _unknown(key, _sections(tree))
        section = homes[0]
    return {section: {name: parsed}} if section else {name: parsed}
