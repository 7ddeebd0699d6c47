"""The configuration: one typed tree, read from presets, a TOML file and flags, in that order of rank."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, SkipValidation, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from pfedvem.algorithms import METHODS, AnyAlgorithm, method
from pfedvem.data.settings import DataSettings
from pfedvem.errors import UserError
from pfedvem.experiments.presets import preset
from pfedvem.guard import Guard
from pfedvem.networks import NETWORKS

Tree = dict[str, Any]
Sections = dict[str, list[str]]
M = TypeVar("M", bound=BaseModel)

# How error messages speak of the types and constraints of fields.
KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "path": "a path",
    "tuple": "a list",
}
LIMITS = {"gt": "greater than", "ge": "greater than or equal to", "lt": "less than", "le": "less than or equal to"}


class Config(BaseModel):
    """Everything that a run is made of. What is saved and printed is what ran."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    method: str = Field(default="pfedvem", description="the federated method")
    rounds: int = Field(default=100, ge=1, description="communication rounds")
    participation: float = Field(default=0.1, gt=0, le=1, description="probability that a client uploads in a round")
    seed: int = Field(default=0, ge=0, lt=2**63, description="drives partition, initial weights and all sampling")
    network: str = Field(default="mlp", description="mlp, lenet or cnn6")
    eval_every: int = Field(default=5, ge=0, description="rounds between evaluations; 0 evaluates after the last only")
    eval_clients: int | None = Field(default=None, ge=1, description="clients that are tested; by default all")
    checkpoint_every: int = Field(default=1, ge=1, description="rounds between checkpoints")
    alone: bool = Field(default=True, description="also train every client alone, to show what the federation is worth")
    keep_models: bool = Field(
        default=True, description="also write every client's personalised model, for predict and export"
    )
    alone_lr: float = Field(default=1e-3, gt=0, description="learning rate of the clients alone")
    train: Literal["all", "uploaders"] = Field(
        default="all", description="who trains in a round: all clients, as in the paper, or only those that upload"
    )
    executor: Literal["auto", "sequential", "vectorised", "processes"] = Field(
        default="auto", description="where clients are trained"
    )
    workers: int | None = Field(
        default=None, ge=1, description="processes that train clients; by default one a processor"
    )
    cohort: int | None = Field(
        default=None, ge=1, description="clients that are trained together, at most; by default as many as pays"
    )
    device: Literal["cpu", "cuda", "mps"] = Field(default="cpu", description="where tensors are computed")
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of the base's products and convolutions while clients train"
    )
    gm: Literal["last", "average"] = Field(
        default="last", description="the global model: the last merged, or its average over about ten rounds"
    )
    data: DataSettings
    guard: Guard = Field(default=Guard(), description="how far the server trusts uploads")
    algorithm: SerializeAsAny[SkipValidation[AnyAlgorithm]]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.executor == "sequential" and (self.workers or 1) > 1:
            raise ValueError(f"The sequential executor has one worker, not {self.workers}")
        if self.executor == "sequential" and (self.cohort or 1) > 1:
            raise ValueError("The sequential executor trains one client at a time; take vectorised for cohorts")
        if self.network not in NETWORKS:
            raise ValueError(f"There is no network {self.network!r}; there are {', '.join(NETWORKS)}")
        if type(self.algorithm) is not method(self.method):
            raise ValueError(f"The method is {self.method!r}, but its settings are those of {self.algorithm.name!r}")
        return self

    def dump(self) -> Tree:
        """The tree as plain values, as config.toml has it; what is None is left out."""
        return self.model_dump(mode="json", exclude_none=True)


def load(file: Path | None = None, flags: Tree | None = None, assignments: Iterable[str] = ()) -> Config:
    """The configuration of a TOML file, flags and ``key=value`` assignments; the later ones win."""
    layers = [read(file) if file is not None else {}, flags or {}]
    assigned = [_assignment(text) for text in assignments]
    named = [layer["method"] for layer in (*layers, dict(assigned)) if "method" in layer]
    chosen = method(str(named[-1] if named else Config.model_fields["method"].default))
    sections = _sections(chosen)
    layers += [_placed(key, value, sections) for key, value in assigned]
    tree: Tree = {}
    for layer in layers:
        _refuse_unknown(layer, sections, chosen)
        tree = merged(tree, layer)
    data = _checked(DataSettings, tree.get("data", {}), "data.")
    tree = merged(preset(data.dataset, chosen), tree)
    guard = _checked(Guard, tree.get("guard", {}), "guard.")
    algorithm = _checked(chosen, tree["algorithm"], "algorithm.")
    guard.check(algorithm)
    return _checked(Config, {**tree, "data": data, "guard": guard, "algorithm": algorithm})


def merged(below: Tree, above: Tree) -> Tree:
    """Both trees in one; where they differ, ``above`` wins."""
    out = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merged(out[key], value) if both else value
    return out


