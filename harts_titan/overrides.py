"""Options and TOML keys of a configuration: booleans with a value, and mistakes named in a line.

Fields are known by their path (``tree.max_tokens``), as in TOML and, behind ``--``, on the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

_BOOLEANS = {"true": True, "false": False}


def field_types(*configs: type) -> dict[str, Any]:
    """Return the type of every field of some configuration classes, by path; later classes override earlier ones."""
    types: dict[str, Any] = {}
    for config in configs:
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            kind = hints[field.name]
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                types |= {f"{field.name}.{name}": inner for name, inner in field_types(kind).items()}
            else:
                types[field.name] = kind
    return types


def booleans_as_flags(arguments: Sequence[str], types: Mapping[str, Any]) -> list[str]:
    """Write ``--section.field true`` as the flag ``--section.field``, ``false`` as ``--section.no-field``; ``=`` alike.

    Args:
        arguments: of the command line; flags may be among them already.
        types: of the fields, from :func:`field_types`.

    Raises:
        ValueError: If a boolean is given another value.
    """
    out: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        option, has_value, value = argument.partition("=")
        name = _name(option)
        if types.get(name) is not bool:
            out.append(argument)
            continue
        if not has_value and rest and not rest[0].startswith("-"):
            has_value, value = " ", rest.pop(0)
        if not has_value:
            out.append(argument)
        elif value.lower() in _BOOLEANS:
            section, _, field = name.rpartition(".")
            out.append(f"--{section}.{'' if _BOOLEANS[value.lower()] else 'no-'}{field}")
        else:
            raise ValueError(f"{option} is {value!r}; true or false is needed")
    return out


def mistaken_option(arguments: Sequence[str], types: Mapping[str, Any]) -> str:
    """Describe the first option that is unknown or has a wrong value; "" if none is found.

    Args:
        arguments: of the command line, booleans as flags.
        types: of the fields, from :func:`field_types`.
    """
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        option, has_value, value = argument.partition("=")
        name = _name(option)
        if not name:
            return f"'{argument}' belongs to no option"
        section, _, field = name.rpartition(".")
        if types.get(f"{section}.{field.removeprefix('no_')}") is bool:
            continue
        if name not in types:
            return f"unknown option {option}{_did_you_mean(name, types, '--{}')}"
        if not has_value:
            if not rest or _name(rest[0]):
                return f"{option} needs a value"
            value = rest.pop(0)
        wanted = _mismatch(value, types[name])
        if wanted:
            return f"{option} is {value!r}; {wanted}"
    return ""


def unknown_keys(content: Mapping[str, Any], types: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Describe the keys and sections of a TOML file that the configuration does not have, and sections that are none.

    Args:
        content: of the file, or of one of its sections.
        types: of the fields, from :func:`field_types`.
        prefix: path of the section with a dot, "" for the file.
    """
    known = {name.removeprefix(prefix).split(".")[0] for name in types if name.startswith(prefix)}
    place = f"[{prefix.rstrip('.')}]: " if prefix else ""
    for key, value in content.items():
        path = f"{prefix}{key}"
        is_section = any(name.startswith(f"{path}.") for name in types)
        if key not in known:
            if isinstance(value, Mapping):
                yield f"{place}unknown section [{path}]{_did_you_mean(key, known, '[' + prefix + '{}]')}"
                continue
            elsewhere = [name for name in types if name.endswith(f".{key}")]
            hint = _did_you_mean(key, known, "{}")
            if not hint and elsewhere:
                hint = f"; did you mean {' or '.join(elsewhere)}?"
            yield f"{place}unknown key {key}{hint}"
        elif is_section and isinstance(value, Mapping):
            yield from unknown_keys(value, types, f"{path}.")
        elif is_section:
            yield f"{place}{key} is {value!r}; [{path}] is a section"


def _name(option: str) -> str:
    """Return the path of the field that an option names, "" if it is none."""
    return option[2:].replace("-", "_") if option.startswith("--") else ""


def _did_you_mean(name: str, known: Iterable[str], form: str) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.7)
    return f"; did you mean {form.format(close[0])}?" if close else ""


def _mismatch(value: str, kind: Any) -> str:
    """Return what a field of a type needs instead of the value, "" if the value will do or the type is another."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        return "" if value in choices else f"choose one of {', '.join(map(repr, choices))}"
    if kind in (int, float):
        try:
            kind(value)
        except ValueError:
            return f"{'a whole number' if kind is int else 'a number'} is needed"
    return ""
