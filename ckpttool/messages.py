"""Make text safe for messages: bounded length, no terminal codes, URLs without secrets.

All text for people or logs (errors, log lines, tables, JSON, tracebacks) passes these functions.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SIMILAR = 0.6
"""Least share of equal characters of a name that is suggested for a mistyped one."""
MAX_TEXT = 4096
"""Most characters of a path, a problem or a hint in an error line."""
MAX_WORD = 300
"""Most characters of a word, such as a parameter's name, in the problem of an error; longer ones are shortened."""
MAX_DEPTH = 4
"""Levels of nested containers that a message shows."""
MAX_ITEMS = 8
"""Most items of a container that a message shows."""
HIDDEN = "..."
"""Replaces a secret."""
_AZURE = {"abfs", "abfss", "az", "adl", "wasb", "wasbs"}
"""Schemes whose URLs have a container before the "@"."""
_URL = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,31}://?[^\s\"<>]*")
"""A URL within a text. One slash suffices: normalized as a path, a URL loses the other."""
_NAMED_CREDENTIAL = (
    r"(?i)([?&;]?\b(?:x-amz-(?:signature|credential|security-token)|awsaccesskeyid|signature|sig|sas_token|access_token"
    r"|token|password|secret|account_key|api_key)=)[^\s&;\"'<>,)]+"
)

_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Characters that are invisible, but printable for Python: fillers, selectors of variants, joiners, a blank pattern.

Source: Unicode 16, DerivedCoreProperties.txt (``Default_Ignorable_Code_Point``), and U+2800."""


def without_secrets(url: str) -> str:
    """Remove users, passwords and query values from a URL or a chain of URLs (``simplecache::s3://...``)."""
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
    # A secret key of AWS may contain a slash. Otherwise the text after a colon is a port number.
    elif "@" in path and re.search(r"^[^\[]*:(?!\d*$)", host):
        rest = path.rpartition("@")[2]
    return f"{scheme}:{slashes}{rest}{tail}"


def _inner_url(path: str) -> tuple[str, str, str]:
    """Split a path that contains a URL into the text before it, the URL and the text after it."""
    found = _URL.search(path)
    return (path[: found.start()], found[0], path[found.end() :]) if found else (path, "", "")


def _cut_query(rest: str) -> tuple[str, str]:
    """Return the text before the query, and the printable part of the query."""
    for mark in "?#":
        before, found, query = rest.partition(mark)
        if found and "=" in query:
            return before, found + HIDDEN
    return rest, ""


def hide_secrets(text: str) -> str:
    """Remove the secrets from every URL in a text."""
    if "://" in text or ":/" in text:
        text = _URL.sub(lambda found: without_secrets(found[0]), text)
    return re.sub(_NAMED_CREDENTIAL, rf"\g<1>{HIDDEN}", text) if "=" in text else text


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """Remove secrets of URLs, escape line breaks and terminal codes, and limit the length.

    Args:
        text: Text with names from untrusted files.
        limit: Characters to keep, half of them at each end; 0 keeps all.
    """
    if limit and len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}...{text[-half:]}"
    text = hide_secrets(text)
    return text if text.isprintable() and not _INVISIBLE.search(text) else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    seen = character.isprintable() and not _INVISIBLE.match(character)
    return character if seen else character.encode("unicode_escape").decode()


def short_words(text: str) -> str:
    """Shorten the words of a text that have more than MAX_WORD characters, such as the name of a parameter."""
    if len(text) <= MAX_WORD:
        return text
    return re.sub(rf"\S{{{MAX_WORD + 1},}}", lambda found: f"{found[0][:100]}...{found[0][-50:]}", text)


def name_some(names: Sequence[str], most: int = 1) -> str:
    """Return the first names of a list, for one line."""
    shown = ", ".join(brief(name, 200).strip("'") for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def brief(value: object, limit: int = 100) -> str:
    """Return the ``repr`` of a value from a file, bounded in time, memory and length.

    ``repr`` of a kilobyte of pickle can be exponentially long, and it calls methods of the value's class. This function
    visits at most MAX_ITEMS items in MAX_DEPTH levels of containers; it shows only the type of values other than plain
    data.

    Args:
        value: Any value.
        limit: Most characters.
    """
    text = _brief(value, limit, MAX_DEPTH)
    return text if len(text) <= limit else f"{text[:limit]}..."


def _brief(value: Any, limit: int, depth: int) -> str:
    kind = type(value)
    if kind in (str, bytes):
        return f"{value[: limit + 1]!r}"
    if kind is int:  # decimal digits of a long integer take quadratic time
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


def similar(name: str, known: Iterable[str]) -> str:
    """Return the known name that a mistyped one may mean, as the start of a hint; "" without one."""
    import difflib  # only errors need it

    found = difflib.get_close_matches(name, [*known], n=1, cutoff=SIMILAR)
    return f"did you mean {printable(found[0])}? " if found else ""
