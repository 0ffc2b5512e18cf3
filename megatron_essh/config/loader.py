"""From YAML files and `--set a.b=c` overrides to a `RunConfig`, and back.

A file may name another with `base:` (a path relative to itself); its own keys win. An unknown key, a value of the
wrong type or a missing key is an error that names the file, the key and the nearest valid key. Knows nothing of
what the settings mean.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megatron_essh.config.components import RunConfig
from megatron_essh.config.plain_yaml import parse_yaml
from megatron_essh.errors import UserError

T = TypeVar("T")

_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # what YAML's escapes can spell and neither paths nor output can hold


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read `path`, lay `overrides` (each `section.key=value`, the value in YAML) over it and build the config.

    Raises:
        UserError: the file or a base of it cannot be read, or a key or value is not what it should be.
    """
    mapping = _read_with_bases(Path(path), ())
    source = str(path)
    for override in overrides:
        _apply_override(mapping, override)
        source = f"{path} with --set"
    return config_from_mapping(RunConfig, mapping, source)


def config_from_mapping(cls: type[T], mapping: Mapping[str, Any], source: str) -> T:
    """Build the dataclass `cls` from nested mappings; `source` names their origin in errors."""
    return _build(cls, mapping, source, "")


def config_to_mapping(config: Any) -> dict[str, Any]:
    """The nested plain mapping that `config_from_mapping` reads back; tuples become lists."""
    result = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            value = config_to_mapping(value)
        elif isinstance(value, tuple):
            value = list(value)
        result[f.name] = value
    return result


def _read_with_bases(path: Path, children: tuple[Path, ...]) -> dict[str, Any]:
    resolved = path.resolve()
    if resolved in children:
        raise UserError(f"{path}: base: leads back to {path} itself; remove one of the base: lines")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        reason = f", named as base by {children[-1]}" if children else ""
        raise UserError(f"{path}: no such config file{reason}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable text file ({error})") from None
    content = parse_yaml(text, str(path))
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected `key: value` lines at the top, found {type(content).__name__}")
    base = content.pop("base", None)
    if base is None:
        return content
    if not isinstance(base, str):
        raise UserError(f"{path}: base: must be the path of another config file, got {base!r}")
    return _merge(_read_with_bases(path.parent / base, (*children, resolved)), content)


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _apply_override(mapping: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted.strip():
        raise UserError(f"--set {override}: expected section.key=value")
    value = parse_yaml(text, f"--set {override}")
    *sections, key = dotted.strip().split(".")
    for section in sections:
        inner = mapping.setdefault(section, {})
        if inner is None:
            inner = mapping[section] = {}
        if not isinstance(inner, dict):
            raise UserError(f"--set {override}: {section} is a value, not a section")
        mapping = inner
    mapping[key] = value


def _build(cls: type[T], mapping: Any, source: str, prefix: str) -> T:
    if not isinstance(mapping, Mapping):
        raise UserError(f"{source}: {prefix.rstrip('.') or 'top level'}: expected a section of keys, got {mapping!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]  # every caller passes a dataclass
    hints = typing.get_type_hints(cls)
    for key in mapping:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.4)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"valid keys: {', '.join(fields)}"
            raise UserError(f"{source}: unknown key {prefix}{key}; {hint}")
    values = {}
    for name, f in fields.items():
        if name in mapping:
            values[name] = _convert(mapping[name], hints[name], source, prefix + name)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise UserError(f"{source}: missing key {prefix}{name} ({_describe(hints[name])})")
    try:
        return cls(**values)
    except UserError:
        raise
    except ValueError as error:
        where = f"{prefix.rstrip('.')}: " if prefix else ""
        raise UserError(f"{source}: {where}{error}") from None


def _convert(value: Any, hint: Any, source: str, key: str) -> Any:
    """`value` as the type `hint`, or an error: nothing is cast that is not plainly that type."""
    origin = typing.get_origin(hint)
    wrong = UserError(f"{source}: {key}: expected {_describe(hint)}, got {value!r}")
    if origin in (typing.Union, types.UnionType):
        inner = [h for h in typing.get_args(hint) if h is not type(None)]
        if value is None:
            return None
        return _convert(value, inner[0], source, key)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, source, key + ".")
    if origin is typing.Literal:
        options = typing.get_args(hint)
        if value not in options:
            near = difflib.get_close_matches(str(value), [str(o) for o in options], n=1)
            raise UserError(
                f"{source}: {key}: {value!r} is none of {', '.join(map(str, options))}"
                + (f"; did you mean {near[0]}?" if near else "")
            )
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise wrong
        item = typing.get_args(hint)[0]
        return tuple(_convert(v, item, source, f"{key}[{i}]") for i, v in enumerate(value))
    if hint is bool:
        if isinstance(value, bool):
            return value
        raise wrong
    if hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise wrong
    if hint is float:
        if not isinstance(value, (int, float, str)) or isinstance(value, bool):
            raise wrong
        try:
            number = float(value)  # of text too: YAML reads 1e-3, without a point, as text
        except (ValueError, OverflowError):
            raise wrong from None
        if not math.isfinite(number):
            raise wrong
        return number
    if hint is str:
        if isinstance(value, str) and not _NO_TEXT.search(value):
            return value
        raise wrong
    raise AssertionError(f"{key}: no rule for type {hint}")


def _describe(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if h is type(None) else _describe(h) for h in typing.get_args(hint))
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if origin is tuple:
        return f"a list of {_describe(typing.get_args(hint)[0])}"
    if dataclasses.is_dataclass(hint):
        return "a section of keys"
    names = {int: "an integer", float: "a finite number", bool: "true or false", str: "text"}
    return names.get(hint, str(hint))
