"""Splits the loss that a Hugging Face TF model computes into sums over micro-batches.

The model's `hf_compute_loss` takes labels and logits and returns a mean, or the sum of two. The
means of micro-batches do not add up to the mean of the whole batch; their products with their
denominators do. `observe_losses` notes the means and denominators of a call, and `make_terms`
returns them.
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


class Mean(NamedTuple):
    """One mean of a micro-batch, and what it divides by, as float32 scalars.

    `value * weight_sum` and `weight_sum` add up over micro-batches.
    """

    value: tf.Tensor
    weight_sum: tf.Tensor


class SeenMeans(list[Mean]):
    """The means that a replaced `hf_compute_loss` computed in a forward pass.

    `returned` is the loss that it returned to the model; None if it was not called, or if it left
    the loss to `make_terms`.
    """

    returned: tf.Tensor | None = None


class _CountedLabels(NamedTuple):
    """The labels and logits of one mean, and a bool for each label that counts."""

    labels: tf.Tensor
    logits: tf.Tensor
    counted: tf.Tensor


def _label_tokens(config: Any, labels: tf.Tensor, logits: tf.Tensor) -> list[_CountedLabels]:
    return [_CountedLabels(labels, logits, labels != -100)]


def _label_token_classes(config: Any, labels: tf.Tensor, logits: tf.Tensor) -> list[_CountedLabels]:
    return [_CountedLabels(labels, logits, labels >= 0)]


def _label_unpadded(config: Any, labels: tf.Tensor, logits: tf.Tensor) -> list[_CountedLabels]:
    return [_CountedLabels(labels, logits, labels != config.pad_token_id)]


def _label_pixels(config: Any, labels: tf.Tensor, logits: tf.Tensor) -> list[_CountedLabels]:
    logits = tf.image.resize(logits, labels.shape[1:], method="bilinear")
    return [_CountedLabels(labels, logits, labels != config.semantic_loss_ignore_index)]


def _label_words_and_sentences(
    config: Any, labels: Mapping[str, tf.Tensor], logits: Sequence[tf.Tensor]
) -> list[_CountedLabels]:
    """Returns the labels of words, and of sentences, which each model names in its own way."""
    words = labels["labels"]
    (sentence_label,) = (name for name in labels if name != "labels")
    sentences = tf.reshape(labels[sentence_label], [-1])
    return [
        _CountedLabels(words, logits[0], words != -100),
        _CountedLabels(sentences, tf.reshape(logits[1], [-1, 2]), sentences != -100),
    ]


# Which labels count in the means of a loss, by the class that defines `hf_compute_loss`. These
# losses divide by the number of labels that count. All others are means over rows.
_LABELS_BY_LOSS_CLASS: dict[str, Callable[..., list[_CountedLabels]]] = {
    "TFCausalLanguageModelingLoss": _label_tokens,
    "TFTokenClassificationLoss": _label_token_classes,
    "TFLEDForConditionalGeneration": _label_unpadded,
    "TFSegformerForSemanticSegmentation": _label_pixels,
    "TFMobileViTForSemanticSegmentation": _label_pixels,
    "TFBertPreTrainingLoss": _label_words_and_sentences,
    "TFMobileBertPreTrainingLoss": _label_words_and_sentences,
    "TFAlbertPreTrainingLoss": _label_words_and_sentences,
}
_SPANS = ("start_positions", "end_positions")  # the labels of models that answer questions


def count_means(model: keras.Model) -> int:
    """Returns the number of means in a model's own loss."""
    if _LABELS_BY_LOSS_CLASS.get(_loss_class(model)) is _label_words_and_sentences:
        return 2
    return 1


def list_arguments(layer: keras.layers.Layer) -> list[str]:
    """Names the arguments of a layer's call."""
    return list(inspect.signature(type(layer).call).parameters)[1:]


def list_label_names(model: keras.Model) -> list[str]:
    """Names the arguments of a model's call that take labels."""
    return [name for name in list_arguments(model) if "label" in name or name in _SPANS]


def merge_labels(model: keras.Model, x: Nest, y: Nest) -> Nest:
    """Returns the inputs with the labels of `y`, as the model's `train_step` merges them."""
    if y is None:
        return x
    arguments = list_arguments(model)
    labels = list_label_names(model)
    if not isinstance(x, Mapping):
        x = {arguments[0]: x}
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
    merged = {}
    for name, value in y.items():
        argument = name
        if name not in arguments:
            argument = argument_of.get(name)
        if argument in arguments:
            merged[argument] = value
    merged.update(x)
    return merged


def match(model: keras.Model, x: Nest, y: Nest, outputs: Any) -> tuple[Nest, Nest]:
    """Returns targets and their outputs, as `train_step` passes them to compiled losses.

    Without `y` the labels among the inputs are the targets.
    """
    if y is None:
        y = {}
        if isinstance(x, Mapping):
            y = {name: x[name] for name in list_label_names(model) if name in x}
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
        # A single target that names no output belongs to the first.
        ((name, target),) = y.items()
        first_prediction = next(iter(predictions.values()))
        return target, predictions.get(name, first_prediction)
    if isinstance(y, (list, tuple)):
        return y, tuple(predictions.values())[: len(y)]
    return y, next(iter(predictions.values()))


