"""Sign manifests and check signatures, so that readers can detect deliberate changes of a checkpoint.

A CRC-32 detects only accidental damage: an attacker who can write the files can also write matching checksums. A signed
manifest has the SHA-256 of each chunk of each file, and an HMAC-SHA256 over all of its fields.

Source: RFC 2104 (HMAC); FIPS 180-4 (SHA-256).
"""

from __future__ import annotations

import os

from ckpttool.errors import PlanError

ENVIRONMENT = "env:"
"""Prefix of the name of an environment variable with a key."""
MIN_KEY_BYTES = 16
"""Least bytes of a key; an attacker could guess a shorter one."""
Key = bytes | str | os.PathLike[str]
"""A key as bytes, the path of a file with a key, or "env:NAME"."""


def read_key(given: Key | None) -> bytes | None:
    """Read a key; strip white space from keys of files and environment variables.

    Args:
        given: The key as bytes, the path of a file with the key, or "env:NAME" for an environment variable.

    Raises:
        PlanError: The key is missing, unreadable or too short. No error shows the key itself.
    """
    if given is None:
        return None
    if isinstance(given, bytes):
        key, where = given, "the key"
    else:
        where = os.fspath(given)
        if where.startswith(ENVIRONMENT):
            found = os.environb.get(where.removeprefix(ENVIRONMENT).encode())
            if found is None:
                raise PlanError(where, "is not set", "set the variable to the key, or pass a file")
            key = found.strip()
        else:
            try:
                with open(where, "rb") as file:
                    key = file.read(1 << 16).strip()
            except OSError as error:
                raise PlanError(
                    where, f"cannot be read as a key: {error.strerror}", "pass a file or env:NAME"
                ) from None
    if len(key) < MIN_KEY_BYTES:
        problem = f"contains a key of {len(key)} bytes, fewer than the {MIN_KEY_BYTES} that are safe"
        raise PlanError(where, problem, "make one with: openssl rand -hex 32")
    return key


def signature(fields: bytes, key: bytes) -> str:
    """Return the HMAC-SHA256 of a manifest's serialized fields as hexadecimal text."""
    import hashlib  # importing it takes longer than reading a manifest without signature
    import hmac

    return hmac.new(key, fields, hashlib.sha256).hexdigest()


def is_signed(fields: bytes, found: str, key: bytes) -> bool:
    """Return whether a signature matches the fields and the key; compares in constant time."""
    import hmac

    return hmac.compare_digest(signature(fields, key).encode(), found.encode("utf-8", "replace"))
