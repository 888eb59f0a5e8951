"""Addresses of servers in what is meant to be published: ``server-1``, ``server-2``, as a spec names them.

A card or a bill of materials goes to strangers, and a host and port of one's own are none of their business; whoever
holds the run finds them in its spec.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from kvaudit.core.policy_names import engine_settings
from kvaudit.reports.page.findings import Findings

_ADDRESS = "base_url"  # the setting of an engine that is a server


def without_servers(text: str, found: Findings) -> str:
    """The text with every address of a server that the run asked as ``server-1``, ``server-2``."""
    for number, address in enumerate(_addresses(found), 1):
        # a short name has left out the end of a long address
        for spelled in (address, address.rstrip("/"), urlsplit(f"//{address}").netloc):
            for form in dict.fromkeys((spelled, _escaped(spelled))):
                text = text.replace(form, f"server-{number}")
    return text


def _addresses(found: Findings) -> list[str]:
    """Of every server, without the scheme, in the order of the spec."""
    settings = [engine_settings(policy).get(_ADDRESS, "") for policy in found.comparison.policies]
    return [text for text in dict.fromkeys(one.partition("://")[2] for one in settings) if text]


def _escaped(text: str) -> str:
    """As Markdown has it."""
    from kvaudit.reports.page.formats.markdown import escape

    return escape(text)
