"""Packs documents of any length into rows of one length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from fastaccum import checks
from fastaccum.basics.attributes import Nest
from fastaccum.basics.packed_rows import PackedRows

# Keys of KerasHub's inputs.
_IDS = "token_ids"
_PADDING = "padding_mask"


def pack(
    dataset: Any,
    length: int,
    *,
    buffer_size: int = 1000,
    longer: Literal["cut", "raise"] = "cut",
    drop_remainder: bool = False,
    seed: int | None = None,
) -> tf.data.Dataset[Any]:
    """Packs documents of any length into rows of `length` tokens, with little padding.

    The rows are for `Trainer.fit` and `Trainer.evaluate`, after `.batch(...)`. There no document
    sees another one, positions start again with each, and losses, weights and metrics count its
    tokens. So an update on packed rows equals that on the same documents, each in a row of its own
    without padding, to float32 rounding. A model for which that does not hold is refused.

    Each `buffer_size` documents are packed by themselves, by first-fit decreasing (Johnson 1973):

        for document in sorted(documents, key=len, reverse=True):
            row = the first row with room for the document, or a new row
            row.append(document)

    Of documents of log-normal lengths (median 180 tokens, sigma 1) in rows of 2,048 and buffers of
    1,000, 99% of the rows' tokens are real.

    Args:
        dataset: a `tf.data.Dataset` of single examples, not batched: `x`, `(x, y)` or
            `(x, y, sample_weight)`. x is a vector of ids [tokens], or a dict of arrays
            [tokens, ...], such as KerasHub's preprocessors make; `padding_mask` among them says
            which tokens are real, and others are left out. y and sample_weight have one entry for
            each token. Without y, the target of a token is the next id, and the last token of a
            document has none. It may also be a list of such examples, a generator of them, which is
            read whole, or a `tf.RaggedTensor` of ids.
        length: tokens in a row.
        buffer_size: documents that are packed together. More fill rows better.
        longer: what becomes of a document of more tokens than `length`: "cut" it into documents of
            `length` tokens and a rest, or "raise" an error. The targets are made before: the last
            token of a piece predicts the first one of the next piece.
        drop_remainder: leave out the row of each buffer that was opened last, with its documents,
            unless it is full.
        seed: draws the order of the rows of each buffer, the same in each pass. None for the order
            of their first documents.

    Returns:
        A dataset of `(x, y)` or `(x, y, sample_weight)`, whose x is a named tuple of the model's
        inputs and of what tells documents apart, and where padding is 0.

    Raises:
        TypeError: raised for a dataset that holds no examples of vectors.
        ValueError: raised for examples of scalars, without ids to make targets of, or, in a list,
            without tokens or with parts that differ in length.
        tf.errors.InvalidArgumentError: raised while rows are read: for a document without tokens,
            with parts that differ in length, or, with `longer="raise"`, of too many tokens.

    >>> documents = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
    >>> for x, y in pack(documents, length=8):
    ...     print(x.inputs.numpy(), x.documents.numpy())
    [ 1  2  3  4  5  8  9 10] [1 1 1 1 1 2 2 2]
    [6 7 0 0 0 0 0 0] [1 1 0 0 0 0 0 0]
    """
    length = checks.whole_number("length", length)
    buffer_size = checks.whole_number("buffer_size", buffer_size)
    checks.one_of("longer", longer, ("cut", "raise"))
    drop_remainder = checks.true_or_false("drop_remainder", drop_remainder)
    if seed is not None:
        seed = checks.whole_number("seed", seed, minimum=None)

    buffers = _buffers(dataset, buffer_size)

    @tf.autograph.experimental.do_not_convert  # `map` would
    def pack_buffer(number: tf.Tensor, buffer: Any) -> tuple:
        tokens, lengths = _read(buffer)
        if longer == "raise":
            message = (
                f"pack: a document is longer than length={length} tokens. Pass longer='cut', or a "
                "larger length."
            )
            check = tf.debugging.assert_less_equal(lengths, length, message)
            lengths = _after(check, lengths)
        pieces = _cut(lengths, length)
        rows = _first_fit_decreasing(pieces, length)
        is_kept = tf.ones_like(rows, tf.bool)
        if drop_remainder:
            is_kept = _is_kept_without_remainder(rows, pieces, length)
        rows = _in_order(rows, seed, number)
        return _fill(tokens, pieces, rows, is_kept, length)

    rows = buffers.enumerate().map(pack_buffer, num_parallel_calls=tf.data.AUTOTUNE)
    return rows.unbatch()


class _Tokens(NamedTuple):
    """The tokens of a buffer's documents, one after the other: tensors [tokens, ...]."""

    x: Nest
    y: Nest
    sample_weight: Nest  # an empty tuple for none
    predicts: tf.Tensor  # bool, false for a token without a target


