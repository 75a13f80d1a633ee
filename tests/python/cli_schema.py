# SPDX-License-Identifier: Apache-2.0
"""docs/schema: what `kvstrata VERB -o json` prints, held against documents that it did print."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jsonschema

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "docs" / "schema"


def path_of(verb: str) -> pathlib.Path:
    return FOLDER / (verb.replace(" --", "-").replace(" ", "-") + ".json")


def closed(schema: Any) -> Any:
    """Readers must take keys of later releases; a key of ours that no schema has is a mistake."""
    if isinstance(schema, list):
        return [closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    return {**inner, "additionalProperties": False} if "properties" in schema and "required" in schema else inner


def check(verb: str, document: Any) -> None:
    schema = json.loads(path_of(verb).read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    errors = sorted(jsonschema.Draft202012Validator(closed(schema)).iter_errors(document), key=lambda e: str(e.path))
    assert not errors, (verb, [f"{error.json_path}: {error.message}" for error in errors[:5]])
