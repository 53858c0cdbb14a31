"""The inputs of a batch whose rows hold several documents each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from fastaccum.basics.attributes import Nest


class PackedRows(NamedTuple):
    """Inputs x of a model, each of whose rows holds documents one after the other, then padding.

    `fastaccum.pack` makes such rows. They are x for `Trainer.fit` and `Trainer.evaluate`, which
    keep the documents apart.

    Attributes:
        inputs: what the model is called with: tensors [B, T, ...], of which T counts tokens.
        documents: int32 [B, T], the number of a token's document in its row, from 1; 0 for padding.
        positions: int32 [B, T], the place of a token in its document, from 0.
        predicts: bool [B, T], true where a token's target counts.
        sources: by the name of each source of a mix, whether a row is of it: bool [B]. Empty for
            rows that are not mixed.
    """

    inputs: Nest
    documents: tf.Tensor
    positions: tf.Tensor
    predicts: tf.Tensor
    sources: Mapping[str, tf.Tensor] = {}


def model_inputs(x: Nest) -> Nest:
    """Returns what a model is called with: the inputs of packed rows, or x itself."""
    return x.inputs if isinstance(x, PackedRows) else x


def restored_rows(x: Any) -> Any:
    """Returns a dataset whose packed rows are `PackedRows` again, where loading has changed that.

    `tf.data.Dataset.load` makes named tuples of a class of its own. All else is returned as it is.
    """
    spec = x.element_spec if isinstance(x, tf.data.Dataset) else None
    if not isinstance(spec, tuple) or not spec or isinstance(spec[0], PackedRows):
        return x
    if getattr(spec[0], "_fields", None) != PackedRows._fields:
        return x

    @tf.autograph.experimental.do_not_convert  # `map` would
    def restore(rows: Any, *targets: Any) -> tuple:
        return PackedRows(*rows), *targets

    return x.map(restore)
