"""`fa.pack`: every token of every document comes once, in rows of one length."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import fastaccum as fa
from fastaccum.basics.packed_rows import PackedRows

SETTINGS = settings(max_examples=8, deadline=None)
DOCUMENTS = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def documents_of(lengths):
    """Documents whose tokens are all different, from 1."""
    starts = np.cumsum([1, *lengths])
    return [np.arange(a, b, dtype="int32") for a, b in itertools.pairwise(starts)]


def rows_of(dataset):
    """The rows as tuples (ids, documents, positions, predicts, y), arrays."""
    return [
        (x.inputs.numpy(), x.documents.numpy(), x.positions.numpy(), x.predicts.numpy(), y.numpy())
        for x, y, *_ in dataset
    ]


def expected_rows(documents, length, buffer_size):
    """First-fit decreasing, in Python: for each row its pieces of documents, in their order."""
    rows = []
    for start in range(0, len(documents), buffer_size):
        pieces = []
        for document in documents[start : start + buffer_size]:
            pieces += [document[i : i + length] for i in range(0, len(document), length)]
        placed = []
        for number in sorted(range(len(pieces)), key=lambda i: -len(pieces[i])):
            free = [
                row
                for row in placed
                if sum(len(pieces[i]) for i in row) + len(pieces[number]) <= length
            ]
            if free:
                free[0].append(number)
            else:
                placed.append([number])
        for row in sorted(placed, key=min):
            rows.append([pieces[i] for i in sorted(row)])
    return rows


@SETTINGS
@given(lengths=DOCUMENTS, length=st.integers(1, 16), buffer_size=st.integers(1, 8))
def test_rows_are_those_of_first_fit_decreasing(lengths, length, buffer_size):
    documents = documents_of(lengths)
    next_ids = {token: token + 1 for document in documents for token in document[:-1]}
    rows = rows_of(fa.pack(documents, length, buffer_size=buffer_size))
    expected = expected_rows(documents, length, buffer_size)
    assert len(rows) == len(expected)
    for (ids, numbers, positions, predicts, y), pieces in zip(rows, expected, strict=True):
        padding = length - sum(map(len, pieces))
        tokens = np.concatenate([*pieces, np.zeros(padding, int)])
        np.testing.assert_array_equal(ids, tokens)
        of_pieces = [np.full(len(piece), i + 1) for i, piece in enumerate(pieces)]
        np.testing.assert_array_equal(numbers, np.concatenate([*of_pieces, np.zeros(padding, int)]))
        places = [np.arange(len(piece)) for piece in pieces]
        np.testing.assert_array_equal(positions, np.concatenate([*places, np.zeros(padding, int)]))
        # The last token of a document predicts nothing; that of a piece, the next piece's first.
        np.testing.assert_array_equal(predicts, [token in next_ids for token in tokens])
        np.testing.assert_array_equal(y, [next_ids.get(token, 0) for token in tokens])


@pytest.mark.parametrize("seed", [0, 3])
def test_a_seed_draws_the_order_of_rows_and_loses_none(seed):
    documents = documents_of([1, 9, 4, 20, 8, 3, 3, 7])
    first, again = (rows_of(fa.pack(documents, 8, seed=seed)) for _ in range(2))
    plain = rows_of(fa.pack(documents, 8))
    for row, same in zip(first, again, strict=True):
        for part, same_part in zip(row, same, strict=True):
            np.testing.assert_array_equal(part, same_part)
    assert sorted(row[0].tolist() for row in first) == sorted(row[0].tolist() for row in plain)


def test_seeds_differ():
    documents = documents_of([5] * 40)
    orders = [[row[0].tolist() for row in rows_of(fa.pack(documents, 8, seed=s))] for s in (0, 1)]
    assert orders[0] != orders[1]


def test_log_normal_documents_fill_rows():
    lengths = np.exp(np.random.default_rng(0).normal(np.log(180), 1, 5000)).astype(int) + 1
    rows = rows_of(fa.pack(documents_of(lengths), 2048, buffer_size=1000))
    real = sum(np.count_nonzero(row[1]) for row in rows)
    assert real == lengths.sum()
    assert real / (len(rows) * 2048) > 0.99


def test_targets_weights_and_further_inputs_are_packed_alike():
    rng = np.random.default_rng(0)
    examples = []
    for length in (3, 5, 2):
        x = {"token_ids": rng.integers(1, 9, length), "features": rng.normal(size=(length, 2))}
        examples.append((x, rng.integers(0, 9, length), rng.uniform(size=length)))
    (x, y, weights), (x2, *_) = fa.pack(examples, 8)
    np.testing.assert_array_equal(y, [*examples[0][1], *examples[1][1]])
    np.testing.assert_allclose(weights, [*examples[0][2], *examples[1][2]])
    np.testing.assert_allclose(x.inputs["features"][:3], examples[0][0]["features"])
    np.testing.assert_array_equal(x2.inputs["token_ids"][:2], examples[2][0]["token_ids"])
    np.testing.assert_array_equal(x2.predicts, [True] * 2 + [False] * 6)  # targets were given


def test_padded_examples_are_cut_to_their_valid_part():
    ids = np.array([[1, 2, 3, 0, 0, 0], [4, 5, 0, 0, 0, 0]], "int32")
    x = {"token_ids": ids, "padding_mask": ids > 0}
    for examples in (
        tf.data.Dataset.from_tensor_slices(x),
        [{name: array[i] for name, array in x.items()} for i in range(2)],
    ):
        ((packed, y),) = fa.pack(examples, 8)
        np.testing.assert_array_equal(packed.inputs["token_ids"], [1, 2, 3, 4, 5, 0, 0, 0])
        np.testing.assert_array_equal(packed.inputs["padding_mask"], [True] * 5 + [False] * 3)
        np.testing.assert_array_equal(packed.predicts, [1, 1, 0, 1, 0, 0, 0, 0])
        np.testing.assert_array_equal(y, [2, 3, 0, 5, 0, 0, 0, 0])


def test_documents_come_from_datasets_ragged_tensors_lists_and_generators():
    documents = documents_of([3, 9, 4, 1])
    expected = [row[0].tolist() for row in rows_of(fa.pack(documents, 8))]
    signature = tf.TensorSpec([None], tf.int32)
    sources = {
        "generator": (document for document in documents),
        "lists": [document.tolist() for document in documents],
        "ragged": tf.ragged.constant([document.tolist() for document in documents], tf.int32),
        "dataset": tf.data.Dataset.from_generator(lambda: documents, output_signature=signature),
    }
    for name, source in sources.items():
        assert [row[0].tolist() for row in rows_of(fa.pack(source, 8))] == expected, name


def test_drop_remainder_leaves_out_the_row_opened_last():
    documents = documents_of([8, 5, 6])
    rows = [row[0].tolist() for row in rows_of(fa.pack(documents, 8, drop_remainder=True))]
    assert rows == [documents[0].tolist(), [*documents[2], 0, 0]]
    full = documents_of([8, 5, 3])
    assert len(rows_of(fa.pack(full, 8, drop_remainder=True))) == 2  # all rows are full


@pytest.mark.parametrize(
    ("documents", "options", "error", "message"),
    [
        ([[1, 2], []], {}, ValueError, "Document 1 has no tokens"),
        ([], {}, ValueError, "no document"),
        ([([1, 2], [1])], {}, ValueError, r"Document 0 has parts of \[1, 2\] tokens"),
        ([([1, 2], 1)], {}, ValueError, "Labels of whole documents"),
        (np.ones((2, 3)), {}, TypeError, "must be a tf.data.Dataset"),
        ([{"ids": [1, 2]}], {}, ValueError, r"makes targets from x\['token_ids'\]"),
        ([[1, 2]], {"length": 0}, ValueError, "length"),
        ([[1, 2]], {"longer": "drop"}, ValueError, "longer"),
        ([[1] * 9], {"longer": "raise"}, tf.errors.InvalidArgumentError, "longer than length=8"),
        (
            tf.data.Dataset.from_tensors(tf.zeros([0], tf.int32)),
            {},
            tf.errors.InvalidArgumentError,
            "has no tokens",
        ),
        (
            tf.data.Dataset.from_tensors(tf.ones([2], tf.int32)).padded_batch(2),
            {},
            ValueError,
            "before .batch",
        ),
    ],
)
def test_bad_documents_are_refused(documents, options, error, message):
    options = {"length": 8, **options}
    with pytest.raises(error, match=message):
        list(fa.pack(documents, **options))


def test_rows_can_be_batched_shuffled_and_mapped():
    documents = documents_of([3, 9, 4, 1, 8, 8])
    rows = fa.pack(documents, 8).shuffle(9, seed=0).map(lambda x, y: (x, y + 1)).batch(2)
    (x, y), *_ = rows
    assert x.documents.shape == x.inputs.shape == y.shape == (2, 8)
    assert isinstance(x, PackedRows)
    assert keras.utils.unpack_x_y_sample_weight((x, y))[0] is x


def test_weights_without_targets_are_weights():
    ((x, y, weights),) = fa.pack([(np.array([1, 2, 3]), None, np.array([1.0, 0.0, 2.0]))], 4)
    np.testing.assert_array_equal(y, [2, 3, 0, 0])
    np.testing.assert_array_equal(weights, [1.0, 0.0, 2.0, 0.0])
    np.testing.assert_array_equal(x.predicts, [1, 1, 0, 0])


def test_large_ids_keep_their_values():
    ids = [2**31 + 5, 2**40 + 7, 3]
    ((x, _),) = fa.pack([np.array(ids), np.array([4])], 4)
    np.testing.assert_array_equal(x.inputs, [*ids, 4])


@pytest.mark.parametrize("documents", [["def f", "x"], [b"def f"], [1, 2, 3]])
def test_texts_and_single_ids_are_refused(documents):
    with pytest.raises(ValueError, match="each a vector of ids"):
        fa.pack(documents, 8)


def test_the_last_token_of_a_piece_predicts_the_next_piece():
    (_, y), (_, y2) = fa.pack([[1, 2, 3, 4, 5, 6]], 4)
    assert y.numpy().tolist() == [2, 3, 4, 5] and y2.numpy().tolist() == [6, 0, 0, 0]


@pytest.mark.parametrize(
    ("documents", "error", "message"),
    [
        (lambda: fa.pack([[1, 2]], 4), TypeError, "packed rows already"),
        (lambda: tf.RaggedTensor.from_row_lengths([], []), ValueError, "no document"),
        (lambda: [[0.5, 1.5]], ValueError, "of float64: cast them"),
        (lambda: [[[1, 2], [3, 4]]], ValueError, "vectors of ids"),
        (lambda: [[1, 2], ([1, 2], [3, 4])], ValueError, "Document 1 has other parts"),
    ],
)
def test_what_is_no_list_of_documents_is_refused(documents, error, message):
    with pytest.raises(error, match=message):
        list(fa.pack(documents(), 8))
