"""Every regular expression of the project takes linear time on text that is made to slow it down.

The expressions are collected from the source of all rooms and of the page. Texts are derived from each expression: for
every repetition, the letters that it takes, many times, behind what has to come before and before what cannot match.
"""

import ast
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]  Python's own parser, the only one that reads all of its syntax

import pytest

REPOSITORY = Path(__file__).parents[1]
ROOMS = ("benchmarks", "bin", "cache", "compile", "examples", "runtime", "server")
PAGE = REPOSITORY / "server" / "assets" / "page.js"
# Methods of `re`. Those that find all matches are tested as `finditer`.
METHODS = {name: name for name in ("match", "fullmatch", "search")} | dict.fromkeys(
    ("sub", "subn", "split", "findall", "finditer"), "finditer"
)
FLAG_POSITION = {"sub": 4, "subn": 4, "split": 3}  # among the arguments of functions of `re`; 2 for the others
PLACEHOLDER = "word"  # for parts of an expression that are known at run time only
SIZE = 100_000  # letters of a text
SHARE = 8  # the text that the time is compared with is this much shorter
MOST_GROWTH = 3 * SHARE  # of the time; SHARE for a linear expression, its square for a quadratic one
LEAST_SECONDS = 0.002  # shorter times count as this much
UNMATCHED = "\0"  # ends each text: a letter that no expression asks for
LETTERS = "a0_ \n-./:,@"  # tried in every repetition, besides the expression's own letters
REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
CATEGORIES = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}


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


def collect_page_expressions(page: Path) -> list[Expression]:
    """The literals `/…/flags` of a script that are arguments. Python reads those without `\\p` and `\\u{}` alike."""
    literals = re.findall(r"\(/((?:[^/\\\n]|\\.)+)/[a-z]*[,)]", page.read_text())
    return [Expression(page.name, literal) for literal in literals]


# -- texts


