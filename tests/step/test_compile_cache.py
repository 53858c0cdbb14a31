"""Compiled programs in a folder: which process uses it, what it loads, and what it refuses."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import keras
import numpy as np
import pytest
import small_disk

from fastaccum import Trainer
from fastaccum.step import compile_cache

pytestmark = pytest.mark.long

HELPER = Path(__file__).parents[1] / "helpers" / "warm_start.py"


@pytest.fixture
def without_tensorflow(monkeypatch):
    """Makes this process look like one that has not imported TensorFlow yet."""
    monkeypatch.delitem(sys.modules, "tensorflow")
    monkeypatch.setattr(compile_cache, "_store", None)
    monkeypatch.setenv("TF_XLA_FLAGS", "")


def store_in(folder):
    """The folder of this version, device and flags that TensorFlow is told of."""
    compile_cache.choose(None)
    compile_cache.choose(folder)
    flags = os.environ["TF_XLA_FLAGS"]
    assert flags.startswith('--tf_xla_persistent_cache_directory="') and flags.endswith('"')
    return Path(flags.partition('"')[2][:-1])


@pytest.mark.usefixtures("without_tensorflow")
def test_the_folder_belongs_to_its_user_alone(tmp_path):
    store = store_in(tmp_path / "cache")
    assert store.parent == tmp_path / "cache"
    for folder in (store, store.parent):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("without_tensorflow")
def test_another_choice_replaces_the_one_before(tmp_path):
    """As in a process that another one started, whose flags it inherits."""
    assert store_in(tmp_path / "a").parent == tmp_path / "a"
    compile_cache.choose(tmp_path / "b")
    assert str(tmp_path / "a") not in os.environ["TF_XLA_FLAGS"]
    compile_cache.require(tmp_path / "b")
    compile_cache.choose(None)
    assert os.environ["TF_XLA_FLAGS"] == ""
    with pytest.raises(RuntimeError, match="none is"):
        compile_cache.require(tmp_path / "b")


@pytest.mark.usefixtures("without_tensorflow")
def test_flags_of_the_user_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_max_cluster_size=9")
    compile_cache.choose(tmp_path)
    assert os.environ["TF_XLA_FLAGS"].startswith("--tf_xla_max_cluster_size=9 --tf_xla_persistent")


@pytest.mark.usefixtures("without_tensorflow")
@pytest.mark.parametrize("flags", ["flags.txt", "--tf_xla_persistent_cache_directory=/elsewhere"])
def test_flags_that_name_a_file_or_another_cache_are_left(tmp_path, monkeypatch, flags):
    monkeypatch.setenv("TF_XLA_FLAGS", flags)
    with pytest.warns(RuntimeWarning, match="is not used: TF_XLA_FLAGS="):
        compile_cache.choose(tmp_path)
    assert os.environ["TF_XLA_FLAGS"] == flags


@pytest.mark.usefixtures("without_tensorflow")
def test_other_flags_have_a_folder_of_their_own(tmp_path, monkeypatch):
    plain = store_in(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert store_in(tmp_path) != plain


@pytest.mark.usefixtures("without_tensorflow")
@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("flags\t\t: fpu sse2 avx2", "flags\t\t: fpu sse2 avx2 avx512f"),
        ("Features\t: fp asimd", "Features\t: fp asimd sve"),
        ("model name\t: AMD EPYC 7B12", "model name\t: Intel(R) Xeon(R)"),
    ],
)
def test_another_cpu_has_a_folder_of_its_own(tmp_path, monkeypatch, line, other):
    """A program has instructions of the processor that it was compiled for."""
    read = Path.read_text

    def store(line_of_cpu):
        text = f"processor\t: 0\n{line_of_cpu}\nbogomips\t: 4500\n"

        def read_text(path, *args, **kwargs):
            return text if path.name == "cpuinfo" else read(path, *args, **kwargs)

        monkeypatch.setattr(Path, "read_text", read_text)
        return store_in(tmp_path)

    assert store(line) == store(f"{line}\ncpu MHz\t: 2250")
    assert store(line) != store(other)


@pytest.mark.usefixtures("without_tensorflow")
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_to_is_not_used(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.warns(RuntimeWarning, match="is not used: others may write to it"):
        compile_cache.choose(tmp_path)
    assert os.environ["TF_XLA_FLAGS"] == ""


@pytest.mark.usefixtures("without_tensorflow")
def test_a_folder_of_someone_else_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.warns(RuntimeWarning, match="is not used: it belongs to user"):
        compile_cache.choose(tmp_path)
    assert os.environ["TF_XLA_FLAGS"] == ""


@pytest.mark.usefixtures("without_tensorflow")
def test_the_entries_used_longest_ago_go_first(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "LIMIT", 2500)
    store = store_in(tmp_path)
    for second, name in enumerate(("old.pb", "newer.pb", "newest.pb")):
        (store / name).write_bytes(b"x" * 1200)
        os.utime(store / name, (second, second))
    os.utime(store / "old.pb", (9, 0))  # read since
    store_in(tmp_path)
    assert compile_cache.entries() == {"old.pb", "newest.pb"}


@pytest.mark.usefixtures("without_tensorflow")
def test_no_cache_on_a_disk_that_is_full_or_cannot_be_written(tmp_path):
    with small_disk.mounted(tmp_path / "disk", "100k") as disk:
        for folder, reason in ((disk / "cache", "MiB free"), (Path("/proc/1/cache"), "")):
            with pytest.warns(RuntimeWarning, match=f"is not used: .*{reason}"):
                compile_cache.choose(folder)
            assert os.environ["TF_XLA_FLAGS"] == ""


def test_the_users_folder(monkeypatch):
    monkeypatch.delenv("FASTACCUM_COMPILE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert compile_cache.user_folder() == Path("/somewhere/fastaccum")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compile_cache.user_folder() == Path.home() / ".cache/fastaccum"
    monkeypatch.setenv("FASTACCUM_COMPILE_CACHE", "")
    assert compile_cache.user_folder() is None


def is_passed_through(output, input):
    return output is input or (output.op.type == "Identity" and output.op.inputs[0] is input)


def test_the_loop_of_a_step_takes_no_constants_from_outside():
    """TensorFlow copies them into the loop in another order in each process."""
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(3, "relu"), keras.layers.Dense(2)]
    )
    program, batch = Trainer(
        model, "adamw", "mse", gradient_accumulation_steps=2
    )._step_inputs.program(2 * (np.ones((2, 3, 2)),))
    graph = program.trace(batch).graph
    loops = [op for op in graph.get_operations() if op.type in ("While", "StatelessWhile")]
    assert loops
    for loop in loops:
        body = graph._get_function(loop.get_attr("body").name).graph
        constants = []
        for outside, input, output in zip(loop.inputs, body.inputs, body.outputs, strict=True):
            if is_passed_through(output, input) and outside.op.type in ("Const", "Fill"):
                constants.append(outside.op.name)
        assert len(constants) <= 1  # the loop's own bound


# In processes of their own: TensorFlow reads once where it keeps what it compiles.


def start(folder, *changes):
    environment = os.environ | {"FASTACCUM_COMPILE_CACHE": str(folder)}
    command = [sys.executable, str(HELPER), *changes]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def ended(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    assert "XlaSerializedCacheEntry" not in err and "SIGILL" not in err
    return json.loads(out.splitlines()[-1])


def entries(folder):
    return sorted(Path(folder).glob("*/*.pb"))


@pytest.fixture(scope="module")
def plain():
    """What a process without a cache prints."""
    return ended(start(""))


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache, and what the process printed that filled it."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    return folder, ended(start(folder))


@pytest.fixture
def cache(filled, tmp_path):
    """A copy of the filled cache."""
    return shutil.copytree(filled[0], tmp_path / "cache")


@pytest.mark.slow
def test_a_second_process_loads_what_the_first_compiled(plain, filled, cache):
    first = filled[1]
    second = ended(start(cache))
    assert first["weights"] == second["weights"] == plain["weights"]
    assert first["warned"] == second["warned"] == plain["warned"] == []
    assert "loaded" not in first["said"]
    assert "loaded from the compile cache" in second["said"]
    assert len(entries(cache)) == 1


@pytest.mark.slow
def test_a_process_that_traces_something_before_compiles_again(filled, cache):
    """TensorFlow numbers the names in a trace, by which XLA finds a program."""
    changed = ended(start(cache, "import tensorflow as tf; tf.function(tf.exp)(1.0)"))
    assert "loaded" not in changed["said"] and len(entries(cache)) == 2
    assert changed["weights"] == filled[1]["weights"]


REPLICAS = """
    import fastaccum as fa
    import keras, numpy as np, tensorflow as tf

    keras.utils.set_random_seed(0)
    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    x = np.ones([4, 8], "float32")
    fa.Trainer(model, "sgd", "mse").fit(x, x[:, :4], batch_size=4, verbose=0)
