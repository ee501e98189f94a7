"""Signatures of manifests, so that a checkpoint tells whether it was saved by who holds a key.

A CRC-32 tells what broke by accident: whoever can write the files can write checksums that fit. A signed manifest has
the SHA-256 of each chunk of each file, and an HMAC-SHA256 over all that it says.

Source: RFC 2104 (HMAC); FIPS 180-4 (SHA-256).
"""

from __future__ import annotations

import hashlib
import hmac
import os

from ckpttool.errors import PlanError

ENVIRONMENT = "env:"
"""Before the name of an environment variable that holds a key."""
MIN_KEY_BYTES = 16
"""A shorter key could be guessed."""
Key = bytes | str | os.PathLike[str]
"""A key; or the file that holds it; or "env:NAME"."""


def read_key(given: Key | None) -> bytes | None:
    """A key, without white space around it if it comes from a file or the environment.

    Args:
        given: Bytes are the key itself. A path names the file that holds it, "env:NAME" an environment variable.

    Raises:
        PlanError: There is none, it cannot be read, or it is too short. The key itself is in no error.
    """
    if given is None:
        return None
    if isinstance(given, bytes):
        key, where = given, "the key"
    else:
        where = os.fspath(given)
        if where.startswith(ENVIRONMENT):
            key = os.environb.get(where.removeprefix(ENVIRONMENT).encode(), b"").strip()
        else:
            try:
                with open(where, "rb") as file:
                    key = file.read(1 << 16).strip()
            except OSError as error:
                raise PlanError(
                    where, f"cannot be read as a key: {error.strerror}", "pass a file or env:NAME"
                ) from None
    if len(key) < MIN_KEY_BYTES:
        problem = f"holds a key of {len(key)} bytes, and fewer than {MIN_KEY_BYTES} can be guessed"
        raise PlanError(where, problem, "make one with: openssl rand -hex 32")
    return key


def signature(said: bytes, key: bytes) -> str:
    """HMAC-SHA256 of what a manifest says, as hexadecimal text."""
    return hmac.new(key, said, hashlib.sha256).hexdigest()


def is_signed(said: bytes, found: str, key: bytes) -> bool:
    """Whether a signature was made with a key; takes the same time wherever they differ."""
    return hmac.compare_digest(signature(said, key).encode(), found.encode("utf-8", "replace"))
