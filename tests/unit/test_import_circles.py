"""No two modules of the package import each other, not even for type checking."""

from __future__ import annotations

from import_circles import circles, imports


def test_there_is_no_circle():
    # those within the operators go with SendArguments
    assert [group for group in circles(imports()) if not group[0].startswith("airflow_delayed.operators.")] == []


def test_a_circle_is_found_by_whichever_import_makes_it(tmp_path):
    package = tmp_path / "house"
    (package / "room").mkdir(parents=True)
    for name, text in {
        "__init__": "",
        "a": "if TYPE_CHECKING:\n    from house.b import B",
        "b": "def f():\n    from house.room import c",
        "room/__init__": "",
        "room/c": "import house.a",
        "room/d": "from house.room.c import C",
    }.items():
        (package / f"{name}.py").write_text(text)
    assert circles(imports(tmp_path, "house")) == [["house.a", "house.b", "house.room.c"]]
