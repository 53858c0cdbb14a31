"""The outputs of a model by position, and what a user passes for each of them: targets, labels among them."""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

NOT_WHOLE = tf.int64.min


class Matched(NamedTuple):
    """One micro-batch by output, in the order of `Outputs.names`; None where an output has no target or no weight."""

    y_true: list[Any]
    y_pred: list[Any]
    sample_weight: list[Any]


class Outputs:
    """The outputs of a model: the leaves of the nest that it returns, in the order in which its Keras flattens it.

    Args:
        names: the model's own, in that order; empty or too few for a model that names none.
        y_pred: symbolic outputs, a nest of tensors; None where there is none.
        loss: as the user passes it: which outputs have one tells what fewer targets than outputs are for.
        legacy: whether the model is tf_keras's, which names and matches outputs by rules of its own.

    Attributes:
        names: one for each output; in a Keras 3 model two may be equal.
        log_names: what their losses are called in logs.
        specs: the symbolic outputs by position.
    """

    def __init__(self, names: list[str], y_pred: Any, loss: Any = None, legacy: bool = False):
        self.legacy, self._paths = legacy, list[tuple]()
        self._tree = self._positions(y_pred)
        if len(names) != len(self._paths):
            names = [_pseudo_name(p) if legacy else _key(p, f"output_{i}") for i, p in enumerate(self._paths)]
        elif not legacy and isinstance(self._tree, dict) and all(len(path) == 1 for path in self._paths):
            names = [path[0] for path in self._paths]
        self.names = self.log_names = list(names)
        if not legacy:
            parts = [(*p[:-1], _key(p, name)) for name, p in zip(names, self._paths, strict=True)]
            self.log_names = ["/".join(map(str, each)) for each in parts]
        self.specs = self.predictions(y_pred)
        self._with_loss = sorted(self.placed(loss, "loss", True, several=True))

    def _positions(self, nest: Any, path: tuple = ()) -> Any:
        """The nest with the positions of its leaves, whose paths are noted in order."""
        if isinstance(nest, Mapping):
            in_order = list(nest) if isinstance(nest, OrderedDict) and not self.legacy else sorted(nest)
            found = {key: self._positions(nest[key], (*path, key)) for key in in_order}
            return {key: found[key] for key in nest}
        if isinstance(nest, (list, tuple)):
            return tuple(self._positions(each, (*path, i)) for i, each in enumerate(nest))
        self._paths.append(path)
        return len(self._paths) - 1

    def predictions(self, y_pred: Any) -> list[Any]:
        """What the model returned, by position."""
        return [functools.reduce(operator.getitem, path, y_pred) for path in self._paths]

    def match(self, value: Any, what: str, repeat: bool = False, several: bool = False) -> list[Any]:
        """`placed` as a list by position; None where there is nothing for an output."""
        placed = self.placed(value, what, repeat, several)
        return [placed.get(i) for i in range(len(self.names))]

    def placed(self, value: Any, what: str, repeat: bool = False, several: bool = False) -> dict[int, Any]:
        """What a user passed as `what` for the outputs, by position, in the order in which Keras goes through them.

        Args:
            value: in the structure of the outputs, a dict by name or a list by position; one value for a single output;
                None or () for nothing.
            repeat: whether one value stands for every output.
            several: whether an output may have a list of values.
        """
        found = (
            (i, each) for i, each in self._placed(value, what, self._tree, repeat, several) if not _is_nothing(each)
        )
        return dict(sorted(found, key=lambda each: each[0]) if self.legacy else found)

    def _placed(self, value: Any, what: str, tree: Any, repeat: bool, several: bool) -> Iterator[tuple[int, Any]]:
        leaves = list(_leaves(tree))
        if _is_nothing(value):
            return
        parts: Iterable[tuple[Any, Any]]
        if isinstance(value, Mapping):
            branches = list(tree.items()) if isinstance(tree, dict) else [(self.names[i], i) for i in leaves]
            known = [name for name, _ in branches]
            if unknown := set(value) - set(known):
                raise ValueError(f"{what} names {sorted(unknown)}, but the model's outputs are {known}.")
            if isinstance(tree, dict):
                branches = [(name, tree[name]) for name in value]
            parts = [(value[name], branch) for name, branch in branches if name in value]
        elif not isinstance(value, (list, tuple)):
            if len(leaves) > 1 and not repeat:
                raise ValueError(
                    f"{what} is one value, but the model has {len(leaves)} outputs {self._named(leaves)}: pass a list "
                    "or dict."
                )
            yield from ((i, value) for i in leaves)
            return
        elif isinstance(tree, int) and several:
            yield tree, value
            return
        elif isinstance(tree, tuple) and len(value) == len(tree):
            parts = zip(value, tree, strict=True)
        elif len(value) == len(leaves):
            parts = [(value[i - min(leaves)], i) for i in leaves]
        else:
            raise ValueError(f"{what} has {len(value)} entries for the {len(leaves)} outputs {self._named(leaves)}.")
        for each, branch in parts:
            yield from self._placed(each, what, branch, repeat, several)

    def targets(self, value: Any, what: str = "y", repeat: bool = False) -> list[Any]:
        """As `match`, where fewer targets than outputs are for those that have a loss, as in Keras."""
        repeat = repeat or self.legacy
        entries = list(value) if isinstance(value, (list, tuple)) else [] if repeat else [value]
        as_returned = isinstance(value, Mapping) or (isinstance(self._tree, tuple) and len(entries) == len(self._tree))
        if entries and len(entries) == len(self._with_loss) < len(self.names) and not as_returned:
            of_loss = dict(zip(self._with_loss, entries, strict=True))
            matched = [of_loss.get(i) for i in range(len(self.names))]
        else:
            matched = self.match(value, what, repeat)
        return [None if _is_nothing(each) else each for each in matched]

    def matched(self, y_true: Any, y_pred: Any, sample_weight: Any) -> Matched:
        """One micro-batch's targets, predictions and weights."""
        weights = self.targets(sample_weight, "sample_weight", repeat=True)
        return Matched(self.targets(y_true), self.predictions(y_pred), weights)

    def _named(self, positions: Sequence[int]) -> list[str]:
        return [self.names[i] for i in sorted(positions)]