@contextmanager
def observe_losses(model: keras.Model, valid: tf.Tensor | None = None) -> Iterator[SeenMeans]:
    """Yields a list that a call of the model fills with the means in its loss over `valid` rows.

    Inside the block the model's `hf_compute_loss` is replaced, if it has one, by a function that
    notes each mean and its denominator, which are those of `hf_compute_loss`. Where nothing in a
    micro-batch counts, the mean is 0 and not, as there, NaN. `make_terms` then reads the list.

    The replacement cannot leave invalid rows out of a loss that the model itself reduces to one
    number: give such a model no padded rows.
    """
    original: Any = getattr(model, "hf_compute_loss", None)
    find_labels = _LABELS_BY_LOSS_CLASS.get(_loss_class(model))
    seen = SeenMeans()

    @tf.autograph.experimental.do_not_convert
    def compute_loss(*args: Nest, **kwargs: Nest) -> tf.Tensor:
        # By name, since some take the logits first.
        arguments = inspect.signature(original).bind(*args, **kwargs).arguments
        if find_labels is None:
            loss = original(**arguments)
            rows = _count_rows(arguments)
            if _is_one_number(loss, rows):
                return loss  # reduced by rules of a user's own, which `make_terms` warns of
            means = [_mean_over_rows(loss, rows, valid)]
        else:
            if getattr(model.config, "tf_legacy_loss", False):
                raise ValueError(
                    f"config.tf_legacy_loss=True of {type(model).__name__} takes a shape that "
                    "XLA cannot know: set it to False, which computes the same mean."
                )
            means = []
            for labels in find_labels(model.config, arguments["labels"], arguments["logits"]):
                means.append(_mean_over_labels(labels, valid))
        seen.extend(means)
        # Of shape [1], as Hugging Face's losses are.
        seen.returned = tf.reshape(tf.add_n([mean.value for mean in means]), [1])
        return seen.returned

    replacements = []
    if original:
        replacements.append((model, "hf_compute_loss", compute_loss))
    with replaced(replacements):
        yield seen


def make_terms(
    model: keras.Model, outputs: Nest, seen: SeenMeans, rows: int, valid: tf.Tensor | None = None
) -> list[Mean]:
    """Returns the means whose sum is the loss of a call inside `observe_losses`.

    These are the means that were seen, if the model returned the very loss that they make. Any
    other loss, such as twice that or one that the model computed by itself, is one mean over rows.
    """
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    else:
        loss = getattr(outputs, "loss", None)
    if loss is None:
        raise ValueError(
            f"{type(model).__name__} returned no loss: pass its labels, "
            f"{list_label_names(model)}, as y or among the inputs, or a loss to the Trainer."
        )
    if loss is seen.returned:
        return list(seen)
    if _is_one_number(loss, rows):
        is_ctc = any("CTC" in kind for kind in kinds(model))
        if is_ctc and getattr(model.config, "ctc_loss_reduction", None) == "sum":
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
    return [_mean_over_rows(loss, rows, valid)]


def _count_rows(arguments: Nest) -> int:
    return tf.nest.flatten(arguments)[0].shape[0]


def _is_one_number(loss: tf.Tensor, rows: int) -> bool:
    """Tells if the loss of several rows has been reduced to one number."""
    return rows > 1 and loss.shape.num_elements() == 1


def _loss_class(model: keras.Model) -> str:
    """Names the class of Hugging Face's that defines the model's hf_compute_loss, or ""."""
    method: Any = getattr(model, "hf_compute_loss", None)  # a bare TFBertModel has none
    function = getattr(method, "__func__", method)
    if package(function) != "transformers":
        return ""
    return function.__qualname__.removesuffix(".hf_compute_loss")


def _mean_over_rows(loss: tf.Tensor, rows: int, valid: tf.Tensor | None) -> Mean:
    """Returns the mean of a loss over its valid rows, whose number is the weight sum."""
    loss = tf.cast(loss, tf.float32)
    if valid is None:
        return Mean(tf.reduce_mean(loss), tf.constant(float(rows)))
    count = tf.reduce_sum(tf.cast(valid, tf.float32))
    if loss.shape.rank and loss.shape[0] == rows:
        of_rows = tf.reduce_mean(tf.reshape(loss, [rows, -1]), axis=1)
        total = tf.reduce_sum(tf.where(valid, of_rows, 0.0))
        return Mean(tf.math.divide_no_nan(total, count), count)
    # One number for all rows: it cannot be told which part of it is of valid rows.
    return Mean(tf.reduce_mean(loss), count)


def _mean_over_labels(labels: _CountedLabels, valid: tf.Tensor | None) -> Mean:
    """Returns the mean cross-entropy of the labels that count, in valid rows."""
    counted = labels.counted
    if valid is not None:
        counted = counted & tf.reshape(valid, [-1] + [1] * (labels.labels.shape.rank - 1))
    classes = tf.where(counted, tf.cast(labels.labels, tf.int64), 0)
    logits = tf.cast(labels.logits, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(classes, logits)
    count = tf.reduce_sum(tf.cast(counted, tf.float32))
    total = tf.reduce_sum(tf.where(counted, losses, 0.0))
    return Mean(tf.math.divide_no_nan(total, count), count)
