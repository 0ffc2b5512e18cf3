"""The part of YAML that configs are written in: maps, lists, text, numbers, booleans and null; a key stands once.

What looks like a date is text. Explicit tags (`!!int x`) are refused.
"""

from __future__ import annotations

from typing import Any

import yaml

from megatron_essh.errors import UserError

_TIMESTAMP = "tag:yaml.org,2002:timestamp"


def parse_yaml(text: str, source: str) -> Any:
    """The value that `text` holds; `source` names its origin in errors.

    Raises:
        UserError: `text` is not YAML, holds a tag, gives a key twice or nests too deeply.
    """
    loader = None
    try:
        loader = _PlainLoader(text)
        loader.name = source
        return loader.get_single_data()
    except UserError:
        raise
    except RecursionError:
        raise UserError(f"{source}: nested too deeply to be read") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: what PyYAML takes for a number, and Python does not
        raise UserError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
    finally:
        if loader is not None:
            loader.dispose()


class _PlainLoader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012  # PyYAML's own way to say which plain text is no text
        first: [rule for rule in rules if rule[0] != _TIMESTAMP]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise UserError(f"{self.name}: line {event.start_mark.line + 1}: remove the tag {tag}: values are plain")
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            line, name = key.start_mark.line + 1, str(key.value)
            if name in lines:
                raise UserError(
                    f"{self.name}: line {line}: key {name} is given twice, first in line {lines[name]}; keep one"
                )
            lines[name] = line
        return node
