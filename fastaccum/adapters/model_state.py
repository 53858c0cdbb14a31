"""A Keras 3 model's layers and variables: those that train, and those that a call may assign."""

from __future__ import annotations

import keras
import tensorflow as tf

from fastaccum.adapters.call_effects import CallEffects
from fastaccum.basics.attributes import Variable, of_keras, raw
from fastaccum.kernels import fp32_layers, private
from fastaccum.layers.chains import Chain


class ModelState:
    """The layers and variables of a Keras 3 model."""

    def __init__(self, model: keras.Model):
        self.model = model
        # Known once the model has been called:
        self.effects = CallEffects()
        self.chains: list[Chain] = []  # layers that its code calls one after the other
        self.apart: list[str] = []  # names of layers that are alike, and called otherwise
        # Where float8 is asked for: why layers stay in half precision, by their ids.
        self.exempt_from_float8: dict[int, str] = {}

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """Every layer, with nested ones and the model itself."""
        return list(private.flatten_layers(self.model))

    @property
    def called_layers(self) -> list[keras.layers.Layer]:
        """Every layer whose `call` runs, also those that a LayerStack calls."""
        by_identity = {id(layer): layer for layer in fp32_layers.all_layers(self.model)}
        return list(by_identity.values())

    @property
    def metric_variables(self) -> list[tf.Variable]:
        """The variables of all layers' metrics."""
        variables: list[tf.Variable] = []
        for layer in self.layers:
            for metric in private.metrics(layer):
                variables += map(raw, metric.variables)
        return variables

    @property
    def variables(self) -> list[Variable]:
        """All variables, without the vocabularies of lookups that tf_keras lists too."""
        return [v for v in self.model.variables if isinstance(v, (keras.Variable, tf.Variable))]

    @property
    def trainable_variables(self) -> list[Variable]:
        """The variables to train, in the form that an optimizer of the model's family takes."""
        # Keras's own step trains `trainable_weights` where a model overrides them.
        if type(self.model).trainable_weights is not keras.Model.trainable_weights:
            return self.model.trainable_weights
        return self.model.trainable_variables

    @property
    def state(self) -> list[tf.Variable]:
        """Variables that a forward pass may assign, such as moving statistics and random seeds."""
        variables = []
        for layer in self.layers:
            variables += self._own_state(layer)

        # A SpectralNormalization assigns a weight of another layer, and layers of the user's own
        # what they like.
        known = {id(variable) for variable in (*variables, *self.metric_variables)}
        for assigned in map(raw, self.effects.assigned):
            if id(assigned) not in known:
                variables.append(assigned)
        return variables

    @property
    def statistics(self) -> list[tf.Variable]:
        """The part of `state` that Keras's own layers hold, and a train step moves."""
        variables = []
        for layer in self.layers:
            if of_keras(type(layer)) and self._moves(layer):
                variables += [v for v in self._own_state(layer) if v.dtype.is_floating]
        return variables

    @property
    def unmanaged_state(self) -> list[str]:
        """The names of the assigned variables that no layer has made with `add_weight`."""
        names = [v.name for v in self.effects.assigned if not isinstance(v, keras.Variable)]
        # The name of the first replica's variable stands for those of the others.
        return [name for name in names if "/replica_" not in name]

    @property
    def moving_layers(self) -> list[str]:
        """The names of the layers whose statistics a train step moves."""
        return [layer.name for layer in self.layers if self._moves(layer)]

    def _moves(self, layer: keras.layers.Layer) -> bool:
        return layer.trainable and any(v.dtype.is_floating for v in self._own_state(layer))

    def _own_state(self, layer: keras.layers.Layer) -> list[tf.Variable]:
        seeds = [generator.state for generator in private.seed_generators(layer)]
        return [v.value for v in (*private.own_state(layer), *seeds)]

    @property
    def seeds(self) -> list[tf.Variable]:
        """The states of random generators."""
        states = []
        for layer in self.layers:
            for generator in private.seed_generators(layer):
                states.append(generator.state.value)
        return states

    def owner(self, variable: tf.Variable) -> str | None:
        """Names the innermost layer that has a trainable variable."""
        innermost = None
        for layer in self.called_layers:  # a layer comes before those within it
            if any(variable is raw(v) for v in layer.trainable_variables):
                innermost = layer.name
        return innermost

    @property
    def compute_dtype(self) -> str:
        """The lowest precision that any layer computes in, which decides on loss scaling."""
        dtypes = {layer.compute_dtype for layer in self.called_layers}
        for low_precision in ("float16", "bfloat16"):
            if low_precision in dtypes:
                return low_precision
        return "float32"
