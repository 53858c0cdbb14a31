import itertools
import math
import re
import tracemalloc
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from hypothesis import given, settings
from hypothesis import strategies as st

import fastaccum as fa
from fastaccum.data import arrays as in_memory
from fastaccum.data import rows as in_rows
from fastaccum.data import source as data
from fastaccum.data.stacks import Batch, Layout, Position

LAYOUTS = st.builds(lambda *own: Layout(*own), st.integers(1, 4), st.integers(1, 3), st.booleans())
quick = settings(deadline=None, database=None, max_examples=25)


def targets(rows):
    """A target that tells whether it still belongs to its row."""
    return -10 * rows - 1


def arrays(rows):
    x = np.arange(rows, dtype="int64")
    return {"x": x, "y": targets(x)}


def used(dispatches, layout):
    """The valid rows of an epoch's dispatches in the order of their use; checks each dispatch on
    the way.
    """
    rows = []
    for dispatch in dispatches:
        assert dispatch.is_multi_step == (dispatch.stacks[0].valid.shape.rank == 3)
        if dispatch.is_multi_step:
            assert len(dispatch.stacks) == 1
            assert dispatch.stacks[0].valid.shape[0] == layout.steps_per_execution >= dispatch.steps
        else:
            assert dispatch.steps == 1
            micro_batches = sum(stack.valid.shape[0] for stack in dispatch.stacks)
            assert 1 <= micro_batches <= layout.accumulation
        for stack in dispatch.stacks:
            x, y, valid = (t.numpy().ravel() for t in (stack.x, stack.y, stack.valid))
            np.testing.assert_array_equal(y, targets(x))
            # A padded row repeats a real one of its own stack.
            assert set(x) == set(x[valid])
            assert valid.all() or not layout.exact_rows
            rows.extend(x[valid].tolist())
        if dispatch.is_multi_step:
            # Steps beyond `steps` hold nothing, those within it something.
            counted = dispatch.stacks[0].valid.numpy()
            assert counted.any(axis=(1, 2)).tolist() == [
                i < dispatch.steps for i in range(len(counted))
            ]
    return rows


def stacks_of(*args, layout, steps_per_epoch=None, **options):
    return data.make_data_source(*args, **options).stacks(layout, steps_per_epoch)


def epochs_of(stacks, count, first=0):
    return [
        list(dispatches)
        for dispatches in itertools.islice(stacks.epochs(Position(first, first)), count)
    ]


def steps_of(dispatches):
    return sum(dispatch.steps for dispatch in dispatches)


