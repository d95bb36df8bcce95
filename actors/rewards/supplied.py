"""Decides which names of a record's tests the program supplies. Owns the decision; runs nothing and reads no program.

The judge compares. So the tests' comparisons must never be the program's: otherwise the program decides its own verdict
and receives the expected value as an argument. The tests alone decide, before any program is seen:

- an attribute's base (`np.`, `pytest.`) is a module or a class, never a function under test;
- a name that tests use to compare or to build (`isclose`, `approx`, `Counter`) is the library's;
- the program's results are followed through variables, loops and the tests' own helpers. A name of the program that
  is called with one *and* with data of the tests (`is_equal(f(1), 5)`), or is compared with one (`f(1) == P(5)`), is
  no function under test. If the library has it, it is the library's; else the record is bad.
"""

import ast
import builtins
import sys
import typing
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec

from actors.rewards.flow import Flow, is_class, solutions
from contracts.rewards import BadRecordError

# Usual names of modules, which tests use without importing them as the reference solution happens to do it.
_ALIASES = {
    **{name: name for name in ("numpy", "pandas", "pytest", "scipy", "sympy", "torch", "networkx", "sklearn")},
    "np": "numpy", "pd": "pandas", "nx": "networkx",
}  # fmt: skip
_COMPARERS = {
    "math": "isclose", "pytest": "approx raises", "numpy": "allclose array_equal",
    "numpy.testing": "assert_allclose assert_almost_equal assert_array_almost_equal assert_array_equal",
}  # fmt: skip
_BUILDERS = {
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple", "fractions": "Fraction",
    "decimal": "Decimal", "datetime": "date datetime timedelta", "pathlib": "Path", "io": "BytesIO StringIO",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation",
    "math": "inf nan pi", "numpy": "array ndarray", "copy": "deepcopy",
}  # fmt: skip
# A record may ask a program for one of these. It is the library's if a name beside it is not in the library.
_HELPERS = {
    "math": "ceil cos exp floor hypot isinf isnan isqrt log log10 log2 prod radians degrees sin sqrt tan",
    "itertools": "accumulate chain combinations islice permutations product zip_longest",
    "functools": "cmp_to_key partial reduce", "operator": "attrgetter itemgetter", "statistics": "mean median stdev",
}  # fmt: skip


def _table(*tables: dict[str, str]) -> dict[str, str]:
    return {name: f"{module}:{name}" for table in tables for module, names in table.items() for name in names.split()}


_PLAIN = _table({"typing": " ".join(typing.__all__)}, _COMPARERS, _BUILDERS)
_LIBRARY = _table(_HELPERS) | _PLAIN
# Built-in names that tests apply to what they compare. They stay built-in if there is a choice.
# fmt: off
_COMPARING = frozenset({
    "abs", "all", "any", "bool", "bytes", "complex", "dict", "divmod", "enumerate", "filter", "float", "frozenset",
    "hash", "int", "isinstance", "iter", "len", "list", "map", "max", "min", "next", "pow", "print", "range", "repr",
    "reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple", "type", "zip",
})
# fmt: on


