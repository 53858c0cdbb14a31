"""The loss that a Hugging Face TF model computes of its labels, as sums over micro-batches.

The model's `hf_compute_loss` returns a mean, of labels and logits.
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
    """One mean of a micro-batch, and what it divides by, as float32 scalars.

    `value * weight_sum` and `weight_sum` add up over micro-batches.
    """

    value: tf.Tensor
    weight_sum: tf.Tensor


# The labels and logits of one mean, and a bool for each label that counts.
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
        ((name, y),) = y.items()
        return y, predictions.get(name, next(iter(predictions.values())))
    if isinstance(y, (list, tuple)):
        return y, tuple(predictions.values())[: len(y)]
    return y, next(iter(predictions.values()))


@contextmanager
def observe_losses(model: keras.Model, valid: tf.Tensor | None = None) -> Iterator[Seen]:
    """Yields a list that a call of the model fills with the means in its loss over `valid` rows.

    The denominators are those of `hf_compute_loss`. A micro-batch in which nothing counts has a
    value of 0 and not, as there, NaN. A loss that the model reduces to a scalar by itself has no
    part for a row: give it no padded rows.
    """
    original: Any = getattr(model, "hf_compute_loss", None)
    sums = _MEANS_OF_TOKENS.get(_loss_class(model))
    seen = Seen()

    @tf.autograph.experimental.do_not_convert
    def observed(*args: Nest, **kwargs: Nest) -> tf.Tensor:
        # By name, since some take the logits first.
        arguments = inspect.signature(original).bind(*args, **kwargs).arguments
        if sums is None:
            loss = original(**arguments)
            rows = tf.nest.flatten(arguments)[0].shape[0]
            if rows > 1 and loss.shape.num_elements() == 1:
                return loss  # reduced by rules of a user's own
            terms = [_rows(loss, rows, valid)]
        else:
            if getattr(model.config, "tf_legacy_loss", False):
                raise ValueError(
                    f"config.tf_legacy_loss=True of {type(model).__name__} takes a shape that "
                    "XLA cannot know: set it to False, which computes the same mean."
                )
            terms = []
            for labels, logits, counts in sums(
                model.config, arguments["labels"], arguments["logits"]
            ):
                terms.append(_mean(labels, logits, counts, valid))
        seen.extend(terms)
        seen.returned = tf.reshape(tf.add_n([term.value for term in terms]), [1])
        return seen.returned

    replacements = []
    if original:
        replacements.append((model, "hf_compute_loss", observed))
    with replaced(replacements):
        yield seen


def make_terms(
    model: keras.Model, outputs: Nest, seen: Seen, rows: int, valid: tf.Tensor | None = None
) -> list[Observed]:
    """Returns the means whose sum is the loss of a call inside `observe_losses`.

    A loss that is not of `hf_compute_loss` is one mean.
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
    if rows > 1 and loss.shape.num_elements() == 1:
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
    return [_rows(loss, rows, valid)]


def _loss_class(model: keras.Model) -> str:
    """Names the class of Hugging Face's that defines the model's hf_compute_loss, or ""."""
    method: Any = getattr(model, "hf_compute_loss", None)  # a bare TFBertModel has none
    function = getattr(method, "__func__", method)
    if package(function) != "transformers":
        return ""
    return function.__qualname__.removesuffix(".hf_compute_loss")


def list_arguments(layer: keras.layers.Layer) -> list[str]:
    """Names the arguments of a layer's call."""
    return list(inspect.signature(type(layer).call).parameters)[1:]


def _rows(loss: tf.Tensor, rows: int, valid: tf.Tensor | None) -> Observed:
    """Returns the mean of a loss over its valid rows, which are also the weight sum."""
    loss = tf.cast(loss, tf.float32)
    if valid is None:
        return Observed(tf.reduce_mean(loss), tf.constant(float(rows)))
    count = tf.reduce_sum(tf.cast(valid, tf.float32))
    if loss.shape.rank and loss.shape[0] == rows:
        of_rows = tf.reduce_mean(tf.reshape(loss, [rows, -1]), axis=1)
        total = tf.reduce_sum(tf.where(valid, of_rows, 0.0))
        return Observed(tf.math.divide_no_nan(total, count), count)
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
    total = tf.reduce_sum(tf.where(counts, values, 0.0))
    return Observed(tf.math.divide_no_nan(total, count), count)


def _segmentation(config: Any, labels: tf.Tensor, logits: tf.Tensor) -> list[Counted]:
    logits = tf.image.resize(logits, labels.shape[1:], method="bilinear")
    return [(labels, logits, labels != config.semantic_loss_ignore_index)]


def _pretraining(
    config: Any, labels: Mapping[str, tf.Tensor], logits: Sequence[tf.Tensor]
) -> list[Counted]:
    """Returns the losses of words and of sentences, whose label has another name in each model."""
    words = labels["labels"]
    (sentence_label,) = (name for name in labels if name != "labels")
    sentences = tf.reshape(labels[sentence_label], [-1])
    return [
        (words, logits[0], words != -100),
        (sentences, tf.reshape(logits[1], [-1, 2]), sentences != -100),
    ]


# The means in the loss, by the class that defines hf_compute_loss.
_MEANS_OF_TOKENS: dict[str, Callable[..., list[Counted]]] = {
    "TFCausalLanguageModelingLoss": lambda _, labels, logits: [(labels, logits, labels != -100)],
    "TFTokenClassificationLoss": lambda _, labels, logits: [(labels, logits, labels >= 0)],
    "TFLEDForConditionalGeneration": lambda config, labels, logits: [
        (labels, logits, labels != config.pad_token_id)
    ],
    **{f"TF{name}ForSemanticSegmentation": _segmentation for name in ("Segformer", "MobileViT")},
    **{f"TF{name}PreTrainingLoss": _pretraining for name in ("Bert", "MobileBert", "Albert")},
}