def _buffers(documents: Any, size: int) -> tf.data.Dataset:
    """Makes a dataset of buffers: nests like an example's, of ragged or dense tensors."""
    if isinstance(documents, tf.data.Dataset):
        _require_vectors(documents.element_spec)
        return documents.ragged_batch(size)
    if not isinstance(documents, tf.RaggedTensor):
        documents = _join_examples(documents)
    elif documents.shape[0]:
        _require_vectors(tf.type_spec_from_value(documents[0]))
    else:
        raise ValueError("dataset holds no document to pack.")
    count = tf.nest.flatten(documents)[0].shape[0]

    # Slices of what is joined already, since `ragged_batch` takes time for each document.
    @tf.autograph.experimental.do_not_convert  # `map` would
    def read_buffer(start: tf.Tensor) -> Nest:
        return tf.nest.map_structure(lambda leaf: leaf[start : start + size], documents)

    return tf.data.Dataset.range(0, count, size).map(read_buffer)


def _join_examples(documents: Any) -> Nest:
    """Joins a list or generator of examples: a nest like an example's, of ragged tensors."""
    is_examples = isinstance(documents, Iterable) and not isinstance(documents, (str, Mapping))
    if not is_examples or isinstance(documents, (tuple, np.ndarray, tf.Tensor)):
        raise TypeError(
            f"dataset ({type(documents).__name__}) must be a tf.data.Dataset, a list or generator "
            "of examples, or a tf.RaggedTensor of ids."
        )
    examples = [_as_arrays(example) for example in documents]
    if not examples:
        raise ValueError("dataset holds no document to pack.")
    first = examples[0]
    if isinstance(first, np.ndarray) and (first.ndim == 0 or first.dtype.kind in "USO"):
        raise ValueError(
            f"The first document is {checks.shown(first.tolist())}: pass a list of documents, each "
            "a vector of ids, as [[1, 2, 3], [4, 5]]. A tokenizer makes ids of a text."
        )
    _require_vectors(tf.nest.map_structure(tf.type_spec_from_value, first))
    for number, example in enumerate(examples):
        _require_like_first(number, example, first)

    def join(*arrays: np.ndarray) -> tf.RaggedTensor:
        return tf.RaggedTensor.from_row_lengths(
            np.concatenate(arrays), [len(array) for array in arrays]
        )

    return tf.nest.map_structure(join, *examples)


def _require_like_first(number: int, example: Nest, first: Nest) -> None:
    """Raises ValueError for a document with other parts than the first one, or of no tokens."""
    try:
        tf.nest.assert_same_structure(first, example)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Document {number} has other parts than the first one: give each the same, x or "
            "(x, y) or (x, y, sample_weight), and x the same keys."
        ) from error
    arrays = tf.nest.flatten(example)
    for array, first_array in zip(arrays, tf.nest.flatten(first), strict=True):
        if array.shape[1:] != first_array.shape[1:] or array.ndim != first_array.ndim:
            raise ValueError(
                f"Document {number} has a part of shape {array.shape}, and the first one of shape "
                f"{first_array.shape}: they may differ in their tokens alone, the first axis."
            )
    sizes = {array.shape[0] for array in arrays}
    if len(sizes) > 1:
        raise ValueError(
            f"Document {number} has parts of {sorted(sizes)} tokens: each part of x, y and "
            "sample_weight has one entry for each token."
        )
    if sizes == {0}:
        raise ValueError(f"Document {number} has no tokens: leave it out.")


def _as_arrays(example: Any) -> Nest:
    """Returns an example of arrays; a list is a vector of ids."""
    if isinstance(example, tuple):
        return tuple(_as_arrays(part) for part in example)
    if isinstance(example, Mapping):
        return {name: _as_arrays(part) for name, part in example.items()}
    if example is None:
        return ()
    array = np.asarray(example)
    fits = np.iinfo(np.int32)
    if array.dtype == np.int64 and np.all((array >= fits.min) & (array <= fits.max)):
        return array.astype(np.int32)  # as ids are
    return array


