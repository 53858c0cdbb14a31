"""Matches a user's targets, losses and metrics with the outputs of a model, by position."""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from fastaccum.basics.arguments import LossArgument, Metric, MetricsArgument
from fastaccum.basics.attributes import Nest
from fastaccum.kernels import private

# The class index that stands for a number that is none, such as a fraction: no class has it.
NOT_WHOLE = tf.int64.min

# The keys and positions from the root of a nest to a leaf.
Path = tuple[Any, ...]

# The positions of leaves, in the structure of their nest.
Positions: TypeAlias = "int | tuple[Positions, ...] | dict[str, Positions]"

# A metric behind its output's position and its name.
Placed = tuple[int, str, keras.metrics.Metric]


class Matched(NamedTuple):
    """One micro-batch by output, in the order of `Outputs.names`.

    An entry is None where an output has no target or no weight.
    """

    y_true: list[tf.Tensor]
    y_pred: list[tf.Tensor]
    sample_weight: list[tf.Tensor | None]
    # Bool [rows], or [rows, length] of a target's elements; None where all are valid.
    valid: Sequence[tf.Tensor | None]
    # True where valid elements count alike in whichever row they are; else metrics that are means
    # of rows' means give each row the same weight, as Keras does without padding.
    by_element: bool = False


class Outputs:
    """The outputs of a model: the leaves of the nest that it returns, in its Keras's order.

    The nest is `y_pred`, and the order is that of the flatten of the model's own Keras. `names` are
    the model's, empty or too few where it names none. Where targets are fewer, they are for the
    outputs that have a `loss`. With `pairs_in_order`, as where a model computes its loss itself,
    targets that are fewer are for the metrics of the first outputs, and the metrics of the
    remaining outputs are left out, as by Keras.
    """

    # True if an output without a target has no loss and no metrics; if False, it is an error.
    skips_missing_targets = False
    # True if one of several outputs may have a list of losses; of a single output's list, Keras
    # takes the first loss.
    takes_lists = True
    # The mappings whose keys are flattened as they come; those of other mappings are sorted.
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
            names = [_key(path, f"output_{i}") for i, path in enumerate(self._paths)]
        elif isinstance(self._tree, dict) and all(len(path) == 1 for path in self._paths):
            names = [path[0] for path in self._paths]

        log_names = []
        for name, path in zip(names, self._paths, strict=True):
            branches = path[:-1]
            keys = (*branches, _key(path, name))
            log_names.append("/".join(map(str, keys)))
        return list(names), log_names

    def _positions(self, nest: Nest, path: Path = ()) -> Positions:
        """Returns the nest with the positions of its leaves, and notes their paths in order."""
        if isinstance(nest, Mapping):
            visited = nest if isinstance(nest, self._keep_order) else sorted(nest)
            branches = {key: self._positions(nest[key], (*path, key)) for key in visited}
            return {key: branches[key] for key in nest}  # in the order of the nest's own keys

        if isinstance(nest, (list, tuple)):
            return tuple(self._positions(entry, (*path, i)) for i, entry in enumerate(nest))

        position = len(self._paths)
        self._paths.append(path)
        return position

    def predictions(self, y_pred: Any) -> list[tf.Tensor]:
        """Lists the tensors that the model returned by position."""
        return [functools.reduce(operator.getitem, path, y_pred) for path in self._paths]

    def match(
        self, value: Any, what: str, repeat: bool = False, several: bool = False
    ) -> list[Any]:
        """Returns `placed` as a list by position, with None for an output that has no value."""
        placed = self.placed(value, what, repeat, several)
        return [placed.get(i) for i in range(len(self.names))]

    def placed(
        self, value: Any, what: str, repeat: bool = False, several: bool = False
    ) -> dict[int, Any]:
        """Returns what a user passed as `what` by output, in the order in which Keras visits them.

        The keys are the outputs' positions. If `repeat`, one value stands for every output; if
        `several`, an output may have a list of values.
        """
        placed = {}
        for position, entry in self._placed(value, what, self._tree, repeat, several):
            if not _is_nothing(entry):
                placed[position] = entry
        return placed

    def _placed(
        self, value: Any, what: str, tree: Positions, repeat: bool, several: bool
    ) -> Iterator[tuple[int, Any]]:
        """Yields the positions in a tree with their values."""
        if _is_nothing(value):
            return

        pairs: Iterable[tuple[Any, Positions]]
        may_be_list = several and isinstance(tree, int)
        if isinstance(value, Mapping):
            pairs = self._pair_by_name(value, what, tree)
        elif isinstance(value, (list, tuple)) and not may_be_list:
            pairs = self._pair_in_order(value, what, tree)
        else:
            leaves = list(_leaves(tree))
            if len(leaves) > 1 and not repeat:
                raise ValueError(
                    f"{what} is one value, but the model has {len(leaves)} outputs "
                    f"{self._names_of(leaves)}: pass a list."
                )
            for position in leaves:
                yield position, value
            return

        for entry, branch in pairs:
            yield from self._placed(entry, what, branch, repeat, several)

    def _pair_by_name(
        self, value: Mapping, what: str, tree: Positions
    ) -> list[tuple[Any, Positions]]:
        """Pairs the entries of a mapping with the branches, or else the outputs, of their names."""
        branches: list[tuple[str, Positions]]
        if isinstance(tree, dict):
            branches = list(tree.items())
        else:
            branches = [(self.names[i], i) for i in _leaves(tree)]

        known = [name for name, _ in branches]
        unknown = set(value) - set(known)
        if unknown:
            raise ValueError(
                f"{what} names {sorted(unknown)}, but the model's outputs are {known}."
            )

        if isinstance(tree, dict):
            return [(value[name], tree[name]) for name in value]
        return [(value[name], branch) for name, branch in branches if name in value]

    def _pair_in_order(
        self, value: Sequence, what: str, tree: Positions
    ) -> list[tuple[Any, Positions]]:
        """Pairs the entries of a list with the branches of a tuple, or else with its leaves."""
        if isinstance(tree, tuple) and len(value) == len(tree):
            return list(zip(value, tree, strict=True))

        leaves = list(_leaves(tree))
        if len(value) != len(leaves):
            raise ValueError(
                f"{what} has {len(value)} entries for the {len(leaves)} outputs "
                f"{self._names_of(leaves)}."
            )
        # Entries are in the order of positions, which a dict's keys may visit in another order.
        entry_at = dict(zip(sorted(leaves), value, strict=True))
        return [(entry_at[i], i) for i in leaves]

    def _names_of(self, positions: Iterable[int]) -> list[str]:
        return [self.names[i] for i in sorted(positions)]

    def targets(self, value: Nest, what: str = "y", repeat: bool = False) -> list[Any]:
        """Returns targets by position; as in Keras, fewer are for the outputs with a loss."""
        if isinstance(value, (list, tuple)):
            entries = list(value)
        elif repeat:  # one value is for every output
            entries = []
        else:
            entries = [value]

        is_as_returned = isinstance(value, Mapping) or (
            isinstance(self._tree, tuple) and len(entries) == len(self._tree)
        )
        fits_losses = len(entries) == len(self._with_loss) < len(self.names)
        if not entries or not fits_losses or is_as_returned:
            return self.match(value, what, repeat)

        targets: list[Any] = [None] * len(self.names)
        for position, target in zip(self._with_loss, entries, strict=True):
            if not _is_nothing(target):
                targets[position] = target
        return targets

    def matched(
        self,
        y_true: Nest,
        y_pred: Nest,
        sample_weight: Nest,
        valid: Sequence[tf.Tensor | None] | None = None,
    ) -> Matched:
        """Returns the targets, predictions and weights of one micro-batch.

        All elements are valid without `valid`.
        """
        return self._matched(self.targets(y_true), y_pred, sample_weight, valid)

    def targets_of_metrics(self, y_true: Nest) -> list[Any]:
        """Returns targets by position; as in Keras, fewer of them may be for the first outputs."""
        entries = tf.nest.flatten(y_true)
        missing = len(self.names) - len(entries)
        if not self.pairs_in_order or isinstance(y_true, Mapping) or missing <= 0:
            return self.targets(y_true)
        return entries + [None] * missing

    def matched_for_metrics(
        self,
        y_true: Nest,
        y_pred: Nest,
        sample_weight: Nest,
        valid: Sequence[tf.Tensor | None] | None = None,
    ) -> Matched:
        """Returns what `matched` does, with the targets of metrics."""
        return self._matched(self.targets_of_metrics(y_true), y_pred, sample_weight, valid)

    def _matched(
        self,
        targets: list[Any],
        y_pred: Nest,
        sample_weight: Nest,
        valid: Sequence[tf.Tensor | None] | None,
    ) -> Matched:
        if valid is None:
            valid = [None] * len(self.names)
        return Matched(
            y_true=targets,
            y_pred=self.predictions(y_pred),
            sample_weight=self.targets(sample_weight, "sample_weight", repeat=True),
            valid=valid,
        )

    def place_metrics(self, what: str, metrics: MetricsArgument) -> list[list[Metric]]:
        """Lists the metrics of each output; a list alone is for a single output, as in Keras."""
        may_be_one = self.skips_missing_targets  # as in tf_keras
        if metrics is not None and not isinstance(metrics, (list, tuple, dict)) and not may_be_one:
            raise ValueError(
                f"{what} must be a list, tuple, or dict, as in Keras; got {metrics!r}."
            )
        if len(self.names) == 1 and not isinstance(metrics, dict):
            return [tf.nest.flatten(metrics)]

        lists: list[list[Metric]] = []
        for of_output in self.match(metrics, "metrics", repeat=may_be_one, several=True):
            if of_output is None:
                lists.append([])
            else:
                lists.append(tf.nest.flatten(of_output))
        return lists

    def logs_each_loss(self, losses: int) -> bool:
        """Tells if each of so many losses is logged beside their sum."""
        return losses > 1

    def sort_metrics(self, placed: list[Placed]) -> list[Placed]:
        """Sorts (position, name, metric), with the metrics before the weighted ones, as in logs."""
        return placed

    def sort_logs(self, logs: Iterable[str], computed: Iterable[str]) -> list[str]:
        """Sorts the names of logs as Keras's `evaluate` does: first those `computed`, in order."""
        logs = list(logs)
        names = [name for name in computed if name in logs]
        names += sorted(logs)
        return list(dict.fromkeys(names))  # each where it comes first


