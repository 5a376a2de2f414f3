"""The docstrings' section is "Example:"; griffe's Google parser knows "Examples:" only."""

from __future__ import annotations

import re
from typing import Any

import griffe

SECTION = re.compile(r"^(\s*)Example:$", flags=re.MULTILINE)


class ExampleSections(griffe.Extension):
    """Hands every docstring on with the plural."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = SECTION.sub(r"\1Examples:", obj.docstring.value)
