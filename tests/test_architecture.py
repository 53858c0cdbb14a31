"""The rules of docs/architecture.md, read off the source: rooms, arrows, private names,
annotations.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("fastaccum", "kernels", "benchmarks")
# A docstring opens with a verb (what the function does) or a typed noun (what the class is):
# CONTRIBUTING.md, Language.
OPENINGS = re.compile(r"(What|Whether|Within|Of|By|As|Around|Before)\b")
TOP_LEVEL_MODULES = 9

# From the lowest room to the highest: a module imports from its own room and from lower layers,
# never from its neighbours in the same layer. "" is fastaccum/__init__.py; the command line runs
# benchmarks where they are there.
LAYERS = (
    {"kernels"},
    {"checks", "basics"},
    {"graphs", "layers"},
    {"adapters"},
    {"legacy"},
    {"families", "addons", "transformer"},
    {"data"},
    {"step"},
    {"fingerprint"},
    {"checkpoint", "distribute"},
    {"memory"},
    {"training"},
    {"trainer"},
    {"planning"},
    {"app"},
    {"benchmarks"},
    {"cli"},
    {"", "__main__"},
)
RANKS = {room: rank for rank, layer in enumerate(LAYERS) for room in layer}

PRIVATE = re.compile(r"(tensorflow\.(python|compiler)|(tf_)?keras\.src)(\.\w+)*")
# The one module that knows private names of TensorFlow and Keras.
KNOWS_PRIVATE = "kernels/private.py"

# The homes of patches, which change a class or a module for the whole process. A process has those
# of `addons` only if it imports it, and that module is there for nothing else.
MAY_PATCH = ("fastaccum/basics/patches.py", "fastaccum/addons.py")
# By these names other packages also come as arguments.
PACKAGES = {"keras", "np", "numpy", "private", "tensorflow", "tf", "tf_keras", "wrapt"}
OF_IMPORTS = ("sys.modules", "sys.meta_path")
SETTERS = re.compile(r"setattr|delattr|(type|object)\.__(set|del)attr__|private\.\w+\.set")

# One context decides what a program computes; the other only says who hears of compilation.
MAY_HOLD_CONTEXT = ("kernels/trace_context.py", "fastaccum/step/announcements.py")

# What a tuple's class offers under such names is public.
OF_NAMED_TUPLES = ("_asdict", "_fields", "_replace")

Sources = dict[str, str]  # a path in the repository, and what the file holds


def module_name(path: str) -> str:
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(["fastaccum", *parts] if parts[0] == "kernels" else parts)


def room_of(module: str) -> str:
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] if first == "fastaccum" else first


def trees(sources: Sources, *folders: str) -> Iterator[tuple[str, ast.Module]]:
    for path, text in sources.items():
        if path.split("/")[0] in folders:
            yield path, ast.parse(text)


def imported_names(path: str, tree: ast.Module) -> Iterator[str]:
    """Returns the full names that import statements bind: `from a.b import c` is a.b.c, in any
    scope.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = node.module or ""
            if node.level:
                parts = module_name(path).split(".")
                parts = parts[: len(parts) - node.level + path.endswith("/__init__.py")]
                package = ".".join([*parts, package]).rstrip(".")
            yield from (f"{package}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant))


def imports(sources: Sources) -> dict[str, set[str]]:
    """The modules of these sources that each of them imports."""
    modules = {module_name(path) for path in sources}

    def module_of(name: str) -> str | None:
        return (
            name
            if name in modules
            else name.rpartition(".")[0]
            if name.rpartition(".")[0] in modules
            else None
        )

    return {
        module_name(path): {m for name in imported_names(path, tree) if (m := module_of(name))}
        - {module_name(path)}
        for path, tree in trees(sources, *FOLDERS)
    }


def private_names(path: str, tree: ast.Module) -> set[str]:
    """Names in TensorFlow's and Keras's private modules: imported, as chains of attributes, and as
    strings.
    """
    aliases = {
        alias.asname: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname
    }
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found = {name for name in imported_names(path, tree) if PRIVATE.fullmatch(name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            root, _, rest = ast.unparse(node).partition(".")
            name = f"{aliases.get(root, root)}.{rest}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
        else:
            continue
        if PRIVATE.fullmatch(name):
            found.add(name)
    return found


def defined_names(tree: ast.Module) -> set[str]:
    """Returns the functions, classes, variables and attributes of self that a module defines."""
    return {
        node.name
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        else getattr(node, "attr", None) or node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        or (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and is_self(node.value)
        )
    }


def class_names(tree: ast.Module) -> set[str]:
    """Returns the methods, class variables and attributes of self that a module's classes define."""
    found = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and is_self(node.value)
        ):
            found.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef):
                    found.add(statement.name)
                elif isinstance(statement, ast.Assign | ast.AnnAssign):
                    found |= {name.id for name in ast.walk(statement) if is_stored_name(name)}
    return found


def imported_from_the_package(tree: ast.Module) -> set[str]:
    """The names by which a module imports what fastaccum defines."""
    statements = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    of_package = [
        node for node in statements if (node.module or "").partition(".")[0] == "fastaccum"
    ]
    return {alias.asname or alias.name for node in of_package for alias in node.names}


def is_stored_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_attributes(tree: ast.Module, package: set[str]) -> set[str]:
    """Private attributes of objects that others define: `x._y` where no class of this module
    defines `_y`.

    On self, and on what is imported from the package, they are others' where nothing in the package
    defines them. A string that looks like one is, where nothing in the module defines it.
    """
    found = set()
    of_classes = class_names(tree)
    of_module = defined_names(tree)
    imported = imported_from_the_package(tree)
    literals = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_own = is_self(node.value) or ast.unparse(node.value) in imported
            name, known = node.attr, package if is_own else of_classes
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in literals
        ):
            name, known = node.value, of_module
        else:
            continue
        if (
            re.fullmatch(r"_[A-Za-z]\w*", name)
            and name not in known
            and name not in OF_NAMED_TUPLES
        ):
            found.add(name)
    return found


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions of the module and methods of its classes; not what is defined within a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from functions(node, prefix)


