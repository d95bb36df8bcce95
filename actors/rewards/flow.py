"""Data flow of the program's results in a record's tests: an abstract run through variables, loops and the tests' own
functions. Owns what counts as a comparison left to the program; supplied.py owns the consequences.

Statements count in any order, and a variable holds every value it is ever given: the run may find more than can happen.
"""

import ast
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

_MUTATORS = {"add", "append", "appendleft", "extend", "insert", "setdefault", "update"}
_PLAIN_METHODS = {name for kind in (str, bytes, list, dict, set, tuple, int, float) for name in dir(kind)}
_COMPARING_METHODS = {"allclose", "compare", "eq", "equal", "equals", "isclose", "same", "__eq__", "__ne__"}


def is_class(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def solutions(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names under which the tests import the program's module."""
    imports = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {alias.asname or alias.name for alias in imports if alias.name == "solution"}


@dataclass(frozen=True, slots=True)
class Conflict:
    """A comparison by the program: `decides` are the names that would compare, `judged` those whose results they would
    get."""

    decides: frozenset[str]
    judged: frozenset[str]
    text: str


@dataclass(frozen=True, slots=True)
class _Value:
    """Possible contents of an expression: results of the program's names, the names and their objects, data of the
    tests, and functions of the tests."""

    returned: frozenset[str] = frozenset()
    made: frozenset[str] = frozenset()
    data: bool = False
    functions: frozenset[ast.AST] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        return self.returned | self.made

    def __or__(self, other: "_Value") -> "_Value":
        return _Value(
            self.returned | other.returned,
            self.made | other.made,
            self.data or other.data,
            self.functions | other.functions,
        )


_NOTHING, _DATA = _Value(), _Value(data=True)
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass
class _Scope:
    """Variables of one function; unbound ones are the outer scope's."""

    outer: "_Scope | None" = None
    values: dict[str, _Value] = field(default_factory=dict)
    returned: _Value = _NOTHING

    def find(self, name: str) -> "_Scope | None":
        scope: _Scope | None = self
        while scope is not None and name not in scope.values:
            scope = scope.outer
        return scope


class Flow:
    """The flow of the results of the program's names: an abstract run of all statements in any order, until nothing new
    is found."""

    def __init__(self, tests: ast.Module, names: Collection[str], library: Collection[str]) -> None:
        self._names, self._library = frozenset(names), frozenset(library)
        nodes = list(ast.walk(tests))
        self._solutions = solutions(nodes)
        stored = Counter(n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        assigned = [n for n in nodes if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)]
        self._literals = {
            n.targets[0].id: n.value
            for n in assigned
            if isinstance(n.targets[0], ast.Name) and stored[n.targets[0].id] == len(n.targets) == 1
        }
        self._scopes: dict[ast.AST, _Scope] = {}
        self._seen: set[str] = set()
        module = _Scope()
        size = -1
        while size != (size := self._size(module)):
            self.conflicts: list[Conflict] = []
            self.statements: list[set[str]] = []
            self._block(tests.body, module)

    def _size(self, module: _Scope) -> int:
        scopes = [module, *self._scopes.values()]
        values = [value for scope in scopes for value in (*scope.values.values(), scope.returned)]
        return len(values) + sum(len(v.names) + len(v.returned) + v.data + len(v.functions) for v in values)

    def _block(self, statements: Iterable[ast.AST], scope: _Scope) -> None:
        for statement in statements:
            self._seen = set()
            self._statement(statement, scope)
            self.statements.append(self._seen)

    def _statement(self, node: ast.AST, scope: _Scope) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._bind(ast.Name(node.name), _Value(functions=frozenset({node})), scope)
                self._function(node, scope)
            case ast.ClassDef():
                inner = self._scopes.setdefault(node, _Scope(scope))
                self._block(node.body, inner)
                self._bind(ast.Name(node.name), _NOTHING, scope)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value, scope)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._assign(target, value, scope)
            case ast.AugAssign(target=target, value=value):
                self._bind(target, self._value(value, scope), scope)
            case ast.For(target=target, iter=values) | ast.AsyncFor(target=target, iter=values):
                self._iterate(target, values, scope)
                self._block([*node.body, *node.orelse], scope)
            case ast.With(items=items) | ast.AsyncWith(items=items):
                for item in items:
                    entered = self._value(item.context_expr, scope)
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, entered, scope)
                self._block(node.body, scope)
            case ast.Return(value=value) if value is not None:
                scope.returned |= self._value(value, scope)
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    if name not in self._names:
                        self._bind(ast.Name(name), _NOTHING, scope)
            case ast.expr():
                self._value(node, scope)
            case _:
                inner_blocks = []
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                        inner_blocks.append(child)
                    elif isinstance(child, ast.expr):
                        self._value(child, scope)
                self._block(inner_blocks, scope)

    def _function(self, node: _Function, scope: _Scope) -> _Scope:
        inner = self._scopes.setdefault(node, _Scope(scope))
        for argument in _arguments(node.args):
            inner.values.setdefault(argument.arg, _NOTHING)
        for default in [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]:
            self._value(default, scope)
        if isinstance(node, ast.Lambda):
            inner.returned |= self._value(node.body, inner)
        else:
            self._block(node.body, inner)
        return inner

    def _assign(self, target: ast.expr, value: ast.expr, scope: _Scope) -> None:
        if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
            for one, its in zip(target.elts, value.elts, strict=False):
                self._assign(one, its, scope)
            return
        self._bind(target, self._value(value, scope), scope)

    def _iterate(self, target: ast.expr, values: ast.expr, scope: _Scope) -> None:
        """Bind `for got, wanted in [(f(1), 2), (f(2), 3)]` row by row, if the rows are written out."""
        whole = self._value(values, scope)
        rows = self._literals.get(values.id, values) if isinstance(values, ast.Name) else values
        if isinstance(rows, ast.List | ast.Tuple) and all(isinstance(row, ast.List | ast.Tuple) for row in rows.elts):
            for row in rows.elts:
                self._assign(target, row, scope)
        else:
            self._bind(target, whole, scope)

    def _bind(self, target: ast.expr, value: _Value, scope: _Scope) -> None:
        match target:
            case ast.Name(id=name):
                holder = scope.values
                holder[name] = holder.get(name, _NOTHING) | value
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    self._bind(part, value, scope)
            case ast.Starred(value=inner):
                self._bind(inner, value, scope)
            case ast.Subscript(value=base, slice=index):
                self._put_into(base, value | self._value(index, scope), scope)
            case ast.Attribute(value=base):
                self._put_into(base, value, scope)

    def _put_into(self, base: ast.expr, value: _Value, scope: _Scope) -> None:
        """Record `base.x = value`, `base[i] = value`, `base.append(value)`."""
        while isinstance(base, ast.Attribute | ast.Subscript):
            base = base.value
        if isinstance(base, ast.Name) and (holder := scope.find(base.id)) is not None:
            holder.values[base.id] |= _Value(value.returned, frozenset(), value.data, value.functions)

    def _value(self, node: ast.AST, scope: _Scope) -> _Value:
        value = self._evaluate(node, scope)
        self._seen |= value.names
        return value

    def _evaluate(self, node: ast.AST, scope: _Scope) -> _Value:
        match node:
            case ast.Constant(value=constant):
                return _NOTHING if constant is None else _DATA
            case ast.Name(id=name):
                if (holder := scope.find(name)) is not None:
                    value = holder.values[name]
                    return value if value.names or value.functions else value | _DATA
                return _Value(made=frozenset({name})) if name in self._names else _NOTHING
            case ast.Attribute(value=base):
                value = self._value(base, scope)
                if isinstance(base, ast.Name) and base.id in self._solutions:
                    return _Value(made=frozenset({node.attr} & self._names))
                return _Value(returned=value.names, data=value.data)
            case ast.Call():
                return self._call(node, scope)
            case ast.Lambda():
                self._function(node, scope)
                return _Value(functions=frozenset({node}))
            case ast.Subscript(value=base, slice=index):
                return self._value(base, scope) | _Value(returned=self._value(index, scope).returned)
            case ast.BinOp(left=left, right=right):
                one, other = self._value(left, scope), self._value(right, scope)
                if one.returned or other.returned:
                    self._beside(one, other, node)
                return one | other
            case ast.Compare(left=left, comparators=others):
                values = [self._value(part, scope) for part in (left, *others)]
                for one, other in pairwise(values):
                    self._beside(one, other, node)
                return _Value(returned=frozenset().union(*(value.names for value in values)))
            case ast.NamedExpr(target=target, value=inner):
                value = self._value(inner, scope)
                self._bind(target, value, scope)
                return value
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                inside = self._scopes.setdefault(node, _Scope(scope))
                for part in node.generators:
                    self._iterate(part.target, part.iter, inside)
                    for condition in part.ifs:
                        self._value(condition, inside)
                made = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
                return _union(self._value(part, inside) for part in made)
        return _union(self._value(part, scope) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr))

    def _call(self, node: ast.Call, scope: _Scope) -> _Value:
        function = self._value(node.func, scope)
        parts = [*node.args, *(keyword.value for keyword in node.keywords)]
        given = [self._value(part, scope) for part in parts]
        everything = _union(given)
        for local in function.functions:
            self._pass(local, node, given, scope)
        method = ""
        if isinstance(node.func, ast.Attribute):
            base = node.func.value
            method = "" if isinstance(base, ast.Name) and base.id in self._solutions else node.func.attr
        if method in _MUTATORS:
            self._put_into(node.func, everything, scope)
        if not function.names or method in _PLAIN_METHODS - _COMPARING_METHODS:
            if function.functions:
                return _union(self._scopes[f].returned for f in function.functions if f in self._scopes)
            # A function of the program may be called by the function it is passed to: map(f, ...), sorted(..., key=f).
            classes = frozenset(filter(is_class, everything.made))
            handed = everything.made - classes
            if handed and everything.data and (others := everything.returned - handed):
                self._conflict(handed, others, node)
            returned = function.names | everything.returned | handed
            return _Value(returned, classes, function.data or everything.data)
        others = everything.returned - function.names
        if everything.data and method in _COMPARING_METHODS:
            self._conflict(frozenset({f".{method}"}), function.names, node)
        elif everything.data and others:
            self._conflict(function.names, others, node)
        if isinstance(node.func, ast.Name) and all(map(is_class, function.made)) and not function.returned:
            return _Value(returned=others, made=function.made)
        return _Value(returned=function.names | others)

    def _pass(self, function: ast.AST, node: ast.Call, given: list[_Value], scope: _Scope) -> None:
        """Bind arguments to the parameters of a function of the tests."""
        assert isinstance(function, _Function)
        inner = self._scopes.setdefault(function, _Scope(scope))
        names = [argument.arg for argument in _arguments(function.args)]
        spread = any(isinstance(part, ast.Starred) for part in node.args) or any(k.arg is None for k in node.keywords)
        for position, value in enumerate(given):
            keyword = node.keywords[position - len(node.args)].arg if position >= len(node.args) else None
            unknown = spread or (keyword is None and position >= len(names))
            for name in names if unknown else [keyword or names[position]]:
                inner.values[name] = inner.values.get(name, _NOTHING) | value

    def _beside(self, one: _Value, other: _Value, node: ast.AST) -> None:
        """Two of the program's objects, by different names: decide which one is judged."""
        if one.names and other.names and one.names != other.names:
            first, second = one.names - other.names, other.names - one.names
            if not (first and second):  # Bag(f(1)) == Bag([2])
                self._conflict(one.names & other.names, first or second, node)
            elif first <= self._library and not second <= self._library:  # approx(2) == f(1)
                self._conflict(first, second, node)
            else:
                self._conflict(second, first, node)

    def _conflict(self, decides: frozenset[str], judged: frozenset[str], node: ast.AST) -> None:
        self.conflicts.append(Conflict(decides, judged, ast.unparse(node)))


def _union(values: Iterable[_Value]) -> _Value:
    found = _NOTHING
    for value in values:
        found |= value
    return found


def _arguments(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    yield from (argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None)
