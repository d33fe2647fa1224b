"""Every regular expression of the project takes linear time on text that is made to slow it down.

The expressions are collected from the source of all rooms. Texts are derived from an example that an
expression matches: its beginning, and then a part of it, or a letter, many times.
"""

import ast
import functools
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from re import _compiler, _parser  # type: ignore[attr-defined]  Python's own, which know all of its syntax

REPOSITORY = Path(__file__).parents[1]
ROOMS = ("benchmarks", "bin", "cache", "compile", "examples", "runtime", "server")
# Methods of `re`. Those that find all matches are tested as `finditer`.
METHODS = {name: name for name in ("match", "fullmatch", "search")} | dict.fromkeys(
    ("sub", "subn", "split", "findall", "finditer"), "finditer"
)
FLAG_POSITION = {"sub": 4, "subn": 4, "split": 3}  # among the arguments of functions of `re`; 2 for the others
PLACEHOLDER = "word"  # for parts of an expression that are known at run time only
SIZE = 3_000  # letters of a text
MOST_TIMES = 20  # the time of a linear expression; the slowest of the project takes 6, a quadratic one hundreds
LETTERS = "a0_ \n-./:,@"  # repeated in every place
CUT = "\1"  # stands around the repetitions of an example
REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


@dataclass(frozen=True)
class Expression:
    """A regular expression, the method that applies it, and the file that holds it."""

    place: str
    pattern: str
    flags: int = 0
    method: str = "finditer"

    def measure(self, text: str) -> float:
        """Seconds of processor time, which a busy machine does not change."""
        apply = getattr(re.compile(self.pattern, self.flags), self.method)
        began = time.thread_time()
        for _ in apply(text) if self.method == "finditer" else [apply(text)]:
            pass
        return time.thread_time() - began


# -- expressions


def collect_expressions(root: Path) -> list[Expression]:
    trees = {
        path.relative_to(root).as_posix(): ast.parse(path.read_text())
        for room in ROOMS
        for path in sorted((root / room).rglob("*.py"))
    }
    constants = {place: dict(list_constants(tree)) for place, tree in trees.items()}
    everywhere = {name: value for values in constants.values() for name, value in values.items()}  # for imported names
    calls = [(place, node) for place, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    used: dict[str, set[str]] = {}  # methods called on a constant, by its name
    for _, call in calls:
        match call.func:
            case ast.Attribute(ast.Name(name), method) if method in METHODS:
                used.setdefault(name, set()).add(METHODS[method])
    names = {id(value): name for values in constants.values() for name, value in values.items()}
    found: dict[Expression, None] = {}
    for place, call in calls:
        methods = used.get(names.get(id(call), ""), {*METHODS.values()})
        for pattern, flags, method in read_call(call, methods):
            text = fold(pattern, everywhere | constants[place])
            found[Expression(place, text, evaluate(flags), method)] = None
    return list(found)


def list_constants(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Names and values that a module assigns at its top level."""
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name(name)], value):
                yield name, value
            case ast.Assign([ast.Tuple(names)], ast.Tuple(values)):
                pairs = zip(names, values, strict=True)
                yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))


def read_call(call: ast.Call, methods: set[str]) -> Iterator[tuple[ast.expr, ast.expr | None, str]]:
    """Pattern, flags and method of each use of a regular expression in a call. methods: of a compiled expression."""
    options = {keyword.arg: keyword.value for keyword in call.keywords}
    match call.func:
        case ast.Attribute(ast.Name("re"), "compile"):
            flags = call.args[1] if len(call.args) > 1 else options.get("flags")
            yield from ((call.args[0], flags, method) for method in sorted(methods))
        case ast.Attribute(ast.Name("re"), name) if name in METHODS:
            at = FLAG_POSITION.get(name, 2)
            flags = call.args[at] if len(call.args) > at else options.get("flags")
            yield call.args[0], flags, METHODS[name]
        case _ if "pattern" in options:  # of msgspec and pydantic, which search
            yield options["pattern"], None, "search"


def fold(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    """The text of a constant expression, with a placeholder for what is not constant."""
    match node:
        case ast.Constant(str() as text):
            return text
        case ast.Constant(bytes() as content):
            return content.decode("latin-1")
        case ast.JoinedStr(parts):
            return "".join(fold(part, constants) for part in parts)
        case ast.FormattedValue(ast.Name(name)) | ast.Name(name) if name in constants:
            return fold(constants[name], constants)
    return PLACEHOLDER


def evaluate(flags: ast.expr | None) -> int:
    return int(eval(compile(ast.Expression(flags), "flags", "eval"), {"re": re})) if flags else 0


# -- texts


def make_texts(expression: Expression) -> list[str]:
    """Texts of about SIZE letters that slow a careless expression down, each before a letter that none expects."""
    items = list(_parser.parse(expression.pattern, expression.flags))
    tokens = [token for token in make_example(items, {}).split(CUT) if token]
    starts = ["".join(tokens[:end]) for end in range(len(tokens))]
    parts = {"".join(tokens[begin : begin + count]) for begin in range(len(tokens)) for count in (1, 2, 3)}
    return [start + part * (SIZE // len(part)) + "\0" for start in starts for part in sorted({*parts, *LETTERS})]


def make_example(items: list, groups: dict[int, str]) -> str:
    """A short text that the items match. groups: examples of numbered groups before them, to which theirs are added."""
    parts = []
    for item in items:
        kind, value = str(item[0]), item[1]
        if kind in REPEATS:
            body = make_example(list(value[2]), groups)
            parts.append(CUT + (body.replace(CUT, "") * value[0] if value[0] > 1 else body) + CUT)
        elif kind == "SUBPATTERN":
            groups[value[0]] = make_example(list(value[3]), groups)
            parts.append(groups[value[0]])
        elif kind == "BRANCH":
            parts.append(make_example(list(value[1][0]), groups))
        elif kind == "GROUPREF":
            parts.append(groups.get(value, ""))
        elif kind not in ("AT", "ASSERT", "ASSERT_NOT"):
            matcher = _compiler.compile(_parser.SubPattern(_parser.State(), [item]))
            letters = (*LETTERS, *map(chr, (*range(ord(" "), 0x3000), *range(0xD800, 0xD810))))
            parts.append(next(filter(matcher.fullmatch, letters)))
    return "".join(parts)


# -- times


@functools.cache
def measure_linear() -> float:
    """Seconds of an expression that takes each letter once, in a group of two branches."""
    return min(Expression("", r"(?:.|\n)*", method="fullmatch").measure("a0_ \n" * (SIZE // 5)) for _ in range(50))


def find_slow_text(expression: Expression) -> str | None:
    """The first letters of a text that takes too long, None if there is none."""
    most = MOST_TIMES * measure_linear()
    return next((text[:80] for text in make_texts(expression) if expression.measure(text) > most), None)


def test_regular_expressions_are_linear():
    expressions = collect_expressions(REPOSITORY)
    assert len(expressions) > 50
    assert {one: text for one in expressions if (text := find_slow_text(one))} == {}


def test_quadratic_expression_is_found():
    assert find_slow_text(Expression("users of URLs, as an attack found it", r"([a-z0-9+.-]+)://([^/\s]*)@"))
