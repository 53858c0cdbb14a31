import keras
import numpy as np
import pytest

from fastaccum.app import run, text
from fastaccum.transformer import gpt


def test_the_standard_library_is_real_text_without_tests():
    files = text.standard_library()
    assert files == sorted(files)
    assert not [path for path in files if {"test", "site-packages"} & set(path.parts)]
    read = text.read_text()
    assert len(read.train) > 1_000_000
    assert 0.01 < len(read.held_out) / len(read.train) < 0.3


@pytest.mark.parametrize("sizes", [[1000], [400, 600], [30] * 45, [1000, *[1] * 24]])
def test_split_is_disjoint_complete_and_repeatable(sizes):
    """Every position has an id of its own, so the two parts can be compared with the whole."""
    position = np.arange(sum(sizes))
    low, high = (position % 256).astype(np.uint8), (position // 256).astype(np.uint8)

    def cut(ids):
        ends = np.cumsum(sizes)
        return [ids[end - size : end].tobytes() for end, size in zip(ends, sizes, strict=True)]

    first = text.split(cut(low))
    pairs = zip(first[:2], text.split(cut(high))[:2], strict=True)
    parts = [np.stack(pair, -1) for pair in pairs]
    train, held_out = ({int(a) + 256 * int(b) for a, b in part} for part in parts)
    assert not train & held_out
    assert train | held_out == set(range(sum(sizes)))
    assert len(held_out) >= 0.03 * len(train)
    for again, part in zip(text.split(cut(low))[:2], parts, strict=True):
        np.testing.assert_array_equal(again, part[:, 0])
    # Files end where they did; one of them may end in both parts.
    for part, lengths in zip(first[:2], (first.train_lengths, first.held_out_lengths), strict=True):
        assert sum(lengths) == len(part) and min(lengths) > 0
    assert len(first.train_lengths) + len(first.held_out_lengths) - len(sizes) in (0, 1)


def test_many_files_are_held_out_whole():
    contents = [bytes([i]) * 10 for i in range(40)]
    train, held_out, train_lengths, held_out_lengths = text.split(contents)
    assert train_lengths.tolist() == [10] * 38 and held_out_lengths.tolist() == [10, 10]
    assert sorted(set(held_out)) == [9, 29]
    assert not set(held_out) & set(train)


def test_reads_folders_to_the_bottom_without_what_is_not_text(tmp_path):
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "b" / "deep" / "2.txt").write_bytes(b"second" * 9)
    (tmp_path / "a.md").write_bytes(b"first!" * 9)
    (tmp_path / "picture.bin").write_bytes(b"\0\1\2")
    (tmp_path / ".hidden" / "x.txt").write_bytes(b"never")
    (tmp_path / ".dot").write_bytes(b"never")
    read = text.read_text([tmp_path])
    assert bytes(read.train) + bytes(read.held_out) == b"first!" * 9 + b"second" * 9
    named = text.read_text([tmp_path / "picture.bin"])
    assert bytes(named.train) + bytes(named.held_out) == b"\0\1\2"


def test_a_file_named_twice_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"0123456789" * 10)
    read = text.read_text([tmp_path / "a.txt", tmp_path])
    assert len(read.train) + len(read.held_out) == 100


def test_the_files_of_runs_are_no_text(tmp_path):
    """A run may write into the folder that it reads; a config.json of something else is text as
    ever.
    """
    (tmp_path / "a.txt").write_bytes(b"text")
    alone = text.read_text([tmp_path])
    for folder in (tmp_path / "runs" / "one", tmp_path / "deep" / "er" / "two"):
        run.begin(str(folder), "", {"text_sha256": "0"})
        (folder / "notes").mkdir()
        (folder / "notes" / "mine.txt").write_text("of the run")
    again = text.read_text([tmp_path])
    assert again.sha256 == alone.sha256
    with pytest.raises(ValueError, match=r"no text in.*other than those of a run"):
        text.read_text([tmp_path / "runs"])
    (tmp_path / "other").mkdir()
    for config in ("{}", "[]", "no json", '{"hidden_size": 8}'):
        (tmp_path / "other" / "config.json").write_text(config)
        read = text.read_text([tmp_path])
        assert bytes(read.train) + bytes(read.held_out) == b"text" + config.encode()