class TestArrays:
    @quick
    @given(
        rows=st.integers(1, 40), batch_size=st.integers(1, 9), layout=LAYOUTS, shuffle=st.booleans()
    )
    def test_use_every_row_once_an_epoch(self, rows, batch_size, layout, shuffle):
        stacks = stacks_of(
            **arrays(rows), batch_size=batch_size, layout=layout, shuffle=shuffle, seed=5
        )
        for epoch in epochs_of(stacks, 2):
            seen = used(epoch, stacks.layout)
            assert sorted(seen) == list(range(rows))
            assert shuffle or seen == list(range(rows))
            assert (
                steps_of(epoch)
                == stacks.steps_per_epoch
                == math.ceil(rows / (batch_size * layout.accumulation))
            )

    @pytest.mark.filterwarnings("ignore:.*ran out of data")
    @quick
    @given(
        rows=st.integers(1, 24),
        batch_size=st.integers(1, 5),
        layout=LAYOUTS,
        steps_per_epoch=st.integers(1, 7),
    )
    def test_continue_where_the_last_epoch_stopped(self, rows, batch_size, layout, steps_per_epoch):
        """An epoch ends where a pass over the rows does."""
        stacks = stacks_of(
            **arrays(rows), batch_size=batch_size, layout=layout, steps_per_epoch=steps_per_epoch
        )
        whole = math.ceil(rows / (batch_size * layout.accumulation))
        parts = [min(steps_per_epoch, whole - start) for start in range(0, whole, steps_per_epoch)]
        epochs = epochs_of(stacks, 2 * len(parts))
        assert [steps_of(epoch) for epoch in epochs] == 2 * parts
        assert [row for epoch in epochs for row in used(epoch, stacks.layout)] == 2 * list(
            range(rows)
        )
        resumed = used(
            next(stacks.epochs(Position(0, len(epochs) - 1, parts[-1] - 1))), stacks.layout
        )
        assert resumed == used(epochs[-1], stacks.layout)[-len(resumed) :]

    @pytest.mark.parametrize(
        ("steps_per_epoch", "said"), [(4, ["3 of the 4"] * 2), (2, ["1 of the 2"]), (3, [])]
    )
    def test_that_end_before_the_steps_asked_for_say_so(self, steps_per_epoch, said):
        stacks = stacks_of(
            **arrays(11), batch_size=4, layout=Layout(1), steps_per_epoch=steps_per_epoch
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            epochs_of(stacks, 2)
        assert [
            re.search(r"after (\d of the \d) steps", str(w.message)).group(1) for w in caught
        ] == said

    def test_shuffle_the_same_way_for_the_same_seed_and_anew_in_every_epoch(self):
        def order(seed, first=0):
            stacks = stacks_of(
                **arrays(50), batch_size=8, layout=Layout(2), shuffle=True, seed=seed
            )
            return [used(epoch, stacks.layout) for epoch in epochs_of(stacks, 3, first)]

        one = order(1)
        assert order(1) == one
        assert order(2) != one
        assert one[0] != one[1] != one[2] != one[0]
        # A run resumed at epoch 1 sees what the whole run saw there.
        assert order(1, first=1)[:2] == one[1:]

    @pytest.mark.parametrize("exact_rows", [False, True])
    def test_pad_to_one_shape_unless_rows_must_be_exact(self, exact_rows):
        stacks = stacks_of(**arrays(29), batch_size=4, layout=Layout(2, 3, exact_rows))
        (epoch,) = epochs_of(stacks, 1)
        shapes = [[tuple(stack.x.shape) for stack in dispatch.stacks] for dispatch in epoch]
        padded = [[(3, 2, 4)], [(3, 2, 4)]]
        exact = [[(3, 2, 4)], [(1, 4), (1, 1)]]
        assert shapes == (exact if exact_rows else padded)

    def test_smaller_than_a_step_make_a_smaller_program(self):
        stacks = stacks_of(**arrays(5), batch_size=32, layout=Layout(8))
        ((dispatch,),) = epochs_of(stacks, 1)
        assert dispatch.stacks[0].x.shape == (1, 5)

    def test_keep_their_nests_and_integers(self):
        x = {"a": np.zeros((3, 2)), "b": [np.zeros(3, "int32"), np.zeros((3, 1), "uint8")]}
        source = data.make_data_source(x, np.zeros(3), batch_size=2)
        assert source.sample.x["a"] == tf.TensorSpec([2, 2], tf.float32)
        assert [spec.dtype for spec in source.sample.x["b"]] == [tf.int32, tf.uint8]

    @pytest.mark.parametrize(
        "dtype",
        [
            "float16",
            "bfloat16",
            "float32",
            ">f4",
            "float64",
            "int8",
            "uint8",
            "int64",
            "uint32",
            "bool",
        ],
    )
    def test_rows_of_every_dtype_are_gathered_into_memory_for_tensorflow(self, dtype, monkeypatch):
        aligned, memory = in_rows._aligned, []
        monkeypatch.setattr(
            in_rows, "_aligned", lambda *args: memory.append(aligned(*args)) or memory[-1]
        )
        dtype = tf.bfloat16.as_numpy_dtype if dtype == "bfloat16" else np.dtype(dtype)
        x = np.arange(66).reshape(22, 3).astype(dtype)
        source = data.make_data_source(x, np.zeros(22), batch_size=3, seed=1)
        stacks = source.stacks(Layout(2))
        order, before = stacks.order(0), x.copy()
        dispatches = epochs_of(stacks, 1)[0]
        x[:] = 0  # what is gathered already must not follow
        tensors = [dispatch.stacks[0].x for dispatch in dispatches]
        assert {tensor.dtype for tensor in tensors} == {source.sample.x.dtype}
        rows = np.concatenate([tensor.numpy().reshape(-1, 3) for tensor in tensors])[:22]
        np.testing.assert_array_equal(rows.astype("float64"), before[order].astype("float64"))
        if source.sample.x.dtype in (tf.bfloat16, tf.bool):
            return  # DLPack has none, or not everywhere
        addresses = [np.asarray(memoryview(tensor)).ctypes.data for tensor in tensors]
        assert set(addresses) <= {array.ctypes.data for array in memory}, (
            "TensorFlow has made a copy"
        )
        # XLA reads whole vectors: an address that TensorFlow would not have chosen may crash it.
        assert all(address % 64 == 0 for address in addresses)

    @pytest.mark.parametrize(
        "view",
        [
            np.asfortranarray,
            lambda x: x[:, ::-1],
            lambda x: x[::2],
            lambda x: np.broadcast_to(x[:1], x.shape),
        ],
        ids=["fortran", "reversed", "strided", "broadcast"],
    )
    def test_noncontiguous_arrays_are_not_copied_as_a_whole(self, view):
        x = view(np.arange(400_000, dtype="float32").reshape(20_000, 20))
        stacks = stacks_of(x, np.zeros(len(x)), batch_size=4, layout=Layout(2), seed=1)
        used = stacks.order(0)[:8]
        tracemalloc.start()
        try:
            rows = stacks._gathered(used, np.ones(8, bool), (2, 4)).x
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        np.testing.assert_array_equal(rows.numpy().reshape(8, 20), x[used])
        assert peak < 0.1 * x.size * x.itemsize

    @pytest.mark.parametrize(
        ("x", "y", "message"),
        [
            (np.zeros((0, 2)), np.zeros(0), "0 rows"),
            (np.zeros((3, 2)), np.zeros(4), r"'x': \[3\], 'y': \[4\]"),
            (np.float32(1.0), np.zeros(1), "scalar"),
            (None, None, "x=None"),
            (np.zeros(3), None, "y=None"),
        ],
    )
    def test_that_do_not_fit_say_so(self, x, y, message):
        with pytest.raises(ValueError, match=message):
            stacks_of(x, y, batch_size=2, layout=Layout(1))

    @pytest.mark.parametrize(
        "x",
        [
            np.array(["text"]),
            np.array([object()]),
            tf.ragged.constant([[1.0], [2.0, 3.0]]),
            [1.0, 2.0],
        ],
    )
    def test_that_are_no_dense_numbers_say_so(self, x):
        with pytest.raises(TypeError, match=r"x holds|x has dtype"):
            stacks_of(x, np.zeros(1), batch_size=2, layout=Layout(1))


def of_lengths(*lengths):
    """A dataset of batches of two rows, each of a length of its own."""

    def batches():
        for length in lengths:
            yield np.zeros((2, length)), np.zeros(2)

    spec = tf.TensorSpec([None, None]), tf.TensorSpec([None])
    return tf.data.Dataset.from_generator(batches, output_signature=spec)


def batched(sizes):
    """A dataset of batches of these sizes, of unknown cardinality."""
    starts = [0, *itertools.accumulate(sizes)]

    def batches():
        for start, size in zip(starts[:-1], sizes, strict=True):
            rows = np.arange(start, start + size)
            yield rows, targets(rows)

    spec = tf.TensorSpec([None], tf.int64)
    return tf.data.Dataset.from_generator(batches, output_signature=(spec, spec))


class TestDatasets:
    @pytest.mark.filterwarnings("ignore:.*compiled again")
    @quick
    @given(
        sizes=st.lists(st.integers(0, 6), min_size=1, max_size=9).filter(any),
        layout=LAYOUTS,
        known=st.booleans(),
    )
    def test_use_every_row_once_an_epoch(self, sizes, layout, known):
        if not all(
            sum(sizes[i : i + layout.accumulation])
            for i in range(0, len(sizes), layout.accumulation)
        ):
            sizes = [size + 1 for size in sizes]
        dataset = batched(sizes)
        if known:
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(sizes)))
        stacks = stacks_of(dataset, batch_size=None, layout=layout)
        assert stacks.steps_per_epoch == (
            math.ceil(len(sizes) / layout.accumulation) if known else None
        )
        for epoch in epochs_of(stacks, 2):
            assert used(epoch, stacks.layout) == list(range(sum(sizes)))
            assert steps_of(epoch) == math.ceil(len(sizes) / layout.accumulation)

    def test_deal_batches_of_varying_size_into_one_shape(self):
        stacks = stacks_of(batched([4, 1, 3, 2, 4, 4]), batch_size=None, layout=Layout(2))
        (epoch,) = epochs_of(stacks, 1)
        assert {tuple(d.stacks[0].x.shape) for d in epoch} == {(2, 4)}

    def test_keep_their_batches_where_rows_must_be_exact(self):
        stacks = stacks_of(
            batched([4, 4, 3, 2]), batch_size=None, layout=Layout(3, exact_rows=True)
        )
        (epoch,) = epochs_of(stacks, 1)
        shapes = [[tuple(stack.x.shape) for stack in dispatch.stacks] for dispatch in epoch]
        assert shapes == [[(2, 4), (1, 3)], [(1, 2)]]

    def test_warn_when_a_growing_batch_costs_a_compilation(self):
        stacks = stacks_of(batched([2, 2, 2, 5]), batch_size=None, layout=Layout(2))
        with pytest.warns(UserWarning, match="batches of up to 5 rows after micro-batches of 2"):
            (epoch,) = epochs_of(stacks, 1)
        assert used(epoch, stacks.layout) == list(range(11))

    def test_that_never_end_need_steps_per_epoch(self):
        dataset = tf.data.Dataset.range(5).map(lambda i: (i, targets(i))).batch(2).repeat()
        with pytest.raises(ValueError, match=r"infinite: pass steps_per_epoch"):
            stacks_of(dataset, batch_size=None, layout=Layout(2))
        stacks = stacks_of(dataset, batch_size=None, layout=Layout(2), steps_per_epoch=2)
        epochs = epochs_of(stacks, 3)
        seen = [row for epoch in epochs for row in used(epoch, stacks.layout)]
        assert seen == ([0, 1, 2, 3, 4] * 5)[: len(seen)]

    @pytest.mark.parametrize("known", [False, True])
    def test_that_end_before_the_steps_asked_for_end_the_epoch(self, known):
        dataset = batched([2] * 5)
        if known:
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(5))
        stacks = stacks_of(dataset, batch_size=None, layout=Layout(2), steps_per_epoch=4)
        with pytest.warns(UserWarning, match="ran out of data after 3 of the 4 steps asked for"):
            epochs = epochs_of(stacks, 2)
        assert [used(epoch, stacks.layout) for epoch in epochs] == [list(range(10))] * 2

    def test_data_that_end_before_those_of_other_workers_are_an_error(self):
        layout = Layout(2, replicas=2, shards=slice(0, 1))
        stacks = stacks_of(batched([2] * 5), batch_size=None, layout=layout, steps_per_epoch=4)
        with pytest.raises(ValueError, match="ran dry after 3 train steps of steps_per_epoch=4"):
            epochs_of(stacks, 1)

    def test_continue_where_the_last_epoch_stopped(self):
        stacks = stacks_of(batched([2] * 6), batch_size=None, layout=Layout(2), steps_per_epoch=2)
        with pytest.warns(UserWarning, match="after 1 of the 2 steps"):
            epochs = epochs_of(stacks, 3)
        expected = [list(range(8)), list(range(8, 12)), list(range(8))]
        assert [used(epoch, stacks.layout) for epoch in epochs] == expected
        # Of three steps it is not known that they were the last.
        stacks = stacks_of(batched([2] * 6), batch_size=None, layout=Layout(2), steps_per_epoch=3)
        assert [used(epoch, stacks.layout) for epoch in epochs_of(stacks, 2)] == [
            list(range(12))
        ] * 2

    @pytest.mark.parametrize(
        ("dataset", "error", "message"),
        [
            (
                tf.data.Dataset.from_tensor_slices(([1.0, 2.0], [1.0, 2.0])),
                ValueError,
                "not batched",
            ),
            (tf.data.Dataset.range(4).batch(2), ValueError, "no targets"),
            (tf.data.Dataset.range(0).map(lambda i: (i, i)).batch(2), ValueError, "empty"),
            (tf.data.Dataset.from_tensors((["a"], [1])), TypeError, "string"),
        ],
    )
    def test_that_do_not_fit_say_so(self, dataset, error, message):
        with pytest.raises(error, match=message):
            stacks_of(dataset, batch_size=None, layout=Layout(1))

    def test_take_no_y_beside_them(self):
        with pytest.raises(ValueError, match="leave them out"):
            stacks_of(batched([2]), np.zeros(2), batch_size=None, layout=Layout(1))

    def test_lengths_that_differ_within_a_step_are_stacks_of_their_own(self):
        (step,) = epochs_of(stacks_of(of_lengths(3, 4), batch_size=None, layout=Layout(2)), 1)[0]
        assert step.by_micro_batch
        assert [tuple(stack.x.shape) for stack in step.stacks] == [(1, 2, 3), (1, 2, 4)]

    def test_lengths_that_differ_say_so_on_replicas(self):
        stacks = stacks_of(
            of_lengths(3, 4),
            batch_size=None,
            layout=Layout(2, allows_by_micro_batch=False, replicas=2, shards=slice(0, 2)),
        )
        with pytest.raises(
            ValueError,
            match=r"(?s)of different shapes.*padded_batch\(k \* b\).unbatch\(\).batch\(b\)",
        ):
            epochs_of(stacks, 1)

    def test_x_and_y_of_different_rows_say_so(self):
        dataset = tf.data.Dataset.from_generator(
            lambda: iter([(np.zeros(2), np.zeros(3))]),
            output_signature=(tf.TensorSpec([None]),) * 2,
        )
        stacks = stacks_of(dataset, batch_size=None, layout=Layout(2))
        with pytest.raises(ValueError, match="different numbers of rows"):
            epochs_of(stacks, 1)


