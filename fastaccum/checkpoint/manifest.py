"""manifest.json, read whole or not at all: every value has its type and range, and they agree with one another."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import reprlib
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastaccum.checkpoint import files
from fastaccum.checkpoint.callback_state import COUNTERS
from fastaccum.checkpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from fastaccum.checkpoint.state import PACKAGES, versions
from fastaccum.lines import warn

FORMAT = 3
MANIFEST = "manifest.json"
LARGEST = 2**27  # bytes: what is larger is not read, nor written
DEEPEST = 100
# What a tensor's group is called in the description.
_GROUPS = {"model": "model", "optimizer": "optimizer", "loss_scale": "loss_scale", "step": "metrics"}
_OWN_LOGS = ("loss", "grad_norm", "loss_scale", "skipped_steps")


def read(path: Path) -> dict[str, Any]:
    """What the manifest in the checkpoint folder `path` holds.

    Raises:
        CorruptCheckpointError: raised if it is not as it was written, or no value that can be right.
        IncompatibleCheckpointError: raised if it is as another version wrote it.
    """
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise CorruptCheckpointError("it is not a directory")
        content = files.read(path / MANIFEST, LARGEST)
        manifest = json.loads(content.decode(), object_pairs_hook=files.without_twins)
        if not isinstance(manifest, dict) or type(manifest.get("format")) is not int:
            raise CorruptCheckpointError(f"{MANIFEST} does not have this format: it has no number of one")
        if manifest["format"] > FORMAT:  # which may be sealed otherwise
            raise IncompatibleCheckpointError(_of_another_version(path, manifest))
        if manifest.pop("sha256", None) != digest(manifest):
            raise CorruptCheckpointError(f"{MANIFEST} was changed after it was written: its checksum differs")
    except (CorruptCheckpointError, IncompatibleCheckpointError):
        raise
    except OSError as error:
        raise CorruptCheckpointError(f"{Path(error.filename or path).name}: {error.strerror}") from error
    except RecursionError as error:
        raise CorruptCheckpointError(f"{MANIFEST} is nested too deep") from error
    except ValueError as error:
        raise CorruptCheckpointError(f"{MANIFEST} is not JSON: {error}") from error
    if manifest["format"] != FORMAT:
        raise IncompatibleCheckpointError(_of_another_version(path, manifest))
    require(manifest)
    return manifest


def _of_another_version(path: Path, manifest: Mapping[str, Any]) -> str:
    saved = manifest.get("versions")
    wrote = ", ".join(f"{k} {v}" for k, v in saved.items()) if isinstance(saved, dict) else "an earlier fastaccum"
    return (
        f"{path} has format {manifest['format']}, written by {wrote}, where this version reads {FORMAT}. Nothing was "
        "changed: go on with that version, or name another checkpoint_dir."
    )


def warn_of_other_versions(path: Path, manifest: Mapping[str, Any]) -> None:
    """Says which versions wrote a checkpoint, if this process has others."""
    saved, now = manifest["versions"], versions()
    others = [f"{name} {saved[name]}, now {now[name]}" for name in saved if now[name] != saved[name]]
    if others:
        warn(
            f"{path} was written under {'; '.join(others)}. Training goes on, but its bits may not be those of an "
            "uninterrupted one."
        )


def warn_of_gaps(where: Any, epoch: Sequence[int], history: Mapping[str, Sequence[Any]]) -> None:
    """Says which columns of a History are uneven, as those are that a callback of the user's adds to now and then."""
    columns = {name: values for name, values in history.items() if _is_column(values)}
    validated = max((len(values) for name, values in columns.items() if name.startswith("val_")), default=0)
    for name, values in columns.items():
        wanted = validated if name.startswith("val_") else len(epoch)
        if len(values) != wanted or len(set(map(np.shape, values))) > 1:
            warn(f"{where}: history[{name!r}] has {len(values)} values for {wanted} epochs, or of several shapes.")


def of_history(epoch: list[int], history: Mapping[str, Any]) -> dict[str, Any]:
    """A History of plain values, as a manifest has it: apart is what a callback of the user's made of it, which may be
    text, None, other numbers of values, or own logs that are not there.
    """
    columns = {n: own for n, own in history.items() if _is_column(own, len(epoch), n in _OWN_LOGS)}
    others = {n: own for n, own in history.items() if n not in columns}
    others |= {n: [] for n in _OWN_LOGS if epoch and n not in history}
    return {"epoch": epoch, "history": columns} | ({"others": others} if others else {})