def resolve(tests: ast.Module, stub: ast.Module, entry_point: str | None) -> tuple[set[str], dict[str, str]]:
    """Return (names that the program supplies, names that are a module's: `module` or `module:attribute`).

    BadRecordError if the tests leave a comparison to the program, or need a package that is not installed.
    """
    nodes = [node for tree in (tests, stub) for node in ast.walk(tree)]
    _require_imports(tests, stub)
    free = _free(nodes)
    used = _free(list(ast.walk(tests))) & free  # a stub may name what its own functions never reach
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    bases = {n.value.id for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
    borrowed = {name: name for name in (free & sys.stdlib_module_names) - called}
    borrowed |= {name: _ALIASES[name] for name in free & bases & _ALIASES.keys()}
    borrowed.pop(entry_point or "", None)
    builtin = free & vars(builtins).keys()
    declared = _declared(nodes)
    wanted = (free - builtin - borrowed.keys()) | declared.keys()
    if entry_point is not None:
        borrowed |= {name: _LIBRARY[name] for name in (wanted & _LIBRARY.keys()) - {entry_point} - declared.keys()}
        if unknown := sorted(((wanted & used) - borrowed.keys()) - {entry_point}):
            raise BadRecordError(f"the record's tests use {_listed(unknown)}, which neither they nor the stub define")
        wanted = {entry_point} | declared.keys()
    elif not wanted and not any(map(_imports_solution, nodes)):
        # The function under test has a built-in's name (MBPP asks for `sum`): the one that compares nothing.
        wanted = builtin & called if len(builtin & called) == 1 else (builtin & called) - _COMPARING
    for name in sorted(wanted & bases - called - _LIBRARY.keys()):
        if not is_class(name):
            raise BadRecordError(
                f"the record's tests use {name!r} as a module or object ('{name}.') without importing or defining it: "
                "the program must not supply it"
            )
    under_test = {name for name in wanted if name == entry_point}
    supplied = bool(wanted)
    _lend_library(tests, wanted, declared, borrowed, under_test)
    if supplied and not wanted:
        raise BadRecordError("the record's tests use nothing of the program: all that they name is the library's")
    for dotted in borrowed.values():
        _require(dotted.partition(":")[0], f"use {dotted.rpartition(':')[2]!r} of")
    return wanted - declared.keys(), {declared.get(name, name): dotted for name, dotted in borrowed.items()}


def _lend_library(
    tests: ast.Module, wanted: set[str], declared: dict[str, str], borrowed: dict[str, str], under_test: set[str]
) -> None:
    """Move the library's names from `wanted` to `borrowed`; BadRecordError for names of the program that still
    compare."""

    def lend(names: Iterable[str]) -> None:
        for name in names:
            wanted.discard(name)
            borrowed[name] = _LIBRARY[declared.get(name, name)]

    if wanted - _PLAIN.keys():  # else a program is asked for its own Counter
        lend((wanted & _PLAIN.keys()) - declared.keys())
    for together in Flow(tests, wanted, _LIBRARY).statements:
        if together - _LIBRARY.keys():
            lend((together & wanted & _LIBRARY.keys()) - declared.keys())
    while conflicts := Flow(tests, wanted, _LIBRARY).conflicts:
        conflict = conflicts[0]
        known = {name for name in conflict.decides - under_test if declared.get(name, name) in _LIBRARY}
        if known != conflict.decides:
            names = _listed(sorted(conflict.decides))
            raise BadRecordError(
                f"the record's tests leave it to the program to compare: {names} in '{conflict.text:.120}' is neither "
                "imported nor defined by the tests, and is given, or stands against, what the program returned. "
                "Import or define it in the tests"
            )
        lend(known)


def _free(nodes: list[ast.AST]) -> set[str]:
    """Return names that are read and nowhere bound."""
    loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    bound |= {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}
    bound |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    for node in imports:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and node.module in sys.stdlib_module_names:
            bound |= set(dir(import_module(node.module)))
    return {name for name in loaded - bound if not name.startswith("__")}


def _declared(nodes: list[ast.AST]) -> dict[str, str]:
    """Return the names imported from the program, by the names in use: `from solution import f as g`."""
    found = {alias.asname or alias.name: alias.name for node in nodes if _from_solution(node) for alias in node.names}
    found.pop("*", None)
    modules = solutions(nodes)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            found[node.attr] = node.attr
    return found


def _from_solution(node: ast.AST) -> typing.TypeGuard[ast.ImportFrom]:
    return isinstance(node, ast.ImportFrom) and node.module == "solution"


def _imports_solution(node: ast.AST) -> bool:
    return _from_solution(node) or (isinstance(node, ast.Import) and any(a.name == "solution" for a in node.names))


def _require_imports(*trees: ast.Module) -> None:
    """Raise BadRecordError for a missing import; one within a `try` may be missing."""
    for tree in trees:
        tried = {id(n) for t in ast.walk(tree) if isinstance(t, ast.Try) for part in t.body for n in ast.walk(part)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import) and id(node) not in tried:
                for alias in node.names:
                    _require(alias.name, "import")
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level and id(node) not in tried:
                _require(node.module, "import")


def _require(module: str, how: str) -> None:
    top = module.partition(".")[0]
    if top != "solution" and top not in sys.modules and find_spec(top) is None:
        raise BadRecordError(f"the record's tests {how} the module {top!r}, which is not installed here: install it")


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:5]))