class Pieces(keras.utils.PyDataset):
    """Batches of at most `size` of `rows` rows."""

    def __init__(self, rows, size):
        super().__init__()
        self.rows, self.size, self.log = rows, size, []

    def __len__(self):
        return math.ceil(self.rows / self.size)

    def __getitem__(self, index):
        x = np.arange(self.rows)[index * self.size : (index + 1) * self.size]
        return x, targets(x)

    def on_epoch_begin(self):
        self.log.append("begin")

    def on_epoch_end(self):
        self.log.append("end")


def test_a_pydataset_is_read_anew_in_every_epoch():
    pieces = Pieces(11, 3)
    stacks = stacks_of(pieces, batch_size=None, layout=Layout(2))
    assert stacks.steps_per_epoch == 2
    for epoch in epochs_of(stacks, 2):
        assert used(epoch, stacks.layout) == list(range(11))
    # Users reshuffle in these hooks.
    assert pieces.log == ["begin", "end"] * 2


def test_a_pydataset_is_shuffled_by_batches():
    keras.utils.set_random_seed(0)
    stacks = stacks_of(Pieces(30, 3), batch_size=None, layout=Layout(2), shuffle=True)
    one, other = (used(epoch, stacks.layout) for epoch in epochs_of(stacks, 2))
    assert one != other
    assert sorted(one) == sorted(other) == list(range(30))
    assert all(one[i + 1] == one[i] + 1 for i in range(0, 30, 3))


