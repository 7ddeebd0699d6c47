"""What a sweep searches, and by what it judges: settled before anything runs."""

from __future__ import annotations

import difflib
import itertools
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pfedvem.data import Federation
from pfedvem.errors import UserError
from pfedvem.experiments.config import Config, load, merged
from pfedvem.experiments.course import recent
from pfedvem.experiments.spaces import SPACES, Space
from pfedvem.rng import generator
from pfedvem.simulation.fit import FREE, flat

Settings = dict[str, Any]
MODELS = {"pm": ("pm",), "gm": ("gm",), "mean": ("pm", "gm")}
TRIALS = 30  # of samplers that do not try everything


@dataclass(frozen=True)
class Plan:
    """A sweep: what all trials share, the values to choose from, and what the score is measured by.

    ``objective`` is pm, gm or mean; ``sampler`` is grid, random or tpe. ``select_on`` is validation, a ``share`` of
    each client's training data that no trial trains on, or test, which is for mirroring the literature only.
    """

    config: Config
    space: Space
    objective: str
    sampler: str = "grid"
    trials: int = 0
    prune: bool = False
    select_on: str = "validation"
    share: float = 0.2
    workers: int | None = None  # of a trial, where trials share the processors

    def data(self, federation: Federation) -> Federation:
        """The data that trials train on and are scored by."""
        return federation if self.select_on == "test" else federation.validation(self.share, self.config.seed)

    def score(self, record: Mapping[str, float | None]) -> float:
        """The score of a record of the history."""
        values = [value for model in MODELS[self.objective] if (value := record[model]) is not None]
        if len(values) < len(MODELS[self.objective]):
            raise UserError("There is no data to score a trial by.")
        return sum(values) / len(values)

    def trial(self, settings: Settings) -> Config:
        """The configuration of a trial."""
        own: Settings = {"alone": False, "keep_models": False, "algorithm": settings}
        if self.workers is not None and self.config.executor in ("auto", "processes"):
            own["workers"] = self.workers
        return load(flags=merged(self.config.dump(), own))

    def best(self, settings: Settings) -> Config:
        """The configuration of a run with these settings."""
        return load(flags=merged(self.config.dump(), {"algorithm": settings}))

    @cached_property
    def all(self) -> list[Settings]:
        """All settings there are, in the order in which they are tried."""
        product = [dict(zip(self.space, values, strict=True)) for values in itertools.product(*self.space.values())]
        if self.sampler == "grid":
            return product
        return [product[i] for i in generator(self.config.seed, "sweep").permutation(len(product))]

    @property
    def total(self) -> int:
        """How many trials there are to be."""
        return len(self.all) if self.sampler == "grid" else min(self.trials, len(self.all))

    def choices(self, key: str) -> list[Any]:
        """The values of a hyper-parameter as Optuna knows them: lists are text."""
        return [json.dumps(value) if isinstance(value, tuple) else value for value in self.space[key]]

    def encoded(self, settings: Settings) -> Settings:
        return {key: json.dumps(value) if isinstance(value, tuple) else value for key, value in settings.items()}

    def decoded(self, params: Mapping[str, Any]) -> Settings:
        return {key: self.space[key][self.choices(key).index(params[key])] for key in self.space}

    def identity(self, data: Federation) -> dict[str, Any]:
        """What the trials in one folder share, as dotted keys."""
        fixed = FREE - {"rounds"} | {f"algorithm.{key}" for key in self.space}
        values = {key: value for key, value in flat(self.config.dump()).items() if key not in fixed}
        values |= {f"space.{key}": self.choices(key) for key in self.space}
        share = {"share": self.share} if self.select_on == "validation" else {}
        judged = {"objective": self.objective, "select-on": self.select_on, **share}
        if "gm" in MODELS[self.objective]:
            judged["gm"] = f"mean of the last {recent(self.config.rounds)} rounds"
        return {**values, **judged, "data": data.fingerprint()}


def plan(
    config: Config,
    *,
    space: Iterable[str] = (),
    objective: str | None = None,
    sampler: str = "grid",
    trials: int | None = None,
    prune: bool = False,
    select_on: str = "validation",
    share: float = 0.2,
) -> Plan:
    """A sweep around a configuration. ``space`` has texts KEY=V1,V2,...; without any, the paper's ranges are searched.

    The objective is by default the mean of the models that the method has: of PM and GM where it has both, since one
    choice of settings has to serve both.
    """
    algorithm = config.algorithm
    there = {"pm": algorithm.personalised, "gm": algorithm.global_model}
    if objective is None:
        objective = "mean" if all(there.values()) else "pm" if there["pm"] else "gm"
    _one_of("objective", objective, list(MODELS))
    _one_of("sampler", sampler, ["grid", "random", "tpe"])
    _one_of("select-on", select_on, ["validation", "test"])
    lacking = [model for model in MODELS[objective] if not there[model]]
    if lacking:
        kind = "personalised" if lacking[0] == "pm" else "global"
        raise UserError(f"{algorithm.title} has no {kind} model: take --objective {'gm' if there['gm'] else 'pm'}.")
    if sampler == "grid" and trials is not None:
        raise UserError("A grid has as many trials as it has points: take --trials with --sampler random or tpe.")
    if trials is not None and trials < 1:
        raise UserError(f"--trials should be at least 1, not {trials}.")
    return Plan(config, _space(config, space), objective, sampler, trials or TRIALS, prune, select_on, share)


def _one_of(name: str, value: str, known: list[str]) -> None:
    if value not in known:
        raise UserError(f"--{name} should be {', '.join(known[:-1])} or {known[-1]}, not {value!r}.")


def _space(config: Config, texts: Iterable[str]) -> Space:
    algorithm = config.algorithm
    space: Space = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        key = key.removeprefix("algorithm.")
        if not equals or not key:
            raise UserError(f"--space takes KEY=V1,V2,..., not {text!r}.")
        if key not in type(algorithm).model_fields:
            near = difflib.get_close_matches(key, type(algorithm).model_fields, n=1, cutoff=0)[0]
            raise UserError(f"{algorithm.title} has no hyper-parameter {key!r}; the nearest is {near!r}.")
        if key in space:
            raise UserError(f"--space has {key} twice; give all its values at once.")
        found = [_checked(config, key, value) for value in _values(values)]
        if not found:
            raise UserError(f"--space has no values for {key}: write {key}=V1,V2,...")
        space[key] = tuple(dict.fromkeys(found))
    if space:
        return space
    if algorithm.name not in SPACES:
        raise UserError(f"The paper has no search ranges for {algorithm.title}: give some with --space KEY=V1,V2,...")
    return SPACES[algorithm.name]


def _values(text: str) -> list[Any]:
    """The values of V1,V2,...: as those of a TOML list or, where they are none, as text."""
    try:
        return list(tomllib.loads(f"values = [{text}]")["values"])
    except tomllib.TOMLDecodeError:
        return [value for part in text.split(",") if (value := part.strip())]


def _checked(config: Config, key: str, value: Any) -> Any:
    """The value as the method takes it; one that it does not take is an error."""
    return getattr(load(flags=merged(config.dump(), {"algorithm": {key: value}})).algorithm, key)
