"""keras-rs: recommenders, as the examples of keras.io/keras_rs build them."""

import keras
import numpy as np
import pytest
from keras import ops
from zoo import Case, row

keras_rs = pytest.importorskip("keras_rs")

USERS, MOVIES, WIDTH = 11, 40, 4


def _adagrad():
    return keras.optimizers.Adagrad(0.1)


def _ids(rows=7, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.integers(0, USERS, rows),
        rng.integers(0, MOVIES, rows),
        rng.uniform(size=rows).astype("float32"),
    )


# Ranking.


@row("keras-rs", "DCN-v2: feature crosses", mixed=True, quick=True)
def test_feature_cross():
    rng = np.random.default_rng(0)
    inputs = keras.Input((8,))
    h = keras_rs.layers.FeatureCross(projection_dim=4)(inputs, inputs)
    h = keras_rs.layers.FeatureCross()(inputs, h)
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(h))
    x = rng.normal(size=(16, 8)).astype("float32")
    y = (x[:, :1] > 0).astype("float32")
    return Case(model, x, y, loss="binary_crossentropy", metrics=["AUC"], micro_batches=4)


class DLRM(keras.Model):
    """Embeddings and a bottom MLP, their dot products, a top MLP."""

    def __init__(self, skip_gather):
        super().__init__()
        self.tables = {
            "user": keras.layers.Embedding(USERS, WIDTH),
            "movie": keras.layers.Embedding(MOVIES, WIDTH),
        }
        self.genres = keras_rs.layers.EmbedReduce(6, WIDTH, combiner="mean")
        self.bottom = keras.Sequential(
            [keras.layers.Dense(8, "relu"), keras.layers.Dense(WIDTH, "relu")]
        )
        self.dot_layer = keras_rs.layers.DotInteraction(
            self_interaction=False, skip_gather=skip_gather
        )
        self.top = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])

    def call(self, inputs):
        features = [table(inputs[name]) for name, table in self.tables.items()]
        features.append(self.genres(inputs["genres"], weights=inputs["genre_weights"]))
        dense = self.bottom(inputs["dense"])
        crossed = self.dot_layer([dense, *features])
        return self.top(ops.concatenate([dense, crossed], axis=-1))


def _dlrm(skip_gather):
    users, movies, ratings = _ids()
    rng = np.random.default_rng(1)
    x = {
        "user": users,
        "movie": movies,
        "genres": rng.integers(0, 6, (7, 3)),
        "genre_weights": rng.integers(1, 3, (7, 3)).astype("float32"),
        "dense": rng.normal(size=(7, 5)).astype("float32"),
    }
    return Case(
        DLRM(skip_gather),
        x,
        ratings[:, None],
        loss="mse",
        metrics=[keras.metrics.RootMeanSquaredError()],
    )


@row("keras-rs", "DLRM: embeddings, weighted bags, dot interaction", mixed=True, quick=True)
def test_dlrm():
    return _dlrm(skip_gather=False)


@row("keras-rs", "DLRM, interactions left in place")
def test_dlrm_skip_gather():
    return _dlrm(skip_gather=True)