def make_texts(expression: Expression, size: int) -> list[str]:
    """Texts of about `size` letters that slow a careless expression down."""
    items = list(_parser.parse(expression.pattern, expression.flags))
    letters = [*dict.fromkeys([*list_literals(items), *LETTERS])]
    texts = {}
    for before, units in list_repetitions(items, "", "", letters):
        for unit in units:
            for start, again in ((before, unit), ("", before + unit), ("", unit)):
                texts[start + again * (size // len(again)) + UNMATCHED] = None
    return list(texts)


def list_literals(items: list) -> Iterator[str]:
    """The letters that an expression names, and the first one of each range."""
    for kind, value in items:
        match str(kind):
            case "LITERAL" | "NOT_LITERAL":
                yield chr(value)
            case "RANGE":
                yield chr(value[0])
            case "IN":
                yield from list_literals(value)
            case "SUBPATTERN":
                yield from list_literals(list(value[3]))
            case "BRANCH":
                yield from (letter for branch in value[1] for letter in list_literals(list(branch)))
            case "ASSERT" | "ASSERT_NOT":
                yield from list_literals(list(value[1]))
            case name if name in REPEATS:
                yield from list_literals(list(value[2]))


def list_repetitions(items: list, before: str, after: str, letters: list[str]) -> Iterator[tuple[str, list[str]]]:
    """For each repetition: an example of what comes before it, and texts to repeat.

    These are the letters that the repetition takes, or an example of it, each alone and with examples of what comes
    after it. `before` and `after` are examples of what surrounds the items.
    """
    groups: dict[int, str] = {}
    examples = [make_example([item], letters, groups) for item in items]
    for at, (kind, value) in enumerate(items):
        start = before + "".join(examples[:at])
        rest = ["".join(examples[at + 1 : end]) for end in range(at + 2, len(items) + 1)]
        rest.append("".join(rest[-1:]) + after)
        match str(kind):
            case "SUBPATTERN":
                yield from list_repetitions(list(value[3]), start, rest[-1], letters)
            case "BRANCH":
                for branch in value[1]:
                    yield from list_repetitions(list(branch), start, rest[-1], letters)
            case name if name in REPEATS:
                body = list(value[2])
                taken = [letter for letter in letters if len(body) == 1 and takes(body[0], letter)]
                units = taken or [make_example(body, letters, groups)]
                yield start, [*units, *(unit + tail for unit in units for tail in rest if tail)]
                yield from list_repetitions(body, start, rest[-1], letters)


def make_example(items: list, letters: list[str], groups: dict[int, str] | None = None) -> str:
    """A short text that the items match. groups: examples of numbered groups before them, to which theirs are added."""
    groups = {} if groups is None else groups
    parts = []
    for item in items:
        kind, value = str(item[0]), item[1]
        if kind in REPEATS:
            parts.append(make_example(list(value[2]), letters, groups) * max(value[0], 1))
        elif kind == "SUBPATTERN":
            groups[value[0]] = make_example(list(value[3]), letters, groups)
            parts.append(groups[value[0]])
        elif kind == "BRANCH":
            parts.append(make_example(list(value[1][0]), letters, groups))
        elif kind == "GROUPREF":
            parts.append(groups.get(value, ""))
        elif kind not in ("AT", "ASSERT", "ASSERT_NOT"):
            parts.append(next(letter for letter in letters if takes(item, letter)))
    return "".join(parts)


def takes(item: tuple, letter: str) -> bool:
    """Whether an item that matches single letters matches this one."""
    kind, value = str(item[0]), item[1]
    match kind:
        case "ANY":
            return letter != "\n"
        case "LITERAL" | "NOT_LITERAL":
            return (letter == chr(value)) == (kind == "LITERAL")
        case "RANGE":
            return value[0] <= ord(letter) <= value[1]
        case "CATEGORY":
            name = str(value).removeprefix("CATEGORY_")
            return bool(re.match(CATEGORIES[name.removeprefix("NOT_")], letter)) != name.startswith("NOT_")
        case "IN":
            negated = any(str(part[0]) == "NEGATE" for part in value)
            return any(takes(part, letter) for part in value) != negated
        case "SUBPATTERN":
            return len(value[3]) == 1 and takes(value[3][0], letter)
    return False


# -- times


def find_slow_text(expression: Expression, size: int = SIZE) -> str | None:
    """The first letters of a text on which the time grows faster than the text; None if there is none."""
    for short, long in zip(make_texts(expression, size // SHARE), make_texts(expression, size), strict=True):
        if (seconds := expression.measure(long)) > LEAST_SECONDS:  # too short to compare otherwise
            most = MOST_GROWTH * max(min(expression.measure(short) for _ in range(3)), LEAST_SECONDS / SHARE)
            if min(seconds, expression.measure(long)) > most:
                return long[:80]
    return None


@pytest.mark.parametrize(
    "expression",
    [*collect_expressions(REPOSITORY), *collect_page_expressions(PAGE)],
    ids=lambda one: f"{one.place}: {one.method} {one.pattern}",
)
def test_regular_expression_is_linear(expression):
    assert find_slow_text(expression) is None


@pytest.mark.parametrize(
    "expression",
    [
        Expression("users of URLs, as an attack found it", r"([a-z0-9+.-]+)://([^/\s]*)@"),
        Expression("queries of URLs", r"(://[^\s?]*)\?[^\s'\")]*"),
        Expression("comments", r"/\*.*?\*/"),
        Expression("two repetitions of the same letter", r"x\d*\d*y", method="match"),
        Expression("a repeated group", r"(?:ab|cd)*!"),
        Expression("a back-reference", r"(a)\1*x"),
        Expression("a part that may begin anywhere", r"a \(.*\) -> .*\{$", method="match"),
    ],
    ids=lambda one: one.place,
)
def test_quadratic_expression_is_found(expression):
    assert find_slow_text(expression, size=24_000)  # a fast processor takes milliseconds for a third of it


def test_expressions_of_all_kinds_are_collected(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "thing.py").write_text(
        'PART = "[a-z]"\n'
        'ONE, OTHER = re.compile(rf"{PART}+", re.ASCII | re.MULTILINE), re.compile(rb"\\d")\n'
        "def use(text, name):\n"
        "    return ONE.fullmatch(text), OTHER.sub(b'', text), re.split(rf'{name}+', text, 0, re.DOTALL)\n"
        'Text = Annotated[str, msgspec.Meta(pattern=r"\\A[0-9]*")]\n'
    )
    place = "cache/thing.py"
    assert set(collect_expressions(tmp_path)) == {
        Expression(place, "[a-z]+", re.ASCII | re.MULTILINE, "fullmatch"),
        Expression(place, r"\d"),
        Expression(place, "word+", re.DOTALL),
        Expression(place, r"\A[0-9]*", method="search"),
    }
