"""Fields whose defaults are calls that declare options: the reference shows the default itself."""

from __future__ import annotations

from typing import Any

import griffe

DECLARATIONS = {"option", "field", "_if_given", "delegated", "fact"}


class DefaultsAsValues(griffe.Extension):
    """Replaces `option(None, kind=SIZE)` by `None`, and a declaration without a default by nothing."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Change one attribute of a class."""
        call = attr.value
        if not isinstance(call, griffe.ExprCall) or call.canonical_name not in DECLARATIONS:
            return
        named = {
            argument.name: argument.value for argument in call.arguments if isinstance(argument, griffe.ExprKeyword)
        }
        positional = [argument for argument in call.arguments if not isinstance(argument, griffe.ExprKeyword)]
        if call.canonical_name == "option" and positional:
            attr.value = positional[0]
        elif call.canonical_name == "_if_given":
            attr.value = "None"
        else:
            attr.value = named.get("default")