# The rules: each yields what breaks it.


def arrows_run_one_way(sources: Sources) -> Iterator[str]:
    for importer, imported in imports(sources).items():
        room = room_of(importer)
        if room == "benchmarks":
            continue
        if room not in RANKS:
            yield f"{importer} stands in no room: place {room!r} in LAYERS"
            continue
        for module in sorted(imported):
            other = room_of(module)
            if other != room and RANKS.get(other, len(LAYERS)) >= RANKS[room]:
                yield f"{importer} imports {module}"


def no_circles(sources: Sources) -> Iterator[str]:
    try:
        graphlib.TopologicalSorter(imports(sources)).prepare()
    except graphlib.CycleError as error:
        yield " <- ".join(error.args[1])


def few_modules_at_the_top(sources: Sources) -> Iterator[str]:
    top = [path for path in sources if re.fullmatch(r"fastaccum/\w+\.py", path)]
    if len(top) > TOP_LEVEL_MODULES:
        yield (
            f"{len(top)} modules directly in fastaccum, over {TOP_LEVEL_MODULES}: {', '.join(top)}"
        )


def private_names_in_one_module(sources: Sources) -> Iterator[str]:
    parsed = dict(trees(sources, "fastaccum", "kernels"))
    others = {path: tree for path, tree in parsed.items() if path != KNOWS_PRIVATE}
    package = set().union(*map(defined_names, others.values()))
    for path, tree in others.items():
        names = private_names(path, tree) | private_attributes(tree, package)
        for name in sorted(names):
            yield f"{path} names {name}: give it a line in {KNOWS_PRIVATE}"


