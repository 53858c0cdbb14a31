"""Places that tell code of Keras and others from a user's: by the object, never by what it says
that it is.

Each place has an impostor, a user's class or function with a known name or the metadata that
`functools.wraps` copies, and a renamed original. `PLACES_WITH_NAMES` lists every place of the
source that reads such a name, and why it may.
"""

import ast
import functools
import types
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import fastaccum as fa
from fastaccum.adapters import (
    added_losses,
    callbacks,
    guards,
    head,
    head_layers,
    label_metrics,
    layer_kinds,
    loss_kinds,
    optimizers,
)
from fastaccum.basics.attributes import function_of, kinds, known_name, of_keras, package
from fastaccum.checkpoint import callback_state
from fastaccum.data import passes
from fastaccum.families import adapt_model, adapt_optimizer
from fastaccum.fingerprint.objects import describe
from fastaccum.kernels import norms, private
from fastaccum.layers import attention_layers, blocks, forms, lookups
from fastaccum.legacy import huggingface, untouched_rows
from fastaccum.legacy.tf_keras_models import TFKerasModel

tf_keras = pytest.importorskip("tf_keras")

ROOT = Path(__file__).parents[2]
ROWS, WIDTH = 16, 4
rng = np.random.default_rng(0)
X = rng.normal(size=(ROWS, 5)).astype("float32")
Y = (rng.uniform(size=(ROWS, WIDTH)) > 0.4).astype("float32")
CLASSES = rng.integers(0, WIDTH, ROWS)


def model(units=WIDTH):
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(units, "sigmoid")])