def test_a_generator_is_read_once():
    batches = (batch for batch in batched([3, 3, 2]).as_numpy_iterator())
    stacks = stacks_of(batches, batch_size=None, layout=Layout(2))
    dispatches = stacks.epochs(Position(0, 0))
    assert used(next(dispatches), stacks.layout) == list(range(8))
    with pytest.raises(ValueError, match="cannot be read again"):
        list(next(dispatches))


def test_a_generator_that_is_used_up_ends_the_training(trainer):
    """Keras would report the last epoch's logs once more for epochs without a step."""
    before = int(trainer.optimizer.iterations)
    with pytest.warns(UserWarning) as said:
        history = trained(trainer, slices(), steps_per_epoch=2, epochs=4)  # 6 batches: 3 steps
    assert len(history[1]) == 2
    assert int(trainer.optimizer.iterations) == before + 3
    assert any(
        "x (generator) ran out of data after 1 of the 2 steps" in str(w.message) for w in said
    )
    assert any("x (generator) is used up, which ends the training" in str(w.message) for w in said)


def test_a_validation_that_cannot_be_read_again_speaks_of_validation_steps(trainer):
    before = int(trainer.optimizer.iterations)
    cases = [
        (
            batched([4, 4]).as_numpy_iterator(),
            "is used up .*: pass validation_steps that it lasts for",
        ),
        (batched([4, 4]).repeat(), "is infinite: pass validation_steps"),
    ]
    for validation, match in cases:
        with pytest.raises(ValueError, match=rf"validation_data \(\w+\) {match}"):
            trainer.fit(batched([4, 4]), epochs=2, validation_data=validation, verbose=0)
    with pytest.raises(ValueError, match=r"x \(\w+\) is infinite: pass steps\."):
        trainer.evaluate(batched([4, 4]).repeat(), verbose=0)
    assert int(trainer.optimizer.iterations) == before


