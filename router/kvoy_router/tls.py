"""TLS of the main port: certificate and key from files, read again when they change.

New connections get the new certificate; open ones keep theirs. A pair that does not work changes
nothing, and the log says so once per change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from kvoy_router.watched_file import POLL_S, WatchedFile

log = logging.getLogger(__name__)


class TlsFiles:
    """`context` serves connections for ever; what it presents follows the files."""

    def __init__(self, certificate: Path, key: Path, poll_s: float = POLL_S) -> None:
        """Raises OSError or ValueError when there is no good pair to begin with."""
        self._certificate = certificate
        self._key = key
        self._watched = (WatchedFile(certificate), WatchedFile(key))
        self._poll_s = poll_s
        self.error: str | None = None
        """What is wrong with the files as they are now."""
        self._has_changed()
        self.context = _load(certificate, key)

    async def run(self) -> None:
        """Watch the files for ever."""
        while True:
            self.check()
            await asyncio.sleep(self._poll_s)

    def check(self) -> None:
        """Read the files if one of them has changed, or does not fit the other yet."""
        has_changed = self._has_changed()
        if not has_changed and self.error is None:
            return
        try:
            _load(self._certificate, self._key)
            self.context.load_cert_chain(self._certificate, self._key)
        except (OSError, ValueError) as error:
            self.error = str(error)
            if has_changed:
                log.error(
                    "TLS files are unusable, the certificate stays as it was",
                    extra={"file": str(self._certificate), "error": self.error},
                )
            return
        self.error = None
        log.info("TLS certificate read", extra={"file": str(self._certificate)})

    def _has_changed(self) -> bool:
        changed = False
        for file in self._watched:
            try:
                changed |= file.read_if_changed() is not None
            except OSError:
                changed = True  # reading it again says what is wrong
        return changed


def _load(certificate: Path, key: Path) -> ssl.SSLContext:
    """Raises OSError or ValueError, naming the file."""
    for path in (certificate, key):
        path.open("rb").close()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without a terminal nobody can type the passphrase of a key that has one.
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        reason = error.reason or "no PEM certificate and key"
        raise ValueError(f"{certificate} and {key}: {reason}") from None
    return context
