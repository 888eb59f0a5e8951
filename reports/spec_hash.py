"""The hash of what a spec says, however its file looks: the one that provenance keeps from the beginning of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from audit.core.errors import DataError

LARGEST = 1_000_000  # characters; aliases can make a few lines of YAML stand for more than a machine holds
ELSEWHERE = "data"  # where the data lies does not change what is measured


def spec_sha256(spec: Mapping[str, Any]) -> str:
    """sha256 of the spec's canonical JSON; raises DataError for one that is no plain spec."""
    row = {key: value for key, value in spec.items() if key != ELSEWHERE}
    found, size = hashlib.sha256(), 0
    try:
        for part in json.JSONEncoder(sort_keys=True, separators=(",", ":")).iterencode(row):
            found.update(part.encode())
            size += len(part)
            if size > LARGEST:
                raise DataError(f"spec.yaml says more than {LARGEST:,} characters; put back the one the run began with")
    except (TypeError, ValueError, RecursionError) as error:
        text = " ".join(str(error).split())[:100]
        raise DataError(f"spec.yaml is no plain spec ({text}); put back the one the run began with") from None
    return found.hexdigest()
