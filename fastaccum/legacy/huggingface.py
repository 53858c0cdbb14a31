"""The loss that a Hugging Face TF model returns from labels among its inputs, as sums that
micro-batches add up.

The loss is the mean of what the model's `hf_compute_loss` makes of labels and logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from fastaccum.basics.attributes import Nest, kinds, package, replaced
from fastaccum.basics.warnings import warn


class Observed(NamedTuple):
    """One mean within a loss, as float32 scalars: `value * weight_sum` and `weight_sum` add up over
    micro-batches.
    """

    value: tf.Tensor
    weight_sum: tf.Tensor


# labels and logits of a mean, and which of the labels count
Counted = tuple[tf.Tensor, tf.Tensor, tf.Tensor]


class Seen(list[Observed]):
    """The means that a forward pass computed; `returned` is the loss that the model was given."""

    returned: tf.Tensor | None = None


_SPANS = ("start_positions", "end_positions")  # the labels of models that answer questions


def count_means(model: keras.Model) -> int:
    """Returns the number of means in a model's own loss."""
    return 2 if _MEANS_OF_TOKENS.get(_loss_class(model)) is _pretraining else 1


def list_label_names(model: keras.Model) -> list[str]:
    """Names the arguments of a model's call that take labels."""
    return [name for name in list_arguments(model) if "label" in name or name in _SPANS]


def merge_labels(model: keras.Model, x: Nest, y: Nest) -> Nest:
    """Returns the inputs with the labels of `y`, merged as the model's `train_step` does where it
    has no other loss.
    """
    if y is None:
        return x
    arguments, labels = list_arguments(model), list_label_names(model)
    x = dict(x) if isinstance(x, Mapping) else {arguments[0]: x}
    if isinstance(y, (list, tuple)) and len(y) == 1:
        (y,) = y
    if not isinstance(y, Mapping):
        if len(labels) != 1 or isinstance(y, (list, tuple)):
            raise ValueError(
                f"{type(model).__name__} takes the labels {labels}: pass y as a dict, or among x."
            )
        return {labels[0]: y, **x}
    argument_of = {
        output: label for label, output in model.get_label_to_output_name_mapping().items()
    }
    named = {
        name if name in arguments else argument_of.get(name): value for name, value in y.items()
    }
    return {**{name: value for name, value in named.items() if name in arguments}, **x}


def match(model: keras.Model, x: Nest, y: Nest, outputs: Any) -> tuple[Nest, Nest]:
    """Returns `y`, or labels among the inputs, and their outputs, as `train_step` passes them to
    compiled losses.
    """
    if y is None:
        y = (
            {name: x[name] for name in list_label_names(model) if name in x}
            if isinstance(x, Mapping)
            else {}
        )
        if not y:
            raise ValueError(
                f"No y, and none of the labels {list_label_names(model)} among the inputs."
            )
    predictions = {name: value for name, value in outputs.items() if name != "loss"}
    if isinstance(y, Mapping):
        output_of = model.get_label_to_output_name_mapping()
        y = {output_of.get(name, name): value for name, value in y.items()}
        if len(y) > 1:
            return y, {name: value for name, value in predictions.items() if name in y}
        ((name, y),) = y.items()
        return y, predictions.get(name, next(iter(predictions.values())))
    if isinstance(y, (list, tuple)):
        return y, tuple(predictions.values())[: len(y)]
    return y, next(iter(predictions.values()))


@contextmanager
def observe_losses(model: keras.Model, valid: tf.Tensor | None = None) -> Iterator[Seen]:
    """Yields a list that a call of the model fills with one entry for each mean in its loss over
    `valid` rows.

    The denominators are those of `hf_compute_loss`. A micro-batch in which nothing counts has a
    value of 0 and not, as there, NaN. A loss that the model reduces to a scalar by itself has no
    part for a row: give it no padded rows.
    """
    original: Any = getattr(model, "hf_compute_loss", None)
    sums = _MEANS_OF_TOKENS.get(_loss_class(model))
    seen = Seen()

    @tf.autograph.experimental.do_not_convert
    def observed(*args: Nest, **kwargs: Nest) -> tf.Tensor:
        # some take the logits first
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        if sums is None:
            loss, rows = original(**given), tf.nest.flatten(given)[0].shape[0]
            if rows > 1 and loss.shape.num_elements() == 1:
                return loss  # reduced by rules of a user's own
            terms = [_rows(loss, rows, valid)]
        else:
            if getattr(model.config, "tf_legacy_loss", False):
                raise ValueError(
                    f"config.tf_legacy_loss=True of {type(model).__name__} takes a shape that "
                    "XLA cannot know: set it to False, which computes the same mean."
                )
            terms = [
                _mean(*each, valid) for each in sums(model.config, given["labels"], given["logits"])
            ]
        seen.extend(terms)
        seen.returned = tf.reshape(tf.add_n([term.value for term in terms]), [1])
        return seen.returned

    with replaced([(model, "hf_compute_loss", observed)] if original else []):
        yield seen