def test_a_validation_whose_generator_is_used_up_is_refused(trainer):
    validated = Validated()
    with (
        pytest.warns(UserWarning, match=r"validation_data .* is used up, which ends the training"),
        pytest.raises(
            ValueError,
            match=r"validation_data .* is used up .*: pass validation_steps that it lasts for",
        ),
    ):
        trained(
            trainer,
            X,
            Y,
            4,
            epochs=3,
            validation_data=slices(),
            validation_steps=3,
            callbacks=[validated],
        )
    assert validated.epochs == 2  # 6 batches


class Validated(keras.callbacks.Callback):
    epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        assert "val_loss" in logs
        self.epochs += 1


class TestClassWeights:
    CLASS_WEIGHT = {0: 0.5, 2: 3.0}  # noqa: RUF012
    LABELS = np.array([0, 1, 2, 2, 1])
    EXPECTED = np.array([0.5, 1.0, 3.0, 3.0, 1.0], "float32")

    def weights(self, y, sample_weight=None, sparse_labels=False):
        stacks = stacks_of(
            np.zeros(len(y)),
            y,
            sample_weight,
            batch_size=len(y),
            layout=Layout(1),
            class_weight=self.CLASS_WEIGHT,
            sparse_labels=sparse_labels,
        )
        ((dispatch,),) = epochs_of(stacks, 1)
        return dispatch.stacks[0].sample_weight.numpy()[0]

    @pytest.mark.parametrize(
        "y",
        [LABELS, LABELS[:, np.newaxis], LABELS.astype("float32"), np.eye(3)[LABELS]],
        ids=["integers", "column", "floats", "one-hot"],
    )
    def test_follow_the_class(self, y):
        np.testing.assert_array_equal(self.weights(y), self.EXPECTED)

    def test_follow_the_class_of_a_token(self):
        tokens_BT = np.stack([self.LABELS, self.LABELS[::-1]])
        expected_BT = np.stack([self.EXPECTED, self.EXPECTED[::-1]])
        np.testing.assert_array_equal(self.weights(tokens_BT, sparse_labels=True), expected_BT)
        one_hot_BTC = np.eye(3)[tokens_BT]
        np.testing.assert_array_equal(self.weights(one_hot_BTC), expected_BT)

    def test_multiply_sample_weights(self):
        weights = np.array([1.0, 2.0, 0.0, 4.0, 5.0])
        np.testing.assert_array_equal(self.weights(self.LABELS, weights), self.EXPECTED * weights)
        tokens_BT = np.stack([self.LABELS, self.LABELS[::-1]])
        expected_BT = np.stack([self.EXPECTED, 2 * self.EXPECTED[::-1]])
        np.testing.assert_array_equal(
            self.weights(tokens_BT, [1, 2] * np.ones(2), True), expected_BT
        )

    def test_are_counted_in_a_dataset_without_a_warning(self, caplog):
        dataset = tf.data.Dataset.from_tensor_slices((np.zeros(5), self.LABELS)).batch(5)
        stacks = stacks_of(
            dataset, batch_size=None, layout=Layout(1), class_weight=self.CLASS_WEIGHT
        )
        ((dispatch,),) = epochs_of(stacks, 1)
        np.testing.assert_array_equal(dispatch.stacks[0].sample_weight.numpy()[0], self.EXPECTED)
        assert "AutoGraph" not in caplog.text

    def test_need_a_single_output(self):
        with pytest.raises(ValueError, match="single output"):
            stacks_of(
                np.zeros(2),
                [np.zeros(2)] * 2,
                batch_size=2,
                layout=Layout(1),
                class_weight={0: 2.0},
            )


