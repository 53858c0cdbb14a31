"""The idioms of keras.io's examples: tables, graphs and time series."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from zoo import Case, Steps, entry

import fastaccum as fa

FAMILY = "keras.io: tables, graphs and time series"
CATEGORIES = {"workclass": 5, "education": 7, "gender": 2}
NUMBERS = ["age", "hours_per_week"]


def _census(rows=10):
    rng = np.random.default_rng(0)
    x = {name: rng.integers(0, size, rows).astype("int32") for name, size in CATEGORIES.items()}
    x |= {name: rng.normal(size=rows).astype("float32") for name in NUMBERS}
    return x, (rng.random(rows) > 0.5).astype("float32"), rng.random(rows).astype("float32")


def _encoded(inputs, dims=4):
    embedded = [layers.Embedding(size, dims)(inputs[name]) for name, size in CATEGORIES.items()]
    return embedded, [ops.expand_dims(inputs[name], -1) for name in NUMBERS]


def _inputs():
    inputs = {name: keras.Input((), name=name, dtype="int32") for name in CATEGORIES}
    return inputs | {name: keras.Input((), name=name, dtype="float32") for name in NUMBERS}


@entry(FAMILY, "wide, deep and cross network: a dict of features, sample weights", mixed=True)
def wide_and_deep():
    inputs = _inputs()
    embedded, numbers = _encoded(inputs)
    x0 = layers.concatenate([*embedded, *numbers])
    cross = x0
    for _ in range(2):
        cross = x0 * layers.Dense(x0.shape[-1])(cross) + cross
    deep = layers.Dense(8, activation="relu")(layers.Dense(8, activation="relu")(x0))
    wide = layers.concatenate(
        [
            layers.CategoryEncoding(size, output_mode="one_hot")(inputs[name])
            for name, size in CATEGORIES.items()
        ]
    )
    outputs = layers.Dense(1, activation="sigmoid")(layers.concatenate([wide, cross, deep]))
    x, y, weight = _census()
    return Case(
        keras.Model(inputs, outputs),
        x,
        y,
        sample_weight=weight,
        loss="binary_crossentropy",
        weighted_metrics=["accuracy"],
        micro_batches=4,
    )


@entry(FAMILY, "TabTransformer: attention over embedded columns, sample weights", fused=True)
def tab_transformer():
    inputs = _inputs()
    embedded, numbers = _encoded(inputs, 8)
    encoded = ops.stack(embedded, axis=1)
    encoded = encoded + layers.Embedding(len(CATEGORIES), 8)(ops.arange(len(CATEGORIES)))
    attention = layers.MultiHeadAttention(num_heads=2, key_dim=8)(encoded, encoded)
    x = layers.LayerNormalization(epsilon=1e-6)(layers.Add()([attention, encoded]))
    forward = keras.Sequential([layers.Dense(8, activation="gelu"), layers.Dense(8)])(x)
    x = layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(layers.Add()([forward, x])))
    numbers = layers.LayerNormalization(epsilon=1e-2)(layers.concatenate(numbers))
    x = layers.Dense(12, activation="selu")(layers.concatenate([x, numbers]))
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid", dtype="float32")(x))
    x, y, weight = _census()
    return Case(
        model,
        x,
        y,
        sample_weight=weight,
        loss=keras.losses.BinaryCrossentropy(),
        metrics=[keras.metrics.BinaryAccuracy(name="accuracy")],
        optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        micro_batches=4,
    )


def _feature_space():
    rng = np.random.default_rng(0)
    raw = {
        "sex": rng.integers(0, 2, 10),
        "age": rng.integers(20, 80, 10),
        "thal": rng.choice(["fixed", "normal", "reversible"], 10),
        "oldpeak": rng.random(10).astype("float32"),
    }
    feature_space = keras.utils.FeatureSpace(
        features={
            "sex": keras.utils.FeatureSpace.integer_categorical(num_oov_indices=0),
            "age": keras.utils.FeatureSpace.float_discretized(num_bins=4),
            "thal": keras.utils.FeatureSpace.string_categorical(num_oov_indices=0),
            "oldpeak": keras.utils.FeatureSpace.float_normalized(),
        },
        crosses=[keras.utils.FeatureSpace.cross(feature_names=("sex", "age"), crossing_dim=8)],
        output_mode="concat",
    )
    y = (rng.random(10) > 0.5).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((raw, y))
    feature_space.adapt(dataset.batch(10).map(lambda x, _: x))
    return feature_space, dataset, raw, y


@entry(FAMILY, "FeatureSpace in tf.data")
def feature_space_example():
    feature_space, dataset, _, _ = _feature_space()
    x = layers.Dense(8, activation="relu")(feature_space.get_encoded_features())
    model = keras.Model(
        feature_space.get_encoded_features(), layers.Dense(1, activation="sigmoid")(x)
    )

    def preprocessed(size):
        return dataset.batch(size).map(lambda x, y: (feature_space(x), y)).prefetch(1)

    def theirs():
        model.compile("sgd", "binary_crossentropy", metrics=["accuracy"], jit_compile=False)
        return {k: v[-1] for k, v in model.fit(preprocessed(10), verbose=0).history.items()}

    def ours():
        trainer = fa.Trainer(
            model, "sgd", "binary_crossentropy", ["accuracy"], gradient_accumulation_steps=3
        )
        return {k: v[-1] for k, v in trainer.fit(preprocessed(4), verbose=0).history.items()}

    return Steps(model.trainable_variables, ours, theirs)


@entry(FAMILY, "FeatureSpace in the model, with strings, jit_compile=False")
def feature_space_in_the_model():
    feature_space, _, raw, y = _feature_space()
    x = layers.Dense(8, activation="relu")(feature_space.get_encoded_features())
    model = keras.Model(feature_space.get_inputs(), layers.Dense(1, activation="sigmoid")(x))
    return Case(
        model,
        {name: tf.constant(values) for name, values in raw.items()},
        y,
        loss="binary_crossentropy",
        metrics=["accuracy"],
        jit_compile=False,
        micro_batches=4,
    )


class GatedLinearUnit(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.linear = layers.Dense(units)
        self.sigmoid = layers.Dense(units, activation="sigmoid")

    def call(self, inputs):
        return self.linear(inputs) * self.sigmoid(inputs)


class GatedResidualNetwork(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.units = units
        self.elu_dense = layers.Dense(units, activation="elu")
        self.linear_dense = layers.Dense(units)
        self.gated_linear_unit = GatedLinearUnit(units)
        self.layer_norm = layers.LayerNormalization()
        self.project = layers.Dense(units)

    def call(self, inputs):
        x = self.gated_linear_unit(self.linear_dense(self.elu_dense(inputs)))
        if inputs.shape[-1] != self.units:
            inputs = self.project(inputs)
        return self.layer_norm(inputs + x)


@entry(FAMILY, "variable selection by gated residual networks: nested layers of one's own")
def variable_selection():
    class VariableSelection(layers.Layer):
        def __init__(self, num_features, units):
            super().__init__()
            self.grns = [GatedResidualNetwork(units) for _ in range(num_features)]
            self.grn_concat = GatedResidualNetwork(units)
            self.softmax = layers.Dense(units=num_features, activation="softmax")

        def call(self, inputs):
            v = self.softmax(self.grn_concat(layers.concatenate(inputs)))
            x = ops.stack([grn(each) for grn, each in zip(self.grns, inputs, strict=True)], axis=1)
            return ops.squeeze(ops.matmul(ops.expand_dims(v, 1), x), axis=1)

    inputs = _inputs()
    embedded, numbers = _encoded(inputs)
    features = VariableSelection(5, 4)([*embedded, *(layers.Dense(4)(each) for each in numbers)])
    x, y, _ = _census()
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(features))
    return Case(model, x, y, loss="binary_crossentropy", metrics=["accuracy"], micro_batches=4)


class NeuralDecisionTree(keras.Model):
    def __init__(self, depth, num_features, used_features_rate, num_classes):
        super().__init__()
        self.depth, self.num_leaves, self.num_classes = depth, 2**depth, num_classes
        one_hot = np.eye(num_features)
        sampled = np.random.choice(
            np.arange(num_features), int(num_features * used_features_rate), replace=False
        )
        self.used_features_mask = ops.convert_to_tensor(one_hot[sampled], dtype="float32")
        self.pi = self.add_weight(
            initializer="random_normal",
            shape=[self.num_leaves, num_classes],
            dtype="float32",
            trainable=True,
        )
        self.decision_fn = layers.Dense(
            units=self.num_leaves, activation="sigmoid", name="decision"
        )

    def call(self, features):
        batch_size = ops.shape(features)[0]
        features = ops.matmul(features, ops.transpose(self.used_features_mask))
        decisions = ops.expand_dims(self.decision_fn(features), axis=2)
        decisions = layers.concatenate([decisions, 1 - decisions], axis=2)
        mu = ops.ones([batch_size, 1, 1])
        begin_idx, end_idx = 1, 2
        for level in range(self.depth):
            mu = ops.tile(ops.reshape(mu, [batch_size, -1, 1]), (1, 1, 2))
            mu = mu * decisions[:, begin_idx:end_idx, :]
            begin_idx = end_idx
            end_idx = begin_idx + 2 ** (level + 1)
        mu = ops.reshape(mu, [batch_size, self.num_leaves])
        return ops.matmul(mu, keras.activations.softmax(self.pi))


@entry(
    FAMILY,
    "deep neural decision forest: models within a model",
    tolerance=1e-4,
    note="Keras updates an embedding's row once for each time that its id occurs, and rounds each time. Its "
    "step differs from float64 by 3e-5, ours by 2e-6.",
)
def decision_forest():
    class NeuralDecisionForest(keras.Model):
        def __init__(self, num_trees, depth, num_features, used_features_rate, num_classes):
            super().__init__()
            self.num_classes = num_classes
            self.ensemble = [
                NeuralDecisionTree(depth, num_features, used_features_rate, num_classes)
                for _ in range(num_trees)
            ]

        def call(self, inputs):
            outputs = ops.zeros([ops.shape(inputs)[0], self.num_classes])
            for tree in self.ensemble:
                outputs += tree(inputs)
            return outputs / len(self.ensemble)

    np.random.seed(0)
    inputs = _inputs()
    embedded, numbers = _encoded(inputs, 2)
    features = layers.concatenate([*embedded, *numbers])
    model = keras.Model(inputs, NeuralDecisionForest(3, 2, features.shape[1], 0.5, 2)(features))
    x, y, _ = _census()
    loss = keras.losses.SparseCategoricalCrossentropy()
    metrics = [keras.metrics.SparseCategoricalAccuracy()]
    return Case(model, x, y, loss=loss, metrics=metrics, micro_batches=4)


@entry(
    FAMILY,
    "collaborative filtering: a subclassed model, columns of one input, embeddings_regularizer",
    quick=True,
)
def collaborative_filtering():
    class RecommenderNet(keras.Model):
        def __init__(self, num_users, num_movies, embedding_size, **kwargs):
            super().__init__(**kwargs)
            regularizer = keras.regularizers.l2(1e-3)
            options = {"embeddings_initializer": "he_normal", "embeddings_regularizer": regularizer}
            self.user_embedding = layers.Embedding(num_users, embedding_size, **options)
            self.user_bias = layers.Embedding(num_users, 1)
            self.movie_embedding = layers.Embedding(num_movies, embedding_size, **options)
            self.movie_bias = layers.Embedding(num_movies, 1)

        def call(self, inputs):
            user_vector, movie_vector = (
                self.user_embedding(inputs[:, 0]),
                self.movie_embedding(inputs[:, 1]),
            )
            x = ops.sum(user_vector * movie_vector, -1, keepdims=True)
            x = x + self.user_bias(inputs[:, 0]) + self.movie_bias(inputs[:, 1])
            return ops.nn.sigmoid(x)

    rng = np.random.default_rng(0)
    x = np.stack([rng.integers(0, 6, 11), rng.integers(0, 8, 11)], 1)
    y = rng.random(11).astype("float32")
    return Case(
        RecommenderNet(6, 8, 4), x, y, loss=keras.losses.BinaryCrossentropy(), micro_batches=4
    )


@entry(
    FAMILY,
    "collaborative filtering as in the example: tensordot over the rows of the batch",
    note="Its `tensordot(user, movie, 2)` sums over the rows of a batch. Compared with a loop over micro-batches.",
)
def collaborative_filtering_tensordot():
    class RecommenderNet(keras.Model):
        def __init__(self):
            super().__init__()
            self.user_embedding = layers.Embedding(6, 4)
            self.movie_embedding = layers.Embedding(8, 4)
            self.movie_bias = layers.Embedding(8, 1)

        def call(self, inputs):
            user_vector, movie_vector = (
                self.user_embedding(inputs[:, 0]),
                self.movie_embedding(inputs[:, 1]),
            )
            return ops.nn.sigmoid(
                ops.tensordot(user_vector, movie_vector, 2) + self.movie_bias(inputs[:, 1])
            )

    rng = np.random.default_rng(0)
    x = np.stack([rng.integers(0, 6, 12), rng.integers(0, 8, 12)], 1)
    y = rng.random(12).astype("float32")[:, None]
    return Case(
        RecommenderNet(), x, y, loss="binary_crossentropy", micro_batches=3, by_micro_batch=True
    )


@entry(FAMILY, "imbalanced classification: class_weight, metrics of confusion")
def imbalanced():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu"),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    rng = np.random.default_rng(0)
    x, y = (
        rng.normal(size=(11, 6)).astype("float32"),
        (np.arange(11) % 4 == 0).astype("uint8")[:, None],
    )
    metrics = [
        keras.metrics.FalseNegatives(name="fn"),
        keras.metrics.TruePositives(name="tp"),
        keras.metrics.Precision(name="precision"),
        keras.metrics.Recall(name="recall"),
    ]
    fit = {"class_weight": {0: 0.002, 1: 1.5}}
    return Case(model, x, y, loss="binary_crossentropy", metrics=metrics, fit=fit, micro_batches=4)


def _graph(nodes=9, features=5):
    rng = np.random.default_rng(0)
    # Each node has an edge to itself.
    edges = np.concatenate([rng.integers(0, nodes, (2, 12)), [np.arange(nodes)] * 2], 1).astype(
        "int32"
    )
    return (
        rng.random((nodes, features)).astype("float32"),
        edges,
        np.ones(edges.shape[1], "float32"),
    )


class GraphConvLayer(layers.Layer):
    def __init__(self, units, aggregation_type):
        super().__init__()
        self.aggregation_type = aggregation_type
        self.ffn_prepare, self.update_fn = layers.Dense(units, "gelu"), layers.Dense(units, "gelu")

    def call(self, inputs):
        node_representations, edges, edge_weights = inputs
        node_indices, neighbour_indices = edges[0], edges[1]
        messages = self.ffn_prepare(ops.take(node_representations, neighbour_indices, axis=0))
        messages = messages * ops.expand_dims(edge_weights, -1)
        segment = getattr(tf.math, f"unsorted_segment_{self.aggregation_type}")
        aggregated = segment(messages, node_indices, num_segments=node_representations.shape[0])
        return self.update_fn(ops.concatenate([node_representations, aggregated], axis=1))


class GNNNodeClassifier(keras.Model):
    def __init__(self, graph_info, num_classes, hidden_units, aggregation_type):
        super().__init__()
        node_features, edges, edge_weights = graph_info
        self.node_features, self.edges = (
            ops.convert_to_tensor(node_features),
            ops.convert_to_tensor(edges),
        )
        self.edge_weights = ops.convert_to_tensor(edge_weights / edge_weights.sum())
        self.preprocess = layers.Dense(hidden_units, "gelu")
        self.conv1 = GraphConvLayer(hidden_units, aggregation_type)
        self.conv2 = GraphConvLayer(hidden_units, aggregation_type)
        self.compute_logits = layers.Dense(units=num_classes, name="logits")

    def call(self, input_node_indices):
        x = self.preprocess(self.node_features)
        x = self.conv1((x, self.edges, self.edge_weights)) + x
        x = self.conv2((x, self.edges, self.edge_weights)) + x
        return self.compute_logits(ops.take(x, input_node_indices, axis=0))


@entry(
    FAMILY,
    "graph neural network: the graph a property of the model, segment sums, node indices as x",
)
def gnn_citations():
    model = GNNNodeClassifier(_graph(), 3, 6, "sum")
    x, y = np.array([0, 3, 8, 1, 4, 4, 7]), np.arange(7) % 3
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = [keras.metrics.SparseCategoricalAccuracy(name="acc")]
    return Case(model, x, y, loss=loss, metrics=metrics, micro_batches=3)


@entry(FAMILY, "graph neural network: segment maxima")
def gnn_max():
    model = GNNNodeClassifier(_graph(), 3, 6, "max")
    x, y = np.array([0, 3, 8, 1, 4, 4, 7, 2]), np.arange(8) % 3
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Case(model, x, y, loss=loss, micro_batches=2)


@entry(FAMILY, "graph attention network: attention over the edges, softmax by segments")
def gat():
    class GraphAttention(layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.units = units

        def build(self, input_shape):
            self.kernel = self.add_weight(
                shape=(input_shape[0][-1], self.units), initializer="glorot_uniform"
            )
            self.kernel_attention = self.add_weight(
                shape=(self.units * 2, 1), initializer="glorot_uniform"
            )

        def call(self, inputs):
            node_states, edges = inputs
            transformed = ops.matmul(node_states, self.kernel)
            expanded = tf.gather(transformed, edges)
            expanded = ops.reshape(expanded, (ops.shape(edges)[0], -1))
            scores = ops.squeeze(ops.leaky_relu(ops.matmul(expanded, self.kernel_attention)), -1)
            scores = ops.exp(ops.clip(scores, -2, 2))
            sums = tf.math.unsorted_segment_sum(
                scores, edges[:, 0], num_segments=ops.shape(node_states)[0]
            )
            norm = scores / tf.gather(sums, edges[:, 0])
            neighbours = tf.gather(transformed, edges[:, 1]) * norm[:, None]
            return tf.math.unsorted_segment_sum(
                neighbours, edges[:, 0], num_segments=ops.shape(node_states)[0]
            )

    class GraphAttentionNetwork(keras.Model):
        def __init__(self, node_states, edges):
            super().__init__()
            self.node_states, self.edges = (
                ops.convert_to_tensor(node_states),
                ops.convert_to_tensor(edges),
            )
            self.preprocess = layers.Dense(6, activation="relu")
            self.attention_layers = [GraphAttention(6) for _ in range(2)]
            self.output_layer = layers.Dense(3)

        def call(self, indices):
            x = self.preprocess(self.node_states)
            for layer in self.attention_layers:
                x = layer([x, self.edges]) + x
            return tf.gather(self.output_layer(x), indices)

    nodes, edges, _ = _graph()
    x, y = np.array([0, 3, 8, 1, 4, 4, 7]), np.arange(7) % 3
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Case(
        GraphAttentionNetwork(nodes, edges.T.copy()),
        x,
        y,
        loss=loss,
        metrics=["acc"],
        micro_batches=3,
    )


@entry(FAMILY, "message passing over molecules of fixed size: edge networks, GRU, masked mean")
def message_passing():
    class EdgeNetwork(layers.Layer):
        def __init__(self, units, bonds):
            super().__init__()
            self.units = units
            self.kernel = self.add_weight(
                shape=(bonds, units * units), initializer="glorot_uniform", name="kernel"
            )

        def call(self, inputs):
            atoms, bonds, pairs = inputs
            bonds = ops.reshape(
                ops.matmul(bonds, self.kernel), (-1, ops.shape(pairs)[1], self.units, self.units)
            )
            neighbours = tf.gather(atoms, pairs[..., 1], batch_dims=1)
            messages = ops.squeeze(ops.matmul(bonds, neighbours[..., None]), -1)
            target = ops.one_hot(pairs[..., 0], ops.shape(atoms)[1])
            return ops.matmul(ops.transpose(target, (0, 2, 1)), messages)

    atoms, bonds = keras.Input((6, 4), name="atoms"), keras.Input((8, 3), name="bonds")
    pairs, mask = keras.Input((8, 2), dtype="int32", name="pairs"), keras.Input((6,), name="mask")
    x = layers.Dense(4)(atoms)
    update = layers.GRUCell(4)
    for _ in range(2):
        messages = EdgeNetwork(4, 3)([x, bonds, pairs])
        h, _ = update(ops.reshape(messages, (-1, 4)), [ops.reshape(x, (-1, 4))])
        x = ops.reshape(h, (-1, 6, 4))
    pooled = ops.sum(x * mask[..., None], 1) / ops.sum(mask, 1, keepdims=True)
    inputs = {"atoms": atoms, "bonds": bonds, "pairs": pairs, "mask": mask}
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(pooled))
    rng = np.random.default_rng(0)
    x = {
        "atoms": rng.random((10, 6, 4)).astype("float32"),
        "bonds": rng.random((10, 8, 3)).astype("float32"),
        "pairs": rng.integers(0, 6, (10, 8, 2)).astype("int32"),
        "mask": (np.arange(6) < (1 + np.arange(10) % 6)[:, None]).astype("float32"),
    }
    y = (np.arange(10) % 2).astype("float32")[:, None]
    fit = {"class_weight": {0: 2.0, 1: 0.5}}
    return Case(model, x, y, loss=keras.losses.BinaryCrossentropy(), fit=fit, micro_batches=4)


@entry(
    FAMILY,
    "message passing as in the example: one graph of a whole batch, x with more rows than y",
    refused="have different numbers of rows",
    why="Make each molecule a row, padded to a fixed number of atoms, and flatten it within the model.",
)
def message_passing_merged_graphs():
    atoms, indicator = (
        keras.Input((4,), name="atoms"),
        keras.Input((), dtype="int32", name="indicator"),
    )
    summed = layers.Lambda(lambda xs: tf.math.segment_sum(*xs), output_shape=(4,))(
        [atoms, indicator]
    )
    model = keras.Model({"atoms": atoms, "indicator": indicator}, layers.Dense(1)(summed))
    rng = np.random.default_rng(0)

    class MPNNDataset(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            x = {
                "atoms": rng.random((12, 4)).astype("float32"),
                "indicator": np.repeat(np.arange(3), 4),
            }
            return x, rng.random((3, 1)).astype("float32")

    def ours():
        fa.Trainer(model, "sgd", "mse", gradient_accumulation_steps=2).fit(MPNNDataset(), verbose=0)

    return Steps(model.trainable_variables, ours, ours)


def _series(rows=10, length=12, features=3):
    return np.random.default_rng(0).normal(size=(rows, length, features)).astype("float32")


@entry(
    FAMILY,
    "time series classification: Transformer with Conv1D",
    tolerance=1e-4,
    note="LayerNormalization of only three features magnifies rounding: Keras's own step with "
    "`jit_compile=True` differs from float64 by as much, 3e-5.",
    fused=True,
)
def timeseries_transformer():
    inputs = keras.Input((12, 3))
    x = layers.MultiHeadAttention(key_dim=4, num_heads=2)(inputs, inputs)
    res = layers.LayerNormalization(epsilon=1e-6)(x) + inputs
    x = layers.Conv1D(filters=4, kernel_size=1, activation="relu")(res)
    x = layers.LayerNormalization(epsilon=1e-6)(layers.Conv1D(filters=3, kernel_size=1)(x)) + res
    x = layers.GlobalAveragePooling1D(data_format="channels_last")(x)
    model = keras.Model(
        inputs, layers.Dense(2, activation="softmax")(layers.Dense(6, activation="relu")(x))
    )
    y = np.arange(10) % 2
    loss, metrics = "sparse_categorical_crossentropy", ["sparse_categorical_accuracy"]
    return Case(model, _series(), y, loss=loss, metrics=metrics, micro_batches=4)


@entry(FAMILY, "WaveNet: dilated causal convolutions with gates and skips")
def wavenet():
    inputs = keras.Input((12, 3))
    x, skips = layers.Conv1D(4, 1)(inputs), []
    for rate in (1, 2, 4):
        gated = [
            layers.Conv1D(4, 2, padding="causal", dilation_rate=rate, activation=each)(x)
            for each in ("tanh", "sigmoid")
        ]
        h = layers.Conv1D(4, 1)(layers.multiply(gated))
        skips.append(h)
        x = layers.add([x, h])
    x = layers.Conv1D(4, 1, activation="relu")(layers.Activation("relu")(layers.add(skips)))
    model = keras.Model(inputs, layers.Conv1D(5, 1, activation="softmax")(x))
    y = np.random.default_rng(1).integers(0, 5, (10, 12))
    return Case(
        model,
        _series(),
        y,
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        micro_batches=4,
    )


@entry(FAMILY, "N-BEATS: backcast and forecast blocks in doubly residual stacks")
def n_beats():
    class NBeatsBlock(layers.Layer):
        def __init__(self, n_neurons, input_size, horizon):
            super().__init__()
            self.hidden = [layers.Dense(n_neurons, activation="relu") for _ in range(2)]
            self.theta_layer = layers.Dense(input_size + horizon, activation="linear")
            self.input_size, self.horizon = input_size, horizon

        def call(self, inputs):
            x = inputs
            for layer in self.hidden:
                x = layer(x)
            theta = self.theta_layer(x)
            return theta[:, : self.input_size], theta[:, -self.horizon :]

    inputs = keras.Input((12,))
    residuals, forecast = NBeatsBlock(8, 12, 2)(inputs)
    residuals = layers.subtract([inputs, residuals])
    for _ in range(2):
        backcast, block_forecast = NBeatsBlock(8, 12, 2)(residuals)
        residuals = layers.subtract([residuals, backcast])
        forecast = layers.add([forecast, block_forecast])
    x = _series()
    return Case(
        keras.Model(inputs, forecast), x[..., 0], x[:, :2, 1], loss="mae", metrics=["mae", "mse"]
    )


@entry(FAMILY, "weather forecasting: LSTM over windows of timeseries_dataset_from_array")
def weather_forecasting():
    data = _series(1, 24, 3)[0]
    inputs = keras.layers.Input(shape=(6, 3))
    model = keras.Model(inputs, layers.Dense(1)(layers.LSTM(5)(inputs)))

    def windows(size):
        return keras.utils.timeseries_dataset_from_array(
            data, data[6:, :1], sequence_length=6, sampling_rate=1, batch_size=size
        )

    def theirs():
        model.compile(keras.optimizers.SGD(0.1), loss="mse", jit_compile=False)
        return {k: v[-1] for k, v in model.fit(windows(32), verbose=0).history.items()}

    def ours():
        trainer = fa.Trainer(model, keras.optimizers.SGD(0.1), "mse", gradient_accumulation_steps=4)
        return {k: v[-1] for k, v in trainer.fit(windows(5), verbose=0).history.items()}

    return Steps(model.trainable_variables, ours, theirs)


@entry(FAMILY, "traffic forecasting: graph convolution and LSTM, adjacency as a constant")
def traffic_forecasting():
    adjacency = ops.convert_to_tensor(
        (np.random.default_rng(0).random((4, 4)) > 0.5).astype("float32")
    )

    class LSTMGC(layers.Layer):
        def __init__(self):
            super().__init__()
            self.graph = layers.Dense(3, activation="relu")
            self.lstm, self.dense = layers.LSTM(5, activation="relu"), layers.Dense(2)

        def call(self, inputs):
            _, steps, nodes, _ = ops.shape(inputs)
            x = self.graph(ops.einsum("mn,btnf->btmf", adjacency, inputs))
            x = ops.reshape(ops.transpose(x, (0, 2, 1, 3)), (-1, steps, 3))
            return ops.transpose(ops.reshape(self.dense(self.lstm(x)), (-1, nodes, 2)), (0, 2, 1))

    inputs = keras.Input((6, 4, 1))
    x = np.random.default_rng(0).random((10, 8, 4, 1)).astype("float32")
    return Case(
        keras.Model(inputs, LSTMGC()(inputs)), x[:, :6], x[:, 6:, :, 0], loss="mse", micro_batches=4
    )


@entry(FAMILY, "anomaly detection: Conv1D autoencoder, x is y")
def anomaly_detection():
    model = keras.Sequential(
        [
            layers.Input((12, 3)),
            layers.Conv1D(4, 5, padding="same", strides=2, activation="relu"),
            layers.Dropout(rate=0.0),
            layers.Conv1DTranspose(4, 5, padding="same", strides=2, activation="relu"),
            layers.Conv1DTranspose(3, 5, padding="same"),
        ]
    )
    return Case(model, _series(), _series(), loss="mse", micro_batches=4)


@entry(FAMILY, "antirectifier: a layer of one's own with its kernel")
def antirectifier():
    class Antirectifier(layers.Layer):
        def __init__(self, initializer="he_normal", **kwargs):
            super().__init__(**kwargs)
            self.initializer = keras.initializers.get(initializer)

        def build(self, input_shape):
            output_dim = input_shape[-1]
            self.kernel = self.add_weight(
                shape=(output_dim * 2, output_dim),
                initializer=self.initializer,
                name="kernel",
                trainable=True,
            )

        def call(self, inputs):
            inputs -= ops.mean(inputs, axis=-1, keepdims=True)
            concatenated = ops.concatenate([ops.relu(inputs), ops.relu(-inputs)], axis=-1)
            return ops.matmul(concatenated, self.kernel)

    model = keras.Sequential([keras.Input((9,)), layers.Dense(6), Antirectifier(), layers.Dense(4)])
    x = np.random.default_rng(0).normal(size=(10, 9)).astype("float32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = [keras.metrics.SparseCategoricalAccuracy()]
    return Case(model, x, np.arange(10) % 4, loss=loss, metrics=metrics, micro_batches=4)


@entry(FAMILY, "node2vec: skip-grams, weights, a dot product of two embeddings")
def node2vec():
    inputs = {"target": layers.Input((), dtype="int32"), "context": layers.Input((), dtype="int32")}
    embed = layers.Embedding(9, 5, embeddings_initializer="he_normal", embeddings_regularizer="l2")
    logits = layers.Dot(axes=1, normalize=False)(
        [embed(inputs["target"]), embed(inputs["context"])]
    )
    rng = np.random.default_rng(0)
    x = {name: rng.integers(0, 9, 13).astype("int32") for name in inputs}
    y, weight = rng.integers(0, 2, 13).astype("float32"), rng.random(13).astype("float32")
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return Case(keras.Model(inputs, logits), x, y, sample_weight=weight, loss=loss, micro_batches=4)