def _checked(cls: type[M], values: Tree, prefix: str = "") -> M:
    """An object of the tree, or what is wrong with its values as sentences."""
    try:
        return cls(**values)
    except ValidationError as error:
        raise UserError(explain(error, cls, prefix)) from error


def explain(error: ValidationError, cls: type[BaseModel], prefix: str = "") -> str:
    """What is wrong with the values of a model, as sentences."""
    problems: dict[str, list[ErrorDetails]] = {}
    for problem in error.errors():
        problems.setdefault(str(problem["loc"][0]) if problem["loc"] else "", []).append(problem)
    sentences = []
    for key, found in problems.items():
        if not key:  # a check of the whole model, which speaks for itself
            sentences += [problem["msg"].removeprefix("Value error, ").rstrip(".") + "." for problem in found]
            continue
        if found[0]["type"] == "missing":
            sentences.append(f"{prefix}{key} has no default: give it a value, as by --set {key}=VALUE.")
            continue
        # A value that may be of several types fails as each of them; it is nearest to the one with the longest path.
        depth = max(len(problem["loc"]) for problem in found)
        nearest = [problem for problem in found if len(problem["loc"]) == depth]
        wanted = ", or ".join(_wanted(problem, cls.model_fields[key]) for problem in nearest)
        each = "each of " if isinstance(nearest[0]["loc"][-1], int) else ""
        sentences.append(f"{each}{prefix}{key} should be {wanted}, not {nearest[0]['input']!r}.")
    return " ".join(sentences)


def _wanted(problem: ErrorDetails, field: FieldInfo) -> str:
    """What a value should have been: its kind and its limits."""
    kind = problem["type"]
    if kind == "literal_error":
        return str(problem["ctx"]["expected"])
    rules = [(words, getattr(rule, name, None)) for rule in field.metadata for name, words in LIMITS.items()]
    if len(problem["loc"]) > 1:  # an item of a list has limits of its own
        context = problem.get("ctx", {})
        rules = [(words, f"{context[name]:g}") for name, words in LIMITS.items() if name in context]
    limits = " and ".join(f"{words} {limit}" for words, limit in rules if limit is not None)
    if kind.startswith(("greater_than", "less_than")):
        return limits
    return f"{KINDS.get(kind.partition('_')[0], problem['msg'])} {limits}".strip()


def read(file: Path) -> Tree:
    """The tree of a TOML file."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"There is no configuration file {file}.") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{file} is no readable TOML file: {reason}.") from error


def _sections(chosen: type[AnyAlgorithm]) -> Sections:
    """The keys that exist: of the tree itself and of its sections."""
    nested = {"data": list(DataSettings.model_fields), "guard": list(Guard.model_fields)}
    nested["algorithm"] = list(chosen.model_fields)
    return {"": [key for key in Config.model_fields if key not in nested], **nested}


def _refuse_unknown(tree: Tree, sections: Sections, chosen: type[AnyAlgorithm]) -> None:
    for key, value in tree.items():
        if key in sections:
            if not isinstance(value, Mapping):
                raise UserError(
                    f"{key} is a section of settings, not a value; its keys are {', '.join(sections[key])}."
                )
            for name in value:
                if name not in sections[key]:
                    raise _unknown(key, name, sections, chosen)
        elif key not in sections[""]:
            if not isinstance(value, Mapping):
                raise _unknown("", key, sections, chosen)
            near = max((name for name in sections if name), key=partial(_likeness, key))
            raise UserError(f"There is no section {key!r}; the nearest is {near!r}.")


def _unknown(section: str, name: str, sections: Sections, chosen: type[AnyAlgorithm]) -> UserError:
    """The error for a key that does not exist, with the nearest that does."""
    problem = f"There is no setting {_dotted(section, name)!r}"
    owners = [other for other, cls in METHODS.items() if name in cls.model_fields]
    if owners and section in ("", "algorithm") and name not in chosen.model_fields:
        section, problem = "algorithm", f"{name!r} is a setting of {', '.join(owners)}, not of {chosen.name}"
    known = [(home, other) for home, names in sections.items() for other in names]
    # Of keys that are about as near, one in the section that was named is meant.
    near = max(known, key=lambda at: _likeness(name, at[1]) + 0.2 * (at[0] == section != ""))
    return UserError(f"{problem}; the nearest is {_dotted(*near)!r}.")


def _likeness(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b).ratio()


def _dotted(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _assignment(text: str) -> tuple[str, Any]:
    """The key and the value of ``key=value``. What is no TOML value is text."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise UserError(f"--set takes key=value, not {text!r}.")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _placed(key: str, value: Any, sections: Sections) -> Tree:
    """An assignment as a tree. Its key is dotted, or bare where only one section has it."""
    section, _, name = key.rpartition(".")
    if not section:
        homes = [home for home, names in sections.items() if name in names]
        if len(homes) > 1:
            raise UserError(f"There is more than one {key}: write {' or '.join(_dotted(home, key) for home in homes)}.")
        section = homes[0] if homes else ""
    return {section: {name: value}} if section else {name: value}
