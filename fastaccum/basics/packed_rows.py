"""The inputs of a batch whose rows hold several documents each."""

from __future__ import annotations

from typing import NamedTuple

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
    """

    inputs: Nest
    documents: tf.Tensor
    positions: tf.Tensor
    predicts: tf.Tensor


def model_inputs(x: Nest) -> Nest:
    """Returns what a model is called with: the inputs of packed rows, or x itself."""
    return x.inputs if isinstance(x, PackedRows) else x