def _require_vectors(spec: Any) -> None:
    """Raises TypeError or ValueError for elements that are no examples of vectors."""
    leaves = tf.nest.flatten(spec)
    if (isinstance(spec, tuple) and len(spec) > 3) or not leaves:
        raise TypeError(
            f"pack takes examples x, (x, y) or (x, y, sample_weight); these are {spec}."
        )
    x = spec[0] if isinstance(spec, tuple) else spec
    if isinstance(spec, PackedRows) or isinstance(x, PackedRows):
        raise TypeError("pack takes documents, and these are packed rows already.")
    shape = getattr(x, "shape", None)
    if shape is not None and shape.rank == 2 and x.dtype.is_integer:
        raise ValueError(
            f"pack takes vectors of ids [tokens], and these have shape {shape}: pack before "
            ".batch(...)."
        )
    for leaf in leaves:
        # The slices of a ragged tensor are dense vectors.
        is_dense = isinstance(leaf, tf.TensorSpec) or getattr(leaf, "ragged_rank", None) == 0
        if not is_dense or leaf.shape.rank is None:
            raise TypeError(
                f"pack takes examples of vectors, and one holds {leaf}: pack before .batch(...)."
            )
        if leaf.shape.rank == 0:
            raise ValueError(
                "pack takes examples of vectors, one entry for each token, and one holds a scalar. "
                "Labels of whole documents have no place in packed rows: pad or bucket these."
            )
        if None in leaf.shape[1:]:
            raise ValueError(
                f"pack takes single examples, and these have shape {leaf.shape}: pack before "
                ".batch(...)."
            )


def _read(buffer: Any) -> tuple[_Tokens, tf.Tensor]:
    """Reads documents that `ragged_batch` has joined: their tokens, and how many each has."""
    lengths_of_leaves = [_lengths(leaf) for leaf in tf.nest.flatten(buffer)]
    lengths = lengths_of_leaves[0]
    message = (
        "pack: parts of a document (of x, y or sample_weight) differ in length; each has one entry "
        "for each token."
    )
    for others in lengths_of_leaves[1:]:
        lengths = _after(tf.debugging.assert_equal(lengths, others, message), lengths)

    joined = tf.nest.map_structure(_join, buffer)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(joined)
    y = () if y is None else y
    has_targets = bool(tf.nest.flatten(y))
    sample_weight = () if sample_weight is None else sample_weight
    is_real = None
    if isinstance(x, Mapping) and _PADDING in x:
        is_real = tf.cast(x[_PADDING], tf.bool)
        document_of_token = tf.repeat(tf.range(tf.shape(lengths)[0]), lengths)
        ones = tf.cast(is_real, tf.int32)
        lengths = tf.math.unsorted_segment_sum(ones, document_of_token, tf.shape(lengths)[0])
    message = "pack: a document has no tokens. Leave it out (dataset.filter)."
    lengths = _after(tf.debugging.assert_positive(lengths, message), lengths)

    def only_real(values: tf.Tensor) -> tf.Tensor:
        return values if is_real is None else tf.boolean_mask(values, is_real)

    x, y, sample_weight = tf.nest.map_structure(only_real, (x, y, sample_weight))
    predicts = tf.ones([tf.reduce_sum(lengths)], tf.bool)
    if not has_targets:
        y = tf.roll(_ids(x), -1, 0)
        last_tokens = tf.cumsum(lengths) - 1
        has_none = tf.zeros_like(last_tokens, tf.bool)
        predicts = tf.tensor_scatter_nd_update(predicts, last_tokens[:, None], has_none)
        y = tf.where(predicts, y, 0)
    return _Tokens(x, y, sample_weight, predicts), lengths


def _lengths(leaf: tf.Tensor | tf.RaggedTensor) -> tf.Tensor:
    """Returns the lengths of joined vectors: int32 [documents]."""
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.row_lengths(), tf.int32)
    return tf.fill([tf.shape(leaf)[0]], tf.shape(leaf)[1])


def _join(leaf: tf.Tensor | tf.RaggedTensor) -> tf.Tensor:
    """Returns the entries of joined vectors, one after the other."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.values
    return tf.reshape(leaf, [-1, *leaf.shape[2:]])


def _after(check: tf.Operation | None, tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor that is computed after a check, which is None where it is known to hold."""
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(tensor)


def _ids(x: Nest) -> tf.Tensor:
    """Returns the ids among inputs, which the targets are made from."""
    ids: Any = x
    if isinstance(x, Mapping):
        if _IDS not in x:
            raise ValueError(
                f"pack makes targets from x[{_IDS!r}], and x has {sorted(x)}: pass examples (x, y)."
            )
        ids = x[_IDS]
    if tf.is_tensor(ids) and not ids.dtype.is_integer:
        raise ValueError(
            f"pack makes targets from ids, and these are of {ids.dtype.name}: cast them to int32, "
            "or pass examples (x, y)."
        )
    if not tf.is_tensor(ids) or ids.shape.rank != 1:
        raise ValueError(
            "pack makes targets from a vector of ids, integers [tokens]: pack before .batch(...), "
            "or pass examples (x, y)."
        )
    return ids