class Lists(keras.Model):
    """Scores of a list of movies for each user."""

    def __init__(self):
        super().__init__()
        self.user_embedding = keras.layers.Embedding(USERS, WIDTH)
        self.candidate_embedding = keras.layers.Embedding(MOVIES, WIDTH)
        self.ratings = keras.Sequential(
            [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
        )

    def call(self, inputs):
        user_id, movie_id = inputs["user_id"], inputs["movie_id"]
        users = ops.repeat(
            ops.expand_dims(self.user_embedding(user_id), 1), ops.shape(movie_id)[-1], axis=1
        )
        scores = self.ratings(ops.concatenate([users, self.candidate_embedding(movie_id)], axis=-1))
        return ops.squeeze(scores, axis=-1)


SHIFT = (
    "The largest error is in the last bias, which shifts all scores alike: its exact gradient is 0."
)


def _lists(loss, **options):
    rng = np.random.default_rng(0)
    x = {
        "user_id": rng.permutation(USERS)[:7],
        "movie_id": rng.permutation(MOVIES)[:35].reshape(7, 5),
    }
    y = rng.integers(0, 5, (7, 5)).astype("float32")
    metrics = [
        keras_rs.metrics.NDCG(k=5, name="ndcg"),
        keras_rs.metrics.MeanReciprocalRank(name="mrr"),
    ]
    return Case(Lists(), x, y, loss=loss, metrics=metrics, **options)


@row("keras-rs", "Ranking lists, pairwise hinge loss, nDCG, Adagrad", tolerance=1e-3, note=SHIFT)
def test_pairwise_hinge():
    return _lists(keras_rs.losses.PairwiseHingeLoss(), optimizer=_adagrad)


@row(
    "keras-rs",
    "Ranking lists, pairwise logistic loss, weights by item",
    mixed=True,
    tolerance=1e-3,
    note=SHIFT,
)
def test_pairwise_logistic():
    weight = np.random.default_rng(2).integers(0, 3, (7, 5)).astype("float32")
    return _lists(keras_rs.losses.PairwiseLogisticLoss(), sample_weight=weight)


@row("keras-rs", "Ranking lists, pairwise mean squared error", tolerance=1e-3, note=SHIFT)
def test_pairwise_mse():
    return _lists(keras_rs.losses.PairwiseMeanSquaredError())


@row("keras-rs", "Ranking lists, ListMLE", tolerance=1e-3, note=SHIFT)
def test_list_mle():
    return _lists(keras_rs.losses.ListMLELoss())


# Retrieval.


class Retrieval(keras.Model):
    """Two towers whose loss is in `compute_loss`; recommends in inference alone."""

    def __init__(self):
        super().__init__()
        self.user_embedding = keras.layers.Embedding(USERS, WIDTH)
        self.candidate_embedding = keras.layers.Embedding(MOVIES, WIDTH)
        self.retrieval = keras_rs.layers.BruteForceRetrieval(k=3, return_scores=False)
        self.loss_fn = keras.losses.MeanSquaredError()

    def build(self, input_shape):
        self.user_embedding.build(input_shape)
        self.candidate_embedding.build(input_shape)
        self.retrieval.candidate_embeddings = self.candidate_embedding.embeddings
        self.retrieval.build(input_shape)
        super().build(input_shape)

    def call(self, inputs, training=False):
        users = self.user_embedding(inputs)
        result = {"user_embeddings": users}
        if not training:
            result["predictions"] = self.retrieval(users)
        return result

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        candidates = self.candidate_embedding(y["movie_id"])
        scores = ops.sum(ops.multiply(y_pred["user_embeddings"], candidates), axis=1, keepdims=True)
        return self.loss_fn(ops.expand_dims(y["rating"], -1), scores, sample_weight)


@row("keras-rs", "Retrieval with BruteForceRetrieval, its loss in compute_loss", quick=True)
def test_retrieval():
    users, movies, ratings = _ids()
    return Case(Retrieval(), users, {"movie_id": movies, "rating": ratings})


class InBatch(keras.Model):
    """Two towers against the other movies of the batch: hard negatives, sampling correction,
    accidental hits.
    """

    def __init__(self):
        super().__init__()
        self.user_embedding = keras.layers.Embedding(USERS, WIDTH)
        self.candidate_embedding = keras.layers.Embedding(MOVIES, WIDTH)
        self.correction = keras_rs.layers.SamplingProbabilityCorrection()
        self.no_hits = keras_rs.layers.RemoveAccidentalHits()
        self.hard = keras_rs.layers.HardNegativeMining(num_hard_negatives=2)
        self.loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True)

    def call(self, inputs, training=False):
        return {
            "users": self.user_embedding(inputs["user"]),
            "movies": self.candidate_embedding(inputs["movie"]),
        }

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        scores = ops.matmul(y_pred["users"], ops.transpose(y_pred["movies"]))
        labels = ops.eye(ops.shape(scores)[0])
        scores = self.correction(scores, x["probability"])
        scores = self.no_hits(scores, labels, x["movie"])
        scores, labels = self.hard(scores, labels)
        return self.loss_fn(labels, scores, sample_weight)


