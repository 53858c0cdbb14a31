"""Tests the sizes that micro-batches are padded to, and the share of rows that is padding."""

import json
import math
import warnings

import numpy as np
import pytest
import tensorflow as tf

from fastaccum.data import sizes as of_sizes
from fastaccum.data.sizes import STEPS_TO_LEARN, Sizes
from fastaccum.data.stacks import Batch, Layout

ROWS = Batch(tf.TensorSpec([None, 2]), tf.TensorSpec([None]))
OPEN = Batch(tf.TensorSpec([None, None, 2]), tf.TensorSpec([None, None]))


class Exact:
    """Padding that never changes a result."""

    fills = (0.0,)

    def is_same(self, given, padded, thoroughly):
        return True


def batch(rows, length):
    return Batch(tf.ones([rows, length, 2]), tf.ones([rows, length]))


def elements(stacks):
    return sum(math.prod(stack.y.shape) for stack in stacks)


def shapes(stacks):
    return {tuple(tuple(t.shape) for t in tf.nest.flatten(stack)) for stack in stacks}


def arranged(layout, steps):
    """Returns the shapes that the stacks of steps of (rows, length) have, and the share of them
    that only fills up.
    """
    sizes = Sizes("x", OPEN, layout)
    seen, given, computed = set(), 0, 0
    for step in steps:
        stacks, apart = sizes.arrange([batch(*each) for each in step], [rows for rows, _ in step])
        seen |= {*shapes(stacks)} if apart else {frozenset(shapes(stacks))}
        given += sum(rows * length for rows, length in step)
        computed += elements(stacks)
    return seen, 1 - given / computed


def drawn_lengths(random, rows):
    """Draws the length of the longest of some rows, whose lengths are log-normal, from 8 to 128."""
    return int(np.clip(np.exp(random.normal(3.5, 0.6, rows)), 8, 128).max())


@pytest.mark.parametrize("accumulation", [3, 4, 8])
def test_rows_that_are_uniform_waste_a_fifth_with_three_programs(accumulation):
    given, computed = 0, 0
    for seed in range(4):
        random = np.random.default_rng(seed)
        sizes = Sizes("x", ROWS, Layout(accumulation))
        seen = set()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a share above a fifth
            for step in range(200):
                rows = [
                    32 if step == 0 else int(each) for each in random.integers(1, 33, accumulation)
                ]
                joined = Batch(tf.ones([sum(rows), 2]), tf.ones([sum(rows)]))
                (stack,), apart = sizes.arrange([joined], rows)
                assert not apart and stack.valid.numpy().sum() == sum(rows)
                seen.add(tuple(stack.x.shape))
                if step > STEPS_TO_LEARN:
                    given += sum(rows)
                    computed += math.prod(stack.valid.shape)
        assert len(seen) == 3
    assert 1 - given / computed < 0.23


@pytest.mark.parametrize("one_trace", ["at first", "always"])
def test_one_trace_for_all_rows_serves_until_programs_earn_their_compilation(
    one_trace, monkeypatch
):
    monkeypatch.setattr(of_sizes, "STEPS_TO_EARN", 50)
    random = np.random.default_rng(0)
    sizes = Sizes("x", ROWS, Layout(3, one_trace=one_trace))
    seen = set()
    for step in range(200):
        rows = [int(each) for each in random.integers(1, 33, 3)]
        joined = Batch(tf.ones([sum(rows), 2]), tf.ones([sum(rows)]))
        stacks, apart = sizes.arrange([joined], rows)
        assert apart == (step < 50 or one_trace == "always")
        if apart:
            assert [tuple(stack.x.shape) for stack in stacks] == [(1, count, 2) for count in rows]
        else:
            seen |= shapes(stacks)
    assert len(seen) == (3 if one_trace == "at first" else 0)


def test_the_sizes_chosen_fill_up_least():
    sizes = Sizes("x", ROWS, Layout(1))
    seen = set()
    for step in range(300):
        rows = 64 if step % 10 == 0 else (3, 4, 9, 9, 9)[step % 5]
        (stack,), _ = sizes.arrange([Batch(tf.ones([rows, 2]), tf.ones([rows]))], [rows])
        if step > STEPS_TO_LEARN:
            seen.add(stack.valid.shape[1])
    assert seen == {4, 9, 64}


def steps_of(*steps):
    """Arranges steps, given by their rows, of two micro-batches; returns the sizes used."""
    sizes = Sizes("x", ROWS, Layout(2))
    used = []
    for rows in steps:
        (stack,), _ = sizes.arrange(
            [Batch(tf.ones([sum(rows), 2]), tf.ones([sum(rows)]))], list(rows)
        )
        used.append(stack.valid.shape[1])
    return used


def test_a_size_that_has_a_program_is_used_after_a_larger_batch_came():
    with pytest.warns(UserWarning, match="compiled again for 64"):
        used = steps_of(*[(32, 3), (8, 9)] * 20, (64, 63), (31, 32), (8, 9))
    assert used[-3:] == [64, 32, 9]


