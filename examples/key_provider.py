"""A key provider of your own: master keys from ``pass``, the standard Unix password manager, as ``pass:NAME``.

Make it a package with this entry point, and install it beside secure-loader:

    [project.entry-points."secure_loader.key_providers"]
    pass = "key_provider:PassProvider"

It is imported when a reference that you configured begins with ``pass:``, and never because of what a file says.
"""

from __future__ import annotations

import os
import re
import subprocess

from secure_loader.core.keys.jwk import Jwk
from secure_loader.core.keys.local import LocalProvider, parse
from secure_loader.errors import KeyAccessError

SECONDS = 10  # nobody may have to wait for ever: a dead service is an error


class PassProvider(LocalProvider):
    """A JWK or JWK set in an entry of ``pass``. For a key that stays elsewhere, write ``resolve`` instead of ``keys``."""

    def keys(self, reference: str) -> list[Jwk]:
        """All keys of an entry; raises KeyAccessError, and says nothing about what the entry holds."""
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,200}", reference):
            raise KeyAccessError(f"pass:{reference[:40]!r} is not the name of an entry")
        try:
            done = subprocess.run(
                ["pass", "show", reference], capture_output=True, timeout=SECONDS, check=True, env=dict(os.environ)
            )
        except subprocess.TimeoutExpired:
            raise KeyAccessError(f"pass did not answer within {SECONDS} seconds") from None
        except (OSError, subprocess.CalledProcessError):
            raise KeyAccessError(f"pass cannot show {reference!r}") from None
        return parse(bytearray(done.stdout), f"pass entry {reference}")
