"""The outputs of a model by position, and the targets, losses and metrics that a user passes for
them.
"""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from fastaccum.adapters.arguments import LossArgument, Metric, MetricsArgument
from fastaccum.adapters.attributes import Nest
from fastaccum.kernels import private

NOT_WHOLE = tf.int64.min
Path = tuple[Any, ...]  # of keys and positions, from the root of a nest to a leaf
# of leaves, in the structure of a nest
Positions: TypeAlias = "int | tuple[Positions, ...] | dict[str, Positions]"
Placed = tuple[int, str, keras.metrics.Metric]  # a metric behind its output's position and its name


class Matched(NamedTuple):
    """One micro-batch by output, in the order of `Outputs.names`; None where an output has no
    target or no weight.
    """

    y_true: list[tf.Tensor]
    y_pred: list[tf.Tensor]
    sample_weight: list[tf.Tensor | None]
    # bool [rows], or [rows, length] of a target's elements; None where all are
    valid: Sequence[tf.Tensor | None]


class Outputs:
    """The outputs of a model: the leaves of the nest `y_pred` that it returns, in the order of its
    Keras's flatten.

    `names` are the model's own, empty or too few where it names none. Where targets are fewer, they
    are for the outputs that have a `loss`. With `pairs_in_order`, as where a model computes its
    loss itself, targets that are fewer are for the metrics of the first outputs, and those of the
    others are left out, as by Keras.
    """

    # or an output without a target has no loss and no metrics, instead of an error
    skips_missing_targets = False
    # of losses for one of several outputs: for a single one Keras takes the first
    takes_lists = True
    # whose keys are flattened as they come, others' sorted
    _keep_order: tuple[type, ...] = (OrderedDict,)

    def __init__(
        self,
        names: Sequence[str],
        y_pred: Nest,
        loss: LossArgument = None,
        pairs_in_order: bool = False,
    ):
        self.pairs_in_order = pairs_in_order
        self._paths: list[Path] = []
        self._tree = self._positions(y_pred)
        self.names, self.log_names = self._name(names)
        self.specs = self.predictions(y_pred)
        self._with_loss = sorted(self.placed(loss, "loss", True, several=True))

    def _name(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Returns the names of the outputs, and those of their losses in logs."""
        if len(names) != len(self._paths):
            names = [_key(p, f"output_{i}") for i, p in enumerate(self._paths)]
        elif isinstance(self._tree, dict) and all(len(path) == 1 for path in self._paths):
            names = [path[0] for path in self._paths]
        parts = [(*p[:-1], _key(p, name)) for name, p in zip(names, self._paths, strict=True)]
        return list(names), ["/".join(map(str, each)) for each in parts]

    def _positions(self, nest: Nest, path: Path = ()) -> Positions:
        """Returns the nest with the positions of its leaves, and notes their paths in order."""
        if isinstance(nest, Mapping):
            keys = nest if isinstance(nest, self._keep_order) else sorted(nest)
            found = {key: self._positions(nest[key], (*path, key)) for key in keys}
            return {key: found[key] for key in nest}
        if isinstance(nest, (list, tuple)):
            return tuple(self._positions(each, (*path, i)) for i, each in enumerate(nest))
        self._paths.append(path)
        return len(self._paths) - 1

    def predictions(self, y_pred: Any) -> list[tf.Tensor]:
        """Lists the tensors that the model returned by position."""
        return [functools.reduce(operator.getitem, path, y_pred) for path in self._paths]

    def match(
        self, value: Any, what: str, repeat: bool = False, several: bool = False
    ) -> list[Any]:
        """Returns `placed` as a list by position, with None where there is nothing for an
        output.
        """
        placed = self.placed(value, what, repeat, several)
        return [placed.get(i) for i in range(len(self.names))]

    def placed(
        self, value: Any, what: str, repeat: bool = False, several: bool = False
    ) -> dict[int, Any]:
        """Returns what a user passed as `what` by the outputs' positions, in the order in which
        Keras visits them.

        If `repeat`, one value stands for every output; if `several`, an output may have a list of
        values.
        """
        return {
            i: v
            for i, v in self._placed(value, what, self._tree, repeat, several)
            if not _is_nothing(v)
        }

    def _placed(
        self, value: Any, what: str, tree: Positions, repeat: bool, several: bool
    ) -> Iterator[tuple[int, Any]]:
        leaves = list(_leaves(tree))
        names = [self.names[i] for i in sorted(leaves)]
        parts: Iterable[tuple[Any, Any]]
        if _is_nothing(value):
            return
        if isinstance(value, Mapping):
            branches = (
                list(tree.items())
                if isinstance(tree, dict)
                else [(self.names[i], i) for i in leaves]
            )
            known = [name for name, _ in branches]
            if unknown := set(value) - set(known):
                raise ValueError(
                    f"{what} names {sorted(unknown)}, but the model's outputs are {known}."
                )
            if isinstance(tree, dict):
                branches = [(name, tree[name]) for name in value]
            parts = [(value[name], branch) for name, branch in branches if name in value]
        elif not isinstance(value, (list, tuple)) or (isinstance(tree, int) and several):
            if len(leaves) > 1 and not repeat:
                raise ValueError(
                    f"{what} is one value, but the model has {len(leaves)} outputs {names}: pass "
                    "a list."
                )
            yield from ((i, value) for i in leaves)
            return
        elif isinstance(tree, tuple) and len(value) == len(tree):
            parts = zip(value, tree, strict=True)
        elif len(value) == len(leaves):
            parts = [(value[i - min(leaves)], i) for i in leaves]
        else:
            raise ValueError(
                f"{what} has {len(value)} entries for the {len(leaves)} outputs {names}."
            )
        for each, branch in parts:
            yield from self._placed(each, what, branch, repeat, several)

    def targets(self, value: Nest, what: str = "y", repeat: bool = False) -> list[Any]:
        """Returns targets by position; fewer targets than outputs are for the outputs with a loss,
        as in Keras.
        """
        entries = list(value) if isinstance(value, (list, tuple)) else [] if repeat else [value]
        as_returned = isinstance(value, Mapping) or (
            isinstance(self._tree, tuple) and len(entries) == len(self._tree)
        )
        if entries and len(entries) == len(self._with_loss) < len(self.names) and not as_returned:
            of_loss = {
                i: each
                for i, each in zip(self._with_loss, entries, strict=True)
                if not _is_nothing(each)
            }
            return [of_loss.get(i) for i in range(len(self.names))]
        return self.match(value, what, repeat)

    def matched(self, y_true: Nest, y_pred: Nest, sample_weight: Nest) -> Matched:
        """Returns the targets, predictions and weights of one micro-batch."""
        weights = self.targets(sample_weight, "sample_weight", repeat=True)
        return Matched(
            self.targets(y_true), self.predictions(y_pred), weights, [None] * len(self.names)
        )

    def targets_of_metrics(self, y_true: Nest) -> list[Any]:
        """Returns targets by position; where targets are fewer, those of the first outputs, as
        Keras pairs them.
        """
        flat = tf.nest.flatten(y_true)
        if not self.pairs_in_order or isinstance(y_true, Mapping) or len(flat) >= len(self.names):
            return self.targets(y_true)
        return [*flat, *[None] * (len(self.names) - len(flat))]

    def matched_for_metrics(self, y_true: Nest, y_pred: Nest, sample_weight: Nest) -> Matched:
        """Returns what `matched` does, with the targets of metrics."""
        weights = self.targets(sample_weight, "sample_weight", repeat=True)
        y_true = self.targets_of_metrics(y_true)
        return Matched(y_true, self.predictions(y_pred), weights, [None] * len(self.names))

    def place_metrics(self, what: str, metrics: MetricsArgument) -> list[list[Metric]]:
        """Lists the metrics of each output; a list alone is for a single output, as in Keras."""
        may_be_one = self.skips_missing_targets  # as in tf_keras
        if metrics is not None and not isinstance(metrics, (list, tuple, dict)) and not may_be_one:
            raise ValueError(
                f"{what} must be a list, tuple, or dict, as in Keras; got {metrics!r}."
            )
        if len(self.names) == 1 and not isinstance(metrics, dict):
            return [tf.nest.flatten(metrics)]
        placed = self.match(metrics, "metrics", repeat=may_be_one, several=True)
        return [tf.nest.flatten([] if each is None else each) for each in placed]

    def logs_each_loss(self, losses: int) -> bool:
        """Tells if each of so many losses is logged beside their sum."""
        return losses > 1

    def sort_metrics(self, placed: list[Placed]) -> list[Placed]:
        """Sorts (position, name, metric), the metrics before the weighted ones, as Keras logs
        them.
        """
        return placed

    def sort_logs(self, logs: Iterable[str], computed: Iterable[str]) -> list[str]:
        """Sorts the names of logs as Keras's `evaluate` lists them: first those `computed`, in this
        order.
        """
        logs = list(logs)
        return list(dict.fromkeys([*(name for name in computed if name in logs), *sorted(logs)]))


class TFKerasOutputs(Outputs):
    """The outputs of a tf_keras model, which names, orders and matches them in another way."""

    skips_missing_targets = True
    takes_lists = False
    _keep_order = ()

    def _name(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        if len(names) != len(self._paths):
            names = [_number(path) for path in self._paths]
        return list(names), list(names)

    def placed(
        self, value: Any, what: str, repeat: bool = False, several: bool = False
    ) -> dict[int, Any]:
        return dict(sorted(super().placed(value, what, repeat, several).items()))

    def targets(self, value: Nest, what: str = "y", repeat: bool = False) -> list[Any]:
        return super().targets(value, what, repeat=True)

    def place_metrics(self, what: str, metrics: Any) -> list[list[Metric]]:
        """Lists the metrics of each output; a plain list is for every output."""
        is_plain = isinstance(metrics, (list, tuple)) and not any(map(tf.nest.is_nested, metrics))
        if len(self.names) > 1 and is_plain:
            objects = keras.metrics.Metric
            return [
                [
                    type(m).from_config(m.get_config()) if isinstance(m, objects) else m
                    for m in metrics
                ]
                for _ in self.names
            ]
        return super().place_metrics(what, metrics)

    def logs_each_loss(self, losses: int) -> bool:
        return len(self.names) > 1

    def sort_metrics(self, placed: list[Placed]) -> list[Placed]:
        return sorted(placed, key=lambda each: each[0])

    def sort_logs(self, logs: Iterable[str], computed: Iterable[str]) -> list[str]:
        return list(logs)


def _number(path: Path) -> str:
    name = "_".join(str(key + 1 if isinstance(key, int) else key) for key in path)
    return name if path and isinstance(path[0], str) else f"output_{name or 1}"


def _leaves(tree: Positions) -> Iterator[int]:
    if isinstance(tree, int):
        yield tree
        return
    for branch in tree.values() if isinstance(tree, dict) else tree:
        yield from _leaves(branch)


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, tuple) and not value)


def _key(path: Path, default: str) -> str:
    """Returns the key at the end of a path, or `default` where the key is a number."""
    return default if not path or isinstance(path[-1], int) else path[-1]


def make_distinct(names: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    """Appends _1, _2, ... to names that occur before or are `taken`, as Keras names metrics."""
    found, taken = list[str](), set(taken)
    for name in names:
        tried = (name, *(f"{name}_{i}" for i in range(1, len(taken) + 1)))
        found.append(next(each for each in tried if each not in taken))
        taken.add(found[-1])
    return found


def get_mask(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the mask that Keras's layers attached to a tensor, or None."""
    return private.keras_mask(tensor, None)


def to_whole(indices: tf.Tensor) -> tf.Tensor:
    """Casts indices to int64, with `NOT_WHOLE` for fractions and NaN, which a plain cast would turn
    into an index.
    """
    as_int = tf.cast(indices, tf.int64)
    if not indices.dtype.is_floating:
        return as_int
    return tf.where(tf.cast(as_int, indices.dtype) == indices, as_int, NOT_WHOLE)


def require_known(
    what: str, value: object, kind: str, get: Callable[[str], object], shorthands: Sequence[str]
) -> None:
    """Raises unless a loss or metric is an object, a function, or a name that `get` knows or of
    `shorthands`.
    """
    if value is not None and not callable(value) and not isinstance(value, str):
        raise TypeError(f"{what}={value!r} must be a {kind}, its name, or fn(y_true, y_pred).")
    try:
        if isinstance(value, str) and value.lower() not in shorthands:
            get(value)
    except ValueError:
        raise ValueError(
            f"{what}={value!r} is not a {kind}. Pass a name such as 'mse', a Keras object, or "
            "fn(y_true, y_pred)."
        ) from None
