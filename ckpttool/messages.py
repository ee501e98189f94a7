"""Safe text for messages: values of bounded length, no terminal codes, URLs without secrets.

Everything that leaves this process for people or logs (errors, log lines, tables, JSON, tracebacks) goes through here.
"""

from __future__ import annotations

import re
from typing import Any

MAX_TEXT = 4096
"""Characters of a path, a problem or a hint in an error line."""
MAX_DEPTH = 4
"""Containers within containers that a message shows."""
MAX_ITEMS = 8
"""Items of a container that a message shows."""
HIDDEN = "..."
"""What stands in place of a secret."""
_AZURE = {"abfs", "abfss", "az", "adl", "wasb", "wasbs"}
"""In their URLs, a container stands before the "@"."""
_URL = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,31}://?[^\s\"<>]*")
"""In a text. One slash, too: a URL that was taken for a path and normalized has no more."""
_NAMED_SECRET = re.compile(
    r"(?i)([?&;]?\b(?:x-amz-(?:signature|credential|security-token)|awsaccesskeyid|signature|sig|sas_token|access_token"
    r"|token|password|secret|account_key|api_key)=)[^\s&;\"'<>,)]+"
)


def without_secrets(url: str) -> str:
    """A URL, or a chain of them (``simplecache::s3://...``), without users, passwords and the values of its query."""
    return "::".join(map(_one_without_secrets, url.split("::")))


def _one_without_secrets(url: str) -> str:
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]{0,31}):(//?)", url)
    if found is None:
        before, inner, after = _inner_url(url)
        return before + without_secrets(inner) + after if inner else url
    scheme, slashes, rest = found[1], found[2], url[found.end() :]
    rest, tail = _cut_query(rest)
    host, _, path = rest.partition("/")
    if "@" in host:
        user = host.rpartition("@")[0]
        if scheme.lower() not in _AZURE or ":" in user:
            rest = rest[len(user) + 1 :]
    # A secret key of Amazon's may hold a slash. What follows a colon is else the number of a port.
    elif "@" in path and re.search(r"^[^\[]*:(?!\d*$)", host):
        rest = path.rpartition("@")[2]
    return f"{scheme}:{slashes}{rest}{tail}"


def _inner_url(path: str) -> tuple[str, str, str]:
    """A URL inside a path that a program has made of it."""
    found = _URL.search(path)
    return (path[: found.start()], found[0], path[found.end() :]) if found else (path, "", "")


def _cut_query(rest: str) -> tuple[str, str]:
    """The text before the query, and the printable part of the query."""
    for mark in "?#":
        before, found, query = rest.partition(mark)
        if found and "=" in query:
            return before, found + HIDDEN
    return rest, ""


def hide_secrets(text: str) -> str:
    """A text, with every URL in it without its secrets."""
    if "://" in text or ":/" in text:
        text = _URL.sub(lambda found: without_secrets(found[0]), text)
    return _NAMED_SECRET.sub(rf"\g<1>{HIDDEN}", text) if "=" in text else text


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """A text without secrets of URLs and anything that breaks a line or drives a terminal, and of bounded length.

    Args:
        text: Names come from untrusted files.
        limit: Characters that are kept, half of them of each end; 0 for all.
    """
    if limit and len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}...{text[-half:]}"
    text = hide_secrets(text)
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def brief(value: object, limit: int = 100) -> str:
    """A value from a file as a message shows it: as ``repr`` would, but bounded in time, memory and length.

    ``repr`` of a kilobyte of pickle can be exponentially long, and it calls what the value's class defines. Here at
    most MAX_ITEMS items of MAX_DEPTH containers are visited, and of anything but plain data the type is named.

    Args:
        value: Anything.
        limit: Characters.
    """
    text = _brief(value, limit, MAX_DEPTH)
    return text if len(text) <= limit else f"{text[:limit]}..."


def _brief(value: Any, limit: int, depth: int) -> str:
    kind = type(value)
    if kind in (str, bytes):
        return f"{value[: limit + 1]!r}"
    if kind is int:  # turning a long one into decimal digits takes quadratic time
        return repr(value) if value.bit_length() <= 4 * limit else f"an integer of {value.bit_length():,} bits"
    if kind in (bool, float, complex, type(None)):
        return repr(value)
    if kind in (list, tuple, dict, set, frozenset):
        return _brief_items(value, limit, depth)
    if isinstance(value, str):
        return repr(str.__str__(value)[: limit + 1])
    return f"<{kind.__module__}.{kind.__qualname__}>"[: limit + 1]


def _brief_items(value: Any, limit: int, depth: int) -> str:
    opening, closing = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
    if not depth:
        return f"{opening}...{closing}"
    parts: list[str] = []
    for number, item in enumerate(value.items() if type(value) is dict else value):
        if number == MAX_ITEMS or sum(map(len, parts)) > limit:
            parts.append("...")
            break
        if type(value) is dict:
            parts.append(f"{_brief(item[0], limit, depth - 1)}: {_brief(item[1], limit, depth - 1)}")
        else:
            parts.append(_brief(item, limit, depth - 1))
    if type(value) is tuple and len(parts) == 1:
        parts.append("")
    return f"{opening}{', '.join(parts).rstrip(' ')}{closing}"