@pytest.mark.parametrize("rows", [5, 10, 33])
@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5])
def test_a_validation_split_is_that_of_keras(rows, fraction):
    x = np.arange(rows)
    weight = np.ones(rows, "float32")
    ours = in_memory.split((x, targets(x), weight), fraction)
    theirs = keras.src.trainers.data_adapters.array_slicing.train_validation_split(
        (x, targets(x), weight), validation_split=fraction
    )
    for part, expected in zip(ours, theirs, strict=True):
        for array, other in zip(part, expected, strict=True):
            np.testing.assert_array_equal(array, other)


def test_rows_are_cast_without_a_warning_about_what_was_in_memory(monkeypatch):
    """A signalling NaN that somebody left there raised "invalid value encountered in cast"."""
    monkeypatch.setattr(
        in_rows, "_aligned", lambda shape, dtype: np.full(shape, 0x7FA00000, "uint32").view(dtype)
    )
    array = np.arange(12.0).reshape(6, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        taken = in_rows.take(array, np.array([[4, 0]]))
    assert taken.dtype == "float32" and taken.numpy().tolist() == [[[8, 9], [0, 1]]]


def test_a_batch_names_what_it_leaves_out():
    assert Batch(1, 2).weights is None
    assert Batch(1, 2).mask is None


X = np.random.default_rng(0).normal(size=(22, 3)).astype("float32")
Y = (X @ np.array([[1.0], [-2.0], [0.5]], "float32")) ** 2
W = np.random.default_rng(1).integers(0, 3, 22).astype("float32")


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return math.ceil(len(X) / 4)

    def __getitem__(self, index):
        return tuple(array[index * 4 : (index + 1) * 4] for array in (X, Y, W))


def slices():
    """(X, Y, W) in batches of 4, a Python generator."""
    return (Rows()[i] for i in range(len(Rows())))


def unknown_cardinality():
    spec = [tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1]), tf.TensorSpec([None])]
    return tf.data.Dataset.from_generator(slices, output_signature=tuple(spec))


class Iterated(Rows):
    """Iterates over batches and also gives them by number, as ImageDataGenerator's iterators do."""

    def __next__(self):
        raise AssertionError


class Sequence(tf_keras.utils.Sequence):
    __len__, __getitem__ = Rows.__len__, Rows.__getitem__