def test_the_share_that_fills_up_is_told_of_once():
    with pytest.warns(
        RuntimeWarning, match=r"x: batches have different .* to 4 or 17 or 32 .* first 32 .* 34% "
    ) as told:
        steps_of(*[(32, 1), (1, 2), (4, 4), (9, 9), (1, 1), (5, 1), (2, 1)] * 12)
    assert len(told) == 1


def test_lengths_that_are_log_normal_waste_less_than_a_quarter():
    random = np.random.default_rng(0)
    steps = [[(16, drawn_lengths(random, 16)) for _ in range(3)] for _ in range(200)]
    seen, wasted = arranged(Layout(3, padding=Exact()), steps)
    assert len(seen) <= 5
    assert wasted < 0.15


def test_ten_sizes_and_a_hundred_lengths_need_few_programs():
    random = np.random.default_rng(0)
    sizes = [17, 9, 32, 5, 21, 8, 30, 3, 13, 26]
    steps = [
        [(int(r), int(random.integers(8, 109))) for r in random.choice(sizes, 3)]
        for _ in range(200)
    ]
    seen, _ = arranged(Layout(3, padding=Exact()), steps)
    assert len(seen) <= 7  # and one that ends the update


def test_one_length_is_not_padded():
    seen, wasted = arranged(Layout(3, padding=Exact()), [[(5, 13)] * 3] * 10)
    assert len(seen) == 1 and wasted == 0


@pytest.mark.parametrize("most", [1, 2, 6])
def test_max_programs_bounds_the_lengths(most):
    random = np.random.default_rng(0)
    steps = [
        [(4, 128)] * 2,
        *([(4, int(random.integers(2, 129))) for _ in range(2)] for _ in range(60)),
    ]
    seen, _ = arranged(Layout(2, padding=Exact(), max_programs=most), steps)
    assert len({shape for shape in seen if not isinstance(shape, frozenset)}) <= most


def test_lengths_that_grow_take_few_programs():
    seen, _ = arranged(Layout(2, padding=Exact()), [[(2, length)] * 2 for length in range(3, 129)])
    assert len(seen) <= 8


def test_lengths_stay_where_padding_changes_a_result():
    seen, wasted = arranged(
        Layout(3), [[(4, length) for length in (7, 9, 11)], [(4, length) for length in (9, 7, 8)]]
    )
    assert len(seen) == 4 and wasted == 0


def test_together_nothing_is_padded_where_rows_of_padding_count():
    class ExactButForEmptyRows(Exact):
        def is_same(self, given, padded, thoroughly):
            return not (given.x.numpy() == 0).all(axis=(1, 2)).any()

    sizes = Sizes(
        "x",
        OPEN,
        Layout(2, allows_by_micro_batch=False, replicas=2, padding=ExactButForEmptyRows()),
    )
    sizes.arrange([batch(2, 5), batch(2, 7)], [2, 2])
    empty = batch(2, 6)
    empty = empty._replace(x=empty.x * [[[0.0]], [[1.0]]])
    with pytest.raises(ValueError, match="padding them would change what the model"):
        sizes.arrange([batch(2, 5), empty], [2, 2])


def test_what_was_padded_is_marked():
    sizes = Sizes("x", OPEN, Layout(2, padding=Exact()))
    stacks, apart = sizes.arrange([batch(2, 5), batch(2, 7)], [2, 2])
    assert apart and [tuple(stack.x.shape) for stack in stacks] == [(1, 2, 5, 2), (1, 2, 8, 2)]
    np.testing.assert_array_equal(stacks[1].real[0, 0], [True] * 7 + [False])
    assert float(tf.reduce_sum(stacks[1].x)) == 2 * 7 * 2


LAYOUTS = {
    "padded": Layout(3, padding=Exact()),
    "rows that are exact": Layout(3, exact_rows=True, padding=Exact()),
    "op by op": Layout(3, one_trace="at first"),
}


@pytest.mark.parametrize("saved_at", [15, 45])
@pytest.mark.parametrize("lengths_vary", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_place_that_was_restored_goes_on_alike(layout, lengths_vary, saved_at, monkeypatch):
    monkeypatch.setattr(of_sizes, "STEPS_TO_EARN", 40)
    random = np.random.default_rng(0)
    longest = 40 if lengths_vary else 5
    steps = [
        [(int(random.integers(1, 9)), int(random.integers(4, longest))) for _ in range(3)]
        for _ in range(60)
    ]
    one = Sizes("x", OPEN, layout)
    for at, step in enumerate(steps):
        if at == saved_at:
            other = Sizes("x", OPEN, layout)
            other.restore(json.loads(json.dumps(one.place())))
        arguments = [batch(*each) for each in step], [rows for rows, _ in step]
        stacks, apart = one.arrange(*arguments)
        if at >= saved_at:
            again, also = other.arrange(*arguments)
            assert apart == also and list(map(shapes, [[s] for s in stacks])) == list(
                map(shapes, [[s] for s in again])
            )