def history_in(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """`History.history`, of plain values, from a manifest."""
    others = manifest["history"].get("others", {})
    return manifest["history"]["history"] | {n: own for n, own in others.items() if own != [] or n not in _OWN_LOGS}


def _is_column(values: Any, epochs: int | None = None, own: bool = False) -> bool:
    """Whether they are numbers of epochs: for one of fastaccum's own logs, one for each."""
    try:
        _require("", [_numbers], values)
    except CorruptCheckpointError:
        return False
    if own:
        return len(values) == epochs and list not in map(type, values)
    return epochs is None or 1 <= len(values) <= epochs


def written(manifest: Mapping[str, Any]) -> bytes:
    """The content of manifest.json, which `read` takes; raises CorruptCheckpointError where it would not."""
    plain: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, "versions": versions(), **manifest}))
    require(plain)
    content = (json.dumps({**plain, "sha256": digest(plain)}, indent=1) + "\n").encode()
    if len(content) > LARGEST:
        raise CorruptCheckpointError(f"{MANIFEST} would be larger than {LARGEST} bytes")
    return content


def digest(manifest: Mapping[str, Any]) -> str:
    """The checksum of all that a manifest holds but the checksum."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def require(manifest: dict[str, Any]) -> None:
    """Raises CorruptCheckpointError, with its key, for a value that cannot be right."""
    _require_shallow(manifest)
    _require("", _RULES, manifest)
    _require_progress(**manifest["progress"], history=manifest["history"])
    _require_variables(manifest["description"], manifest["tensors"])
    _require_arrays(manifest["callbacks"], manifest["tensors"])
    plan = manifest["description"]["batch plan"]
    of_arrays = "shuffle" in plan
    _require("data", _DATA_OF_ARRAYS if of_arrays else _DATA_OF_BATCHES, manifest["data"])
    if ("batches" in manifest["cut"]) == of_arrays or (of_arrays and manifest["cut"]["batch_size"] is None):
        _refuse("cut", manifest["cut"], f"that of {'arrays' if of_arrays else 'batches'}")
    if of_arrays:
        _require_steps_of_arrays(plan, manifest["cut"])
        _require_place_in_arrays(manifest["progress"], manifest["data"], plan)
    else:
        _require_place_in_batches(manifest["progress"], manifest["data"], plan)
        _require_held(manifest["data"], manifest["tensors"])


def _refuse(key: str, value: Any, rule: str) -> None:
    raise CorruptCheckpointError(f"{MANIFEST}: {key.lstrip('.') or 'it'} is {reprlib.repr(value)}, which is not {rule}")


def _require_shallow(manifest: Any) -> None:
    """Of text that can be printed, and of a depth that functions which call themselves can go through."""
    left = [("", manifest, 0)]
    while left:
        key, value, depth = left.pop()
        if depth > DEEPEST:
            raise CorruptCheckpointError(f"{MANIFEST} is nested too deep: {key[:200]}")
        if isinstance(value, str):
            _require_text(key, value)
        elif isinstance(value, dict):
            for name, each in value.items():
                _require_text(key, name)
                left.append((f"{key}.{name}", each, depth + 1))
        elif isinstance(value, list):
            left.extend((key, each, depth + 1) for each in value if isinstance(each, (str, list, dict)))


def _require_text(key: str, value: str) -> None:
    if not value.isascii() and re.search("[\ud800-\udfff]", value):
        _refuse(key, value, "text")


# What a value must be: a range of whole numbers; a pattern of text; `float`, any number, NaN among them; `bool`; (None,
# what it must be if not None); [what each must be]; a dict by names, of which those with a "?" may be missing and "*"
# is any; a function of key and value.


def _require(key: str, rule: Any, value: Any) -> None:
    if isinstance(rule, dict) and isinstance(value, dict):
        _require_names(key, rule, value)
        for name, own in value.items():
            _require(f"{key}.{name}", rule.get(name, rule.get(f"{name}?", rule.get("*"))), own)
    elif isinstance(rule, list) and isinstance(value, list):
        for i, own in enumerate(value):
            _require(f"{key}[{i}]", rule[0], own)
    elif isinstance(rule, tuple):
        if value is not None or None not in rule:
            _require(key, rule[-1], value)
    elif callable(rule) and not isinstance(rule, type):
        rule(key, value)
    elif not _is(rule, value):
        _refuse(key, value, _SAID.get(type(rule), "of that form").format(rule))


_SAID = {range: "a whole number in {0}", re.Pattern: "text like {0.pattern}", type: "a {0.__name__}"}


def _is(rule: Any, value: Any) -> bool:
    if rule is float:
        return type(value) is float or (type(value) is int and abs(value) < 2**63)
    if isinstance(rule, re.Pattern):
        return isinstance(value, str) and rule.fullmatch(value) is not None
    return type(value) is (rule if rule is bool else int) and (rule is bool or value in rule)


def _require_names(key: str, rule: Mapping[str, Any], value: Mapping[str, Any]) -> None:
    missing = [name for name in rule if name[-1] not in "?*" and name not in value]
    unknown = [name for name in value if not {name, f"{name}?", "*"} & rule.keys()]
    for name in (missing + unknown)[:1]:
        is_what = "missing" if missing else "unknown"
        raise CorruptCheckpointError(f"{MANIFEST}: {f'{key}.{name}'.lstrip('.')} is {is_what}")


def _anything(key: str, value: Any) -> None:
    pass


def _numbers(key: str, value: Any) -> None:
    """A number, or as an array holds them."""
    left = [value]
    while left:
        each = left.pop()
        left.extend(each) if isinstance(each, list) else _require(key, float, each)
    try:
        np.array(value, np.float64)
    except ValueError:
        _refuse(key, value, "an array of numbers")


def _callback(key: str, value: Any) -> None:
    _require(key, {"kind": _anything, "state": _OBJECT}, value)
    if value["kind"] is not None:  # else a class of the user's, which checks it itself
        _require(f"{key}.kind", re.compile("|".join(COUNTERS)), value["kind"])
        rules = {name: _COUNTER[of] for name, of in COUNTERS[value["kind"]].items()}
        _require(f"{key}.state", rules, value["state"])


def _random_state(key: str, value: Any) -> None:
    """What Python's `random.setstate` takes."""
    try:
        random.Random().setstate((value[0], tuple(value[1]), value[2]))
    except (TypeError, ValueError, LookupError, OverflowError):
        _refuse(key, value, "a state of Python's random numbers")
    _require(key, [(None, _anything)], value)
    _require(f"{key}[1]", [_COUNT], value[1])
    _require(f"{key}[2]", (None, float), value[2])


