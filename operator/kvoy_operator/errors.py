"""What can be wrong with what a user wrote.

InvalidSpec   a field of a custom resource cannot be served as it stands: no retry helps, the user
              reads the field and the message in the condition `Accepted`

The API server refuses most of it first, by the same rules; this is for what only the operator can
see, and for objects that were stored under older rules.
"""

from __future__ import annotations


class InvalidSpec(Exception):
    """`field` is a path such as `spec.model.uri`; `message` says what is wrong and what to do."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
