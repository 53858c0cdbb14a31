"""Models of tf_keras (Keras 2), those of Hugging Face among them."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters.data_adapters import read_python
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.models import Model as Model
from fastaccum.adapters.models import never_draws
from fastaccum.basics.attributes import Nest, kinds, replaced
from fastaccum.kernels import private
from fastaccum.legacy import huggingface
from fastaccum.legacy.tf_keras_outputs import TFKerasOutputs


class TFKerasModel(Model):
    """A tf_keras (Keras 2) model."""

    callback_kind = "tf_keras.Callback"
    trains_on_replicas = False
    _PACKAGE, KIND, _FOREIGN_METRIC = "tf_keras", "tf_keras.Model", "keras.Metric"
    OUTPUTS = TFKerasOutputs
    _COMPILED = "compiled_loss", private.user_losses.name, "compiled_metrics"

    def symbolic_call(self, x: Nest, training: bool) -> Nest:
        if not self.model.built:
            # tf_keras has no symbolic call for subclassed models; one row of zeros builds them all
            # the same.
            with checks.naming("x"):
                one = tf.nest.map_structure(
                    lambda spec: tf.zeros([1, *spec.shape[1:]], spec.dtype), x
                )
            self(one, training=False)
        # Not called with numbers, which would move the state of a model that has some.
        outputs = self._note_calls(x)
        rows = tf.nest.flatten(x)[0].shape[0]
        return tf.nest.map_structure(
            lambda t: None if t is None else keras.KerasTensor((rows, *t.shape[1:]), t.dtype.name),
            outputs,
        )

    def predict(self, x: Nest, **options: Any) -> Any:
        if isinstance(x, keras.utils.PyDataset):
            x = read_python(x).dataset
        return self.model.predict(x, **options)

    @property
    def compute_loss_adds_penalty(self) -> bool:
        return self.overrides("compute_loss") and self.penalty() is not None

    @property
    def called_layers(self) -> list[keras.layers.Layer]:
        return self.layers

    def _own_state(self, layer: keras.layers.Layer) -> list[tf.Variable]:
        if hasattr(layer, "update_state"):  # a metric, which is a layer here
            return []
        return [v for v in private.own_weights_state(layer) if isinstance(v, tf.Variable)]

    def _draws(self, layer: keras.layers.Layer) -> bool:
        return "tf_keras.BaseRandomLayer" in kinds(layer) and not never_draws(layer)

    def _added_losses(self) -> list[tf.Tensor]:
        return [loss for layer in self.layers for loss in private.eager_losses(layer)]

    def penalty(self) -> tf.Tensor | None:
        losses = [loss() for layer in self.layers for loss in private.callable_losses(layer)]
        losses = [loss for loss in losses if loss is not None]
        return tf.add_n(losses) if losses else None

    def adopt(
        self, optimizer: keras.optimizers.Optimizer, metrics: Metrics, loss: Any, loss_weights: Any
    ) -> None:
        losses = [each for each in tf.nest.flatten(loss) if each is not None]
        of_keras_3 = any(
            isinstance(each, (keras.Loss, keras.Optimizer)) for each in (*losses, optimizer)
        )
        if losses and not of_keras_3 and self.model.compiled_loss is None:
            # tf_keras's own, as above; without it `save` leaves the optimizer out.
            own = metrics.for_compile(self._FOREIGN_METRIC)
            self.family.compile(self.model, optimizer, loss, loss_weights=loss_weights, **own)
        self.model.optimizer = optimizer

    def adopt_means(
        self, loss: keras.metrics.Mean, losses: Mapping[str, keras.metrics.Mean]
    ) -> None:
        """Does nothing: tf_keras keeps its own means, and the logs have what was trained."""

    def compute_loss(
        self, x: Nest, y: Nest, y_pred: Nest, sample_weight: Nest, training: bool
    ) -> tf.Tensor:
        return self.model.compute_loss(x, y, y_pred, sample_weight)

    def own_losses(
        self, compiled: Callable | None, rescaled: Callable[[tf.Tensor, bool], tf.Tensor]
    ) -> AbstractContextManager[None]:
        return replaced([(self.model, "compiled_loss", compiled)])

    def compute_metrics(
        self, x: Nest, y: Nest, y_pred: Nest, sample_weight: Nest, update: Callable
    ) -> dict[str, Any]:
        with replaced(
            [
                (
                    self.model,
                    "compiled_metrics",
                    types.SimpleNamespace(update_state=update, metrics=[]),
                )
            ]
        ):
            return self.model.compute_metrics(x, y, y_pred, sample_weight)

    @property
    def own_metrics(self) -> list[keras.metrics.Metric]:
        if not self.overrides("metrics"):
            return [metric for layer in self.layers for metric in private.metrics(layer)]
        of_compile: list[keras.metrics.Metric] = []
        for container in (self.model.compiled_loss, self.model.compiled_metrics):
            if container is not None:
                of_compile += container.metrics
        return [m for m in self.model.metrics if all(m is not each for each in of_compile)]

    @property
    def passed_over_methods(self) -> list[str]:
        return [name for name in ("get_metrics_result",) if self.overrides(name)]


class PretrainedModel(TFKerasModel):
    """A Hugging Face TF model, whose `train_step` does what is done here: its own loss from labels,
    or a Keras loss.
    """

    KIND = "transformers.TFPreTrainedModel"

    @property
    def compiled_with(self) -> dict[str, Any]:
        own = (
            {"loss": None, "loss_weights": None}
            if private.using_dummy_loss(self.model, True)
            else {}
        )
        return super().compiled_with | own

    @property
    def lookups(self) -> list[tuple[keras.layers.Layer, int]]:
        # BERT's and others look up ids in a table without an Embedding.
        own = [
            each
            for each in self.layers
            if len(getattr(getattr(each, "weight", None), "shape", ())) == 2
        ]
        tables = [
            (each, each.weight.shape[0])
            for each in own
            if "input_ids" in huggingface.list_arguments(each)
        ]
        return [*super().lookups, *tables]

    @property
    def returned_losses(self) -> int:
        return huggingface.count_means(self.model)

    def with_losses(
        self, x: Nest, y: Nest, training: bool, valid: tf.Tensor | None
    ) -> tuple[Nest, list[tuple[tf.Tensor, tf.Tensor]]]:
        inputs = huggingface.merge_labels(self.model, x, y)
        with huggingface.observe_losses(self.model, valid) as seen:
            # as CLIP, which takes no labels
            asks = "return_loss" in huggingface.list_arguments(self.model)
            outputs = self.model(
                inputs, training=training, **({"return_loss": True} if asks else {})
            )
        rows = tf.nest.flatten(x)[0].shape[0]
        return outputs, [
            tuple(each) for each in huggingface.make_terms(self.model, outputs, seen, rows, valid)
        ]

    @property
    def takes_targets_apart(self) -> bool:
        return True

    def matched(self, x: Nest, y: Nest, y_pred: Nest) -> tuple[Nest, Nest]:
        return huggingface.match(self.model, x, y if tf.nest.flatten(y) else None, y_pred)
