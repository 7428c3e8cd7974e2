"""What of the reference is made from code: parameters with their defaults, commands, options of the configuration."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_PARAMETER = re.compile(r":param (\w+): ")
#: A line of a docstring that names the parameters below it.
_GROUP = re.compile(r"([A-Z][\w ,]*):")


class Commands(SphinxDirective):
    """``delayed-commands``: the commands of ``airflow delayed``, each with its arguments."""

    def run(self) -> list[nodes.Node]:
        from airflow_delayed.cli import definition

        self.env.note_dependency(definition.__file__)
        (group,) = definition.get_delayed_commands()
        text = "\n".join(line for command in group.subcommands for line in _command(command))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def _command(command: Any) -> Iterator[str]:
    parser = argparse.ArgumentParser(prog=f"airflow delayed {command.name}", add_help=False)
    for argument in command.args:
        argument.add_to_parser(parser)
    yield from (command.name, "-" * len(command.name), "", f"{command.help}.", "")
    if command.description:
        yield from (_literal(command.description), "")
    yield from (f".. program:: {parser.prog}", "", f".. describe:: {_usage(parser)}", "")
    for action in parser._actions:
        names = action.option_strings or [action.dest]
        value = "" if action.nargs == 0 or not action.option_strings else f" <{action.dest}>"
        help_text = f" {_literal((action.help or '').strip())}"
        listed = action.choices and not all(choice in help_text for choice in action.choices)
        choices = f" One of {', '.join(f'``{choice}``' for choice in action.choices)}." if listed else ""
        required = " Required." if action.required and action.option_strings else ""
        yield from (f"   .. option:: {', '.join(name + value for name in names)}", "")
        yield from (f"      {' '.join(help_text.split()).removesuffix('.')}.{choices}{required}", "")


def _usage(parser: argparse.ArgumentParser) -> str:
    return " ".join(parser.format_usage().removeprefix("usage: ").split())


def _literal(text: str) -> str:
    """Return a help text with its options as code, and nothing else as markup."""
    plain = re.sub(r"([*`|\\])", r"\\\1", text)
    return re.sub(r"(?<![\w-])(--[\w-]+|\[delayed\] \w+)", r"``\1``", plain)


class Configuration(SphinxDirective):
    """``delayed-configuration``: the options of the section ``[delayed]``."""

    def run(self) -> list[nodes.Node]:
        from airflow_delayed import provider_info

        self.env.note_dependency(provider_info.__file__)
        options = provider_info.get_provider_info()["config"]["delayed"]["options"]
        return self.parse_text_to_nodes("\n".join(line for pair in options.items() for line in _option(*pair)))


def _option(name: str, option: Mapping[str, Any]) -> Iterator[str]:
    yield from (f".. confval:: {name}", f"   :type: {option['type']}")
    yield from (f"   :default: ``{option['default'] or '(empty)'}``", "", f"   {option['description']}", "")
    variable = f"AIRFLOW__DELAYED__{name.upper()}"
    yield from (f"   Example: ``{name} = {option['example']}``, or ``{variable}={option['example']}``.", "")


def _describe(app: Sphinx, what: str, name: str, obj: Any, options: object, lines: list[str]) -> None:
    """Add the defaults to a docstring's parameters, and the template fields to an operator's."""
    if what not in ("class", "exception", "function", "method"):
        return
    try:
        defaults = {each.name: each.default for each in inspect.signature(obj).parameters.values()}
    except (TypeError, ValueError):
        defaults = {}
    lines[:] = [line for each in _with_defaults(lines, defaults) for line in _grouped(each)]
    if what == "class" and (fields := tuple(getattr(obj, "template_fields", ()))):
        fields_text = ", ".join(f"``{field}``" for field in fields)
        lines[:] = [*lines, "", f"**Template fields**: {fields_text}.", ""]


def _with_defaults(lines: list[str], defaults: Mapping[str, object]) -> list[str]:
    """Return a docstring's lines with a default after each parameter whose text names none."""
    done: list[str] = []
    entry: list[str] = []

    def close() -> None:
        found = _PARAMETER.match(entry[0]) if entry else None
        if found and (text := _shown(defaults.get(found[1]))) and "default" not in " ".join(entry):
            entry[-1] = entry[-1].rstrip()
            entry[-1] += (" " if entry[-1].endswith(".") else ". ") + f"Default: ``{text}``."
        done.extend(entry)
        entry.clear()

    for line in [*lines, ""]:
        if not line.startswith(" "):
            close()
        entry.append(line)
    close()
    return done


def _grouped(line: str) -> list[str]:
    found = _GROUP.fullmatch(line)
    return [".. rst-class:: group", "", found[1]] if found else [line]


def _shown(default: object) -> str:
    if isinstance(default, timedelta):
        return str(default)
    if isinstance(default, str | int | float):
        return repr(default)
    return ""


def _without_signature(
    app: Sphinx, what: str, name: str, obj: object, options: object, arguments: str | None, returns: str | None
) -> tuple[str, None] | None:
    """Leave a class's arguments to the list of parameters below it, which has types and defaults too."""
    return ("", None) if what in ("class", "exception") and arguments else None


def setup(app: Sphinx) -> dict[str, bool | int]:
    app.add_directive("delayed-commands", Commands)
    app.add_directive("delayed-configuration", Configuration)
    app.connect("autodoc-process-docstring", _describe)
    # after those who look at it
    app.connect("autodoc-process-signature", _without_signature, priority=900)
    # all pages are made again when this file changes
    version = int(Path(__file__).stat().st_mtime)
    return {"env_version": version, "parallel_read_safe": True, "parallel_write_safe": True}