def difference(loss, y=Y, steps=4):
    """Returns by how much two updates of fastaccum and of Keras on the full batch are apart."""
    theirs, ours = model(), model()
    theirs.compile(keras.optimizers.SGD(0.5), loss)
    theirs.fit(X, y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    trainer = fa.Trainer(
        ours, keras.optimizers.SGD(0.5), loss, gradient_accumulation_steps=steps, jit_compile=False
    )
    trainer.fit(X, y, batch_size=ROWS // steps, epochs=2, shuffle=False, verbose=0)
    return max(
        np.abs(a - b).max() for a, b in zip(theirs.get_weights(), ours.get_weights(), strict=True)
    )


# What training does.


@functools.wraps(keras.losses.binary_crossentropy)
def over_rows(y_true, y_pred):
    values = keras.losses.binary_crossentropy(y_true, y_pred)
    return values / ops.cast(ops.shape(y_pred)[0], "float32")


@functools.wraps(keras.losses.binary_crossentropy)
def by_shares(y_true, y_pred):
    share = ops.mean(y_true)
    return keras.losses.binary_crossentropy(y_true, y_pred) * (1 - share)


@functools.wraps(keras.losses.binary_crossentropy)
def with_weight_column(y_true, y_pred):
    return keras.losses.binary_crossentropy(y_true[:, :WIDTH], y_pred) * y_true[:, WIDTH]


def test_a_decorated_loss_that_divides_by_the_rows_is_exact():
    assert difference(over_rows) < 1e-6


def test_a_decorated_loss_that_weighs_by_the_batch_warns():
    with pytest.warns(UserWarning, match="no sum or mean over the rows"):
        difference(by_shares)


def test_a_decorated_loss_takes_a_target_of_another_shape():
    weights = rng.uniform(0.5, 2, size=(ROWS, 1)).astype("float32")
    assert difference(with_weight_column, np.concatenate([Y, weights], 1)) < 1e-6


def overlap(y_true, y_pred):
    return 1 - (2 * ops.sum(y_true * y_pred, -1) + 1) / (
        ops.sum(y_true, -1) + ops.sum(y_pred, -1) + 1
    )


class Named(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return overlap(y_true, y_pred)


def renamed(name):
    def function(y_true, y_pred):
        return overlap(y_true, y_pred)

    function.__name__ = function.__qualname__ = name
    return function


NAMES = [
    "dice",
    "tversky",
    "circle",
    "ctc",
    "sparse_categorical_crossentropy",
    "categorical_crossentropy",
]


@pytest.mark.parametrize(
    "make", [renamed, lambda name: Named(name=name)], ids=["function", "object"]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_loss_with_a_name_of_keras_is_exact(name, make):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert difference(make(name)) < 1e-6


def test_a_loss_of_keras_under_another_name_is_known():
    with pytest.raises(ValueError, match="compares the whole batch"):
        difference(keras.losses.Dice(axis=(0,), name="mine"))
    with pytest.raises(ValueError, match="compares the whole batch"):
        difference(type("Mine", (keras.losses.Dice,), {})(axis=(0,)))


@pytest.mark.parametrize("rows", [WIDTH, 2 * WIDTH])
def test_a_loss_over_the_axis_of_rows_is_refused_whatever_the_sizes(rows):
    trainer = fa.Trainer(
        model(), "sgd", lambda y, p: ops.sum(ops.square(y - p), axis=0), jit_compile=False
    )
    with pytest.raises(ValueError, match="whatever the number of examples"):
        trainer.fit(X[: 2 * rows], Y[: 2 * rows], batch_size=rows, verbose=0)


def test_a_frozen_layer_with_the_name_of_another_moves_no_statistics():
    one = keras.layers.BatchNormalization(name="norm")
    frozen = keras.layers.BatchNormalization(name="norm", trainable=False)
    inner = keras.Sequential([keras.Input((5,)), frozen])
    adapted = adapt_model(keras.Sequential([keras.Input((5,)), one, inner]))
    moving = [one.moving_mean.value, one.moving_variance.value]
    assert [id(v) for v in adapted.statistics] == [id(v) for v in moving]


# Heads and metrics of logits that are never held.


def test_a_quantised_head_is_named_and_the_remedy_works():
    made = [keras.Input((5,)), keras.layers.Dense(8), keras.layers.Dense(WIDTH, name="head")]
    quantised = keras.Sequential(made)
    quantised.layers[-1].quantize("int8")
    trainer = fa.Trainer(quantised, "sgd", fa.LinearCrossEntropy(head="head"), jit_compile=False)
    with pytest.raises(
        ValueError,
        match=r"head 'head' \(Dense\) is quantised to int8.*SparseCategoricalCrossentropy",
    ):
        trainer.fit(X, CLASSES, batch_size=8, verbose=0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fa.Trainer(quantised, "sgd", loss, jit_compile=False).fit(X, CLASSES, batch_size=8, verbose=0)


@functools.wraps(keras.metrics.sparse_categorical_accuracy)
def doubled_accuracy(y_true, y_pred):
    return 2 * keras.metrics.sparse_categorical_accuracy(y_true, y_pred)


def test_a_decorated_metric_is_not_keras_s():
    linear = keras.Sequential([keras.Input((5,)), keras.layers.Dense(WIDTH)])
    trainer = fa.Trainer(
        linear, "sgd", fa.LinearCrossEntropy(), [doubled_accuracy], jit_compile=False
    )
    with pytest.raises(ValueError, match="need the logits"):
        trainer.fit(X, CLASSES, batch_size=8, verbose=0)


def test_metrics_of_keras_are_known_under_other_names():
    accuracy = keras.metrics.sparse_categorical_accuracy
    assert label_metrics.find_values(keras.metrics.MeanMetricWrapper(accuracy, name="mine"), -100)
    assert label_metrics.find_values(
        type("Mine", (keras.metrics.SparseCategoricalAccuracy,), {})(), -100
    )

    class Own(keras.metrics.SparseCategoricalAccuracy):
        def update_state(self, y_true, y_pred, sample_weight=None):
            super().update_state(y_true, 1 - y_pred, sample_weight)

    assert label_metrics.find_values(Own(), -100) is None


def test_perplexity_is_keras_hub_s_alone():
    class Perplexity(keras.metrics.Metric):
        from_logits = True

    Perplexity.__module__ = "keras_hub.src.metrics.perplexity"
    assert label_metrics.find_values(Perplexity(), -100) is None


# The place in the source, what it asks, of an impostor, and of a renamed original.


def impostor(name, base=keras.layers.Layer, module="keras.src.layers", **members):
    """Makes a user's class that says it is one of a package's."""
    return type(name, (base,), {"__module__": module, "__qualname__": name, **members})


def wrapped(original, function=lambda *args, **kwargs: None):
    """Makes a user's function that says it is an original."""

    @functools.wraps(original)
    def made(*args, **kwargs):
        return function(*args, **kwargs)

    return made


def subclass(original, **members):
    return type("Mine", (original,), members)


def legacy(**forms):
    """Makes an optimizer of a user's, with forms of updates of its own."""
    return type("Mine", (tf_keras.optimizers.legacy.SGD,), forms)


def own_call(self, inputs):
    return inputs


def says_that_it_is(module, name):
    """Makes a user's function that says it is one of a package's."""

    def function(*args, **kwargs):
        raise AssertionError("never called")

    function.__module__, function.__qualname__ = module, name
    return function


def treats_apart(kind):
    return untouched_rows.treats_apart(kind(0.1))


def built(layer, shape=(None, 5)):
    layer.build(shape)
    return layer


def linear(y):
    return 2 * y


def _is_refused_as_mean(regularizer):
    try:
        added_losses.require_sum_over_rows(
            types.SimpleNamespace(name="a", activity_regularizer=regularizer)
        )
    except ValueError:
        return True
    return False


KERAS, TF_KERAS = keras.layers, tf_keras.layers
PLACES = {
    # name: (question, impostors, renamed originals); the question is answered by False and by True
    "attributes.of_keras, function": (
        of_keras,
        [
            wrapped(keras.losses.dice),
            wrapped(tf_keras.losses.mse),
            tf.function(wrapped(keras.losses.dice)),
        ],
        [
            keras.losses.Dice().fn,
            tf.function(keras.losses.dice),
            tf_keras.losses.MeanSquaredError().fn,
        ],
    ),
    "attributes.of_keras, class": (
        of_keras,
        [impostor("Dense"), impostor("Dense")()],
        [KERAS.Dense, KERAS.Dense(1)],
    ),
    "attributes.of_keras, method": (
        of_keras,
        [subclass(KERAS.Dense)(1).call, wrapped(KERAS.Dense.call)],
        [KERAS.Dense(1).call, KERAS.Dense.call],
    ),
    "attributes.kinds": (
        lambda value: "keras.Optimizer" in kinds(value),
        [impostor("Optimizer", object, "keras.src.optimizers.optimizer")()],
        [subclass(keras.optimizers.SGD)()],
    ),
    "attributes.function_of": (
        lambda loss: function_of(loss) is not None,
        [
            Named(),
            subclass(keras.losses.Dice, call=own_call)(),
            types.SimpleNamespace(fn=keras.losses.dice),
        ],
        [
            keras.losses.Dice(name="mine"),
            subclass(keras.losses.Dice)(),
            tf_keras.losses.MeanSquaredError(name="a"),
        ],
    ),
    "loss_kinds.takes_class_indices": (
        loss_kinds.takes_class_indices,
        [
            renamed("sparse_categorical_crossentropy"),
            wrapped(keras.losses.sparse_categorical_crossentropy),
        ],
        [
            keras.losses.SparseCategoricalCrossentropy(name="mine"),
            subclass(keras.losses.SparseCategoricalCrossentropy)(),
            tf_keras.losses.sparse_categorical_crossentropy,
            "sparse_categorical_crossentropy",
        ],
    ),
    "losses, __call__ of keras": (
        lambda loss: (
            loss_kinds.require_sum_of_rows(loss, "y", keras.KerasTensor((None, 2)), False) or True
        ),
        [impostor("Loss", Named, "keras.src.losses.loss", __call__=lambda self, *y: 1.0)()],
        [subclass(keras.losses.MeanSquaredError)(), Named()],
    ),
    "head.replacement": (
        lambda loss: head.replacement(loss) is not None,
        [private.get_loss(wrapped(keras.losses.sparse_categorical_crossentropy), None, None)],
        [subclass(keras.losses.SparseCategoricalCrossentropy)(from_logits=True, name="mine")],
    ),
    "head_layers.is_dense": (
        head_layers.is_dense,
        [
            impostor("Dense")(),
            impostor("Dense", module="tf_keras.src.layers")(),
            subclass(KERAS.Dense, call=own_call)(1),
        ],
        [subclass(KERAS.Dense)(1), subclass(TF_KERAS.Dense)(1)],
    ),
    "head_layers.is_reversible": (
        head_layers.is_reversible,
        [
            impostor("ReversibleEmbedding")(),
            subclass(KERAS.ReversibleEmbedding, call=own_call)(3, 2),
        ],
        [subclass(KERAS.ReversibleEmbedding)(3, 2)],
    ),
    "head_layers.is_masked_lm_head": (
        head_layers.is_masked_lm_head,
        [impostor("MaskedLMHead", module="keras_hub.src.layers")()],
        [],
    ),
    "head, a linear activation": (
        lambda layer: head_layers.require_linear(built(layer), 3) or True,
        [KERAS.Dense(3, linear), KERAS.Dense(3, wrapped(keras.activations.linear))],
        [KERAS.Dense(3, keras.activations.linear), KERAS.Dense(3), TF_KERAS.Dense(3)],
    ),
    "forms._is_dilated": (
        forms._is_dilated,
        [impostor("Conv2D", dilation_rate=(2, 2), data_format="channels_last")()],
        [
            subclass(KERAS.Conv2D)(1, 3, dilation_rate=2),
            subclass(TF_KERAS.Conv2D)(1, 3, dilation_rate=2),
        ],
    ),
    "lookups._lookup_class": (
        lambda layer: lookups._lookup_class(layer) is not None,
        [impostor("Embedding")()],
        [subclass(KERAS.Embedding)(2, 2), subclass(TF_KERAS.Embedding)(2, 2)],
    ),
    "blocks.refusal, an input": (
        lambda layer: blocks.refusal(layer) is not None,
        [impostor("InputLayer")()],
        [subclass(KERAS.InputLayer)((3,)), subclass(TF_KERAS.InputLayer)((3,))],
    ),
    "blocks.refusal, a spectral normalization": (
        lambda layer: blocks.refusal(layer) is not None,
        [impostor("SpectralNormalization")()],
        [subclass(KERAS.SpectralNormalization)(KERAS.Dense(1))],
    ),
    "layer_kinds.never_draws": (
        layer_kinds.never_draws,
        [impostor("Dropout", rate=0)()],
        [KERAS.Dropout(0, name="a")],
    ),
    "layer_kinds.may_count_rows": (
        lambda layer: not layer_kinds.may_count_rows(layer),
        [
            impostor("Dense")(),
            KERAS.Dense(1, wrapped(keras.activations.relu)),
            KERAS.Dense(1, wrapped(tf.nn.relu)),
        ],
        [
            KERAS.Dense(1, keras.activations.relu),
            KERAS.Dense(1, tf.nn.relu),
            KERAS.Dense(1, KERAS.LeakyReLU()),
        ],
    ),
    "layer_kinds.may_do_more": (
        lambda layer: not layer_kinds.may_do_more(layer),
        [impostor("Dense")()],
        [KERAS.Dense(1, name="mine")],
    ),
    "models, random layers of tf_keras": (
        lambda layer: TFKerasModel(tf_keras.Sequential())._draws(layer),
        [impostor("BaseRandomLayer")()],
        [subclass(TF_KERAS.Dropout)(0.5)],
    ),
    "families.adapt_optimizer": (
        lambda optimizer: isinstance(_answer(adapt_optimizer, optimizer), optimizers.Optimizer),
        [impostor("Optimizer", object, "keras.src.optimizers.optimizer")()],
        [subclass(keras.optimizers.SGD)(), subclass(tf_keras.optimizers.SGD)()],
    ),
    "guards.is_users": (
        lambda kind: not guards.is_users(kind(), "minimize"),
        [
            subclass(keras.optimizers.SGD, minimize=wrapped(tf_keras.optimizers.SGD.minimize)),
            impostor(
                "SGD", tf_keras.optimizers.SGD, "tf_keras.src.optimizers.sgd", minimize=own_call
            ),
        ],
        [subclass(tf_keras.optimizers.SGD)],
    ),
    "untouched_rows._find_forms": (
        lambda kind: _answer(treats_apart, kind) is not None,
        [
            legacy(
                _resource_apply_sparse=says_that_it_is(
                    "__main__", "OptimizerV2._resource_apply_sparse"
                )
            ),
            legacy(
                _resource_apply_sparse=wrapped(
                    tf_keras.optimizers.legacy.SGD._resource_apply_sparse
                )
            ),
        ],
        [
            legacy(),
            legacy(
                _resource_apply_sparse=tf_keras.optimizers.legacy.Optimizer._resource_apply_sparse
            ),
        ],
    ),
    # Those of tensorflow-addons train in test_untouched_rows.py, Hugging Face's models in
    # tests/zoo.
    "untouched_rows._decays": (
        untouched_rows._decays,
        [
            says_that_it_is(
                "tensorflow_addons", "DecoupledWeightDecayExtension._resource_apply_sparse"
            )
        ],
        [],
    ),
    "huggingface._loss_class": (
        huggingface._loss_class,
        [
            types.SimpleNamespace(
                hf_compute_loss=says_that_it_is(
                    "transformers", "TFCausalLanguageModelingLoss.hf_compute_loss"
                )
            )
        ],
        [],
    ),
    # tensorflow-probability's own is refused as a mean over rows is: tests/zoo/test_probability.py.
    "added_losses, a mean over rows": (
        _is_refused_as_mean,
        [
            impostor(
                "KLDivergenceRegularizer", keras.regularizers.L2, "tensorflow_probability.layers"
            )()
        ],
        [tf.reduce_mean],
    ),
    "callbacks._is": (
        lambda callback: callbacks._is(callback, "TensorBoard"),
        [impostor("TensorBoard", keras.callbacks.Callback, "keras.src.callbacks")()],
        [subclass(keras.callbacks.TensorBoard)(), subclass(tf_keras.callbacks.TensorBoard)()],
    ),
    "callback_state._kind": (
        lambda callback: callback_state._kind(callback) == "EarlyStopping",
        [impostor("EarlyStopping", keras.callbacks.Callback, "keras.src.callbacks")()],
        [subclass(keras.callbacks.EarlyStopping)()],
    ),
    "attention_layers.attends": (
        attention_layers.attends,
        [impostor("Attention", module="keras.src.layers.attention")()],
        [KERAS.Attention(name="mine"), KERAS.AdditiveAttention()],
    ),
    "attention_layers.find_hub_form": (
        lambda layer: attention_layers.find_hub_form(layer) is not None,
        [
            impostor(
                "LlamaAttention",
                module="keras_hub.src.models.llama.llama_attention",
                _compute_attention=own_call,
            )()
        ],
        [],
    ),
    "norms.activated": (
        lambda activation: known_name(activation) in norms._GELUS,
        [wrapped(keras.activations.gelu)],
        [keras.layers.Dense(1, "gelu").activation],
    ),
    "fingerprint, code of a user's function": (
        lambda function: "code" not in describe(function),
        [wrapped(keras.losses.dice), renamed("dice")],
        [keras.losses.Dice().fn],
    ),
    "fingerprint, a user's class": (
        lambda layer: "code" not in describe(layer),
        [impostor("Dense", call=own_call)()],
        [KERAS.Dense(1, name="mine")],
    ),
    "passes._parts": (
        lambda dataset: bool(passes._parts(dataset, "ShuffleDataset")),
        [
            impostor(
                "ShuffleDataset",
                type(tf.data.Dataset.range(2)),
                "tensorflow.python.data.ops.shuffle_op",
            )(2)
        ],
        [tf.data.Dataset.range(2).shuffle(2, name="mine")],
    ),
}


def _answer(question, *values):
    """Returns the answer to a question; None for one that refuses."""
    try:
        return question(*values)
    except (TypeError, ValueError):
        return None


@pytest.mark.parametrize("name", PLACES)
def test_an_impostor_is_told_from_an_original(name):
    question, impostors, originals = PLACES[name]
    assert [bool(_answer(question, each)) for each in impostors] == [False] * len(impostors)
    assert [bool(_answer(question, each)) for each in originals] == [True] * len(originals)


def test_originals_of_keras_hub_are_known():
    keras_hub = pytest.importorskip("keras_hub")
    made = type("Mine", (keras_hub.layers.MaskedLMHead,), {})(vocabulary_size=4, name="mine")
    assert head_layers.is_masked_lm_head(made)
    assert label_metrics.find_values(
        type("Mine", (keras_hub.metrics.Perplexity,), {})(from_logits=True), -100
    )
    assert package(keras_hub.layers.ReversibleEmbedding) == "keras_hub"
    assert head_layers.is_reversible(
        type("Mine", (keras_hub.layers.ReversibleEmbedding,), {})(3, 2)
    )
    llama = pytest.importorskip("keras_hub.src.models.llama.llama_attention")
    assert (
        attention_layers.find_hub_form(type("Mine", (llama.LlamaAttention,), {})(2, 2)) is not None
    )


# Reads of `__name__`, `__module__` and `__qualname__`, but in the text of an error or a warning, by
# function, and why each may.
PLACES_WITH_NAMES = {
    "kernels/origins.py:known_name": "of what is its package's by `package`",
    "kernels/origins.py:package": "finds the module, which must hold the object",
    "kernels/origins.py:_holds": "looks the object up in the module",
    "kernels/origins.py:_is_defined_in": (
        "tells a class that a function made, whose methods' globals decide"
    ),
    "fastaccum/layers/attention_layers.py:find_hub_form": (
        "a key, of a class that is KerasHub's by `package`"
    ),
    "fastaccum/adapters/optimizers.py:Optimizer._storable": "the text of an error",
    "fastaccum/adapters/shared_updates.py:_refusal": "the text of an error",
    "fastaccum/layers/float8.py:_why_not_able": "the text of a reason",
    "fastaccum/legacy/huggingface.py:_loss_class": (
        "a key, of a function that is transformers's by `package`"
    ),
    "fastaccum/legacy/untouched_rows.py:_decays": (
        "of a function that is tensorflow-addons's by `package`"
    ),
    "fastaccum/legacy/untouched_rows.py:_find_forms": (
        "of functions that are a package's by `package`; and a message"
    ),
    "fastaccum/training/reading.py:_release_iterators": (
        "of a frame that has ended, whose module Python names"
    ),
    "fastaccum/fingerprint/bytecode.py:is_of_user": "of what is its module's by `package`",
    "fastaccum/fingerprint/objects.py:_describe": (
        "part of a description, beside the code; of Python's own modules"
    ),
    "fastaccum/fingerprint/objects.py:_describe_nest": (
        "part of a description: a nest that holds itself"
    ),
    "fastaccum/fingerprint/objects.py:_coded": (
        "part of a description; `__init__`, which Python itself finds by name"
    ),
    "fastaccum/fingerprint/bytecode.py:is_users": ("`__init__`, which Python itself finds by name"),
    "fastaccum/fingerprint/objects.py:_names_used": (
        "methods that Python and Keras themselves find by name"
    ),
    "fastaccum/checkpoint/callback_state.py:_kind": (
        "the key in a file, of a class that is Keras's by `of_keras`"
    ),
    "fastaccum/checkpoint/callback_state.py:require_one_resume": (
        "of classes that are Keras's by `of_keras`"
    ),
    "fastaccum/checkpoint/callback_state.py:_stateful": (
        "the key in a file, by which a later process finds a callback"
    ),
    "fastaccum/fingerprint/values.py:plain": "the value in a file of what JSON does not hold",
    "fastaccum/layers/alike.py:_show": "a message",
    "fastaccum/layers/interceptors.py:_holder_of": "the name that a layer's class keeps",
    "fastaccum/addons.py:_other_finders": "of this module's own finder",
    "fastaccum/basics/warnings.py:_is_inner": "of a frame's globals: which line a warning names",
    # Values of messages, which are made apart from their text.
    "fastaccum/adapters/added_losses.py:require_sum_over_rows": "a message",
    "fastaccum/adapters/head_layers.py:require_linear": "a message",
    "fastaccum/adapters/loss_kinds.py:loss_name": "a message",
    "fastaccum/adapters/own_loss.py:OwnLoss.__init__": "a message",
    "fastaccum/adapters/own_methods.py:_overriding": "a message",
    "fastaccum/adapters/own_methods.py:_removing": "a message",
    "fastaccum/adapters/slots.py:_refusal": "a message",
    "fastaccum/app/run.py:resume": "a message",
    "fastaccum/checkpoint/writer.py:Writer.wait": "a message",
    "fastaccum/data/datasets.py:DatasetSource.__init__": "a message",
    "fastaccum/distribute/replicas.py:replicas_for": "a message",
    "fastaccum/distribute/workers.py:abort_peers_on_error.call": (
        "a message, and the name of a thread"
    ),
    "fastaccum/basics/processes.py:Workers.report": "a message",
    "fastaccum/memory/admission.py:Admission.error": "a message",
    "fastaccum/step/compilable.py:_with_type": "a message",
    "fastaccum/step/diagnosis.py:_of_micro_batch": "a message",
    "fastaccum/step/diagnosis.py:error": "a message",
    "fastaccum/step/document_check.py:_Recorder.call_layer": "a message",
    "fastaccum/step/document_check.py:require_packable": "a message",
    "fastaccum/step/loss_scale.py:LossScale.__repr__": "a message",
    "fastaccum/step/probe.py:probe": "a message",
    "fastaccum/trainer.py:Trainer.__repr__": "a message",
    "fastaccum/training/step_builder.py:StepBuilder._build": "a message",
    "kernels/checks.py:shown": "a message",
    "kernels/cudnn_attention.py:_tried": "a message",
    "kernels/stackable.py:describe": "a message",
}


def _is_text_of_an_error(node):
    if isinstance(node, ast.Raise):
        return True
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("warn", "checks.naming")


def _reads_of_names(path):
    """Yields the functions of a file that read such a name other than in the text of an error or a
    warning.
    """
    tree = ast.parse(path.read_text())
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        attribute = isinstance(node, ast.Attribute) and node.attr in (
            "__name__",
            "__module__",
            "__qualname__",
        )
        text = isinstance(node, ast.Constant) and node.value in (
            "__name__",
            "__module__",
            "__qualname__",
        )
        if not (attribute or text):
            continue
        around = [node]
        while around[-1] in parents:
            around.append(parents[around[-1]])
        in_text = any(isinstance(each, ast.JoinedStr) for each in around)
        if in_text and any(map(_is_text_of_an_error, around)):
            continue
        functions = [
            each.name for each in around if isinstance(each, (ast.FunctionDef, ast.ClassDef))
        ]
        yield f"{path.relative_to(ROOT)}:{'.'.join(reversed(functions))}"


def test_every_read_of_a_name_is_listed():
    folders = (ROOT / "fastaccum", ROOT / "kernels")
    files = [
        path
        for folder in folders
        for path in folder.rglob("*.py")
        if "fastaccum/kernels" not in str(path)
    ]
    found = {place for path in files for place in _reads_of_names(path)}
    assert found == set(PLACES_WITH_NAMES)
