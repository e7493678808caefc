"""Whether the answer to an own write shows more than that write.

The answer is the object as it is now. Where somebody else has changed it since it was last seen,
the answer holds that change too, and the watch's event about it, being older than what is known by
then, tells nothing more: it must be noticed here, or nobody acts upon it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from kvoy_operator.record import Record


class Write(Enum):
    """A kind of write, by the fields that it may change."""

    NOTHING = ()
    """It was only read."""
    CREATE = (("metadata",), ("spec",), ("status",))
    STATUS = (("status",),)
    REPLICAS = (("spec", "replicas"), ("metadata", "generation"))
    OWNERS = (("metadata", "labels"), ("metadata", "ownerReferences"))
    CONTENT = (
        ("spec",),
        ("data",),
        ("roleRef",),
        ("subjects",),
        ("metadata", "generation"),
        ("metadata", "annotations"),
        ("metadata", "labels"),
        ("metadata", "ownerReferences"),
    )
    """What is rendered prevails over what others have written, whatever that was."""
    DELETION = (
        ("metadata", "deletionTimestamp"),
        ("metadata", "deletionGracePeriodSeconds"),
        ("metadata", "finalizers"),
        ("metadata", "generation"),
    )


def has_news(previous: Record | None, record: Record, write: Write) -> bool:
    """`record` is the answer to the `write`, `previous` what was known before it."""
    if write is Write.CREATE:
        return False  # the answer is of the moment in which it came to be
    if previous is None or previous.uid != record.uid:
        return True
    return _beside(previous, write) != _beside(record, write)


def _beside(record: Record, write: Write) -> dict[str, Any]:
    """All that the write cannot have changed."""
    body = record.body()
    for path in (*write.value, ("metadata", "resourceVersion")):
        body = _without(body, path)
    return body


def _without(body: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    name, *deeper = path
    rest = {key: value for key, value in body.items() if key != name}
    if deeper and name in body:
        rest[name] = _without(body[name], tuple(deeper))
    return rest
