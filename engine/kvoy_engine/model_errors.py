"""Why a model cannot be had, in one sentence for the person who asked for it.

Raised by the model store and what it uses (hub, GGUF conversion); `kvoy` shows it without a
traceback.
"""

from __future__ import annotations


class ModelSourceError(Exception):
    """The reference is wrong, or its source cannot be reached, read, verified or stored."""