def _leaves(tree: Positions) -> Iterator[int]:
    if isinstance(tree, int):
        yield tree
        return
    branches = tree.values() if isinstance(tree, dict) else tree
    for branch in branches:
        yield from _leaves(branch)


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, tuple) and not value)


def _key(path: Path, default: str) -> str:
    """Returns the key at the end of a path, or `default` where the key is a number."""
    if not path or isinstance(path[-1], int):
        return default
    return path[-1]


def make_distinct(names: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    """Appends _1, _2, ... to names that occur before or are `taken`, as Keras names metrics."""
    taken = set(taken)
    distinct = []
    for name in names:
        candidate = name
        number = 0
        while candidate in taken:
            number += 1
            candidate = f"{name}_{number}"
        distinct.append(candidate)
        taken.add(candidate)
    return distinct


def get_mask(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the mask that Keras's layers attached to a tensor, or None."""
    return private.keras_mask(tensor, None)


def to_whole(indices: tf.Tensor) -> tf.Tensor:
    """Casts indices to int64, with `NOT_WHOLE` for fractions and NaN.

    A plain cast would turn these into the index of some class.
    """
    indices = tf.convert_to_tensor(indices)  # ids may be a variable of Keras's
    as_int = tf.cast(indices, tf.int64)
    if not indices.dtype.is_floating:
        return as_int
    return tf.where(tf.cast(as_int, indices.dtype) == indices, as_int, NOT_WHOLE)


def require_known(
    what: str, value: object, kind: str, get: Callable[[str], object], shorthands: Sequence[str]
) -> None:
    """Raises unless a loss or metric is an object, a function, or a known name.

    Names are known if they are in `shorthands`, or if `get` finds them.
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
