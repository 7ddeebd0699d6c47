"""The settings of the data: which data set, how many clients, and how it is dealt to them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pfedvem.data.catalogue import find

Partition = Literal["labels", "subclasses", "domains", "dirichlet", "iid", "natural"]


class DataSettings(BaseModel):
    """Which data, and who owns it. What is not given comes from the data set's preset, then from the defaults here."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    dataset: str = Field(
        default="digits", description="A name of `pfedvem data list`, a hub id owner/name, or a folder."
    )
    root: Path | None = Field(
        default=None,
        description="Folder with local copies of hub data sets, as owner/name; without it the hub is used.",
    )
    clients: int = Field(default=20, ge=1, description="How many clients the data is dealt to.")
    partition: Partition = Field(
        default="labels",
        description="Who owns what: some labels each; some subclasses of every label; one domain and some labels of "
        "it; a Dirichlet mix of labels; the same mix for all; or natural clients by an id in the data.",
    )
    labels_per_client: int = Field(
        default=5, ge=1, description="Labels that a client owns (partitions labels and domains)."
    )
    subclasses_per_client: int = Field(
        default=1, ge=1, description="Subclasses of every label that a client owns (partition subclasses)."
    )
    sizes: Literal["slices", "equal"] | tuple[float, ...] = Field(
        default="slices",
        description="Sizes of the clients: random slices, equal, or a list with one weight for each client.",
    )
    cuts: Literal["shared", "independent"] = Field(
        default="shared",
        description="Random slices: cut all labels at the same points, so that local sizes spread widely, or each at "
        "its own.",
    )
    dirichlet_alpha: float = Field(
        default=0.5, gt=0, description="Concentration of the Dirichlet partition; small is heterogeneous."
    )
    train_samples: int | None = Field(
        default=None,
        ge=1,
        description="Use only this many training samples, chosen by the seed, equally many of each label.",
    )
    holdout: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="Fraction held out for testing where the data, or a natural client, has no test.",
    )
    image_column: str | None = Field(
        default=None, description="The column of the images; found by itself if there is one."
    )
    label_column: str | None = Field(default=None, description="The column of the labels; `label` if not given.")
    subclass_column: str | None = Field(
        default=None, description="The column of the subclasses (partition subclasses)."
    )
    domain_column: str | None = Field(default=None, description="The column of the domains (partition domains).")
    client_column: str | None = Field(default=None, description="The column of the client ids (partition natural).")
    image_size: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Cut the centre square of each image and resize it to this many pixels a side.",
    )
    pm_test: Literal["owned", "published"] = Field(
        default="owned",
        description="Test data of a personalised model: all of the subclasses that it owns, or, as a flaw of the "
        "published code has it, those of them whose superclass has an id that is also the id of one of them.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return defaults_for(str(values.get("dataset", "digits"))) | dict(values)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pm_test == "published" and self.partition != "subclasses":
            raise ValueError("pm_test 'published' is a flaw of the partition 'subclasses'; use 'owned' with any other")
        if not isinstance(self.sizes, str) and len(self.sizes) != self.clients:
            raise ValueError(f"sizes has {len(self.sizes)} weights for {self.clients} clients; give one for each")
        return self


def defaults_for(dataset: str) -> dict[str, Any]:
    """The preset of a data set: values of some fields of DataSettings; empty where the catalogue does not know it."""
    entry = find(dataset)
    return dict(entry.preset) if entry else {}