_COUNT, _FROM_1, _CRC = range(2**63), range(1, 2**63), range(2**32)
_OBJECT = {"*": _anything}
_VARIABLES = {"*": re.compile(r"\w+\[.*\]")}
_COUNTER = {
    "count": range(-(2**63), 2**63),  # a subclass may begin below 0
    "count or none": (None, range(-1, 2**63)),
    "number or none": (None, float),
    "flag": bool,
    "arrays or none": (None, {"arrays": _COUNT}),
}
_MARK = {"passes": _COUNT, "steps": _COUNT, "rows": _COUNT}
_DATA_OF_ARRAYS = {"seed": (None, range(2**31)), "checksum": _CRC}
_DATA_OF_BATCHES = {
    "batch_size": range(2**31),
    "first_step": (None, {"rows": _FROM_1, "checksum": _CRC}),
    **_MARK,
    "random?": _random_state,
    "given?": _MARK,
    "held?": [_FROM_1],
}
_RULES = {
    "format": range(FORMAT, FORMAT + 1),
    "versions": dict.fromkeys(("python", *PACKAGES), re.compile(r"[\w.+-]+")),
    "progress": {"step": _FROM_1, **dict.fromkeys(("epoch", "step_in_epoch", "first_epoch"), _COUNT), "stopped": bool},
    "data": _OBJECT,
    "history": {"epoch": [_COUNT], "history": {"*": [_numbers]}, "others?": _OBJECT},
    "callbacks": {"*": _callback},
    "description": {
        "model": {"layers": _OBJECT, "variables": _VARIABLES, "trained": _OBJECT},
        "metrics": {"variables": _VARIABLES},
        "optimizer": {"variables": _VARIABLES, "*": _anything},
        "loss_scale": {"variables": _VARIABLES, "*": _anything},
        "loss": _OBJECT,
        "batch plan": _OBJECT,
    },
    "cut": {
        "gradient_accumulation_steps": _FROM_1,
        "replicas": _FROM_1,
        "batch_size": (None, _FROM_1),  # of batches, where it can be seen
        "batches?": range(-2, 2**63),  # unknown, infinite
    },
    "tensors": {"*": {"shape": [_COUNT], "dtype": re.compile(r"\w+")}},
    "files": {"*": {"size": _COUNT, "sha256": re.compile("[0-9a-f]{64}")}},
}

# What values must be to one another.


def _require_progress(
    step: int, epoch: int, step_in_epoch: int, first_epoch: int, stopped: bool, history: Mapping[str, Any]
) -> None:
    ended = history["epoch"]
    if len(ended) != epoch - first_epoch or any(e != first_epoch + i for i, e in enumerate(ended)):
        _refuse("history.epoch", ended, f"the epochs from {first_epoch} to {epoch}, where training goes on")
    if step < len(ended) + step_in_epoch:
        _refuse("progress.step", step, f"enough for {len(ended)} epochs and {step_in_epoch} steps")
    for name, values in history["history"].items():
        if not 1 <= len(values) <= len(ended):
            _refuse(f"history.history.{name}", values, f"values of {len(ended)} epochs")
    for name in _OWN_LOGS if ended else ():
        values = history["history"].get(name, [])
        if name not in history.get("others", {}) and (len(values) != len(ended) or list in map(type, values)):
            _refuse(f"history.history.{name}", values, f"a number for each of {len(ended)} epochs")


