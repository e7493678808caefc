"""What ends a `kvoy` command with a sentence for its user instead of a traceback.

CommandError        status 1
  ChildDied         a process that the command started has ended by itself
"""

from __future__ import annotations


class CommandError(Exception):
    status = 1


class ChildDied(CommandError):
    """Carries the last lines of the child's log in its message."""
