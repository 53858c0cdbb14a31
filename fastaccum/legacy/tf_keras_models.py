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
from fastaccum.adapters.layer_kinds import never_draws
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.models import Model
from fastaccum.basics.attributes import Nest, kinds, replaced
from fastaccum.kernels import private
from fastaccum.legacy import huggingface
from fastaccum.legacy.tf_keras_outputs import TFKerasOutputs


class TFKerasModel(Model):
    """A tf_keras (Keras 2) model."""

    callback_kind = "tf_keras.Callback"
    trains_on_replicas = False
    _PACKAGE = "tf_keras"
    KIND = "tf_keras.Model"
    _FOREIGN_METRIC = "keras.Metric"
    OUTPUTS = TFKerasOutputs
    _COMPILED = ("compiled_loss", private.user_losses.name, "compiled_metrics")

    def symbolic_call(self, x: Nest, training: bool) -> Nest:
        if not self.model.built:
            # tf_keras has no symbolic call for subclassed models; a row of zeros builds them too.
            with checks.naming("x"):
                row = tf.nest.map_structure(
                    lambda spec: tf.zeros([1, *spec.shape[1:]], spec.dtype), x
                )
            self(row, training=False)
        # Traced, not called with numbers, which would move the state of a model that has some.
        outputs = self._note_calls(x)
        rows = tf.nest.flatten(x)[0].shape[0]

        def symbolic(output: tf.Tensor | None) -> keras.KerasTensor | None:
            if output is None:
                return None
            return keras.KerasTensor((rows, *output.shape[1:]), output.dtype.name)

        return tf.nest.map_structure(symbolic, outputs)

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
        penalties = []
        for layer in self.layers:
            for compute in private.callable_losses(layer):
                penalty = compute()
                if penalty is not None:
                    penalties.append(penalty)
        if not penalties:
            return None
        return tf.add_n(penalties)

    def adopt(
        self, optimizer: keras.optimizers.Optimizer, metrics: Metrics, loss: Any, loss_weights: Any
    ) -> None:
        losses = [loss for loss in tf.nest.flatten(loss) if loss is not None]
        has_keras_3 = any(
            isinstance(trains, (keras.Loss, keras.Optimizer)) for trains in (*losses, optimizer)
        )
        if losses and not has_keras_3 and self.model.compiled_loss is None:
            # By tf_keras's own `compile`, without which `save` leaves the optimizer out.
            metrics_of_tf_keras = metrics.for_compile(self._FOREIGN_METRIC)
            self.family.compile(
                self.model, optimizer, loss, loss_weights=loss_weights, **metrics_of_tf_keras
            )
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
        container = types.SimpleNamespace(update_state=update, metrics=[])
        with replaced([(self.model, "compiled_metrics", container)]):
            return self.model.compute_metrics(x, y, y_pred, sample_weight)

    @property
    def own_metrics(self) -> list[keras.metrics.Metric]:
        if not self.overrides("metrics"):
            return [metric for layer in self.layers for metric in private.metrics(layer)]
        compiled: set[int] = set()
        for container in (self.model.compiled_loss, self.model.compiled_metrics):
            if container is not None:
                compiled.update(id(metric) for metric in container.metrics)
        return [metric for metric in self.model.metrics if id(metric) not in compiled]

    @property
    def passed_over_methods(self) -> list[str]:
        return [name for name in ("get_metrics_result",) if self.overrides(name)]


class PretrainedModel(TFKerasModel):
    """A Hugging Face TF model: it trains by its own loss of labels, or by a Keras loss."""

    KIND = "transformers.TFPreTrainedModel"

    @property
    def compiled_with(self) -> dict[str, Any]:
        compiled = super().compiled_with
        if private.using_dummy_loss(self.model, True):  # the model's own loss
            compiled |= {"loss": None, "loss_weights": None}
        return compiled

    @property
    def lookups(self) -> list[tuple[keras.layers.Layer, int]]:
        lookups = list(super().lookups)
        for layer in self.layers:
            # BERT's and others look up ids in a table without an Embedding.
            table: Any = getattr(layer, "weight", None)
            is_matrix = len(getattr(table, "shape", ())) == 2
            if is_matrix and "input_ids" in huggingface.list_arguments(layer):
                lookups.append((layer, table.shape[0]))
        return lookups

    @property
    def returned_losses(self) -> int:
        return huggingface.count_means(self.model)

    def with_losses(
        self, x: Nest, y: Nest, training: bool, valid: tf.Tensor | None
    ) -> tuple[Nest, list[tuple[tf.Tensor, tf.Tensor]]]:
        inputs = huggingface.merge_labels(self.model, x, y)
        with huggingface.observe_losses(self.model, valid) as seen:
            options = {}
            if "return_loss" in huggingface.list_arguments(self.model):
                options["return_loss"] = True  # CLIP takes no labels
            outputs = self.model(inputs, training=training, **options)
        rows = tf.nest.flatten(x)[0].shape[0]
        terms = huggingface.make_terms(self.model, outputs, seen, rows, valid)
        return outputs, [(term.value, term.weight_sum) for term in terms]

    @property
    def takes_targets_apart(self) -> bool:
        return True

    def matched(self, x: Nest, y: Nest, y_pred: Nest) -> tuple[Nest, Nest]:
        if not tf.nest.flatten(y):
            y = None
        return huggingface.match(self.model, x, y, y_pred)