def _leaves(tree: Any) -> Iterator[int]:
    if isinstance(tree, int):
        yield tree
        return
    for branch in tree.values() if isinstance(tree, dict) else tree:
        yield from _leaves(branch)


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, tuple) and not value)


def _key(path: tuple, default: str) -> str:
    """The key at the end of a path, or `default` where that is a number."""
    return default if not path or isinstance(path[-1], int) else path[-1]


def _pseudo_name(path: tuple) -> str:
    """What tf_keras calls an output of a model that names none."""
    name = "_".join(str(key + 1 if isinstance(key, int) else key) for key in path)
    return name if path and isinstance(path[0], str) else f"output_{name or 1}"


def distinct(names: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    """The names, with _1, _2, ... behind those that are there already or `taken`, as Keras names metrics."""
    found, taken = list[str](), set(taken)
    for name in names:
        tried = (name, *(f"{name}_{i}" for i in range(1, len(taken) + 1)))
        found.append(next(each for each in tried if each not in taken))
        taken.add(found[-1])
    return found


def mask_of(tensor: Any) -> tf.Tensor | None:
    """The mask that Keras's layers attached to a tensor, if any."""
    return getattr(tensor, "_keras_mask", None)


def whole(indices: tf.Tensor) -> tf.Tensor:
    """As int64, with fractions and NaN, which a cast would make some index, as `NOT_WHOLE`."""
    as_int = tf.cast(indices, tf.int64)
    if not indices.dtype.is_floating:
        return as_int
    return tf.where(tf.cast(as_int, indices.dtype) == indices, as_int, NOT_WHOLE)


def require_known(what: str, value: Any, kind: str, get: Callable[[str], Any], shorthands: Sequence[str]) -> None:
    """Raises unless a loss or metric is an object, a function, or a name: one that `get` knows, or of `shorthands`,
    of which an output's shape decides what they stand for.
    """
    if value is None or callable(value):
        return
    if not isinstance(value, str):
        raise TypeError(f"{what}={value!r} must be a {kind}, its name, or fn(y_true, y_pred).")
    try:
        if value.lower() not in shorthands:
            get(value)
    except ValueError:
        raise ValueError(
            f"{what}={value!r} is not a {kind}. Pass a name such as 'mse', a Keras object, or fn(y_true, y_pred)."
        ) from None
