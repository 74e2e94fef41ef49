"""JSON schemas of the files that the report reads.

They require only what the report uses, and allow further keys.
"""

from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

__all__ = ["EVALUATION", "POSTERIOR", "RECORD", "RESULTS", "check_format"]

Schema = dict[str, Any]


def _object(required: Schema | None = None, optional: Schema | None = None) -> Schema:
    required = required or {}
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
    }


def _mapping(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
NUMBER: Schema = {"type": "number"}
ABOVE_0: Schema = {"type": "number", "exclusiveMinimum": 0}
NUMBERS = _list(NUMBER)
METRIC_NAMES: Schema = {
    "anyOf": [{"not": {"pattern": "^shift/"}}, {"pattern": "^shift/[^/]+/[0-9]+/."}]
}
METRICS: Schema = _mapping(NUMBER) | {"propertyNames": METRIC_NAMES}
IMAGE: Schema = {"type": "string", "pattern": "^data:image/png;base64,[A-Za-z0-9+/]+={0,2}$"}
ENVIRONMENT: Schema = {
    "seconds": NUMBER,
    "device": TEXT,
    "threads": COUNT,
    "python": TEXT,
    "versions": _mapping(TEXT),
}

BINS = _object(
    {
        "edges": NUMBERS,
        "counts": _list(COUNT),
        "confidence": _list(_or_null(NUMBER)),
        "accuracy": _list(_or_null(NUMBER)),
    }
)
LEVELS = _object({"levels": NUMBERS, "coverage": NUMBERS}, {"count": POSITIVE})
ENTROPY = _object({"edges": NUMBERS, "test": _list(COUNT)}, {"ood": _list(COUNT)})
ENDS: Schema = {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}
DIFFERENCE: Schema = {"type": "array", "items": NUMBER, "minItems": 3, "maxItems": 3}
PREDICTIVE = _object(
    {"metrics": METRICS},
    {
        "options": _or_null({"type": "object"}),
        "reliability": _or_null(
            {"if": {"required": ["levels"]}, "then": LEVELS, "else": BINS},
        ),
        "entropy": _or_null(ENTROPY),
        "intervals": _mapping(ENDS),
        "against": _object({"predictive": TEXT, "differences": _mapping(DIFFERENCE)}),
        "risk_coverage": _object({"coverage": NUMBERS, "risk": NUMBERS}),
        "roc": _object({"fpr": NUMBERS, "tpr": NUMBERS}),
        "classes": _object(
            {"counts": _list(COUNT), "right": _list(COUNT)}, {"confusion": _list(_list(COUNT))}
        ),
        "seconds": NUMBER,
    },
)
EXAMPLE = _object(
    {
        "index": COUNT,
        "label": TEXT,
        "predicted": TEXT,
        "probability": NUMBER,
        "entropy": NUMBER,
        "aleatoric": NUMBER,
        "epistemic": NUMBER,
        "image": IMAGE,
    }
)

EVALUATION = _object(
    {"data": TEXT, "predictives": _mapping(PREDICTIVE)},
    {
        "classes": _or_null(_list(TEXT)),
        "num_test": COUNT,
        "num_positions": _or_null(COUNT),
        "ood": _or_null(_object({"name": TEXT}, {"num_examples": COUNT, "note": _or_null(TEXT)})),
        "uncertain": _or_null(_object({"predictive": TEXT, "examples": _list(EXAMPLE)})),
        **ENVIRONMENT,
    },
)
"""evaluation.json."""

RESULTS = _object(
    {"data": TEXT, "model": TEXT, "num_data": POSITIVE, "metrics": _mapping(METRICS)},
    {
        "evidence": _object({}, {"kept": NUMBER, "epoch": COUNT}),
        "weight_decay": _mapping(
            _object(
                {"parameters": COUNT},
                {"initial": NUMBER, "learned": NUMBER, "effective_parameters": NUMBER},
            )
        ),
        "config": _mapping({"type": "object"}),
        "intervals": _mapping(_mapping(ENDS)),
        "differences": _mapping(_mapping(DIFFERENCE)),
        "seconds_beside": _mapping(NUMBER),
        "ranks": POSITIVE,
        **ENVIRONMENT,
    },
)
"""results.json."""

FIT = _object(
    {
        "calibration": _object(
            {"covariance_scale": {"type": "number", "minimum": 0}},
            {"output_temperature": ABOVE_0, "sigma_noise": _or_null(ABOVE_0)},
        ),
        "num_terms": COUNT,
        **{f"nll{end}": NUMBER for end in ("", "_uncalibrated", "_scaled_map", "_map")},
    }
)

POSTERIOR = _object(
    {
        "likelihood": TEXT,
        "prior_precision": _mapping(NUMBER),
        "num_data": POSITIVE,
        "effective_parameters": _mapping(NUMBER),
        "parameters": _mapping(COUNT),
    },
    {
        "evidence": NUMBER,
        "temperature": NUMBER,
        "calibrations": _or_null(_mapping(FIT)),
        "model": _or_null(_object({}, {"class_path": TEXT})),
        "data": _or_null(_object({}, {"name": TEXT})),
        **ENVIRONMENT,
    },
)
"""posterior.json."""

RECORD = {
    "type": "object",
    "properties": {"kind": TEXT, "epoch": COUNT},
    "required": ["kind", "epoch"],
    "allOf": [
        {
            "if": {"properties": {"kind": {"const": "epoch"}}},
            "then": _object({"loss": NUMBER, "seconds": NUMBER}),
        },
        {
            "if": {"properties": {"kind": {"const": "update"}}},
            "then": _object(
                {
                    "evidence_per_example": NUMBER,
                    "weight_decay": _mapping(NUMBER),
                    "seconds": _mapping(NUMBER),
                }
            ),
        },
    ],
}
"""A line of log.jsonl."""


VERSIONED = (
    (EVALUATION, "marglik.evaluation", 1, "evaluate RUN_DIR"),
    (POSTERIOR, "marglik.posterior", 1, "fit"),
)
"""(schema, format and version that a file must have, command that writes it)."""


def check_format(content: Any, schema: Schema, path: Path, line: int | None = None) -> None:
    """Raise a ValueError that names the first thing in a file that the report cannot read.

    Args:
        content: the parsed JSON.
        schema: one of the schemas of this module.
        path: path of the file, for the error.
        line: number of the line, if each line is a document of its own.

    Raises:
        ValueError: names the file, the place in it, and what is expected there.
    """
    where = f"{path}, line {line}" if line else str(path)
    for versioned, name, version, command in VERSIONED:
        if schema is versioned:
            _check_version(content, where, name, version, command)
    error = best_match(Draft202012Validator(schema).iter_errors(content))
    if error is not None:
        message = error.message if len(error.message) < 200 else f"{error.message[:200]}..."
        raise ValueError(
            f"{where}: {message} (at {error.json_path}). The report cannot read this file; write "
            "it again with the marglik command that wrote the folder."
        )
    if schema is EVALUATION:
        _check_lengths(content, where)


def _check_lengths(evaluation: dict[str, Any], where: str) -> None:
    """Raise a ValueError for lists whose lengths do not fit together, which no schema can check."""
    for name, predictive in evaluation["predictives"].items():
        for key in ("reliability", "entropy"):
            columns = {k: v for k, v in (predictive.get(key) or {}).items() if isinstance(v, list)}
            axis = "levels" if "levels" in columns else "edges"
            wanted = len(columns.pop(axis, ())) - (axis == "edges")
            wrong = {k: len(v) for k, v in columns.items() if len(v) != wanted}
            if wrong:
                raise ValueError(
                    f"{where}: by its {axis}, {key} of {name!r} should have {wanted} values, but "
                    f"has {wrong}. Write it again: marglik evaluate RUN_DIR."
                )
        for key in ("risk_coverage", "roc"):
            lengths = {k: len(v) for k, v in predictive.get(key, {"": ()}).items()}
            if len(set(lengths.values())) > 1 or not all(lengths.values()) and key in predictive:
                raise ValueError(
                    f"{where}: {key} of {name!r} should have lists of the same length, at least 1, "
                    f"but has {lengths}. Write it again: marglik evaluate RUN_DIR."
                )
        if problem := _problem_of_classes(predictive.get("classes"), evaluation.get("classes")):
            raise ValueError(
                f"{where}: classes of {name!r}: {problem}. Write it again: marglik evaluate "
                "RUN_DIR."
            )


def _problem_of_classes(classes: dict[str, Any] | None, names: list[str] | None) -> str:
    if classes is None:
        return ""
    C = len(classes["counts"])
    if len(classes["right"]) != C or (names is not None and len(names) != C):
        return f"{C} counts, {len(classes['right'])} right, {len(names or ())} names"
    if any(r > n for r, n in zip(classes["right"], classes["counts"], strict=True)):
        return "more predictions are right than there are examples"
    matrix = classes.get("confusion")
    if matrix is not None and [sum(row) for row in matrix if len(row) == C] != classes["counts"]:
        return "the rows of the confusion matrix do not sum to the counts"
    return ""


def _check_version(content: Any, where: str, name: str, version: int, command: str) -> None:
    found = content if isinstance(content, dict) else {}
    if found.get("format") != name:
        raise ValueError(
            f"{where} has the format {found.get('format')!r}, not {name!r}. Write it again: "
            f"marglik {command}."
        )
    if found.get("version") != version:
        raise ValueError(
            f"{where} has version {found.get('version')!r} of {name}; this marglik reads version "
            f"{version}. Write it again (marglik {command}), or use the marglik that wrote it."
        )
