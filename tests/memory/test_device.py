"""Tests the memory that a device has: the tightest of the limits on it."""

import pytest

from fastaccum.memory import device


@pytest.fixture
def host(tmp_path, monkeypatch):
    """The files that a host with 8 GB says it by, of which 6 are free."""
    monkeypatch.delenv(device.LIMIT, raising=False)
    monkeypatch.setattr(device, "_MACHINE", tmp_path / "meminfo")
    monkeypatch.setattr(device, "_CGROUPS", tmp_path / "cgroups")
    monkeypatch.setattr(device, "_PROCESS", tmp_path)
    (tmp_path / "meminfo").write_text(
        "MemTotal: 8000000 kB\nMemAvailable: 6000000 kB\nSwapFree: 0 kB\n"
    )
    (tmp_path / "cgroup").write_text("0::/a/b\n")
    return tmp_path


def limit(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


def test_machine(host):
    assert device.available("CPU:0") == (
        8_192_000_000,
        2_048_000_000,
        6_144_000_000,
        "the machine's memory",
    )


def test_the_tightest_control_group_counts_and_its_cached_files_do_not(host):
    limit(host / "cgroups/a/b", memory_max="max", memory_current=5, memory_stat="inactive_file 0")
    limit(
        host / "cgroups/a",
        memory_max=3 * 10**9,
        memory_current=2 * 10**9,
        memory_stat="inactive_file 500000000",
    )
    assert device.available("CPU:0")[:3] == (3 * 10**9, 1_500_000_000, 1_500_000_000)


def test_control_groups_of_the_first_version(host):
    (host / "cgroup").write_text("4:memory:/a\n3:cpu:/a\n0::/\n")
    folder = host / "cgroups/memory/a"
    folder.mkdir(parents=True)
    for name, text in {
        "memory.limit_in_bytes": 2**30,
        "memory.usage_in_bytes": 2**29,
        "memory.stat": "",
    }.items():
        (folder / name).write_text(str(text))
    assert device.available("CPU:0").free == 2**29


def test_the_limit_of_the_process(host, monkeypatch):
    (host / "status").write_text("VmSize:  1000000 kB\n")
    monkeypatch.setattr(device.resource, "getrlimit", lambda which: (2 * 10**9, 2 * 10**9))
    assert device.available("CPU:0").free == 2 * 10**9 - 1_024_000_000


@pytest.mark.parametrize(
    ("text", "size"), [("16GiB", 2**34), ("2 gb", 2 * 10**9), ("4096", 4096), ("512M", 2**29)]
)
def test_the_variable_takes_the_place_of_all(monkeypatch, text, size):
    monkeypatch.setenv(device.LIMIT, text)
    assert device.available() == (size, 0, size, device.LIMIT)


@pytest.mark.parametrize("text", ["much", "-1", "0", "1 PiB"])
def test_what_is_no_size_is_refused_by_name(monkeypatch, text):
    monkeypatch.setenv(device.LIMIT, text)
    with pytest.raises(ValueError, match=f"{device.LIMIT}='{text}' is not a size"):
        device.available()
