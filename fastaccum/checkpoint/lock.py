"""A lock of a folder for one process, which the system releases however the process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from pathlib import Path

from fastaccum.lines import warn

NAME = ".fastaccum-lock"
# For a process that is just ending, or has the lock but has not written its number yet.
_TRIES, _PAUSE = 10, 0.05
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class FolderInUseError(RuntimeError):
    """Error that another process, or something else in this one, works in the folder; the message names both."""


class FolderLock:
    """Lock of a folder, which nobody else can enter meanwhile, in this process or another.

    The lock is a flock on a hidden file, which is removed at the end. The file of a killed process is no obstacle, and
    a forked child does not hold its parent's lock.

    Raises:
        FolderInUseError: raised if another has it.
        ValueError: raised if something that is no lock stands in its place.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._file = self.path / NAME
        self._descriptor: int | None = None

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Acquires the lock unless it is held; a folder that was removed with its lock is made anew."""
        if self._descriptor is not None and self._is_in_place(self._descriptor):
            return
        self.release()
        held_by = b""
        for _ in range(_TRIES):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = self._opened()
            except FileNotFoundError:  # the folder is being removed
                continue
            if self._locked(descriptor):
                self._descriptor = descriptor
                _held.add(self)
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}".encode(), 0)
                return
            held_by = os.pread(descriptor, 300, 0)
            os.close(descriptor)
            time.sleep(_PAUSE)
        raise FolderInUseError(self._in_use(held_by.decode("utf-8", "replace")))

    def release(self) -> None:
        """Releases the lock, if it is held."""
        if self._descriptor is None:
            return
        if self._is_in_place(self._descriptor):
            self._file.unlink(missing_ok=True)
        _held.discard(self)
        os.close(self._descriptor)
        self._descriptor = None

    def _opened(self) -> int:
        try:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ValueError(f"{str(self.path)!r} cannot be locked: {NAME} in it: {error.strerror}.") from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:  # what is written would be elsewhere
            os.close(descriptor)
            raise ValueError(f"{str(self._file)!r} is not a file that a training left there: remove it.")
        return descriptor

    def _locked(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            warn(
                f"the file system of {str(self.path)!r} has no locks ({error.strerror}): whether another process works "
                "in this folder is not checked."
            )
        return self._is_in_place(descriptor)  # or the one that had it removed it at its end

    def _is_in_place(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.lstat(self._file), os.fstat(descriptor))
        except OSError:
            return False

    def _in_use(self, held_by: str) -> str:
        number, _, host = held_by.partition(" ")
        here = held_by == f"{os.getpid()} {socket.gethostname()}"
        other = "by another fit of this process" if here else f"by the process {number or '?'} on {host or '?'}"
        return (
            f"{str(self.path)!r} is in use {other}, and a folder belongs to one process at a time: wait for that one "
            "or end it, or name another folder."
        )


_held: set[FolderLock] = set()


def _forget_in_child() -> None:
    """Closes the descriptors that a forked child shares with its parent, whose locks it would hold for longer."""
    for lock in _held:
        if lock._descriptor is not None:
            os.close(lock._descriptor)
            lock._descriptor = None
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
