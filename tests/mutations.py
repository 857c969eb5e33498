"""One change at a time to a text of Lua, SQL or Python, each under a name that says where and what."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

SWAPPED = {
    "==": "~=", "~=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "and": "or", "or": "and",
    "AND": "OR", "OR": "AND", "+": "-", "-": "+", "0": "1", "1": "0", "true": "false", "false": "true",
}  # fmt: skip


class Edit(NamedTuple):
    """The replacement of `text[start:end]` by `new`."""

    start: int
    end: int
    new: str
    kind: str


class Mutant(NamedTuple):
    """A text with one edit, named by the kind of the edit and the line where it begins."""

    name: str
    text: str


def mutants(text: str, edits: Iterable[Edit]) -> list[Mutant]:
    names: Counter[str] = Counter()
    result = []
    for start, end, new, kind in sorted(set(edits)):
        line = text[text.rfind("\n", 0, start) + 1 :].lstrip().partition("\n")[0]
        name = f"{kind}: {line}"
        names[name] += 1
        result.append(
            Mutant(f"{name} ({names[name]})" if names[name] > 1 else name, text[:start] + new + text[end:])
        )
    return result


def _swapped(found: re.Match[str], at: int = 0) -> Edit:
    return Edit(at + found.start(), at + found.end(), SWAPPED[found[0]], f"{found[0]} -> {SWAPPED[found[0]]}")


def _masked(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", "_", found[0])


_LUA_APART = re.compile(r"--[^\n]*|'(?:\\.|[^'\\])*'")
_LUA_TOKEN = re.compile(
    r"==|~=|<=|>=|[<>]|\b(?:and|or)\b|(?<=[\w)\]] )[+-](?= )|(?<=[=<>+\-dnr] )(?:[01]|true|false)\b(?!\.)"
)
_LUA_CONDITION = re.compile(r"\b(if|elseif|while)\b(.*?)\b(?:then|do)\b", re.DOTALL)
_LUA_STATEMENT = re.compile(
    r"^ *(?:return\n|(?!local |for |if |elseif |while |return )[\w.]+[^\n=]* = |[\w.]+\()", re.MULTILINE
)
_LUA_FIELD = re.compile(r", ('\w+'),\s(?!')[^,(){}]+(?:\([^()]*(?:\([^()]*\)[^()]*)*\)[^,(){}]*)*(?=[,)}])")
_LUA_KEYS = re.compile(r"redis\.call\('DEL'((?:,\s+[^\s(),]+){2,})\)")


def lua(text: str) -> list[Mutant]:
    code = _LUA_APART.sub(_masked, text)
    edits = [_swapped(found) for found in _LUA_TOKEN.finditer(code)]
    for found in _LUA_CONDITION.finditer(code):
        start, end = found.span(2)
        if re.fullmatch(r"[^=~]*[=~]=[^=~]*", found[2]) and not re.search(r"\b(and|or)\b", found[2]):
            # A test that finds it always true, or never, finds its contrary, too.
            edits = [edit for edit in edits if not (start <= edit.start < end and edit.new in ("==", "~="))]
        words = ("false",) if found[1] == "while" else ("false", "true")
        edits += [Edit(start, end, f" {word} ", f"if {word}") for word in words]
    for found in _LUA_STATEMENT.finditer(code):
        end = code.find("\n", found.start())
        while any(
            code.count(a, found.start(), end) > code.count(b, found.start(), end) for a, b in ("()", "{}")
        ):
            end = code.find("\n", end + 1)
        if not code[: found.start()].rstrip().endswith(","):
            edits.append(Edit(found.start(), end, "", "dropped"))
    edits += [Edit(*found.span(), "", f"without {found[1]}") for found in _LUA_FIELD.finditer(text)]
    for found in _LUA_KEYS.finditer(text):
        for key in re.finditer(r",\s+([^\s(),]+)", found[1]):
            start, end = (found.start(1) + at for at in key.span())
            edits.append(Edit(start, end, "", f"without {key[1]}"))
    return mutants(text, edits)


_STRING = re.compile(
    r'#.*|^ *"""(?:.|\n)*?"""|"""((?:.|\n)*?)"""|"((?:\\.|[^"\\\n])*)"|' r"'(?:\\.|[^'\\\n])*'", re.MULTILINE
)
_SQL = re.compile(
    r"\b(?:SELECT|UPDATE|DELETE FROM|WHERE|AND|OR|CASE|WHEN|JOIN|ORDER BY)\b|\w [=<>]+ (?:[:{_]|'')"
)
_SQL_TOKEN = re.compile(
    r"(?<= )(?:(?:<=|>=|[<>])(?! \{+now)|AND|OR)(?=\s)"
    r"|(?<=LIMIT )1|(?<=THEN )[01]|(?<=ELSE )[01]|(?<=, )0(?=\))"
)
_SQL_WORD = re.compile(
    r"\b(WHERE|AND|OR|ON|WHEN|THEN|ELSE|END|ORDER BY|GROUP BY|HAVING|LIMIT|UNION|LEFT|CROSS|JOIN|FROM|SET"
    r"|SELECT|RETURNING)\b|$"
)
_SQL_SET = re.compile(r", (\w+) = [^'\n]*?(?:''[^'\n]*?)*(?=, \w+ =|,? *$| WHERE)", re.MULTILINE)


def sql(text: str) -> list[Mutant]:
    """Return the mutants of the SQL in the strings of a Python file."""
    edits: list[Edit] = []
    for string in _STRING.finditer(text):
        group = 1 if string[1] is not None else 2
        if string[group] and _SQL.search(string[group]):
            query = re.sub(r"\{(?!now)[^{}]*\}", _masked, string[group])
            edits += (
                edit._replace(start=edit.start + string.start(group), end=edit.end + string.start(group))
                for edit in _of_query(query)
            )
    return mutants(text, edits)


def _of_query(query: str) -> Iterator[Edit]:
    yield from map(_swapped, _SQL_TOKEN.finditer(query))
    for found in re.finditer(r"(?<=ORDER BY )([\w.]+)( DESC)?", query):
        yield Edit(*found.span(), found[1] if found[2] else f"{found[1]} DESC", "other order")
    for found in _SQL_SET.finditer(query):
        yield Edit(*found.span(), "", f"without {found[1]}")
    before, at = "WHERE", 0
    for word in _SQL_WORD.finditer(query):
        if before in ("WHERE", "AND", "OR", "ON", "WHEN"):
            term = query[at : word.start()]
            opened = len(term) - len(term.lstrip(" \n(")) if term.count("(") > term.count(")") else 0
            closed = len(term) if term.count(")", opened) <= term.count("(", opened) else term.rindex(")")
            term = term[opened:closed].strip()
            start = query.index(term, at)
            is_whole = term.count("(") == term.count(")") and not re.match(r",|.* = CASE$|1 = 1$", term)
            if is_whole and re.search(r" (?:[<>=]+|IS|IN) ", term):
                yield Edit(
                    start, start + len(term), "1 = 0" if "OR" in (before, word[0]) else "1 = 1", "no term"
                )
        before, at = word[0], word.end()


_CONTRARY = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip
_NODES = {"drop": ast.stmt, "swap": ast.Compare, "false": ast.expr, "true": ast.expr}


def python(text: str, function: str, change: str) -> str:
    """Return the text of a module with one change in a function.

    The change is `drop STATEMENT`, `false CONDITION`, `true CONDITION` or `swap COMPARISON`, of which the
    first words are given, `without WORDS`, or `OLD WORDS -> NEW WORDS`.
    """
    scope: ast.AST = ast.parse(text)
    for name in function.split("."):
        scope = next(
            node for node in ast.walk(scope) if getattr(node, "name", "") == name and hasattr(node, "body")
        )
    place = _places(text)
    kind, _, words = change.partition(" ")
    if kind not in _NODES:
        old, _, new = (words, "", "") if kind == "without" else change.partition(" -> ")
        start = text.index(old, *place(scope))
        return text[:start] + new + text[start + len(old) :]
    nodes = [node for node in ast.walk(scope) if isinstance(node, _NODES[kind]) and node is not scope]
    chosen = min(
        (
            node
            for node in nodes
            if len(words) <= len(text[slice(*place(node))]) and text.startswith(words, place(node)[0])
        ),
        key=lambda node: place(node)[1] - place(node)[0],
    )
    start, end = place(chosen)
    new = {"drop": "pass", "false": "False", "true": "True"}.get(kind, "")
    if isinstance(chosen, ast.Compare) and kind == "swap":
        new = ast.unparse(ast.Compare(chosen.left, [_CONTRARY[type(chosen.ops[0])]()], chosen.comparators))
    return text[:start] + new + text[end:]


def _places(text: str) -> Callable[[ast.AST], tuple[int, int]]:
    """Return a function that tells where in the text a node begins and ends."""
    lines = text.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]

    def at(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    return lambda node: (at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset))  # type: ignore[attr-defined]