def _require_variables(description: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    described = {
        f"{group}/{name}": spec
        for group, part in _GROUPS.items()
        for name, spec in description[part]["variables"].items()
    }
    held = {n: f"{spec['dtype']}{spec['shape']}" for n, spec in tensors.items() if n.partition("/")[0] in _GROUPS}
    if held != described:
        names = sorted(n for n in {*held, *described} if held.get(n) != described.get(n))
        raise CorruptCheckpointError(
            f"{MANIFEST}: its description and its tensors are of other variables: {', '.join(names[:3])}"
        )


def _require_arrays(callbacks: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Of callbacks' weights, as many as their states say."""
    held = {name for name in tensors if name.startswith("callbacks/")}
    for name, own in callbacks.items():
        for attribute, value in own["state"].items() if own["kind"] else ():
            if isinstance(value, dict):
                prefix, count = f"callbacks/{name}/{attribute}/", value["arrays"]
                found = {each for each in held if each.startswith(prefix)}
                held -= found
                if len(found) != count or found != {f"{prefix}{i}" for i in range(count)}:
                    _refuse(f"callbacks.{name}.state.{attribute}.arrays", count, f"the number of tensors {prefix}*")
    if held:
        _refuse("callbacks", sorted(held), "among its states")


def _require_steps_of_arrays(plan: Mapping[str, Any], cut: Mapping[str, Any]) -> None:
    rules = {"rows": _FROM_1, "global_batch": _FROM_1, "steps_per_epoch": (None, _FROM_1), "*": _anything}
    _require("description.batch plan", rules, plan)
    rows, size = plan["rows"], cut["batch_size"]
    steps = min(cut["gradient_accumulation_steps"], math.ceil(rows / size))
    if min(size * steps, rows) != plan["global_batch"]:
        _refuse("cut", cut, f"one of {plan['global_batch']} of {rows} rows")


def _require_place_in_arrays(progress: Mapping[str, Any], data: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    if (data["seed"] is None) == plan["shuffle"]:
        _refuse("data.seed", data["seed"], f"that of arrays whose shuffle={plan['shuffle']}")
    if progress["stopped"]:  # in the middle of an epoch, perhaps
        return
    of_pass = math.ceil(plan["rows"] / plan["global_batch"])
    of_epoch = min(plan.get("steps_per_epoch") or of_pass, of_pass)
    passes, part = divmod(progress["epoch"] - progress["first_epoch"], math.ceil(of_pass / of_epoch))
    done = passes * of_pass + part * of_epoch
    if progress["step_in_epoch"] >= of_epoch or progress["step"] != done + progress["step_in_epoch"]:
        _refuse("progress", progress, f"a place in epochs of {of_epoch} steps and passes of {of_pass}")


def _require_place_in_batches(progress: Mapping[str, Any], data: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    given = data.get("given", data)
    place = (progress["epoch"] - progress["first_epoch"], progress["step_in_epoch"])
    if plan.get("steps_per_epoch") is None and not progress["stopped"] and (given["passes"], given["steps"]) != place:
        _refuse("data", given, f"that after {place[0]} passes and {place[1]} steps")
    if ("given" in data) != ("held" in data):
        _refuse("data", data, "of a saved iterator or of one that is read again")
    if "held" in data:
        held, read = len(data["held"]), (data["passes"], data["steps"])
        ended = held > 0 and read == (given["passes"] + 1, 0)
        if not ended and read != (given["passes"], given["steps"] + held):
            _refuse("data", data, f"{held} steps ahead of what was given out")


def _require_held(data: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Of what an iterator needs to go on, and of the steps that were read ahead."""
    names = {name.removeprefix("data/") for name in tensors if name.startswith("data/")}
    if (data["steps"] > 0 and "held" in data) != ("iterator" in names):
        _refuse("data.steps", data["steps"], "in agreement with the iterator's state")
    names -= {"iterator", "start of the pass"}
    leaves = sorted({name.rpartition("/")[2] for name in names})
    stacks = ((i, j) for i, count in enumerate(data.get("held", ())) for j in range(min(count, len(names) + 1)))
    if names != {f"held/{i}/{j}/{k}" for i, j in stacks for k in leaves}:
        _refuse("data.held", data.get("held"), "the number of stacks of each step that was read ahead")