"""


def run_script(script, folder):
    environment = os.environ | {"FASTACCUM_COMPILE_CACHE": str(folder)}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, timeout=300, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_what_replicas_compile_is_kept_too(tmp_path):
    files = []
    for _ in range(2):
        run_script(REPLICAS, tmp_path / "cache").check_returncode()
        files.append({path.name: path.stat().st_ino for path in entries(tmp_path / "cache")})
    assert len(files[0]) == 2  # the sums and the end of a step
    assert files[0] == files[1]  # written once


@pytest.mark.slow
def test_an_error_of_a_damaged_entry_says_what_to_delete(cache):
    entry = entries(cache)[0]
    entry.write_bytes(entry.read_bytes()[:-1000])
    process = start(cache)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"Delete {entry.parent}, or set FASTACCUM_COMPILE_CACHE to nothing." in err


@pytest.mark.slow
def test_two_processes_at_once_and_one_that_is_killed(plain, tmp_path):
    pair = [start(tmp_path / "cache") for _ in range(2)]
    killed = start(tmp_path / "cache")
    while not entries(tmp_path / "cache") and killed.poll() is None:
        pass
    killed.send_signal(signal.SIGKILL)
    for process in pair:
        assert ended(process)["weights"] == plain["weights"]
    after = ended(start(tmp_path / "cache"))
    assert after["weights"] == plain["weights"] and "loaded" in after["said"]
    assert len(entries(tmp_path / "cache")) == 1


LATE = """
    import tensorflow
    import fastaccum as fa, keras

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    fa.Trainer(model, "sgd", "mse", compile_cache={folder!r})
"""


@pytest.mark.slow
def test_a_trainer_that_comes_too_late_for_its_cache_is_refused(tmp_path):
    """The remedy of the error is what the other tests' processes do."""
    folder = str(tmp_path / "cache")
    unset = run_script(LATE.format(folder=folder), "")
    too_late = run_script(LATE.format(folder=folder), folder)
    for ended_process in (unset, too_late):
        assert ended_process.returncode == 1
        remedy = f"Set the environment variable FASTACCUM_COMPILE_CACHE={folder}, and import fast"
        assert remedy in ended_process.stderr
    assert "TensorFlow was imported before fastaccum" in too_late.stderr
    assert "is not used" not in unset.stderr


@pytest.mark.slow
def test_the_remedy_of_that_error_works_at_the_first_try(tmp_path):
    folder = str(tmp_path / "cache")
    early = LATE.replace("    import tensorflow\n", "").format(folder=folder)
    run_script(early, folder).check_returncode()