def make_terms(
    model: keras.Model, outputs: Nest, seen: Seen, rows: int, valid: tf.Tensor | None = None
) -> list[Observed]:
    """Returns the means whose sum is the loss of a call inside `observe_losses`: one if not of
    `hf_compute_loss`.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        raise ValueError(
            f"{type(model).__name__} returned no loss: pass its labels, "
            f"{list_label_names(model)}, as y or among the inputs, or a loss to the Trainer."
        )
    if loss is seen.returned:
        return list(seen)
    if rows > 1 and loss.shape.num_elements() == 1:
        if getattr(model.config, "ctc_loss_reduction", None) == "sum" and any(
            "CTC" in kind for kind in kinds(model)
        ):
            raise ValueError(
                f"config.ctc_loss_reduction='sum' of {type(model).__name__} adds up rows, where "
                "a mean is needed: set it to 'mean'."
            )
        warn(
            f"{type(model).__name__} returns its loss as a scalar, which fastaccum takes for the "
            "mean over the rows of a micro-batch. The update is exact only if the model computes "
            "each row on its own and divides by the number of rows.",
            UserWarning,
        )
    return [_rows(loss, rows, valid)]


def _loss_class(model: keras.Model) -> str:
    """Names the class of Hugging Face's that defines the model's hf_compute_loss; empty for another
    package's class.
    """
    method: Any = getattr(model, "hf_compute_loss", None)  # a bare TFBertModel has none
    method = getattr(method, "__func__", method)
    return (
        method.__qualname__.removesuffix(".hf_compute_loss")
        if package(method) == "transformers"
        else ""
    )


def list_arguments(layer: keras.layers.Layer) -> list[str]:
    """Names the arguments of a layer's call."""
    return list(inspect.signature(type(layer).call).parameters)[1:]


def _rows(loss: tf.Tensor, rows: int, valid: tf.Tensor | None) -> Observed:
    """Returns the mean of a loss per row over valid rows, or a scalar loss, with the number of
    valid rows.
    """
    loss = tf.cast(loss, tf.float32)
    count = tf.constant(float(rows)) if valid is None else tf.reduce_sum(tf.cast(valid, tf.float32))
    if valid is not None and loss.shape.rank and loss.shape[0] == rows:
        inner = tf.reduce_mean(tf.reshape(loss, [rows, -1]), axis=1)
        return Observed(
            tf.math.divide_no_nan(tf.reduce_sum(tf.where(valid, inner, 0.0)), count), count
        )
    return Observed(tf.reduce_mean(loss), count)


def _mean(
    labels: tf.Tensor, logits: tf.Tensor, counts: tf.Tensor, valid: tf.Tensor | None
) -> Observed:
    """Returns the mean cross-entropy of the labels that count."""
    if valid is not None:
        counts = counts & tf.reshape(valid, [-1] + [1] * (labels.shape.rank - 1))
    labels = tf.where(counts, tf.cast(labels, tf.int64), 0)
    values = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.cast(logits, tf.float32))
    count = tf.reduce_sum(tf.cast(counts, tf.float32))
    return Observed(
        tf.math.divide_no_nan(tf.reduce_sum(tf.where(counts, values, 0.0)), count), count
    )


def _segmentation(config: Any, labels: tf.Tensor, logits: tf.Tensor) -> list[Counted]:
    logits = tf.image.resize(logits, labels.shape[1:], method="bilinear")
    return [(labels, logits, labels != config.semantic_loss_ignore_index)]


def _pretraining(
    config: Any, labels: Mapping[str, tf.Tensor], logits: Sequence[tf.Tensor]
) -> list[Counted]:
    """Returns the losses of words and of sentences; the label of sentences has another name in each
    model.
    """
    (sentence,) = (tf.reshape(labels[name], [-1]) for name in labels if name != "labels")
    words = labels["labels"]
    return [
        (words, logits[0], words != -100),
        (sentence, tf.reshape(logits[1], [-1, 2]), sentence != -100),
    ]


# By the class that defines hf_compute_loss.
_MEANS_OF_TOKENS: dict[str, Callable[..., list[Counted]]] = {
    "TFCausalLanguageModelingLoss": lambda _, labels, logits: [(labels, logits, labels != -100)],
    "TFTokenClassificationLoss": lambda _, labels, logits: [(labels, logits, labels >= 0)],
    "TFLEDForConditionalGeneration": lambda config, labels, logits: [
        (labels, logits, labels != config.pad_token_id)
    ],
    **{f"TF{name}ForSemanticSegmentation": _segmentation for name in ("Segformer", "MobileViT")},
    **{f"TF{name}PreTrainingLoss": _pretraining for name in ("Bert", "MobileBert", "Albert")},
}
