"""`kvoy chat` on a terminal: Ctrl-C cancels an answer and keeps the conversation."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from typing import IO, Any

import pytest

pytestmark = pytest.mark.slow


def read_until(stream: IO[bytes], words: bytes) -> bytes:
    seen = b""
    while words not in seen:
        piece = stream.read(1)
        assert piece, f"ended without {words!r}: {seen!r}"
        seen += piece
    return seen


def test_ctrl_c_cancels_the_answer_upstream_and_not_the_chat(endpoint: Any) -> None:
    endpoint.num_endless = 1
    master, terminal = pty.openpty()
    chat = subprocess.Popen(
        [sys.executable, "-m", "kvoy_cli", "chat", "--url", endpoint.url],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    )
    assert chat.stdout is not None
    with chat.stdout:
        os.write(master, b"hi\n")
        read_until(chat.stdout, b"more more")

        os.kill(chat.pid, signal.SIGINT)
        read_until(chat.stdout, b"(cancelled)")
        os.write(master, b"again\n")
        read_until(chat.stdout, b"[first token after")
        os.write(master, b"/quit\n")

        assert chat.wait(30) == 0
    os.close(master)
    os.close(terminal)
    assert endpoint.client_left.wait(30)
    assert [message["content"] for message in endpoint.bodies[1]["messages"]] == ["again"]
