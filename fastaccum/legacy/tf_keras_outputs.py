"""The outputs of a tf_keras model, and what its targets, losses and metrics are matched by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from fastaccum.adapters.outputs import Outputs, Path, Placed
from fastaccum.basics.arguments import Metric
from fastaccum.basics.attributes import Nest


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
            lists = []
            for _ in self.names:
                lists.append([_copy_of(metric) for metric in metrics])
            return lists
        return super().place_metrics(what, metrics)

    def logs_each_loss(self, losses: int) -> bool:
        return len(self.names) > 1

    def sort_metrics(self, placed: list[Placed]) -> list[Placed]:
        return sorted(placed, key=lambda metric: metric[0])  # by the output's position

    def sort_logs(self, logs: Iterable[str], computed: Iterable[str]) -> list[str]:
        return list(logs)


def _copy_of(metric: Any) -> Any:
    """Returns a new metric of the same configuration; a name or a function as it is."""
    if isinstance(metric, keras.metrics.Metric):
        return type(metric).from_config(metric.get_config())
    return metric


def _number(path: Path) -> str:
    """Names an output as tf_keras does, by its path with positions that count from 1."""
    keys = []
    for key in path:
        if isinstance(key, int):
            keys.append(str(key + 1))
        else:
            keys.append(str(key))
    name = "_".join(keys)

    if path and isinstance(path[0], str):
        return name
    return f"output_{name or 1}"
