"""The methods for people: what they keep and send, the models that they give, their hyper-parameters and presets."""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pfedvem.algorithms import METHODS, AnyAlgorithm, method
from pfedvem.experiments.presets import ALGORITHMS

SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def method_rows(name: str | None = None) -> list[dict[str, Any]]:
    """All methods, or the named one, as plain values."""
    return [_row(cls) for cls in ([method(name)] if name is not None else METHODS.values())]


def methods_view(name: str | None = None) -> RenderableType:
    """All methods as a table with the hyper-parameters of each; or the named one alone."""
    rows = method_rows(name)
    overview = Table(title="Methods", title_justify="left", header_style="bold")
    for column in ("method", "a client keeps", "a client sends", "PM", "GM", "reference"):
        overview.add_column(column, no_wrap=column in ("method", "PM", "GM"))
    for row in rows:
        marks = ("yes" if row[key] else "-" for key in ("pm", "gm"))
        overview.add_row(f"[bold]{row['name']}[/]", row["keeps"], row["sends"], *marks, row["reference"])
    settings = Table(title="Hyper-parameters", title_justify="left", header_style="bold")
    for column in ("method", "setting", "default", "range", "meaning"):
        settings.add_column(column, no_wrap=column in ("method", "setting", "default"))
    for row in rows:
        for number, setting in enumerate(row["settings"]):
            cells = (str(setting[key]) for key in ("name", "default", "range", "meaning"))
            settings.add_row(row["name"] if number == 0 else "", *(escape(cell) for cell in cells))
        settings.add_section()
    presets = Table(title="Presets: what differs on a data set", title_justify="left", header_style="bold")
    for column in ("method", "data set", "settings"):
        presets.add_column(column, no_wrap=column != "settings")
    for row in rows:
        for number, (dataset, values) in enumerate(row["presets"].items()):
            given = ", ".join(
                f"{key}={list(value) if isinstance(value, tuple) else value}" for key, value in values.items()
            )
            presets.add_row(row["name"] if number == 0 else "", dataset, escape(given))
        presets.add_section()
    shown = [overview, settings, *([presets] if presets.row_count else [])]  # a method of yours may have none
    return Group(*shown, "Set one with --set NAME=VALUE.")


def _row(cls: type[AnyAlgorithm]) -> dict[str, Any]:
    return {
        "name": cls.name,
        "title": cls.title,
        "keeps": cls.keeps,
        "sends": cls.sends,
        "pm": cls.personalised,
        "gm": cls.global_model,
        "reference": cls.reference,
        "settings": [_setting(name, field) for name, field in cls.model_fields.items()],
        "presets": {dataset: values for (dataset, name), values in ALGORITHMS.items() if name == cls.name},
    }


def _setting(name: str, field: FieldInfo) -> dict[str, Any]:
    limits = [
        f"{sign} {getattr(rule, key)}" for rule in field.metadata for key, sign in SIGNS.items() if hasattr(rule, key)
    ]
    choices = getattr(field.annotation, "__args__", ()) if "Literal" in str(field.annotation) else ()
    allowed = ", ".join(str(choice) for choice in choices) or " and ".join(limits)
    if field.annotation is bool:
        allowed = "true, false"
    default = ", ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    return {"name": name, "default": default, "range": allowed, "meaning": field.description}