def _cut(lengths: tf.Tensor, length: int) -> tf.Tensor:
    """Returns the lengths of pieces of at most `length` tokens, document by document: int32."""
    full_pieces = (lengths - 1) // length
    last = lengths - full_pieces * length
    last_places = tf.cumsum(full_pieces + 1) - 1
    pieces = tf.fill([last_places[-1] + 1], length)
    return tf.tensor_scatter_nd_update(pieces, last_places[:, None], last)


def _first_fit_decreasing(pieces: tf.Tensor, length: int) -> tf.Tensor:
    """Returns the row of each piece, int32 [pieces]: the longest first, the first row with room."""
    order = tf.argsort(pieces, direction="DESCENDING", stable=True)
    longest_first = tf.gather(pieces, order)
    # Pieces that fill a row have one each, the first ones.
    full = tf.math.count_nonzero(pieces == length, dtype=tf.int32)
    shorter = longest_first[full:]
    count = tf.shape(shorter)[0]

    def place(
        i: tf.Tensor, room: tf.Tensor, rows: tf.TensorArray
    ) -> tuple[tf.Tensor, tf.Tensor, tf.TensorArray]:
        piece = tf.gather(shorter, i)
        row = tf.argmax(room >= piece, output_type=tf.int32)
        room = tf.tensor_scatter_nd_sub(room, [[row]], [piece])
        return i + 1, room, rows.write(i, row)

    rows = tf.TensorArray(tf.int32, count, element_shape=[])
    _, _, rows = tf.while_loop(
        lambda i, *_: i < count, place, (0, tf.fill([count], length), rows), parallel_iterations=1
    )
    rows_of_longest = tf.concat([tf.range(full), full + rows.stack()], 0)
    return tf.gather(rows_of_longest, tf.math.invert_permutation(order))


def _is_kept_without_remainder(rows: tf.Tensor, pieces: tf.Tensor, length: int) -> tf.Tensor:
    """Tells of each piece if it is kept: not if its row was opened last and is not full."""
    last = tf.reduce_max(rows)
    tokens_of_last = tf.reduce_sum(tf.where(rows == last, pieces, 0))
    return (rows != last) | (tokens_of_last == length)


def _in_order(rows: tf.Tensor, seed: int | None, buffer_number: tf.Tensor) -> tf.Tensor:
    """Renumbers the rows of pieces: by their first piece, or in an order drawn from the seed."""
    count = tf.reduce_max(rows) + 1
    if seed is None:
        keys = tf.math.unsorted_segment_min(tf.range(tf.shape(rows)[0]), rows, count)
    else:
        keys = tf.random.stateless_uniform([count], [seed, buffer_number])
    return tf.gather(tf.math.invert_permutation(tf.argsort(keys)), rows)


def _fill(
    tokens: _Tokens, pieces: tf.Tensor, rows: tf.Tensor, is_kept: tf.Tensor, length: int
) -> tuple:
    """Returns the rows of the pieces that are kept: x, y, perhaps weights, [rows, length, ...]."""
    order = tf.argsort(rows, stable=True)
    order = tf.boolean_mask(order, tf.gather(is_kept, order))
    pieces_in_order = tf.gather(pieces, order)
    row_of_piece = tf.gather(rows, order)
    # Rows without a piece were left out: the numbers of the others are made consecutive.
    _, row_of_piece = tf.unique(row_of_piece)
    tokens_of_row = tf.math.segment_sum(pieces_in_order, row_of_piece)

    def to_rows(values: tf.Tensor) -> tf.Tensor:
        by_row = tf.RaggedTensor.from_row_lengths(values, tokens_of_row, validate=False)
        return by_row.to_tensor(shape=[None, length, *values.shape[1:]])

    def fill(values: tf.Tensor) -> tf.Tensor:
        by_piece = tf.RaggedTensor.from_row_lengths(values, pieces, validate=False)
        return to_rows(tf.gather(by_piece, order).values)

    x, y, sample_weight, predicts = tf.nest.map_structure(fill, tokens)
    first_of_row = tf.searchsorted(row_of_piece, row_of_piece)
    number_in_row = tf.range(tf.shape(order)[0]) - first_of_row + 1
    documents = to_rows(tf.repeat(number_in_row, pieces_in_order))
    positions = to_rows(tf.ragged.range(pieces_in_order).values)
    packed = PackedRows(x, documents, positions, predicts)
    if not tf.nest.flatten(tokens.sample_weight):
        return packed, y
    return packed, y, sample_weight
