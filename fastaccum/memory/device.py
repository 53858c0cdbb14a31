"""The memory of a device, and how much of it is free."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from fastaccum.kernels.devices import compute_capability, device_memory, has_gpu

LIMIT = "FASTACCUM_MEMORY_LIMIT"

# Bytes of each unit; a number alone counts bytes.
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KIB": 1024,
    "MIB": 1024**2,
    "GIB": 1024**3,
    "TIB": 1024**4,
}

# Nobody means fewer bytes than a page of memory has: "24" without a unit is meant as 24 GiB.
_SMALLEST_WITHOUT_UNIT = 4096

# MiB that TensorFlow's pool leaves to a GPU's driver and libraries, by CUDA's compute capability.
_GPU_RESERVE = {6: 500, 7: 1050, 8: 1536}
_RESERVE_OF_NEWER_GPUS = 1800

_PROCESS = Path("/proc/self")
_MACHINE = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")


class DeviceMemory(NamedTuple):
    """Bytes of a device."""

    total: int  # of the device, or of the limit on this process
    in_use: int  # by this process and others, of `total`
    free: int  # for this process to take
    source: str  # the limit or the device that these figures are of


def available(device: str | None = None) -> DeviceMemory:
    """Looks up the memory of a device, or what FASTACCUM_MEMORY_LIMIT says in its place.

    Args:
        device: "GPU:1" or "CPU:0", also at the end of a longer name. None for the first GPU, or
            without one for the host, of which the tightest limit counts.

    Raises:
        ValueError: raised if FASTACCUM_MEMORY_LIMIT is no size, in bytes or as "16GiB".
    """
    text = os.environ.get(LIMIT)
    if text:
        total = parse_size(text, LIMIT)
        return DeviceMemory(total, 0, total, LIMIT)
    return physical(device)


def physical(device: str | None = None) -> DeviceMemory:
    """Looks up a device's memory as `available` does, but without FASTACCUM_MEMORY_LIMIT."""
    if not device:
        device = "GPU:0" if has_gpu() else "CPU:0"
    device = device.rpartition("device:")[2]
    if "GPU" in device:
        return _gpu(device)
    return min([host(), *_pool()], key=_free)


def host() -> DeviceMemory:
    """Looks up the host's memory: that of the control group, process or machine with least free."""
    return min(_host(), key=_free)


def _free(memory: DeviceMemory) -> int:
    return memory.free


def parse_size(text: str | int, name: str = "memory_limit") -> int:
    """Parses a number of bytes, or a text like "16GiB" or "500 MB".

    Raises:
        ValueError: raised for anything else, and for a number that is too small to be meant as
            bytes.

    >>> parse_size("16GiB"), parse_size("1.5 GB"), parse_size(4096)
    (17179869184, 1500000000, 4096)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", str(text), re.IGNORECASE)
    size = 0
    unit = ""
    if match:
        number, unit = match.groups()
        size = int(float(number) * _bytes_of_unit(unit))
    if not size:
        raise ValueError(f'{name}={text!r} is not a size: pass bytes, or a text like "16GiB".')
    if not unit and size < _SMALLEST_WITHOUT_UNIT:
        raise ValueError(
            f"{name}={text!r} would be {size:,} bytes, since it has no unit: "
            f'pass "{size}GiB", or "{size}MiB".'
        )
    return size


def _bytes_of_unit(unit: str) -> int:
    """Returns the bytes of a unit, 0 if there is no such unit; "16G" and "16Gi" are GiB."""
    unit = unit.upper()
    if unit in _UNITS:
        return _UNITS[unit]
    if unit.endswith("I"):
        return _UNITS.get(unit + "B", 0)
    return _UNITS.get(unit + "IB", 0)


def _gpu(device: str) -> DeviceMemory:
    in_use = tf.config.experimental.get_memory_info(device)["current"]
    gpus = tf.config.list_physical_devices("GPU")
    index = min(int(device.rpartition(":")[2]), len(gpus) - 1)
    configurations = tf.config.get_logical_device_configuration(gpus[index]) or []
    limits = [logical.memory_limit for logical in configurations if logical.memory_limit]
    if limits:
        total = limits[0] * 2**20
    else:
        generation = compute_capability()[0]
        reserve = _GPU_RESERVE.get(generation, _RESERVE_OF_NEWER_GPUS)
        total = device_memory() - reserve * 2**20
    return _limited(total, in_use, "TensorFlow's pool on the GPU")


def _limited(total: int, in_use: int, source: str) -> DeviceMemory:
    return DeviceMemory(total, in_use, max(0, total - in_use), source)


def _host() -> Iterator[DeviceMemory]:
    """Yields the machine's memory and every limit on this process."""
    machine = _kilobytes(_MACHINE.read_text())
    total = machine["MemTotal"]
    free = machine["MemAvailable"] + machine["SwapFree"]
    yield DeviceMemory(total, max(0, total - free), free, "the machine's memory")

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        in_use = _kilobytes((_PROCESS / "status").read_text())["VmSize"]
        yield _limited(limit, in_use, "the process's limit on its address space")

    for group in _cgroups():
        yield from _of_cgroup(group, total)


def _pool() -> Iterator[DeviceMemory]:
    """Yields TensorFlow's pool of the host's memory, if the environment turns it on."""
    if os.environ.get("TF_CPU_ALLOCATOR_USE_BFC", "").lower() in ("1", "true"):
        # The pool has 64 GiB unless the environment says how many MiB.
        total = int(os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB") or 2**16) * 2**20
        in_use = tf.config.experimental.get_memory_info("CPU:0")["current"]
        yield _limited(total, in_use, "TensorFlow's pool on the CPU")


def _kilobytes(text: str) -> dict[str, int]:
    """Reads the lines "name: 123 kB" of a file in /proc as bytes."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)
    return {name: int(number) * 1024 for name, number in lines}


class _ControlGroup(NamedTuple):
    """A control group of Linux: its folder, and what that folder's files are called."""

    folder: Path
    limit: str
    usage: str
    inactive: str  # the line in memory.stat for pages of files that nobody uses


def _cgroups() -> Iterator[_ControlGroup]:
    """Yields the process's control groups, of both versions, and all groups above them."""
    for line in (_PROCESS / "cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        is_version_2 = number == "0"
        if not is_version_2 and "memory" not in controllers.split(","):
            continue
        for part in (Path(path), *Path(path).parents):
            relative = part.relative_to("/")
            if is_version_2:
                yield _ControlGroup(
                    _CGROUPS / relative, "memory.max", "memory.current", "inactive_file"
                )
            else:
                yield _ControlGroup(
                    _CGROUPS / "memory" / relative,
                    "memory.limit_in_bytes",
                    "memory.usage_in_bytes",
                    "total_inactive_file",
                )


def _of_cgroup(group: _ControlGroup, machine: int) -> Iterator[DeviceMemory]:
    """Yields a control group's limit if it has one below the bytes of the machine."""
    try:
        limit = (group.folder / group.limit).read_text().strip()
        usage = int((group.folder / group.usage).read_text())
        statistics = (group.folder / "memory.stat").read_text()
        counts = dict(line.split() for line in statistics.splitlines())
    except (OSError, ValueError):
        return
    if limit == "max" or int(limit) >= machine:
        return
    # Pages of files that nobody uses are given back before anything is refused.
    in_use = max(0, usage - int(counts.get(group.inactive, 0)))
    yield _limited(int(limit), in_use, "the limit of a control group")
