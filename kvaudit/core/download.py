"""A file from a public address, when somebody asked for it: whole, of bounded size, in bounded time."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from http.client import HTTPException

from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.text import inline, one_line

_LARGEST = 64 << 20  # bytes
_PART = 1 << 16
_SECONDS = 120.0  # for a whole file


def downloaded(url: str, seconds: float = _SECONDS) -> bytes:
    """The bytes at an address; raises RunError, in one line, where there is no network or no such file."""
    if not url.startswith(("http://", "https://")):
        raise SpecError(f"address {url[:80]!r} wants http:// or https://")
    deadline, size = time.monotonic() + seconds, 0
    parts = list[bytes]()
    try:
        with urllib.request.urlopen(url, timeout=seconds) as reply:  # noqa: S310 - the scheme was checked
            while part := reply.read1(_PART):  # what has come by now, so that the clock is looked at
                parts.append(part)
                size += len(part)
                if size > _LARGEST or time.monotonic() > deadline:
                    raise RunError(
                        f"{url} gives more than {_LARGEST >> 20} MiB, or takes over {seconds:g} s; try later"
                    )
    except urllib.error.HTTPError as error:
        with error:
            raise RunError(f"{url} answers {error.code}; nothing was written") from None
    except (OSError, HTTPException, ValueError) as error:
        why = inline(one_line(error)) or type(error).__name__
        raise RunError(
            f"{url} cannot be reached ({why}); fetch where there is a network, or copy the file into the folder of "
            "public rows by hand"
        ) from None
    return b"".join(parts)
