"""Text as bytes: files to ids, a held-out part, windows to train on, and text back from a model."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from fastaccum.app.options import CONFIG_FILE, TEMPERATURE
from fastaccum.data.packing import pack

# One file of so many is held out, or else the last of so many parts of the text: 5%.
HELD_OUT_EVERY = 20
BUFFER_BYTES = 2**22  # of files that are packed together, about


class Text(NamedTuple):
    """Byte ids, uint8, to train on and to evaluate with, and the bytes of each file in them."""

    train: np.ndarray
    held_out: np.ndarray
    train_lengths: np.ndarray
    held_out_lengths: np.ndarray

    @property
    def sha256(self) -> str:
        """The SHA-256 of the text to train on, followed by the one held out."""
        digest = hashlib.sha256(self.train.data)
        digest.update(self.held_out.data)
        return digest.hexdigest()

    @property
    def sha256_of_files(self) -> str:
        """The SHA-256 of the text and of where its files end."""
        digest = hashlib.sha256(self.sha256.encode())
        for lengths in (self.train_lengths, self.held_out_lengths):
            digest.update(np.ascontiguousarray(lengths, "<i8").data)
        return digest.hexdigest()


def standard_library() -> list[Path]:
    """Lists the source files of the running Python, without tests: text that all machines have."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = [path for path in root.rglob("*.py") if not left_out & {*path.relative_to(root).parts}]
    return sorted(paths)


def read_text(paths: Sequence[str | os.PathLike[str]] = ()) -> Text:
    """Reads files and folders, or else `standard_library()`, as bytes, and splits them by `split`.

    Folders are read in sorted order, without hidden files, folders of runs and files with a NUL
    byte.
    """
    # Each file by its resolved path, since one that was read twice could be trained on and held
    # out. True marks a file that `paths` names itself.
    files = {}
    if not paths:
        files = dict.fromkeys(standard_library(), False)
    for name in paths:
        path = Path(name)
        if name and path.is_dir():
            for file in _files_below(path):
                files.setdefault(file.resolve(), False)
        elif name and path.is_file():  # a pipe could not be read again
            files.setdefault(path.resolve(), True)
        else:
            raise ValueError(
                f"{str(name)!r} is no file and no folder: give a text file, or a folder of them."
            )

    contents = []
    for file, is_named in files.items():
        content = file.read_bytes()
        if is_named or b"\0" not in content:
            contents.append(content)
    if not any(contents):
        where = ", ".join(repr(str(path)) for path in paths)
        raise ValueError(
            f"no text in {where}: give a file or a folder that holds some, other than those of a "
            "run."
        )
    return split(contents)


def split(contents: Sequence[bytes]) -> Text:
    """Splits contents of files into those to train on and those held out, always in the same way.

    Every 20th file is held out whole. If there are fewer than 20, or if those have less than 1% of
    all bytes, the last 20th of the joined text is held out instead.
    """
    train = []
    held_out = []
    for number, content in enumerate(contents):
        if number % HELD_OUT_EVERY == HELD_OUT_EVERY // 2 - 1:  # the 10th, the 30th, ...
            held_out.append(content)
        else:
            train.append(content)
    total = sum(map(len, contents))
    total_held_out = sum(map(len, held_out))
    if len(contents) >= HELD_OUT_EVERY and 100 * total_held_out >= total:
        return Text(_join(train), _join(held_out), _lengths(train), _lengths(held_out))

    joined = _join(contents)
    end = total - total // HELD_OUT_EVERY
    file_ends = np.cumsum(_lengths(contents))
    ends_of_train = np.minimum(file_ends, end)
    starts_of_held_out = np.maximum(file_ends - _lengths(contents), end)
    train_lengths = np.diff(ends_of_train, prepend=0)
    held_out_lengths = np.maximum(file_ends - starts_of_held_out, 0)
    return Text(
        joined[:end],
        joined[end:],
        train_lengths[train_lengths > 0],
        held_out_lengths[held_out_lengths > 0],
    )


def _join(contents: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(contents), np.uint8)


def _lengths(contents: Sequence[bytes]) -> np.ndarray:
    return np.array([len(content) for content in contents if content], np.int64)


class RandomWindows(keras.utils.PyDataset):
    """Micro-batches `(x, y)` of random windows, both int32 `[batch_size, context]`.

    `y` has the windows that begin one byte later than those of `x`. The seed and the number of a
    micro-batch alone decide what it holds.
    """

    def __init__(self, ids: np.ndarray, context: int, batch_size: int, batches: int, seed: int):
        super().__init__()
        _check_length(ids, context, "training text")
        self.ids = ids
        self.context = context
        self.batch_size = batch_size
        self.batches = batches
        self.seed = seed

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        starts = np.random.default_rng((self.seed, index)).integers(
            0, len(self.ids) - self.context, self.batch_size
        )
        return _windows_at(self.ids, starts, self.context)


