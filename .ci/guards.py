"""Rules of the package's structure that no linter knows; `make lint` runs them.

    .venv/bin/python .ci/guards.py [--lower]

circle: no module imports another that imports it, directly or through others; imports in functions and those for type
    checking count.
layer: a room imports the rooms that its row allows, in the table of docs/development/architecture.md.
door: a room is a folder of the package, or the core, which is the files beside the folders; the other rooms import at
    most DOORS of its names, and OF_THE_CORE of the core's. A name counts once, by whatever module it comes; of a module
    that is imported, the names that are used count.
class: no public class has the name of another.
constant: nor has a public constant.
function: nor has a public function, but for routes of the API, and for modules that play the same role (ROLES).
module: no module has the name of another, unless both play the same role in their rooms (ROLES).
parameter: no docstring describes a parameter in the words of another docstring; "see ..." says where the words are.
dialect: only store/dialects.py compares the name of a database.
word: some words (WORDS) say too little for a name or a docstring, and some (NOT_NAMES) for the name of a function, a
    class or a public constant. Error texts may have them.
test: integration and acceptance tests, and what they share, import public paths and doors of rooms alone (TEST_DOORS).

test_imports.txt has the modules that a test imports all the same, and why. A line that is not needed any more fails.

What was there before the rules is counted in guards.txt, by rule and file. A count may only fall: where it rises this
fails, and where it fell it asks for the lower number, which `--lower` writes. That also follows files that were moved
or renamed, as long as the sum of no rule rises.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).resolve().parent.parent
PACKAGE = TOP / "airflow_delayed"
COUNTS = TOP / ".ci" / "guards.txt"
EXCEPTIONS = TOP / ".ci" / "test_imports.txt"
LAYERS = TOP / "docs" / "development" / "architecture.md"
LOWER = ".venv/bin/python .ci/guards.py --lower"

#: Names that several rooms give to a module, because it does the same in each.
ROLES = {"__init__", "admin", "connections", "dispatch", "due_time", "errors", "fifo_cycle", "limits", "plugin"}
ROLES |= {"reporting"}
# frozen dataclasses that a room returns: records
ROLES |= {"clock", "records", "topology", "transport"}
DOORS = 40
#: The most names of the core, which all rooms share.
OF_THE_CORE = 240
#: So many places of a rule in a file are printed.
PRINTED = 10
#: By room, "" for the core: what tests of several rooms may import. All modules of a room: "*".
TEST_DOORS = {
    "": "celery clock delivery errors identity links message nservicebus provider_info",
    "cli": "*",
    "decorators": "*",
    "hooks": "*",
    "notifications": "notifiers",
    "operators": "change custom_dispatch dispatch pause send spark spark_connections topology",
    "rabbitmq": "levels publisher topology transport",
    "sensors": "*",
    "sources": "*",
    "spark": "sink",
    "sqs": "entries queues settings transport",
    "store": "api dispatch.dispatcher dispatch.report policy protocol records schema",
    "testing": "*",
    "triggers": "*",
    "ui": "app hook_pool plugin",
}
#: Folders of tests to which that applies.
TEST_FOLDERS = ("integration", "acceptance", "support")
#: What says more.
WORDS = {
    "told": "reported, logged, described",
    "said": "text, message, reason",
    "meant": "matching, intended, named by",
    "aside": "rejected, dead-lettered, parked",
    "anew": "again, from the beginning",
}

NOT_NAMES = {
    "found": "read, or the noun of what is found",
    "one": "the noun of the thing",
    "known": "remembered, registered, declared",
    "left": "remaining, or the noun of what remains",
    "given": "passed, configured",
    "some": "a number, or the noun",
    "held": "leased, locked, kept",
}
#: The one file that may know databases by their names.
DIALECTS = "store/dialects.py"

#: Where a node has the name that it makes.
_NAMES: dict[type, str] = {ast.ClassDef: "name", ast.FunctionDef: "name", ast.AsyncFunctionDef: "name"}
_NAMES |= {ast.arg: "arg", ast.Name: "id", ast.Attribute: "attr"}

#: By rule and file (or folder).
Counts = Counter[tuple[str, str]]


class Violation(NamedTuple):
    """Something that a rule forbids; it is counted for `file`, and shown where it is."""

    rule: str
    file: str
    place: str
    text: str


class Import(NamedTuple):
    """One import of a module of the package by another, with the names that are used of it."""

    importer: str
    imported: str
    line: int
    names: frozenset[str]


class Package:
    """The modules of a package, parsed."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.trees: dict[str, ast.Module] = {}
        self._files: dict[str, str] = {}
        for file in sorted(folder.rglob("*.py")):
            path = file.relative_to(folder.parent)
            module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
            self.trees[module] = ast.parse(file.read_text(), str(file))
            self._files[module] = path.as_posix()
        self.imports = [one for module in self.trees for one in self._imports(module)]

    def file(self, module: str) -> str:
        return self._files[module]

    def room(self, module: str) -> str:
        """Return the folder below the package; "" for the core, which lies beside the folders."""
        return module.split(".")[1] if self._files[module].count("/") > 1 else ""

    def _imports(self, importer: str) -> Iterator[Import]:
        tree = self.trees[importer]
        used: dict[str, set[str]] = defaultdict(set)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                used[ast.unparse(node.value)].add(node.attr)
        for node in ast.walk(tree):
            base = self._base(importer, node) if isinstance(node, ast.ImportFrom) else ""
            names: dict[str, set[str]] = defaultdict(set)
            for imported, name, alias in self._modules(node, base):
                names[imported] |= {name} if name else used[alias]
            for imported in sorted(names.keys() - {importer}):
                yield Import(importer, imported, node.lineno, frozenset(names[imported]))

    def imported_by(self, tree: ast.Module) -> set[tuple[str, int]]:
        """Return the modules of this package that code outside imports, with the lines."""
        imports = (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)))
        return {(one[0], node.lineno) for node in imports for one in self._modules(node, getattr(node, "module", ""))}

    def _modules(self, node: ast.AST, base: str | None) -> Iterator[tuple[str, str, str]]:
        """Yield each module of this package that a statement imports, a name in it or "" for all, and the alias."""
        for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            path = f"{base}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            # a name is a module or something that is in one
            if path in self.trees:
                yield path, "", alias.asname or alias.name
            elif base in self.trees:
                yield base, alias.name, ""

    def _base(self, importer: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        above = importer.split(".")
        # an __init__ is its folder already
        up = node.level - self._files[importer].endswith("__init__.py")
        return ".".join([*above[: len(above) - up], *([node.module] if node.module else [])])


def circles(package: Package) -> Iterator[Violation]:
    """Find each import that is a part of a circle."""
    imports: dict[str, set[str]] = defaultdict(set)
    for one in package.imports:
        imports[one.importer].add(one.imported)
    for one in package.imports:
        if way := _way(imports, one.imported, one.importer):
            circle = " -> ".join([one.importer, *way])
            text = f"import circle {circle}; move what both need into a module below them, or pass it as an argument"
            file = package.file(one.importer)
            yield Violation("circle", file, f"{file}:{one.line}", text)


def _way(imports: dict[str, set[str]], start: str, end: str) -> list[str] | None:
    """Return a shortest chain of imports from one module to another."""
    ways = {start: [start]}
    for module in (waiting := [start]):
        for imported in sorted(imports[module] - ways.keys()):
            ways[imported] = [*ways[module], imported]
            waiting.append(imported)
    return ways.get(end)


def names_twice(package: Package) -> Iterator[Violation]:
    """Find public classes, constants and functions with the name of another one."""
    places: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    for module, tree in package.trees.items():
        for node in tree.body:
            for rule, name in _public(node):
                places[rule, name].append((package.file(module), node.lineno))
    for (rule, name), found in places.items():
        for file, line in found:
            role = Path(file).stem if rule == "function" and Path(file).stem in ROLES else None
            others = ", ".join(sorted({other for other, _ in found if other != file and Path(other).stem != role}))
            if others:
                text = f"{rule} {name} is in {others} too; name what differs, or begin the name with an underscore"
                yield Violation(rule, file, f"{file}:{line}", text)


def _public(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """Return what a statement of a module makes that is public; the T of generics is not, and no route of the API."""
    made: list[tuple[str, str]] = []
    if isinstance(node, ast.ClassDef):
        made = [("class", node.name)]
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        route = any(re.search(r"\brouter\.\w+\(", ast.unparse(decorator)) for decorator in node.decorator_list)
        made = [] if route else [("function", node.name)]
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
        made = [("constant", name) for name in names if name.isupper() and len(name) > 1]
    yield from (one for one in made if not one[1].startswith("_"))


def modules(package: Package) -> Iterator[Violation]:
    """Find modules with the name of another one."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for module in package.trees:
        file = package.file(module)
        by_name[Path(file).stem].append(file)
    for name, files in by_name.items():
        for file in files if name not in ROLES and len(files) > 1 else ():
            others = ", ".join(other for other in files if other != file)
            text = f"{others} has this name too; name what differs, or add the name of a shared role to ROLES"
            yield Violation("module", file, f"{file}:1", text)


def doors(package: Package) -> Iterator[Violation]:
    """Find what other rooms import of a room that has too many doors."""
    first: dict[str, dict[str, Import]] = defaultdict(dict)
    for one in package.imports:
        if (room := package.room(one.imported)) != package.room(one.importer):
            for name in one.names:
                first[room].setdefault(name, one)
    for room, entered in first.items():
        most = DOORS if room else OF_THE_CORE
        for name, one in entered.items() if len(entered) > most else ():
            text = (
                f"{name} of {one.imported}; other rooms use {len(entered)} names of {room or 'the core'}, at most"
                f" {most} are allowed: use what they use already, or move the code that needs it into that room"
            )
            folder = "/".join(part for part in (package.name, room) if part)
            yield Violation("door", folder, f"{package.file(one.importer)}:{one.line}", text)


def layers(package: Package, page: Path) -> Iterator[Violation]:
    """Find imports between rooms that the page's table does not allow, and rows that do not say what is there."""
    rows = re.findall(r"^\| `?(core|\w+/)`? \|[^|]*\|([^|]*)\|$", page.read_text(), re.MULTILINE)
    allowed = {room.removesuffix("/"): set(re.findall(r"`(\w+)`", cell)) for room, cell in rows}
    unused = {(room, other) for room, others in allowed.items() for other in others}
    for one in package.imports:
        room, other = package.room(one.importer) or "core", package.room(one.imported)
        unused.discard((room, other))
        if other and other != room and other not in allowed.get(room, ()):
            text = f"{room} imports {other}; go by a room that its row in {page.name} allows, or allow it there"
            yield Violation("layer", package.file(one.importer), f"{package.file(one.importer)}:{one.line}", text)
    for room in {package.room(module) or "core" for module in package.trees} ^ allowed.keys():
        text = f"{room} is a row of the table or a room of the package, and not both"
        yield Violation("layer", page.name, page.name, text)
    for room, other in sorted(unused):
        text = f"{room} does not import {other} any more; remove it from the row"
        yield Violation("layer", page.name, page.name, text)


def read_exceptions(file: Path) -> set[tuple[str, str]]:
    """Read which file imports which module beside the doors: a line for each, with file, module and the reason."""
    lines = (line.split(maxsplit=2) for line in file.read_text().splitlines() if not line.startswith("#"))
    return {(name, module) for name, module, _ in lines}


def test_imports(package: Package, tests: Path, exceptions: set[tuple[str, str]]) -> Iterator[Violation]:
    """Find what tests import beside public paths and doors, and exceptions that are not needed any more."""
    unused = set(exceptions)
    for file in (file for folder in TEST_FOLDERS for file in sorted((tests / folder).rglob("*.py"))):
        name = file.relative_to(tests).as_posix()
        for module, line in sorted(package.imported_by(ast.parse(file.read_text(), str(file)))):
            unused.discard((name, module))
            if (name, module) not in exceptions and not _is_door(package, module):
                text = (
                    f"imports {module}: go by a public path, or a door of the room (TEST_DOORS); where neither shows"
                    f" the behaviour, write the reason into {EXCEPTIONS.name}"
                )
                yield Violation("test", f"tests/{name}", f"tests/{name}:{line}", text)
    for name, module in sorted(unused):
        text = f"{name} does not import {module} any more; remove the line"
        yield Violation("test", f".ci/{EXCEPTIONS.name}", f".ci/{EXCEPTIONS.name}", text)


def _is_door(package: Package, module: str) -> bool:
    path = module.split(".", 1)[1] if "." in module else ""
    room, _, name = path.partition(".") if package.room(module) else ("", "", path)
    allowed = TEST_DOORS.get(room, "")
    # a room itself is its folder
    return not name or allowed == "*" or name in allowed.split()


def parameters(package: Package) -> Iterator[Violation]:
    """Find parameters that several docstrings describe in the same words."""
    places: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for module, tree in package.trees.items():
        for line, text in _docstrings(tree):
            # up to the next field, or the end of the paragraph
            for field in re.finditer(r"^ *(:param .*(?:\n *[^:\s].*)*)", text, re.MULTILINE):
                described = " ".join(field[1].split())
                if not re.match(r":param \w+: see ", described):
                    place = package.file(module), line + text.count("\n", 0, field.start())
                    places[described].append(place)
    for described, same in places.items():
        for file, line in same if len(same) > 1 else ():
            others = ", ".join(f"{other}:{there}" for other, there in same if (other, there) != (file, line))
            text = f"{described!r} is in {others} too; let the others say: see :class:`...`"
            yield Violation("parameter", file, f"{file}:{line}", text)


def dialects(package: Package) -> Iterator[Violation]:
    """Find comparisons of a database's name outside the dialects."""
    for module, tree in package.trees.items():
        file = package.file(module)
        for node in ast.walk(tree) if file != f"{package.name}/{DIALECTS}" else ():
            compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            compared += [node.subject] if isinstance(node, ast.Match) else []
            if any(re.search(r"\bdialect[._]name$", ast.unparse(part)) for part in compared):
                text = f"compares the name of a database; give the dialects in {DIALECTS} what differs"
                yield Violation("dialect", file, f"{file}:{node.lineno}", text)


def words(package: Package) -> Iterator[Violation]:
    """Find words that say too little, in names where they are made and in docstrings."""
    for module, tree in package.trees.items():
        file = package.file(module)
        names = [(name, line, WORDS) for name, line in [(Path(file).stem, 1), *_names(tree)]]
        names += [(name, line, NOT_NAMES) for name, line in _public_names(tree)]
        for name, line, forbidden in names:
            for word in re.findall(r"[a-z]+|[A-Z]+(?![a-z])|[A-Z][a-z]*", name):
                if word.lower() in forbidden:
                    remedy = f"say {forbidden[word.lower()]}, or the noun of the domain"
                    text = f"{word.lower()!r} in the name {name}; {remedy}"
                    yield Violation("word", file, f"{file}:{line}", text)
        # names in double backquotes are those of queues, keys and parameters
        for line, text in [each for first, doc in _docstrings(tree) for each in enumerate(doc.splitlines(), first)]:
            for word in re.findall(rf"\b(?:{'|'.join(WORDS)})\b", re.sub("``.*?``", "", text.lower())):
                remedy = f"{word!r} in a docstring; say {WORDS[word]}, or a subject, a verb and a noun"
                yield Violation("word", file, f"{file}:{line}", remedy)


def _public_names(tree: ast.Module) -> list[tuple[str, int]]:
    """Return the names of functions, methods and classes, and of public constants."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    made = [(node.name, node.lineno) for node in ast.walk(tree) if isinstance(node, kinds)]
    return made + [(name, node.lineno) for node in tree.body for rule, name in _public(node) if rule == "constant"]


def _names(tree: ast.Module) -> list[tuple[str, int]]:
    """Return the names that a module makes: of functions, classes, arguments, variables and attributes."""
    made = (node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", ast.Store()), ast.Store))
    names = {(getattr(node, _NAMES[type(node)]), node) for node in made if type(node) in _NAMES}
    return sorted((name, node.lineno) for name, node in names)


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Return the docstrings, each with the number of its first line."""
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and (text := ast.get_docstring(node, clean=False)):
            yield node.body[0].lineno, text


def violations(folder: Path) -> list[Violation]:
    package = Package(folder)
    rules = (circles, doors, names_twice, modules, parameters, dialects, words)
    found = [one for rule in rules for one in rule(package)]
    if folder == PACKAGE:
        found += layers(package, LAYERS)
        found += test_imports(package, TOP / "tests", read_exceptions(EXCEPTIONS))
    return found


def read(file: Path) -> Counts:
    """Read the counts that are allowed: a line for each, with rule, file and number."""
    lines = (line.split() for line in file.read_text().splitlines())
    return Counter({(rule, name): int(number) for rule, name, number in lines})


def write(file: Path, counts: Counts) -> None:
    file.write_text("".join(f"{rule} {name} {number}\n" for (rule, name), number in sorted(counts.items())))


def main(arguments: list[str] | None = None, *, folder: Path = PACKAGE, counts: Path = COUNTS) -> int:
    """Print what is wrong; return how the process ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lower", action="store_true", help=f"write {counts.name}, if the sum of no rule rises")
    lower = parser.parse_args(arguments).lower
    found = violations(folder)
    now: Counts = Counter((one.rule, one.file) for one in found)
    allowed = read(counts)
    if lower and Counter(rule for rule, _ in now.elements()) <= Counter(rule for rule, _ in allowed.elements()):
        write(counts, now)
        return 0
    for rule, file in sorted(now | allowed):
        old, new = allowed[rule, file], now[rule, file]
        if new > old:
            print(f"{file}: {new} of rule {rule!r}, and {counts.name} allows {old}:")
            places = [f"  {one.place}: {one.text}" for one in found if (one.rule, one.file) == (rule, file)]
            print(*places[:PRINTED], *([f"  and {more} more"] if (more := len(places) - PRINTED) > 0 else ()), sep="\n")
        elif new < old:
            print(f"{file}: {new} of rule {rule!r}, fewer than {old}: lower the number in {counts.name} ({LOWER})")
    if now != allowed:
        print(f"The rules are in .ci/guards.py. After a file was moved or renamed: {LOWER}")
    return int(now != allowed)


if __name__ == "__main__":
    sys.exit(main())
