"""What a deployment is made of: an app's ``[tool.flwr.app.config]``, read alike by the server and by every site."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, SkipValidation, ValidationError
from torch import nn

from pfedvem.algorithms import AnyAlgorithm, method
from pfedvem.errors import UserError
from pfedvem.experiments.config import explain
from pfedvem.guard import Guard
from pfedvem.models import Model
from pfedvem.rng import generator

Network = Callable[[], nn.Module]
M = TypeVar("M", bound=BaseModel)

# They say where, how long and how patiently a run goes on, not what it computes: they may change when it does.
FREE = {"rounds", "out", "min_sites", "min_replies", "wait", "round_timeout"}


class Settings(BaseModel):
    """The settings of a federation of sites; the method's own are ``algorithm.NAME``, the guard's ``guard.NAME``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    experiment: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="names what the sites keep")
    clients: int = Field(ge=1, description="number of sites")
    method: str = Field(default="pfedvem", description="the federated method")
    rounds: int = Field(default=100, ge=1, description="communication rounds")
    participation: float = Field(default=1.0, gt=0, le=1, description="probability that a site uploads in a round")
    seed: int = Field(default=0, ge=0, lt=2**63, description="drives initial weights and all sampling")
    eval_every: int = Field(default=1, ge=0, description="rounds between evaluations; 0: after the last only")
    gm: Literal["last", "average"] = Field(
        default="last", description="the global model: the last merged, or its average over about ten rounds"
    )
    min_sites: int = Field(default=1, ge=1, description="sites that must be connected before a round begins")
    min_replies: int = Field(default=1, ge=1, description="usable replies that a round needs, of those asked for")
    wait: float = Field(default=300.0, gt=0, description="seconds to wait for the sites that a round needs")
    round_timeout: float = Field(default=600.0, gt=0, description="seconds to wait for the replies of a round")
    out: str = Field(default="runs/flower", description="the folder, at the server, of the run's files")
    guard: Guard = Field(default=Guard(), description="how far the server trusts uploads")
    algorithm: SerializeAsAny[SkipValidation[AnyAlgorithm]]

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """The settings of a run configuration, whose keys may be written with dashes."""
        flat = {key.replace("-", "_"): value for key, value in values.items()}

        def section(prefix: str) -> dict[str, Any]:
            return {key.removeprefix(prefix): value for key, value in flat.items() if key.startswith(prefix)}

        own = {key: value for key, value in flat.items() if not key.startswith(("algorithm.", "guard."))}
        chosen = method(str(own.get("method", cls.model_fields["method"].default)))
        algorithm = _checked(chosen, section("algorithm."), "algorithm.")
        guard = _checked(Guard, section("guard."), "guard.")
        guard.check(algorithm)
        return _checked(cls, {**own, "guard": guard, "algorithm": algorithm})

    def dump(self) -> dict[str, Any]:
        """The settings as plain values, as config.toml has them."""
        return self.model_dump(mode="json", exclude_none=True)

    def build(self, network: Network) -> Model:
        """The network, split into base and head; its initial weights come from the seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(generator(self.seed, "network").integers(2**63)))
            return Model(network())


def _checked(cls: type[M], values: Mapping[str, Any], prefix: str = "") -> M:
    """An object of these values, or what is wrong with them as sentences."""
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise UserError(_explained(error, cls, prefix)) from error


def _explained(error: ValidationError, cls: type[BaseModel], prefix: str = "") -> str:
    """What is wrong, as sentences; keys that do not exist or are missing have no field that could be explained."""
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            return f"There is no setting {prefix}{name}; there are {', '.join(cls.model_fields)}."
        if problem["type"] == "missing":
            return f"The setting {prefix}{name} is missing in [tool.flwr.app.config]."
    return explain(error, cls, prefix)
