"""Small changes of a program, one at a time: the mutants of a source file.

An operator is a method of `_Finder` named after the syntax node that it changes. Left alone are
texts that change no behaviour: docstrings, annotations, messages (f-strings, what is raised and
logged), decorators, imports, asserts that narrow a type, and what only a GPU tells apart.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

Key = tuple[str, str, str, str]
"""File, qualified function, its text before and after: what identifies a mutant as lines move."""

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Pow: ast.Mult,
}
SWAPPED_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
WITHOUT_EFFECT = ("logger.", "warnings.", "torch.cuda.")
"""Calls whose result is not used: what they do is said to somebody, or to a GPU."""
KEPT_KEYWORDS = frozenset(
    # Of zip, which tells what is so anyway; of a locale that is not UTF-8.
    {"strict", "encoding"}
    # Of tensors and kernels, where only a GPU shows the difference.
    | {"device", "pin_memory", "non_blocking", "num_warps", "num_stages"}
)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change: the bytes from `start` to `end` of a file become `replacement`.

    `lines` are those of which one must run for the change to matter; `names` stand for them where
    the change is in no function: what the statement defines.
    """

    file: str
    function: str
    line: int
    original: str
    mutated: str
    start: int
    end: int
    replacement: str
    lines: tuple[int, ...]
    names: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        return (self.file, self.function, self.original, self.mutated)

    def apply(self, source: str) -> str:
        """The source with the change."""
        text = source.encode()
        return (text[: self.start] + self.replacement.encode() + text[self.end :]).decode()


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Every mutant of a file, whose name is `file`; each reads differently."""
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return list({(mutant.line, mutant.key): mutant for mutant in finder.found}.values())


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, source: str) -> None:
        self.file = file
        self.text = source.encode()
        self.scope: list[str] = []
        self.found: list[Mutant] = []
        self.statement: ast.stmt | None = None
        self.function: ast.FunctionDef | ast.AsyncFunctionDef | None = None
        self.in_signature = False

    @cached_property
    def line_starts(self) -> list[int]:
        starts = [0]
        for line in self.text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    # -- what is found

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.line_starts[node.lineno - 1] + node.col_offset
        return start, self.line_starts[node.end_lineno - 1] + node.end_col_offset

    def change(self, node: ast.expr | ast.stmt, *replacements: str) -> None:
        """Note that the node's text may be any of these instead."""
        start, end = self.span(node)
        first = self.line_starts[node.lineno - 1]
        last = self.line_starts[node.end_lineno or node.lineno]
        before, after = self.text[first:start], self.text[end:last]
        for replacement in replacements:
            self.found.append(
                Mutant(
                    file=self.file,
                    function=".".join(self.scope),
                    line=node.lineno,
                    original=_one_line(self.text[first:last]),
                    mutated=_one_line(before + replacement.encode() + after),
                    start=start,
                    end=end,
                    replacement=replacement,
                    lines=self._lines(node),
                    names=self._names(),
                )
            )

    def _lines(self, node: ast.expr | ast.stmt) -> tuple[int, ...]:
        if self.function is not None and self.in_signature:
            last = self.function.end_lineno or self.function.lineno
            return tuple(range(self.function.body[0].lineno, last + 1))
        if self.function is None:
            return ()
        return tuple(range(node.lineno, (node.end_lineno or node.lineno) + 1))

    def _names(self) -> tuple[str, ...]:
        if self.function is not None or self.statement is None:
            return ()
        stores = (n for n in ast.walk(self.statement) if isinstance(n, ast.Name))
        return tuple(n.id for n in stores if isinstance(n.ctx, ast.Store))

    # -- where we are

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            outer, self.statement = self.statement, node
            super().visit(node)
            self.statement = outer
        else:
            super().visit(node)

    def visit_all(self, nodes: Sequence[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self.function = self.function, node
        self.scope.append(node.name)
        self.in_signature = True
        self.visit_all([*node.args.defaults, *node.args.kw_defaults])
        self.in_signature = False
        self.visit_all(node.body)
        self.scope.pop()
        self.function = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - ast's name

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.append(node.name)
        self.visit_all(node.body)
        self.scope.pop()

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A message."""

    # -- statements

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.change(node, "pass")

    def visit_Assert(self, node: ast.Assert) -> None:
        if not _narrows(node.test):
            self.change(node, "pass")
            self.visit(node.test)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            if ast.unparse(node.value.func).startswith(WITHOUT_EFFECT):
                return
            self.change(node, "pass")
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(t, ast.Name) and t.id.startswith("__") for t in node.targets):
            return
        if all(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets):
            self.change(node, "pass")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.change(node, "pass")
        if type(node.op) in ARITHMETIC:
            swapped = ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value)
            self.change(node, ast.unparse(swapped))
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self.change(node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        is_none = node.value is None or ast.unparse(node.value) == "None"
        if self.function is not None and is_none and node is self.function.body[-1]:
            return
        if is_none or isinstance(node.value, ast.Constant):
            # Without it, the function goes on.
            self.change(node, "pass")
        else:
            self.change(node, "return None")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self.change(node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.change(node, "break", "pass")

    # -- expressions

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._negate(condition)
            self.change(condition, "True")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for index, op in enumerate(node.ops):
            for other in COMPARISONS[type(op)]:
                ops = [*node.ops[:index], other(), *node.ops[index + 1 :]]
                self.change(node, _in_brackets(ast.Compare(node.left, ops, node.comparators)))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in ARITHMETIC:
            other = ARITHMETIC[type(node.op)]()
            self.change(node, _in_brackets(ast.BinOp(node.left, other, node.right)))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.change(node, _in_brackets(ast.BoolOp(other, node.values)))
        for index in range(len(node.values)):
            left = [*node.values[:index], *node.values[index + 1 :]]
            rest = left[0] if len(left) == 1 else ast.BoolOp(node.op, left)
            self.change(node, _in_brackets(rest))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self.change(node, _in_brackets(node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.change(node, str(not node.value))
        elif isinstance(node.value, int):
            self.change(node, str(node.value + 1), str(node.value - 1) if node.value else "(-1)")
        elif isinstance(node.value, float):
            self.change(node, f"{node.value * 2 or 1.0!r}")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        index = ast.unparse(node.slice)
        if index in ("0", "-1"):
            self.change(node.slice, "-1" if index == "0" else "0")
            self.visit(node.value)
        else:
            self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant):
                self.change(bound, f"{ast.unparse(bound)} + 1")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "cast":
            self.visit_all(node.args[1:])
            return
        if name in SWAPPED_CALLS:
            self.change(node.func, SWAPPED_CALLS[name])
        for index, keyword in enumerate(node.keywords):
            if keyword.arg in KEPT_KEYWORDS:
                continue
            self.visit(keyword.value)
            if keyword.arg is not None:
                rest = [*node.keywords[:index], *node.keywords[index + 1 :]]
                self.change(node, ast.unparse(ast.Call(node.func, node.args, rest)))
        self.visit_all([node.func, *node.args])

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Compare | ast.UnaryOp | ast.Constant):
            self.change(test, f"(not ({ast.unparse(test)}))")


def _in_brackets(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def _one_line(text: bytes) -> str:
    return " ".join(text.decode().split())


def _narrows(test: ast.expr) -> bool:
    """Whether an assert only tells a type checker what is known."""
    parts: Iterator[ast.expr] = iter(test.values if isinstance(test, ast.BoolOp) else [test])
    return all(
        (isinstance(p, ast.Compare) and isinstance(p.ops[0], ast.IsNot))
        or (isinstance(p, ast.Call) and ast.unparse(p.func) == "isinstance")
        for p in parts
    )