KINDS = {
    "dataset": lambda: tf.data.Dataset.from_tensor_slices((X, Y, W)).batch(4),
    "unknown cardinality": unknown_cardinality,
    "infinite": lambda: tf.data.Dataset.from_tensor_slices((X, Y, W)).batch(4).repeat(),
    "PyDataset": Rows,
    "PyDataset with __next__": Iterated,
    "Sequence of tf_keras": Sequence,
    "generator": slices,
}


@pytest.fixture(scope="module")
def trainer():
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    )
    return fa.Trainer(model, keras.optimizers.SGD(0.1), "mse", gradient_accumulation_steps=2)


def trained(trainer, *args, **kwargs):
    rng = np.random.default_rng(2)
    trainer.model.set_weights([rng.normal(size=w.shape) for w in trainer.model.get_weights()])
    history = trainer.fit(*args, shuffle=False, verbose=0, **kwargs).history
    return np.concatenate([w.ravel() for w in trainer.model.get_weights()]), history["loss"]


@pytest.mark.parametrize("kind", KINDS)
def test_fit_learns_the_same_from_every_kind_of_data(trainer, kind):
    if kind == "infinite":
        # A pass over repeated data has no end to pad at: two epochs of the first two of its three
        # steps.
        expected = trained(trainer, X[:16], Y[:16], 4, sample_weight=W[:16])
        found = trained(trainer, KINDS[kind](), steps_per_epoch=2)
    else:
        epochs = 1 if kind == "generator" else 2
        expected = trained(trainer, X, Y, 4, epochs, sample_weight=W)
        found = trained(trainer, KINDS[kind](), epochs=epochs)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)
    if kind == "Sequence of tf_keras":
        assert trainer.predict(Sequence(), verbose=0).shape == (22, 1)


def rows_of(dispatches):
    """Returns the numbers of the rows of X in each train step."""
    valid = (
        stack.x.numpy()[stack.valid.numpy()] for dispatch in dispatches for stack in dispatch.stacks
    )
    return [[int(np.argmax((row == X).all(1))) for row in rows] for rows in valid]


class Shuffling(Sequence):
    """Other batches in each epoch."""

    def __init__(self):
        super().__init__()
        self.ended = 0

    def __getitem__(self, index):
        return super().__getitem__((index + self.ended) % len(self))

    def on_epoch_end(self):
        self.ended += 1