def private_names_are_used(sources: Sources) -> Iterator[str]:
    """Finds what the module of private names declares and no other uses: all capitals and all
    Attributes.
    """
    used = set()
    for _, tree in trees(sources, "fastaccum", "kernels"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "private":
                used.add(node.attr)
    for path, tree in trees(sources, "kernels"):
        if path != KNOWS_PRIVATE:
            continue
        for node in tree.body:
            if isinstance(node, ast.Assign) and "Place" not in ast.unparse(node.value):
                name = ast.unparse(node.targets[0])
                is_used_here = (
                    sum(isinstance(n, ast.Name) and n.id == name for n in ast.walk(tree)) > 1
                )
                if not name.startswith("_") and name not in used and not is_used_here:
                    yield f"{KNOWS_PRIVATE} has {name}, which nothing uses"
            if (
                isinstance(node, ast.AnnAssign)
                and ast.unparse(node.target) == "PLACES"
                and node.value
            ):
                names = [key.value for key in node.value.keys]
                yield from (
                    f"{KNOWS_PRIVATE} has {name}, which nothing uses"
                    for name in names
                    if name not in used
                )


def public_functions_are_annotated(sources: Sources) -> Iterator[str]:
    for path, tree in trees(sources, "fastaccum", "kernels"):
        for name, function in functions(tree):
            if function.name.startswith("_") and function.name != "__init__":
                continue
            arguments = function.args
            parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            parameters += [p for p in (arguments.vararg, arguments.kwarg) if p]
            bare = [
                p.arg for p in parameters if p.annotation is None and p.arg not in ("self", "cls")
            ]
            if function.returns is None and function.name != "__init__":
                bare.append("return")
            if bare:
                yield f"{path}:{function.lineno} {name} leaves unannotated: {', '.join(bare)}"


def docstrings_open_with_a_verb_or_a_noun(sources: Sources) -> Iterator[str]:
    for path, tree in trees(sources, *FOLDERS):
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and OPENINGS.match(
                ast.get_docstring(node) or ""
            ):
                yield (
                    f"{path}:{getattr(node, 'lineno', 1)} {ast.get_docstring(node).splitlines()[0]}"
                )


def one_context_for_traces(sources: Sources) -> Iterator[str]:
    for path, tree in trees(sources, "fastaccum", "kernels"):
        if path not in MAY_HOLD_CONTEXT:
            calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
            yield from (
                f"{path}:{call.lineno} makes a ContextVar; extend TraceContext"
                for call in calls
                if re.search(r"\bContextVar\b", ast.unparse(call.func))
            )


def names_of_packages(path: str, tree: ast.Module) -> set[str]:
    """Returns the names by which a module knows other packages, their modules and their classes."""
    names = set(PACKAGES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [alias for alias in node.names if room_of(alias.name) not in RANKS]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            is_own = (node.module or "").partition(".")[0] == "fastaccum"
            imported = [] if is_own else node.names
        else:
            continue
        names |= {alias.asname or alias.name.partition(".")[0] for alias in imported}
    # Other names for them, such as `nn = private.nn`.
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and root_name(node.value) in names:
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def root_name(node: ast.AST) -> str | None:
    """Returns the first name of a chain of attributes; None for what is no such chain."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def patched_places(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the objects whose attributes a statement or a call sets or deletes."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.value
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        is_vars = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "vars"
        if is_vars:
            yield from node.value.args
    elif isinstance(node, ast.Call) and SETTERS.fullmatch(ast.unparse(node.func)):
        yield from node.args[:1]


def patches_in_their_homes(sources: Sources) -> Iterator[str]:
    for path, tree in trees(sources, "fastaccum", "kernels"):
        if path in MAY_PATCH:
            continue
        packages = names_of_packages(path, tree) - {"sys"}
        for node in ast.walk(tree):
            line = getattr(node, "lineno", 0)
            for place in patched_places(node):
                if root_name(place) in packages:
                    yield f"{path}:{line} patches {ast.unparse(place)}: move it to {MAY_PATCH[0]}"
            is_set = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
            if is_set and ast.unparse(node).startswith(OF_IMPORTS):
                yield f"{path}:{line} changes {ast.unparse(node)}: move it to {MAY_PATCH[0]}"


Rule = Callable[[Sources], Iterator[str]]
RULES: list[Rule] = [
    arrows_run_one_way,
    no_circles,
    few_modules_at_the_top,
    private_names_in_one_module,
    private_names_are_used,
    public_functions_are_annotated,
    docstrings_open_with_a_verb_or_a_noun,
    one_context_for_traces,
    patches_in_their_homes,
]


@pytest.fixture(scope="module")
def repository() -> Sources:
    # fastaccum/kernels is a link to kernels, which rglob does not follow.
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    own = [path for path in paths if ROOT / "fastaccum" / "kernels" not in path.parents]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in own}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule, repository):
    broken = list(rule(repository))
    assert not broken, "\n" + "\n".join(broken)


LOW, HIGH = "fastaccum/adapters/models.py", "fastaccum/step/train_step.py"
BREAKS = [
    (arrows_run_one_way, {LOW: "from fastaccum.step.train_step import TrainStep", HIGH: ""}),
    (arrows_run_one_way, {LOW: "def f():\n    from fastaccum.step import train_step", HIGH: ""}),
    (
        arrows_run_one_way,
        {LOW: "if TYPE_CHECKING:\n    import fastaccum.step.train_step", HIGH: ""},
    ),
    (arrows_run_one_way, {LOW: "from ..step.train_step import TrainStep", HIGH: ""}),
    (arrows_run_one_way, {LOW: "importlib.import_module('fastaccum.step.train_step')", HIGH: ""}),
    (arrows_run_one_way, {LOW: "import fastaccum as fa", "fastaccum/__init__.py": ""}),
    (
        arrows_run_one_way,
        {HIGH: "from fastaccum.checkpoint import store", "fastaccum/checkpoint/store.py": ""},
    ),
    (
        arrows_run_one_way,
        {"kernels/matmul.py": "from fastaccum import checks", "fastaccum/checks.py": ""},
    ),
    (arrows_run_one_way, {"fastaccum/checks.py": "from fastaccum.adapters import models", LOW: ""}),
    (arrows_run_one_way, {"fastaccum/helpers.py": ""}),
    (
        no_circles,
        {
            "kernels/a.py": "from fastaccum.kernels import b",
            "kernels/b.py": "import fastaccum.kernels.a",
        },
    ),
    (
        no_circles,
        {
            "benchmarks/tools/charts.py": "from benchmarks.tools.report import found_in",
            "benchmarks/tools/report.py": "def write():\n    from benchmarks.tools import charts",
        },
    ),
    (few_modules_at_the_top, {f"fastaccum/m{i}.py": "" for i in range(TOP_LEVEL_MODULES + 1)}),
    (private_names_in_one_module, {LOW: "from tensorflow.python.eager import record"}),
    (
        private_names_in_one_module,
        {HIGH: "def f():\n    from tensorflow.compiler.tf2xla.python import xla"},
    ),
    (private_names_in_one_module, {HIGH: "import keras\nkeras.src.backend.get_keras_mask(x)"}),
    (
        private_names_in_one_module,
        {HIGH: "import tensorflow as tf\ntf.python.eager.record.stop_recording()"},
    ),
    (private_names_in_one_module, {HIGH: "importlib.import_module('tf_keras.src.engine')"}),
    (private_names_in_one_module, {LOW: "def f(layer):\n    return layer._losses"}),
    (private_names_in_one_module, {LOW: "def f(layer):\n    return getattr(layer, '_losses')"}),
    (
        private_names_in_one_module,
        {LOW: "class L(Layer):\n    def f(self):\n        return self._losses"},
    ),
    (
        private_names_in_one_module,
        {LOW: "class C:\n    def f(self): self._x = 1", HIGH: "def f(c): return c._x"},
    ),
    (private_names_in_one_module, {LOW: "def _kernel(layer):\n    return layer._kernel"}),
    (
        private_names_in_one_module,
        {LOW: "def f(x): getattr(x, '_b')", HIGH: "class C:\n    def f(self): self._b = 1"},
    ),
    (private_names_are_used, {KNOWS_PRIVATE: "losses = Attribute('_losses')", HIGH: ""}),
    (private_names_are_used, {KNOWS_PRIVATE: "PLACES: dict = {'record': Place(())}", HIGH: ""}),
    (public_functions_are_annotated, {HIGH: "def f(x) -> int: ..."}),
    (public_functions_are_annotated, {HIGH: "def f(x: int): ..."}),
    (
        public_functions_are_annotated,
        {HIGH: "class C:\n    def f(self, *rest, key: int = 0) -> int: ..."},
    ),
    (public_functions_are_annotated, {HIGH: "class C:\n    def __init__(self, x): ..."}),
    (docstrings_open_with_a_verb_or_a_noun, {"fastaccum/new/m.py": '"""Whether it is."""'}),
    (docstrings_open_with_a_verb_or_a_noun, {"fastaccum/new/m.py": 'def f():\n    """Of both."""'}),
    (docstrings_open_with_a_verb_or_a_noun, {"benchmarks/new/m.py": '"""What it is."""'}),
    (one_context_for_traces, {HIGH: "import contextvars\n_x = contextvars.ContextVar[int]('x')"}),
    (patches_in_their_homes, {LOW: "import keras\nkeras.Variable.value = 1"}),
    (patches_in_their_homes, {LOW: "def f(keras):\n    keras.optimizers.Optimizer.load = 1"}),
    (patches_in_their_homes, {LOW: "from keras import Variable\nsetattr(Variable, 'value', 1)"}),
    (patches_in_their_homes, {LOW: "import tensorflow as tf\ndelattr(tf.Variable, 'value')"}),
    (patches_in_their_homes, {LOW: "import tensorflow as tf\nvars(tf.Module)['name'] = 1"}),
    (patches_in_their_homes, {LOW: "private.variable_value.set(keras.Variable, 1)"}),
    (patches_in_their_homes, {LOW: "nn = private.nn\nnn.dot_product_attention = 1"}),
    (patches_in_their_homes, {LOW: "def f():\n    import keras as k\n    k.Model.fit = 1"}),
    (patches_in_their_homes, {LOW: "import sys\nsys.modules['keras.src'] = 1"}),
]


@pytest.mark.parametrize(("rule", "sources"), BREAKS)
def test_rule_sees_what_breaks_it(rule, sources):
    assert list(rule(sources))


KEEPS = {
    "fastaccum/__init__.py": "from fastaccum.trainer import Trainer",
    "fastaccum/trainer.py": (
        "from fastaccum import checks\nfrom fastaccum.step.train_step import TrainStep"
    ),
    "fastaccum/checks.py": "def f(x: int, *rest: int) -> int:\n    def inner(y): ...",
    HIGH: "import keras\nfrom .program import Program\nfrom fastaccum.adapters import models\nkeras.src_of_x",
    "fastaccum/step/program.py": (
        "from fastaccum.kernels import private\nprivate.losses(x)._replace()\nprivate.record"
    ),
    KNOWS_PRIVATE: "from tensorflow.python.eager import record\n"
    "PLACES: dict = {'record': Place(())}\nlosses = Attribute('_losses')",
    LOW: "class C:\n    def __init__(self, x: int): ...\n    def _f(self, x): ...\n    def g(self) -> None:\n"
    + "        x = 1\n",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_rule_accepts_what_keeps_it(rule):
    assert not list(rule(KEEPS))
