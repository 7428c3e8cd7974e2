"""The guards of the package's structure, on small packages that are made up; and on the package itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import guards
import pytest


@pytest.fixture
def package(tmp_path: Path):
    """Make a package: package({"store/api.py": "import house.store.rows"})."""

    def make(files: dict[str, str]) -> Path:
        for name, text in files.items():
            file = tmp_path / "house" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path / "house"

    return make


def found(folder: Path, rule: str) -> list[tuple[str, str]]:
    """Return places and texts."""
    return [(one.place, one.text) for one in guards.violations(folder) if one.rule == rule]


@pytest.mark.parametrize(
    "there, back",
    [
        ("import house.b", "import house.a"),
        ("from house import b", "from house.a import thing"),
        ("from . import b", "from .a import thing"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.b", "import house.a"),
        ("def work():\n    from house.b import thing", "import house.a"),
    ],
)
def test_a_circle_of_imports(package, there, back):
    circles = found(package({"a.py": there, "b.py": back, "c.py": "import house.a"}), "circle")
    assert [place for place, _ in circles] == [f"house/a.py:{1 + there.count(chr(10))}", "house/b.py:1"]
    assert "circle house.a -> house.b -> house.a; move what both need" in circles[0][1]


def test_a_circle_through_rooms_and_none_where_there_is_none(package):
    files = {"x/__init__.py": "", "x/a.py": "from ..y import b", "y/b.py": "from house.z import thing", "z.py": ""}
    assert found(package(files), "circle") == []
    (_, text), *others = found(package({"z.py": "from house.x.a import thing"}), "circle")
    assert "house.x.a -> house.y.b -> house.z -> house.x.a" in text
    assert len(others) == 2


def test_a_public_class_twice(package):
    same = "class _Own: ...\nclass Place: ..."
    classes = found(package({"a.py": same, "b.py": same, "c.py": "from house.a import Place"}), "class")
    assert [place for place, _ in classes] == ["house/a.py:2", "house/b.py:2"]
    assert "class Place is in house/b.py too; name what differs" in classes[0][1]


def test_a_module_twice_unless_it_is_a_role(package):
    names = ("x/checks.py", "y/checks.py", "x/transport.py", "y/transport.py", "x/__init__.py", "y/__init__.py")
    modules = found(package(dict.fromkeys(names, "")), "module")
    assert [place for place, _ in modules] == ["house/x/checks.py:1", "house/y/checks.py:1"]
    assert "or add the name of a shared role to ROLES" in modules[0][1]


def test_a_room_with_too_many_doors(package):
    rows = {f"store/row{number}.py": "" for number in range(guards.DOORS + 1)}
    inside = {"store/api.py": "\n".join(f"from house.store import row{number}" for number in range(9))}
    enter = [f"from house.store.row{number} import thing" for number in range(9)]
    folder = package({**rows, **inside, "a.py": "\n".join(enter[:4]), "ui/b.py": "\n".join(enter[2:8])})
    assert found(folder, "door") == []
    package({"ui/c.py": f"\n{enter[8]}"})
    doors = found(folder, "door")
    assert len(doors) == 9
    assert doors[-1][0] == "house/ui/c.py:2"
    assert "imports house.store.row8; other rooms import 9 modules of store/, at most 8 are allowed" in doors[-1][1]


def test_what_lies_in_a_folder_of_a_room_is_one_door(package):
    parts = {f"store/dispatch/part{number}.py": "" for number in range(9)}
    entering = "\n".join(f"import house.store.dispatch.part{number}" for number in range(9))
    assert found(package({**parts, "a.py": entering}), "door") == []


@pytest.mark.parametrize(
    "text, line",
    [
        ("def set_aside(): ...", 1),
        ("def f(meant): ...", 1),
        ("class Told: ...", 1),
        ("class C:\n    def f(self):\n        self.what_was_said = 1", 3),
        ("for said in (): ...", 1),
        ("told: int = 1", 1),
        ('def f():\n    """Begin.\n\n    Anew.\n    """', 4),
        ('"""What is meant."""', 1),
    ],
)
def test_words_that_say_too_little(package, text, line):
    ((place, remedy),) = found(package({"a.py": text}), "word")
    assert place == f"house/a.py:{line}"
    assert "; say " in remedy


def test_the_name_of_a_module_is_a_name(package):
    assert [place for place, _ in found(package({"told.py": ""}), "word")] == ["house/told.py:1"]


@pytest.mark.parametrize(
    "text",
    ['raise ValueError("is told anew")', "# told", "import said", "x = y.told(meant=1)", "meantime = besides = 1"],
)
def test_other_texts_and_the_names_of_others_are_free(package, text):
    assert found(package({"a.py": text}), "word") == []


def run(folder: Path, counts: Path, capsys, *arguments: str) -> str:
    """Return what it printed, which is nothing if and only if it succeeds."""
    status = guards.main(list(arguments), folder=folder, counts=counts)
    printed = capsys.readouterr().out
    assert status == bool(printed)
    return printed


def test_a_count_may_only_fall(package, tmp_path, capsys):
    counts = tmp_path / "counts.txt"
    counts.write_text("word house/a.py 2\n")
    folder = package({"a.py": "told = 1\nsaid = 1"})
    assert run(folder, counts, capsys) == ""
    package({"a.py": "told = 1\nsaid = 1\nmeant = 1"})
    for arguments in ((), ("--lower",)):
        printed = run(folder, counts, capsys, *arguments)
        assert "house/a.py: 3 of rule 'word', and counts.txt allows 2:" in printed
        assert "  house/a.py:3: 'meant' in the name meant; say matching" in printed
        assert counts.read_text() == "word house/a.py 2\n"
    package({"a.py": "told = 1"})
    assert "house/a.py: 1 of rule 'word', fewer than 2: lower the number in counts.txt" in run(folder, counts, capsys)
    assert run(folder, counts, capsys, "--lower") == ""
    assert counts.read_text() == "word house/a.py 1\n"
    assert run(folder, counts, capsys) == ""


def test_a_file_that_is_renamed_takes_its_number_along(package, tmp_path, capsys):
    counts = tmp_path / "counts.txt"
    counts.write_text("word house/old.py 1\n")
    folder = package({"new.py": "told = 1"})
    assert run(folder, counts, capsys) != ""
    assert run(folder, counts, capsys, "--lower") == ""
    assert counts.read_text() == "word house/new.py 1\n"


def test_no_rule_pays_for_another(package, tmp_path, capsys):
    counts = tmp_path / "counts.txt"
    counts.write_text("circle house/a.py 5\n")
    assert "1 of rule 'word', and counts.txt allows 0" in run(package({"a.py": "told = 1"}), counts, capsys, "--lower")


def test_what_is_allowed_is_sorted():
    """So that branches that lower different numbers merge; that the package keeps to them is checked by `make lint`."""
    lines = guards.COUNTS.read_text().splitlines()
    assert lines == sorted(lines)
    assert Counter(guards.read(guards.COUNTS).values())[0] == 0
