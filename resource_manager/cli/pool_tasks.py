"""Tasks of an Airflow pool in the source of a DAG, rewritten to ask for GPUs; nothing is imported."""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper, PositionProvider

WITH_GPUS = "with_gpus"
PACKAGE = "resource_manager.airflow"
NO_OPERATORS = {"DAG", "TaskGroup", "Pool"}
OUR_OPERATORS = {"GPUTrainingOperator", "GPUAllocateOperator", "GPUAvailableSensor"}
NOT_LEASED = {
    *("TriggerDagRunOperator", "HITLOperator", "ApprovalOperator", "HITLBranchOperator", "HITLEntryOperator"),
    *("DockerSwarmOperator", "SSHRemoteJobOperator"),
}
"""Operators that `with_gpus` refuses."""
PYTHON_TASKS = {"task", "task.python"}
"""Decorators of which `@task.gpu` is the form with GPUs."""

LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True, slots=True, order=True)
class Unconverted:
    """Line, counted from 1, with a task that has to be rewritten by hand, and why."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Conversion:
    """Rewritten source, the number of tasks rewritten in it, and those that could not be."""

    source: str
    converted: int = 0
    unconverted: tuple[Unconverted, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class _Edit:
    """Replacement of the bytes from `start` to `end`."""

    start: int
    end: int
    text: str = ""


def convert(source: str, pools: Mapping[str, int]) -> Conversion:
    """Return the source with the tasks of these pools asking for GPUs, so many for each slot of the pool.

    Whatever is not part of such a task stays as it is. Raises `ValueError` for a source that is not Python,
    or would not be afterwards.
    """
    try:
        tree = ast.parse(source)  # before libcst, whose parser has no limit of nesting
        wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
        found = _PoolTasks(source.encode(), pools, wrapper, _constants(tree), _slots_elsewhere(tree))
        wrapper.module.visit(found)
    except SyntaxError as error:
        where = "" if error.lineno is None else f" in line {error.lineno}"
        raise ValueError(f"it is not Python: {error.msg}{where}") from None
    except (cst.ParserSyntaxError, RecursionError, MemoryError, KeyError):  # the last hides a recursion
        raise ValueError("it is nested too deeply, or newer than the installed libcst") from None
    line = found.import_line()
    rewritten = _applied(found.source, found.edits if line is None else [line, *found.edits])
    if found.edits:
        _require_python(rewritten)
    return Conversion(rewritten, found.converted, tuple(sorted(found.unconverted)))


def _require_python(rewritten: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first parser told them
        try:
            compile(rewritten, "rewritten", "exec", dont_inherit=True)
        except (SyntaxError, RecursionError, MemoryError):
            raise ValueError("it would be no Python afterwards: rewrite it by hand") from None


def _applied(source: bytes, edits: Iterable[_Edit]) -> str:
    parts, at = [], 0
    for edit in sorted(edits):
        parts += [source[at : edit.start], edit.text.encode()]
        at = edit.end
    return b"".join([*parts, source[at:]]).decode()


class _PoolTasks(cst.CSTVisitor):
    """Edits that the tasks of one source need, collected in a walk over it."""

    def __init__(
        self,
        source: bytes,
        pools: Mapping[str, int],
        wrapper: MetadataWrapper,
        constants: Mapping[str, str],
        slots_elsewhere: tuple[int, int],
    ) -> None:
        super().__init__()
        self.source, self.pools, self.module = source, pools, wrapper.module
        self.edits: list[_Edit] = []
        self.unconverted: list[Unconverted] = []
        self.converted = 0
        self.first_use: int | None = None
        self._spans = wrapper.resolve(ByteSpanPositionProvider)
        self._lines = wrapper.resolve(PositionProvider)
        self._constants = constants
        self._slots_before, self._slots_after = slots_elsewhere
        lines = [line for line in self.module.body if isinstance(line, cst.SimpleStatementLine)]
        self._is_imported = any(_imports_with_gpus(statement) for line in lines for statement in line.body)
        self._is_shadowed = not self._is_imported and WITH_GPUS.encode() in source

    def visit_Call(self, node: cst.Call) -> None:
        arguments = {argument.keyword.value: argument for argument in node.args if argument.keyword}
        if "pool" not in arguments:
            return
        name = _dotted(node.func)
        pool = self._text(arguments["pool"].value)
        if pool is None:
            is_none = _dotted(arguments["pool"].value) == "None"  # Airflow's word for its default pool
            if _makes_tasks(name) and not is_none:
                self._leave(node, f"pool is computed: {self._code(arguments['pool'].value)}")
        elif pool in self.pools:
            self._convert(node, name, arguments, self.pools[pool])

    def _convert(self, node: cst.Call, name: str, arguments: Mapping[str, cst.Arg], gpus_a_slot: int) -> None:
        operator = node.func
        if isinstance(operator, cst.Attribute) and operator.attr.value == "partial":
            operator = operator.value
        last = _dotted(operator).rpartition(".")[2]
        if (reason := self._why_left(node, name, last, "pool_slots" in arguments)) is not None:
            self._leave(node, reason)
            return
        going = [arguments[key] for key in ("pool", "pool_slots") if key in arguments]
        gpus = self._gpus(arguments.get("pool_slots"), gpus_a_slot)
        if name in PYTHON_TASKS:
            self._edit(node.func, "task.gpu")
            self._edit(going[0], f"gpus={gpus}")
            self._remove(node, going[1:])
        else:
            start, end = self._span(operator)
            code = self.source[start:end].decode()
            self.edits.append(_Edit(start, end, f"{WITH_GPUS}({code}, gpus={gpus})"))
            self._remove(node, going)
            self.first_use = start if self.first_use is None else min(start, self.first_use)
        self.converted += 1

    def _why_left(self, node: cst.Call, name: str, last: str, has_slots: bool) -> str | None:
        """Return why the call is left; first what keeps it from being converted, whatever its slots are."""
        if name in PYTHON_TASKS:
            pass
        elif name.split(".")[0] == "task":
            return f"@{name} has no form with GPUs: use @task.gpu, or with_gpus and its operator"
        elif last in OUR_OPERATORS:
            return f"{last} asks for GPUs itself; its pool is its team: take pool away by hand"
        elif last in NOT_LEASED:
            return f"with_gpus refuses {last}: rewrite it by hand, such as in a gpu_lease"
        elif not _is_class(last):
            return f"{name or 'what is called'} is not known to be an operator"
        elif self._is_shadowed:
            return f"the file has a {WITH_GPUS} of its own"
        if line := self._slots_after or (not has_slots and self._slots_before):
            return f"its pool_slots may be what line {line} says: give it to the task itself"
        more = next((argument.value for argument in node.args if argument.star == "**"), None)
        if more is not None and not has_slots:
            return f"pool_slots may be in **{self._code(more)}: give it to the task itself"
        return None

    def visit_DictElement(self, node: cst.DictElement) -> None:
        if self._text(node.key) == "pool" and self._text(node.value) in self.pools:
            self._leave(node, "pool is an entry of a dictionary, such as default_args: name it at each task")

    def visit_Param(self, node: cst.Param) -> None:
        if node.name.value == "pool" and node.default and self._text(node.default) in self.pools:
            self._leave(node, "pool is the default of a function's parameter")

    def visit_Assign(self, node: cst.Assign) -> None:
        for target in node.targets:
            is_pool = isinstance(target.target, cst.Attribute) and target.target.attr.value == "pool"
            if is_pool and self._text(node.value) in self.pools:
                self._leave(node, "pool is set after the task was made")

    def import_line(self) -> _Edit | None:
        """Return the line that imports `with_gpus`, behind the imports above its first use, if one is due."""
        if self.first_use is None or self._is_imported:
            return None
        header = "".join(map(self.module.code_for_node, self.module.header))
        at, newline = len(header.encode()), self.module.default_newline
        for number, statement in enumerate(self.module.body):
            _, end = self._span(statement)
            if end > self.first_use:
                break
            if isinstance(statement, cst.SimpleStatementLine):
                is_docstring = number == 0 and isinstance(statement.body[0], cst.Expr)
                if is_docstring or isinstance(statement.body[-1], cst.Import | cst.ImportFrom):
                    at = LINE_END.search(self.source, end).end()  # type: ignore[union-attr]  # one follows
        return _Edit(at, at, f"from {PACKAGE} import {WITH_GPUS}{newline}")

    def _gpus(self, slots: cst.Arg | None, gpus_a_slot: int) -> str:
        if slots is None:
            return str(gpus_a_slot)
        code = self._code(slots.value)
        if isinstance(slots.value, cst.Integer):
            return str(gpus_a_slot * slots.value.evaluated_value)
        if gpus_a_slot > 1:
            return f"{gpus_a_slot} * ({code})"
        return f"({code})" if slots.value.lpar else code  # whose span is without its parentheses

    def _remove(self, call: cst.Call, going: Sequence[cst.Arg]) -> None:
        """Remove arguments with their commas; a line that had nothing else goes, one with a comment stays."""
        spans: list[tuple[int, int]] = []
        for number, argument in enumerate(call.args):
            if argument in going:
                start, end = self._span(argument)
                if isinstance(argument.comma, cst.Comma):
                    end = self._span(argument.comma)[1]
                is_next = bool(spans) and call.args[number - 1] in going
                if is_next and b"#" not in self.source[spans[-1][1] : start]:
                    start = spans.pop()[0]
                spans.append((start, end))
        self.edits += [_Edit(*self._with_blanks(start, end)) for start, end in spans]

    def _with_blanks(self, start: int, end: int) -> tuple[int, int]:
        """Return the span of arguments to remove, with the blanks or the rest of a line around them."""
        line_start = max(self.source.rfind(newline, 0, start) for newline in (b"\n", b"\r")) + 1
        before = self.source[line_start:start]
        behind = re.compile(rb"[ \t]*(\r\n|\n|\r)?").match(self.source, end)
        assert behind is not None  # it matches nothing, too
        if not before.strip():
            return (line_start if behind[1] else start), behind.end()
        has_comma = self.source[end - 1 : end] == b","
        if has_comma and not behind[1]:
            return start, behind.end()
        kept = before.rstrip() if has_comma else before.rstrip().removesuffix(b",")
        return line_start + len(kept), end

    def _edit(self, node: cst.CSTNode, text: str) -> None:
        self.edits.append(_Edit(*self._span(node), text))

    def _leave(self, node: cst.CSTNode, reason: str) -> None:
        self.unconverted.append(Unconverted(self._lines[node].start.line, reason))

    def _span(self, node: cst.CSTNode) -> tuple[int, int]:
        span = self._spans[node]
        return span.start, span.start + span.length

    def _code(self, node: cst.CSTNode) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()

    def _text(self, node: cst.BaseExpression) -> str | None:
        """Return the text of a literal, or of a name that is nothing but a text; None if unknown."""
        if isinstance(node, cst.SimpleString | cst.ConcatenatedString):
            value = node.evaluated_value
            return value if isinstance(value, str) else None
        return self._constants.get(node.value) if isinstance(node, cst.Name) else None


def _dotted(node: cst.BaseExpression) -> str:
    """Return `a.b.c` of a name or attribute, and an empty text of anything else."""
    if isinstance(node, cst.Attribute):
        return f"{_dotted(node.value)}.{node.attr.value}"
    return node.value if isinstance(node, cst.Name) else ""


def _makes_tasks(name: str) -> bool:
    first, _, _ = name.partition(".")
    _, _, last = name.rpartition(".")
    return _is_class(last) or last == "partial" or first == "task"


def _is_class(name: str) -> bool:
    return re.match("_*[A-Z]", name) is not None and name not in NO_OPERATORS


def _constants(tree: ast.Module) -> dict[str, str]:
    """Return the names to which a statement of the module itself assigns a text, and nothing else a value."""
    bound: Counter[str | None] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            bound[node.id] += not isinstance(node.ctx, ast.Load)
        elif isinstance(node, ast.arg):
            bound[node.arg] += 1
        elif isinstance(node, ast.alias):
            bound[node.asname or node.name] += 1
        else:  # a function, a class, an error that is caught, a pattern
            bound[getattr(node, "name", None)] += 1
    return {
        target.id: line.value.value
        for line in tree.body
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant)
        if isinstance(line.value.value, str)
        for target in line.targets
        if isinstance(target, ast.Name) and bound[target.id] == 1
    }


def _slots_elsewhere(tree: ast.Module) -> tuple[int, int]:
    """Return the last lines that may give tasks `pool_slots` otherwise than the call that makes them does.

    One before it, such as in `default_args`, which that call replaces; and one after it, which replaces the
    call's. 0 stands for none.
    """
    before = after = 0
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Name("setattr"), [_, ast.Constant("pool_slots"), _]):
                after = node.lineno
        if isinstance(node, ast.Attribute) and node.attr == "pool_slots" and isinstance(node.ctx, ast.Store):
            after = node.lineno
        elif isinstance(node, ast.Constant) and node.value == "pool_slots":
            before = node.lineno
        elif isinstance(node, ast.Call) and any(keyword.arg == "pool_slots" for keyword in node.keywords):
            if isinstance(node.func, ast.Attribute) and node.func.attr == "override":
                after = node.lineno
            elif not _makes_tasks(ast.unparse(node.func)):
                before = node.lineno
    return before, after


def _imports_with_gpus(statement: cst.CSTNode) -> bool:
    """Return whether the statement is an import of our `with_gpus` under its own name."""
    return (
        isinstance(statement, cst.ImportFrom)
        and statement.module is not None
        and _dotted(statement.module) == PACKAGE
        and not isinstance(statement.names, cst.ImportStar)
        and any(alias.name.value == WITH_GPUS and alias.asname is None for alias in statement.names)
    )