@row(
    "keras-rs",
    "Two towers against in-batch negatives: hard negatives, sampling correction, accidental hits",
    note="The negatives are those of a micro-batch. Compared with a loop over micro-batches.",
)
def test_in_batch():
    users, movies, probability = _ids(8)
    x = {"user": users, "movie": movies, "probability": probability}
    return Case(InBatch(), x, by_micro_batch=True)


class MultiTask(keras.Model):
    """Ratings and retrieval at once, metrics of its own in `compute_metrics`."""

    def __init__(self):
        super().__init__()
        self.user_embedding = keras.layers.Embedding(USERS, WIDTH)
        self.candidate_embedding = keras.layers.Embedding(MOVIES, WIDTH)
        self.rating_model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
        self.ranking_loss_fn = keras.losses.MeanSquaredError()
        self.rmse_metric = keras.metrics.RootMeanSquaredError()

    def call(self, inputs, training=False):
        users = self.user_embedding(inputs["user_id"])
        movies = self.candidate_embedding(inputs["movie_id"])
        return {
            "score": ops.sum(users * movies, axis=1, keepdims=True),
            "rating": self.rating_model(ops.concatenate([users, movies], axis=1)),
        }

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        ratings = ops.expand_dims(y, -1)
        retrieval = keras.losses.BinaryCrossentropy(from_logits=True)(
            ratings, y_pred["score"], sample_weight
        )
        return 0.5 * retrieval + self.ranking_loss_fn(ratings, y_pred["rating"], sample_weight)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.rmse_metric.update_state(y, y_pred["rating"][:, 0], sample_weight=sample_weight)
        return self.get_metrics_result()


@row("keras-rs", "Multi-task: ranking and retrieval, metrics in compute_metrics", mixed=True)
def test_multi_task():
    users, movies, ratings = _ids()
    return Case(MultiTask(), {"user_id": users, "movie_id": movies}, ratings)


class SasRec(keras.Model):
    """A decoder of KerasHub's layers; positives and negatives of each item in `compute_loss`."""

    def __init__(self, length):
        super().__init__()
        hub = pytest.importorskip("keras_hub")
        self.item_embedding = hub.layers.ReversibleEmbedding(
            MOVIES, WIDTH, embeddings_regularizer=keras.regularizers.l2(0.001)
        )
        self.position_embedding = hub.layers.PositionEmbedding(length)
        self.block = hub.layers.TransformerDecoder(8, 2, activation="relu", normalize_first=True)
        self.layer_norm = keras.layers.LayerNormalization(epsilon=1e-8)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)

    def call(self, inputs, training=False):
        x = self.item_embedding(inputs["item_ids"])
        x = x + self.position_embedding(x)
        x = self.block(x, decoder_padding_mask=inputs["padding_mask"])
        return {"item_sequence_embedding": self.layer_norm(x)}

    def compute_loss(self, x, y, y_pred, sample_weight, training=False):
        hidden = y_pred["item_sequence_embedding"]
        positive = ops.sum(self.item_embedding(y["positive_sequence"]) * hidden, axis=-1)
        negative = ops.sum(self.item_embedding(y["negative_sequence"]) * hidden, axis=-1)
        logits = ops.concatenate([positive, negative], axis=1)
        labels = ops.concatenate([ops.ones_like(positive), ops.zeros_like(negative)], axis=1)
        weight = ops.concatenate([sample_weight, sample_weight], axis=1)
        loss = self.loss_fn(
            ops.expand_dims(labels, -1), ops.expand_dims(logits, -1), sample_weight=weight
        )
        return ops.divide_no_nan(ops.sum(loss), ops.sum(weight))


@row(
    "keras-rs",
    "SASRec on padded sequences",
    note="Its own loss divides by the tokens of a micro-batch and leaves out the regularizer. Compared with a "
    "loop over micro-batches.",
)
def test_sas_rec():
    rng = np.random.default_rng(0)
    mask = np.arange(6) < rng.integers(2, 7, (8, 1))
    item, positive, negative = (
        np.where(mask, rng.integers(1, MOVIES, mask.shape), 0) for _ in range(3)
    )
    x = {"item_ids": item, "padding_mask": mask}
    y = {"positive_sequence": positive, "negative_sequence": negative}
    return Case(SasRec(6), x, y, sample_weight=mask.astype("float32"), by_micro_batch=True)
