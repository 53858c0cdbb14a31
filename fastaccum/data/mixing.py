"""Mixes packed rows of several sources."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from fastaccum import checks
from fastaccum.basics.packed_rows import PackedRows, restored_rows


def mix(
    datasets: Mapping[str, tf.data.Dataset[Any]],
    weights: Mapping[str, float],
    *,
    stop: Literal["first_exhausted", "all_exhausted", "restart"] = "first_exhausted",
    seed: int = 0,
) -> tf.data.Dataset[Any]:
    """Mixes packed rows of several sources, each with a share of the tokens.

    For each row, the source is drawn:

        while True:
            name = random.choice(names, p=weights / sum(weights))
            yield next(rows_of[name])

    Rows are of one length and all but full, so these are the shares of tokens, too. The documents
    of a row are of one source. `Trainer.fit` logs, for each epoch, the share of the real tokens
    that is of each source: "tokens_of_code" of the source "code".

    Args:
        datasets: for the name of each source, its rows as `fastaccum.pack` makes them, not batched.
        weights: for each of these names, a positive number. Each source's share is its weight
            divided by the sum of all.
        stop: what happens when a source ends. "first_exhausted": the mix ends, so the shares hold
            to the end. "all_exhausted": the other sources go on without it until all have ended,
            so each row comes once. "restart": it starts again, and the mix never ends, unless a
            source has no row at all.
        seed: draws the sources, the same in each pass.

    Returns:
        A dataset of rows like those of `datasets`, for `.batch(...)`.

    Raises:
        TypeError: raised for what is no dataset of packed rows, and for rows that differ in their
            length, their keys or their dtypes.
        ValueError: raised for fewer than two sources, and for weights that are not positive or of
            other names.

    >>> import fastaccum as fa
    >>> rows = {"a": fa.pack([[1, 2, 3]] * 200, 4), "b": fa.pack([[7, 8]] * 400, 4)}
    >>> ids = [int(x.inputs[0]) for x, y in mix(rows, {"a": 3, "b": 1}, stop="restart").take(400)]
    >>> 0.7 < ids.count(1) / 400 < 0.8
    True
    """
    checks.one_of("stop", stop, ("first_exhausted", "all_exhausted", "restart"))
    seed = checks.whole_number("seed", seed, minimum=None)
    if not isinstance(datasets, Mapping) or len(datasets) < 2:
        raise ValueError(
            "datasets must be a dict of two or more datasets of packed rows, by their names, as in "
            "fa.mix({'code': fa.pack(code, 2048), 'text': fa.pack(text, 2048)}, "
            "{'code': 0.7, 'text': 0.3})."
        )
    names = list(datasets)
    _require_weights(names, weights)
    datasets = {name: restored_rows(rows) for name, rows in datasets.items()}
    for name in names:
        _require_packed_rows(name, datasets[name])
    _require_alike(datasets)

    def name_source(name: str, rows: tf.data.Dataset) -> tf.data.Dataset:
        sources = {other: other == name for other in names}

        @tf.autograph.experimental.do_not_convert  # `map` would
        def with_sources(x: PackedRows, *targets: Any) -> tuple:
            tensors = tf.nest.map_structure(tf.constant, sources)
            return x._replace(sources=tensors), *targets

        return rows.map(with_sources)

    all_rows = [name_source(name, datasets[name]) for name in names]
    if stop == "restart":
        all_rows = [rows.repeat() for rows in all_rows]
    log_weights = np.log([float(weights[name]) for name in names])

    # `sample_from_datasets` would draw by TensorFlow's global seed too. A training that is resumed
    # under another one would get other rows.
    @tf.autograph.experimental.do_not_convert
    def draw(number: tf.Tensor) -> tf.Tensor:
        drawn = tf.random.stateless_categorical(log_weights[None], 1, [seed, number])
        return drawn[0, 0]

    choices = tf.data.Dataset.range(np.iinfo(np.int64).max).map(draw)
    return tf.data.Dataset.choose_from_datasets(
        all_rows, choices, stop_on_empty_dataset=stop != "all_exhausted"
    )


def _require_weights(names: list[str], weights: Any) -> None:
    """Raises ValueError unless each name has a positive weight."""
    if not isinstance(weights, Mapping) or set(weights) != set(names):
        has = sorted(weights) if isinstance(weights, Mapping) else weights
        raise ValueError(
            f"weights must have a number for each of {sorted(names)}; it has {checks.shown(has)}."
        )
    for name, weight in weights.items():
        is_number = isinstance(weight, (int, float, np.number)) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < math.inf:
            raise ValueError(
                f"weights[{name!r}]={checks.shown(weight)} must be a positive number; leave out a "
                "source that is to have no rows."
            )


def _require_packed_rows(name: object, rows: Any) -> None:
    """Raises TypeError for what is no dataset of packed rows, or of batches of them."""
    if not isinstance(name, str) or not name.isidentifier():
        raise TypeError(
            f"datasets holds the name {name!r}: names are words, such as 'code', which the logs "
            "have."
        )
    spec = getattr(rows, "element_spec", None)
    x = spec[0] if isinstance(spec, tuple) and spec else spec
    if not isinstance(rows, tf.data.Dataset) or not isinstance(x, PackedRows):
        raise TypeError(
            f"datasets[{name!r}] is no dataset of packed rows, whose shares are those of tokens: "
            f"pass fa.pack(..., length) as {name!r}. To mix documents, each as one, use "
            "tf.data.Dataset.sample_from_datasets."
        )
    if x.documents.shape.rank != 1:
        raise TypeError(f"datasets[{name!r}] has batches of packed rows: mix before .batch(...).")
    if x.sources:
        raise TypeError(
            f"datasets[{name!r}] is a mix itself: pass its sources, each with a weight of its own."
        )


def _require_alike(datasets: Mapping[str, tf.data.Dataset]) -> None:
    """Raises TypeError unless all rows have the same length, keys and dtypes."""
    first, *others = datasets
    spec = datasets[first].element_spec
    for other in others:
        other_spec = datasets[other].element_spec
        if other_spec == spec:
            continue
        lengths = [rows[0].documents.shape[0] for rows in (other_spec, spec)]
        if lengths[0] != lengths[1]:
            raise TypeError(
                f"datasets[{other!r}] has rows of {lengths[0]} tokens, and datasets[{first!r}] of "
                f"{lengths[1]}: pack all to one length."
            )
        raise TypeError(
            f"datasets[{other!r}] has rows of {other_spec}, and datasets[{first!r}] of {spec}: "
            "give all the same keys and dtypes."
        )