@pytest.mark.parametrize(("kind", "expected"), [(Sequence, [2, 2, 2]), (Rows, [2, 1, 2])])
def test_steps_per_epoch_is_counted_as_that_keras_counts_it(kind, expected):
    """tf_keras begins a Sequence anew in each epoch; Keras 3 goes on with a PyDataset, and ends the
    epoch with it.
    """
    stacks = stacks_of(kind(), batch_size=None, layout=Layout(2), steps_per_epoch=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*ran out of data")
        epochs = [rows_of(each) for each in epochs_of(stacks, 3)]
    assert [len(each) for each in epochs] == expected
    assert epochs[0] == [[*range(8)], [*range(8, 16)]]
    assert (epochs[0] == epochs[1]) is (kind is Sequence)


def test_a_sequence_that_begins_anew_is_resumed_in_its_epoch():
    def stacks(sequence, steps_per_epoch=2):
        stacks = stacks_of(
            sequence, batch_size=None, layout=Layout(2), steps_per_epoch=steps_per_epoch
        )
        stacks.track()
        return stacks

    sequence = Shuffling()
    whole = [rows_of(each) for each in epochs_of(stacks(sequence), 2)]
    assert whole[0] != whole[1] and sequence.ended == 2
    epochs_of(stacks(sequence, steps_per_epoch=3), 1)
    assert sequence.ended == 3
    stopped, resumed = stacks(Shuffling()), stacks(Shuffling())
    epochs = stopped.epochs(Position(0, 0))
    rows_of(next(epochs))
    next(next(epochs))
    resumed.restore(*stopped.position())
    assert rows_of(next(resumed.epochs(Position(0, 1, 1)))) == whole[1][1:]


def test_predict_takes_what_the_other_keras_reads_batches_from():
    layers = [tf_keras.layers.Input((3,)), tf_keras.layers.Dense(1)]
    trainer = fa.Trainer(tf_keras.Sequential(layers), "sgd", "mse", jit_compile=False)
    np.testing.assert_allclose(
        trainer.predict(Rows(), verbose=0), trainer.predict(X, verbose=0), rtol=1e-5
    )


def test_a_map_that_keeps_a_state_is_read_again_as_often_as_it_was():
    """Resumes a `map` with augmentation layers, whose seeds go on from pass to pass."""

    def stacks():
        seen = tf.Variable(0.0)
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
        stacks = stacks_of(
            dataset.map(lambda x, y: (x + seen.assign_add(1.0), y)),
            batch_size=None,
            layout=Layout(2),
        )
        stacks.track()
        return stacks, seen

    def rows(dispatches):
        return [stack.x.numpy().tolist() for dispatch in dispatches for stack in dispatch.stacks]

    (whole, _), (resumed, seen) = stacks(), stacks()
    epochs = whole.epochs(Position(0, 0))
    with pytest.warns(RuntimeWarning, match="reads a pass and all earlier passes again"):
        for _ in range(2):
            rows(next(epochs))
        resumed.restore(*whole.position())
        assert seen.numpy() == 12.0
        assert rows(next(resumed.epochs(Position(0, 2)))) == rows(next(epochs))


def test_a_workers_own_dataset_goes_on_by_the_number_of_steps():
    """Restores the steps of each worker in data of its own from the chief's checkpoint, and nothing
    of the chief's data.
    """
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF

    def stacks(worker):
        rows = np.arange(10) + 100 * worker
        dataset = (
            tf.data.Dataset.from_tensor_slices((rows, rows))
            .shuffle(10, seed=3)
            .batch(2)
            .with_options(options)
        )
        layout = Layout(1, replicas=2, shards=slice(worker, worker + 1))
        return stacks_of(dataset, batch_size=None, layout=layout)

    def rows(dispatches, count):
        return [d.stacks[0].x.numpy().ravel().tolist() for d in itertools.islice(dispatches, count)]

    chief, other, resumed = stacks(0), stacks(1), stacks(1)
    for each in (chief, resumed):
        each.track()
    rows(next(chief.epochs(Position(0, 0))), 2)
    plain, tensors = chief.position()
    assert not tensors
    resumed.restore(plain, tensors)
    assert (
        rows(next(resumed.epochs(Position(0, 0, 2))), 3)
        == rows(next(other.epochs(Position(0, 0))), 5)[2:]
    )


def sparse_kinds():
    scipy, values = pytest.importorskip("scipy.sparse"), X * (np.abs(X) > 0.7)
    twice = tf.SparseTensor([[0, 1], [0, 1], [2, 0]], [1.0, 2.0, 3.0], [3, 3])
    return {
        "tf": (tf.sparse.from_dense(values), values),
        "tf, twice": (twice, np.array([[0, 3, 0], [0, 0, 0], [3, 0, 0]], "float32")),
        "tf, three axes": (
            tf.sparse.from_dense(values.reshape(11, 2, 3)),
            values.reshape(11, 2, 3),
        ),
        **{
            name: (getattr(scipy, f"{name}_matrix")(values), values)
            for name in ("csr", "csc", "coo", "lil", "bsr")
        },
    }


@pytest.mark.parametrize(
    "kind", ["tf", "tf, twice", "tf, three axes", "csr", "csc", "coo", "lil", "bsr"]
)
def test_sparse_arrays_become_dense_a_stack_at_a_time(kind):
    sparse, dense = sparse_kinds()[kind]
    source = data.make_data_source(sparse, np.zeros(len(dense)), batch_size=2, shuffle=True, seed=3)
    assert source.sample.x == tf.TensorSpec([2, *dense.shape[1:]], tf.float32)
    stacks = source.stacks(Layout(2))
    found = [dispatch.stacks[0] for dispatch in epochs_of(stacks, 1)[0]]
    rows = np.concatenate([stack.x.numpy()[stack.valid.numpy()] for stack in found])
    np.testing.assert_array_equal(rows, dense[stacks.order(0)])


@pytest.mark.parametrize("kind", ["tf", "csr", "dataset", "generator"])
def test_fit_learns_the_same_from_sparse_data(trainer, kind):
    dense = X * (np.abs(X) > 0.7)
    expected = trained(trainer, dense, Y, 4)
    loss = trainer.evaluate(dense, Y, 4, verbose=0)
    if kind in ("tf", "csr"):
        given = (sparse_kinds()[kind][0], Y, 4)
    else:
        batches = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(dense), Y)).batch(4)
        given = (batches if kind == "dataset" else (batch for batch in batches),)
    found = trained(trainer, *given)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)
    if kind != "generator":
        np.testing.assert_allclose(trainer.evaluate(*given, verbose=0), loss, rtol=1e-5)


@pytest.mark.parametrize("given", [None, True, False])
def test_a_dataset_is_not_tuned_unless_its_options_say_so(given):
    dataset = tf.data.Dataset.from_tensor_slices((np.ones((4, 2)), np.ones(4))).batch(2)
    if given is not None:
        options = tf.data.Options()
        options.autotune.enabled = given
        dataset = dataset.with_options(options)
    assert data.make_data_source(
        dataset, batch_size=None
    ).dataset.options().autotune.enabled is bool(given)