def packed_rows(
    ids: np.ndarray, lengths: np.ndarray, context: int, seed: int
) -> tf.data.Dataset[Any]:
    """Makes rows of `context` bytes, in which each file is a document of its own; without end.

    Args:
        ids: the bytes of all files, one after the other.
        lengths: the bytes of each file.
        context: bytes of a row; longer files are cut.
        seed: draws the order of files, another one in each pass, and of rows.
    """
    _check_length(ids, context, "training text")
    files = tf.RaggedTensor.from_row_lengths(ids, lengths)
    count = len(lengths)
    # Numbers are shuffled, not files, since checkpoints hold what is being shuffled.
    numbers = tf.data.Dataset.range(count).shuffle(count, seed).repeat()
    documents = numbers.map(lambda number: tf.cast(files[number], tf.int32))
    return pack(documents, context, buffer_size=_files_of_buffer(lengths), seed=seed)


def packed_rows_held_out(
    ids: np.ndarray, lengths: np.ndarray, context: int, most: int
) -> tuple[Any, Any]:
    """Takes up to `most` rows like those of `packed_rows`, the same for each seed, as (x, y)."""
    _check_length(ids, context, "held-out text")
    files = tf.cast(tf.RaggedTensor.from_row_lengths(ids, lengths), tf.int32)
    rows = pack(files, context, buffer_size=_files_of_buffer(lengths), seed=0)
    return next(iter(rows.batch(most)))


def _files_of_buffer(lengths: np.ndarray) -> int:
    """Returns how many files are packed together."""
    return max(1, min(len(lengths), BUFFER_BYTES * len(lengths) // int(lengths.sum())))


def spread_windows(ids: np.ndarray, context: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Takes up to `most` windows that do not overlap, spread evenly.

    Returns `(x, y)`, both int32 `[windows, context]`.
    """
    _check_length(ids, context, "held-out text")
    windows = min(most, (len(ids) - 1) // context)
    return _windows_at(ids, np.linspace(0, len(ids) - 1 - context, windows).astype(int), context)


def generate(
    model: keras.Model,
    prompt: bytes,
    length: int,
    context: int,
    *,
    temperature: float = TEMPERATURE,
    seed: int = 0,
) -> bytes:
    """Draws `length` bytes after `prompt` from `softmax(logits / temperature)`.

    At temperature 0 it takes the likeliest ones.

    Raises:
        ValueError: raised if the model's logits are not finite.
    """

    @tf.function(jit_compile=True, autograph=False)
    def logits_at(ids_BT, position):
        return tf.gather(model(ids_BT, training=False)[0], position)

    random = np.random.default_rng(seed)
    ids = list(prompt)
    for _ in range(length):
        seen = ids[-context:]
        # Padding at the end gives all inputs one shape, so that one program is compiled. A causal
        # model does not read it.
        padded_BT = np.zeros((1, context), np.int32)
        padded_BT[0, : len(seen)] = seen
        scores = logits_at(padded_BT, np.int32(len(seen) - 1)).numpy().astype(np.float64)
        if not np.isfinite(scores).all():
            raise ValueError(
                "the model's logits are not finite: its training has diverged, and a lower --lr "
                "may help"
            )
        if temperature == 0:
            ids.append(int(scores.argmax()))
            continue
        chances = np.exp((scores - scores.max()) / temperature)
        ids.append(int(random.choice(len(chances), p=chances / chances.sum())))
    return bytes(ids[len(prompt) :])


def printable(data: bytes) -> str:
    """Decodes bytes to text that is safe to print.

    What is not UTF-8 or not printable becomes U+FFFD.
    """
    letters = []
    for letter in data.decode("utf-8", "replace"):
        if letter.isprintable() or letter in "\n\t":
            letters.append(letter)
        else:
            letters.append("\ufffd")
    return "".join(letters)


def _files_below(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    # Without `onerror`, `os.walk` would silently leave out a folder that it cannot list.
    for parent, folders, names in os.walk(folder, onerror=fail):
        config = Path(parent, CONFIG_FILE)
        if config.is_file() and b'"text_sha256"' in config.read_bytes():
            folders.clear()  # skips the folder of a run, whose files change while it goes on
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _check_length(ids: np.ndarray, context: int, what: str) -> None:
    if len(ids) < context + 1:
        raise ValueError(
            f"the {what} has {len(ids)} bytes, but a window takes {context + 1} "
            f"(context={context}): give more text, of which one {HELD_OUT_EVERY}th is held out."
        )


def _windows_at(ids: np.ndarray, starts: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    windows = ids[starts[:, None] + np.arange(context + 1)].astype(np.int32)
    return windows[:, :-1], windows[:, 1:]
