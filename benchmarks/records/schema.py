"""Is a line a record? What is read of one must be there, and of its type."""
import json
import math
from types import UnionType
from typing import Any

from common.report.record import PARTS, PASSES, SCHEMA, Record
from common.runtime.iteration import LAUNCHES

NUMBER = float | int
_CASE = {"study": str, "step": int | None, "name": str | None, "variant": dict, "pass": (*PASSES, None),
         "launch": (*LAUNCHES, None)}
_INFO = {"schema": (SCHEMA,), "case": _CASE, "status": str, "reason": str, "engine": str, "parameter_dtype": str,
         "run": str | None, "config": dict}
_RECORD = {"benchmark": {"mode": str, "dtype": str | None, "extra_info": _INFO}, "model": {"name": str},
           "metric": {"name": str, "benchmark_values": list, "extra_info": dict}, "dependencies": dict, "runners": list}
_CONFIG = {"amp_dtype": str, "dropout": NUMBER, "fp8_weights": str, "fp8_attention": bool}     # where it is a block
Shape = dict | tuple | type | UnionType            # keys and their shapes, or the values there may be, or a type


class NotARecord(ValueError):
    """A line that is no record of this schema; the message says why."""


def checked(text: str) -> Record:
    """The record in a line of a file. Raises NotARecord."""
    try:
        record = json.loads(text, parse_constant=_refuse_constant)
        schema = record["benchmark"]["extra_info"].get("schema", "transformer block, 1")
        if schema != SCHEMA:
            raise NotARecord(f"is of the schema '{schema}', this suite reads '{SCHEMA}'; record it anew")
        _check(record)
    except KeyError as error:
        raise NotARecord(f"has no {error}; give a file that --json wrote") from None
    except NotARecord:
        raise
    except (ValueError, TypeError, IndexError, AttributeError, OverflowError, RecursionError):
        raise NotARecord("is no record of this suite; give a file that --json wrote") from None
    return record


def _refuse_constant(constant: str) -> None:
    """What json.loads does with NaN and Infinity, which are no JSON."""
    raise ValueError(constant)


def _check(record: Record) -> None:
    """Raise KeyError for what is missing, and ValueError or the like for what is not as it should be."""
    _require(record, _RECORD)
    _require(record["runners"][0], {"name": str, "extra_info": dict})
    for library in record["dependencies"].values():
        _require(library, {"version": str})
    info, metric = record["benchmark"]["extra_info"], record["metric"]["name"]
    extra, values = record["metric"]["extra_info"], record["metric"]["benchmark_values"]
    _require(info["case"].get("work", {}), dict)
    if info["config"]:
        _require(info["config"], _CONFIG)
    for key, shape in {"reason": str, "clock": str, "calibration": dict}.items():
        _require(extra.get(key, shape()), shape)
    _require_finite(values)
    if metric == "size done":                                                                # sweep's
        _require(info["case"]["variant"], {"axis": str, "size": int})
    if metric == "latency":
        if values:
            _require(info["case"]["launch"], LAUNCHES)
        for samples in (values, *extra.get("calibration", {}).values()):
            _require_finite(samples, positive=True)
    if metric == "time by part" and "parts" in extra:
        _require(extra, {"parts": dict.fromkeys(PARTS, NUMBER), "of": str})
        _require_finite([*extra["parts"].values(), extra.get("clocked") or 0.0, extra.get("timed") or 0.0])
        if min(extra["parts"].values()) < 0 or not sum(extra["parts"].values()):
            raise ValueError


def _require(value: Any, shape: Shape) -> None:
    """Raise KeyError, TypeError or ValueError where `value` has not that shape."""
    if isinstance(shape, dict):
        for key, inner in shape.items():
            _require(value[key], inner)
    elif isinstance(shape, tuple):
        if value not in shape:
            raise ValueError
    elif not isinstance(value, shape):
        raise TypeError


def _require_finite(values: list, positive: bool = False) -> None:
    for value in values:
        if type(value) not in (int, float) or not math.isfinite(value) or (positive and value <= 0):
            raise ValueError
