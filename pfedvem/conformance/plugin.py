"""A pytest plugin: the option ``--method`` of the conformance suite. It imports nothing heavy."""

from __future__ import annotations

from typing import Any


def pytest_addoption(parser: Any) -> None:
    parser.addoption(
        "--method",
        action="append",
        metavar="NAME",
        help="pfedvem.conformance: the methods to test, by name or as package.module:Class; by default all of ours",
    )
