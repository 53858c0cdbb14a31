"""A lock of a folder for one process, which the system releases however the process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path

from fastaccum.basics.warnings import warn

NAME = ".fastaccum-lock"
# Bytes of a holder's text, the number of a process and the name of its host, of at most 255 bytes.
_MAX_HOLDER = 300
# Errors of file systems that have no locks.
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class FolderInUseError(RuntimeError):
    """Error that another process, or another fit of this one, works in the folder."""


class FolderLock:
    """Lock of a folder, which nobody else can acquire meanwhile, in this process or another.

    The lock is a flock on a hidden file. The file is never removed: a process that has opened it
    could then lock the removed file, and another one a new file, both at once. A forked child does
    not hold its parent's lock.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Acquires the lock unless this object holds it, and makes the folder.

        Raises FolderInUseError if another has it.
        """
        if self._descriptor is not None:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(self.path / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except PermissionError:
            # An earlier fit of another user has made the file. To lock it, reading is enough.
            descriptor = os.open(self.path / NAME, os.O_RDONLY | os.O_NOFOLLOW)
        holder = f"{os.getpid()} {socket.gethostname()}"
        try:
            self._lock(descriptor, holder)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        _held.add(self)
        with contextlib.suppress(OSError):  # another user's file, which is open for reading alone
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, holder.encode(), 0)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self)

    def _lock(self, descriptor: int, holder: str) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            other = os.pread(descriptor, _MAX_HOLDER, 0).decode("utf-8", "replace")
            number, _, host = other.partition(" ")
            who = f"by the process {number} on {host}"
            if other == holder:
                who = "by another fit of this process"
            raise FolderInUseError(
                f"{str(self.path)!r} is in use {who}, and a folder belongs to one process at a "
                "time: wait for that one or end it, or name another folder."
            ) from error
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            warn(
                f"the file system of {str(self.path)!r} has no locks ({error.strerror}), so "
                "fastaccum cannot check whether another process works in this folder."
            )


_held: set[FolderLock] = set()


def _release_in_child() -> None:
    """Closes the descriptors that a forked child shares with its parent.

    The parent keeps its locks. With open descriptors, the child would hold them too for as long as
    it lives.
    """
    for lock in tuple(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
