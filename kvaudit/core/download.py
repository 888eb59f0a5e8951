"""A file from a public address, when somebody asked for it: whole, of bounded size, in bounded time."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future
from http.client import HTTPException

from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.text import has_password, hide_passwords
from kvaudit.core.text import inline, one_line

_LARGEST = 64 << 20  # bytes
_PART = 1 << 16
_SECONDS = 120.0  # for a whole file


def downloaded(url: str, seconds: float = _SECONDS) -> bytes:
    """The bytes at an address; raises RunError, in one line, where there is no network or no such file."""
    if not url.startswith(("http://", "https://")):
        raise SpecError(f"address {hide_passwords(url)[:80]!r} wants http:// or https://")
    shown = hide_passwords(url)
    if has_password(url):  # the look-up of the host's name would give it away
        raise SpecError(f"address {shown!r} has a user or a password in it, wanted one that needs none")
    try:
        return _in_time(url, seconds)
    except TimeoutError:
        raise RunError(
            f"{shown} gives more than {_LARGEST >> 20} MiB, or takes over {seconds:g} s; try later"
        ) from None
    except urllib.error.HTTPError as error:
        with error:
            raise RunError(f"{shown} answers {error.code}; nothing was written") from None
    except (OSError, HTTPException, ValueError) as error:
        why = hide_passwords(inline(one_line(error))) or type(error).__name__
        raise RunError(
            f"{shown} cannot be reached ({why}); fetch where there is a network, or copy the file into the folder of "
            "public rows by hand"
        ) from None


def _in_time(url: str, seconds: float) -> bytes:
    """The file; raises TimeoutError for one that is too large or too slow.

    A socket's own timeout begins anew with every byte, so a server that drips its headers is left to a thread of its
    own, which keeps no process alive.
    """
    found, deadline = Future[bytes](), time.monotonic() + seconds

    def fetch() -> None:
        try:
            found.set_result(_read(url, deadline))
        except BaseException as error:  # raised where it is waited for
            found.set_exception(error)

    threading.Thread(target=fetch, name="download", daemon=True).start()
    return found.result(seconds)


def _read(url: str, deadline: float) -> bytes:
    body = bytearray()
    with urllib.request.urlopen(url, timeout=deadline - time.monotonic()) as reply:  # noqa: S310 - the scheme was checked
        while part := reply.read1(_PART):  # what has come by now, so that the clock is looked at
            body += part
            if len(body) > _LARGEST or time.monotonic() > deadline:
                raise TimeoutError
    return bytes(body)