def test_nothing_to_read_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"missing\.txt.*is no file and no folder"):
        text.read_text([tmp_path / "missing.txt"])
    with pytest.raises(ValueError, match="no text in"):
        text.read_text([tmp_path])
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"no text in.*empty\.txt"):
        text.read_text([tmp_path / "empty.txt"])


def test_random_windows_are_shifted_by_one_and_depend_on_seed_and_index_alone():
    ids = np.arange(30)
    windows = text.RandomWindows(ids, context=7, batch_size=64, batches=2, seed=1)
    assert len(windows) == 2
    x, y = windows[1]
    assert (x.shape, x.dtype, y.dtype) == ((64, 7), np.int32, np.int32)
    np.testing.assert_array_equal(y, x + 1)
    assert {x.min(), y.max()} == {0, 29}, "every byte can be drawn, the first and the last too"
    np.testing.assert_array_equal(x, text.RandomWindows(ids, 7, 64, 2, seed=1)[1][0])
    assert (x != windows[0][0]).any()
    assert (x != text.RandomWindows(ids, 7, 64, 2, seed=2)[1][0]).any()


def test_bytes_above_127_stay_ids_of_0_to_255():
    x, y = text.spread_windows(np.full(20, 255, np.uint8), context=4, most=2)
    assert (x == 255).all() and (y == 255).all()


@pytest.mark.parametrize(
    ("length", "most", "windows"), [(9, 5, 2), (101, 5, 5), (5, 5, 1), (41, 100, 10)]
)
def test_spread_windows_do_not_overlap(length, most, windows):
    x, y = text.spread_windows(np.arange(length), context=4, most=most)
    assert x.shape == (windows, 4)
    np.testing.assert_array_equal(y, x + 1)
    assert len(np.unique(y)) == y.size
    assert x[0, 0] == 0
    assert windows == 1 or y[-1, -1] == length - 1


def test_too_little_text_says_how_much_a_window_takes():
    with pytest.raises(ValueError, match=r"held-out text has 4 bytes.*takes 5"):
        text.spread_windows(np.arange(4), context=4, most=1)
    with pytest.raises(ValueError, match=r"training text has 4 bytes.*takes 5"):
        text.RandomWindows(np.arange(4), context=4, batch_size=1, batches=1, seed=0)


class Successor(keras.layers.Layer):
    """A model that is sure that the next id is one more than this one."""

    def call(self, ids):
        return keras.ops.one_hot((ids + 1) % 256, 256) * 100.0


def test_generate_follows_the_model_past_its_context():
    ids = keras.Input((None,), dtype="int32")
    model = keras.Model(ids, Successor()(ids))
    assert text.generate(model, b"abc", 10, context=4) == b"defghijklm"
    assert text.generate(model, b"abcdefgh", 3, context=4) == b"ijk"


def test_generate_repeats_under_a_seed():
    keras.utils.set_random_seed(0)
    model = gpt(width=16, layers=1, heads=2, context=8)
    first = text.generate(model, b"abc", 12, context=8, seed=1)
    assert len(first) == 12
    assert first == text.generate(model, b"abc", 12, context=8, seed=1)
    assert first != text.generate(model, b"abc", 12, context=8, seed=2)


def test_printable_keeps_text_and_defuses_control_codes():
    assert text.printable("naïve\n\té".encode()) == "naïve\n\té"
    assert text.printable(b"\x1b]0;title\x07") == "\ufffd]0;title\ufffd"
    assert text.printable(b"a\xff\xc3") == "a\ufffd\ufffd"
