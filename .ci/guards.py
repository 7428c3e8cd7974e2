"""Rules of the package's structure that no linter knows; `make lint` runs them.

    .venv/bin/python .ci/guards.py [--lower]

circle: no module imports another that imports it, directly or through others; imports in functions and those for type
    checking count.
class: no public class has the name of another.
constant: nor has a public constant.
module: no module has the name of another, unless both play the same role in their rooms (ROLES).
door: a room is a folder of the package; the others import at most DOORS of its modules or subfolders.
test: integration and acceptance tests, and what they share, import public paths and doors of rooms alone (TEST_DOORS).
word: some words (WORDS) say too little for a name or a docstring. Error texts may have them.

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
LOWER = ".venv/bin/python .ci/guards.py --lower"

#: Names that several rooms give to a module, because it does the same in each.
ROLES = {"__init__", "admin", "connections", "dispatch", "due_time", "errors", "fifo_cycle", "limits", "plugin"}
ROLES |= {"reply", "reporting"}
# frozen dataclasses that a room returns: records
ROLES |= {"clock", "messages_dispatched", "records", "topology", "transport"}
DOORS = 8
#: By room, "" for the core: what tests of several rooms may import. All modules of a room: "*".
TEST_DOORS = {
    "": "clock delivery errors identity links message nservicebus provider_info replies",
    "cli": "*",
    "decorators": "*",
    "hooks": "*",
    "notifications": "callback_run listener missed_run notifiers store_calls",
    "operators": "change custom_dispatch dispatch pause send spark spark_connections topology",
    "rabbitmq": "bridge consumer levels publisher topology transport",
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
    """One import of a module of the package by another."""

    importer: str
    imported: str
    line: int


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

    def room(self, module: str) -> str | None:
        """Return the folder below the package; None for what lies beside the folders."""
        return module.split(".")[1] if self._files[module].count("/") > 1 else None

    def _imports(self, importer: str) -> Iterator[Import]:
        for node in ast.walk(self.trees[importer]):
            base = self._base(importer, node) if isinstance(node, ast.ImportFrom) else ""
            for imported in sorted(self._modules(node, base) - {importer}):
                yield Import(importer, imported, node.lineno)

    def imported_by(self, tree: ast.Module) -> set[tuple[str, int]]:
        """Return the modules of this package that code outside imports, with the lines."""
        imports = (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)))
        return {(name, node.lineno) for node in imports for name in self._modules(node, getattr(node, "module", ""))}

    def _modules(self, node: ast.AST, base: str | None) -> set[str]:
        """Return the modules of this package that a statement imports."""
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # a name is a module or something that is in one
            names = [name if (name := f"{base}.{alias.name}") in self.trees else base or "" for alias in node.names]
        return {*names} & self.trees.keys()

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
    """Find public classes and constants with the name of another one."""
    places: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    for module, tree in package.trees.items():
        for node in tree.body:
            for rule, name in _public(node):
                places[rule, name].append((package.file(module), node.lineno))
    for (rule, name), found in places.items():
        for file, line in found:
            others = ", ".join(sorted({other for other, _ in found} - {file}))
            if others:
                text = f"{rule} {name} is in {others} too; name what differs, or begin the name with an underscore"
                yield Violation(rule, file, f"{file}:{line}", text)


def _public(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """Return the public class or constants that a statement of a module makes; the T of generics is none."""
    if isinstance(node, ast.ClassDef):
        made = [("class", node.name)]
    else:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
        assigns = isinstance(node, ast.Assign | ast.AnnAssign)
        made = [("constant", name) for name in names if assigns and name.isupper() and len(name) > 1]
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
        room = package.room(one.imported)
        if room is not None and room != package.room(one.importer):
            first[room].setdefault(".".join(one.imported.split(".")[:3]), one)
    for room, entered in first.items():
        for door, one in entered.items() if len(entered) > DOORS else ():
            place = f"{package.file(one.importer)}:{one.line}"
            text = (
                f"imports {door}; other rooms import {len(entered)} modules of {room}/, at most {DOORS} are allowed:"
                " import a module that other rooms import already, or let that module pass it on"
            )
            yield Violation("door", door.replace(".", "/"), place, text)


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


def words(package: Package) -> Iterator[Violation]:
    """Find words that say too little, in names where they are made and in docstrings."""
    for module, tree in package.trees.items():
        file = package.file(module)
        for name, line in [(Path(file).stem, 1), *_names(tree)]:
            for word in re.findall(r"[a-z]+|[A-Z][a-z]*", name):
                if word.lower() in WORDS:
                    text = f"{word.lower()!r} in the name {name}; say {WORDS[word.lower()]}, or the noun of the domain"
                    yield Violation("word", file, f"{file}:{line}", text)
        for line, text in _docstrings(tree):
            # names in double backquotes are those of queues, keys and parameters
            for word in re.findall(rf"\b(?:{'|'.join(WORDS)})\b", re.sub("``.*?``", "", text.lower())):
                remedy = f"{word!r} in a docstring; say {WORDS[word]}, or a subject, a verb and a noun"
                yield Violation("word", file, f"{file}:{line}", remedy)


def _names(tree: ast.Module) -> list[tuple[str, int]]:
    """Return the names that a module makes: of functions, classes, arguments, variables and attributes."""
    made = (node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", ast.Store()), ast.Store))
    names = {(getattr(node, _NAMES[type(node)]), node) for node in made if type(node) in _NAMES}
    return sorted((name, node.lineno) for name, node in names)


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and (text := ast.get_docstring(node, clean=False)):
            yield from enumerate(text.splitlines(), node.body[0].lineno)


def violations(folder: Path) -> list[Violation]:
    package = Package(folder)
    found = [one for rule in (circles, names_twice, modules, doors, words) for one in rule(package)]
    if folder == PACKAGE:
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
            print(*(f"  {one.place}: {one.text}" for one in found if (one.rule, one.file) == (rule, file)), sep="\n")
        elif new < old:
            print(f"{file}: {new} of rule {rule!r}, fewer than {old}: lower the number in {counts.name} ({LOWER})")
    if now != allowed:
        print(f"The rules are in .ci/guards.py. After a file was moved or renamed: {LOWER}")
    return int(now != allowed)


if __name__ == "__main__":
    sys.exit(main())
