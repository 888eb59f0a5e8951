"""Inspect's logs: ``.eval``, a zip of JSON with one member per sample and epoch, and ``.json``, all of it in one.

Scores become numbers as Inspect makes them: C 1, P 0.5, I and N 0, yes and true 1, no and false 0, numbers themselves.
A scorer that gives several values is one metric per value, SCORER.VALUE. An epoch is a repeat of its item. Logs that
are compressed with Zstandard, as Inspect writes them now, need the package zstandard.
The zip may be hostile: it is read without unpacking to disk and within limits, whatever its directory declares.
"""

from __future__ import annotations

import io
import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvaudit.core.errors import DataError
from kvaudit.core.text import one_line
from kvaudit.reports.records.readers.base import (
    CollectedScores,
    Log,
    Problems,
    Reader,
    Request,
    Row,
    fingerprint_of,
    log_of,
    metric_name,
    name_of,
    parse_number,
    repeat_of,
)
from kvaudit.reports.records.readers.clusters import SharedFields

LARGEST_MEMBER = 64 * 2**20  # bytes of JSON in one member
LARGEST_TOTAL = 256 * 2**20  # bytes that any zip may unpack to; beyond it, at most ``LARGEST_RATIO`` times its size
LARGEST_RATIO = 400
MOST_MEMBERS = 2_000_000
ZSTANDARD, ENCRYPTED = 93, 0x1  # a method and a flag of the zip format
PLAIN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what Python unpacks no further than it is asked to
_LOOKED_AT = 4096  # bytes of the beginning of a log in JSON
_LOCAL_HEADER = 30  # bytes before the name of a member
_DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, NotImplementedError),
    *(MemoryError, OverflowError, RuntimeError),
)


class MissingPackage(DataError):
    """The zip can only be read with a package that is not there."""


class Archive:
    """An open zip. Raises DataError for a file that is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = zipfile.ZipFile(path)
        except _DAMAGED as error:
            raise DataError(f"{str(path)!r} cannot be read as a zip ({error}); copy the file again") from None
        self._members = {info.filename: info for info in self._file.infolist()}  # one written again replaces the first
        # bytes that all members together may still unpack to
        self._left = max(LARGEST_TOTAL, LARGEST_RATIO * path.stat().st_size)
        if len(self._members) > MOST_MEMBERS:
            raise DataError(f"{str(path)!r} has {len(self._members)} members; at most {MOST_MEMBERS} are read")

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._members))

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def json(self, name: str) -> dict[str, Any]:
        """A member's JSON object; raises DataError for one that is damaged, encrypted, too long or something else."""
        info = self._members[name]
        if info.flag_bits & ENCRYPTED:
            raise DataError("the member is encrypted")
        if info.compress_type not in (*PLAIN, ZSTANDARD):
            raise DataError(f"the member is packed by method {info.compress_type}; deflate, Zstandard or none are read")
        raw = self._zstandard(info) if info.compress_type == ZSTANDARD else self._plain(info)
        if len(raw) > LARGEST_MEMBER:
            raise DataError(f"the member unpacks to more than {LARGEST_MEMBER >> 20} MB")
        self._left -= len(raw)
        if self._left < 0:
            raise TooLarge(f"{str(self.path)!r} unpacks to more than {LARGEST_RATIO} times its size; it is no log")
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise DataError(f"not JSON ({one_line(error)})") from None
        if not isinstance(value, dict):
            raise DataError("not a JSON object")
        return value

    def _plain(self, info: zipfile.ZipInfo) -> bytes:
        try:
            with self._file.open(info) as stream:
                # a byte more than is allowed, by which a longer one is told
                return stream.read(LARGEST_MEMBER + 1)
        except _DAMAGED as error:
            raise DataError(f"the member is damaged ({error})") from None

    def _zstandard(self, info: zipfile.ZipInfo) -> bytes:
        """Python's zipfile knows the method from 3.14 on; the package serves every version."""
        try:
            import zstandard
        except ImportError:
            text = f"{str(self.path)!r} is compressed with Zstandard; install the package: pip install zstandard"
            raise MissingPackage(text) from None
        # a frame names the memory that it wants: nothing is taken before that is held to the limit
        reader = zstandard.ZstdDecompressor(max_window_size=LARGEST_MEMBER).stream_reader(
            io.BytesIO(self._compressed(info)), read_across_frames=True
        )
        try:
            return bytes(reader.read(LARGEST_MEMBER + 1))
        except (zstandard.ZstdError, MemoryError) as error:
            raise DataError(f"the member is damaged ({error})") from None

    def _compressed(self, info: zipfile.ZipInfo) -> bytes:
        with self.path.open("rb") as handle:
            size = handle.seek(0, io.SEEK_END)
            if not 0 <= info.header_offset <= size - _LOCAL_HEADER:
                raise DataError("the member is damaged (no local header)")
            handle.seek(info.header_offset)
            local = handle.read(_LOCAL_HEADER)
            # name and extra field as the local header has them: the directory may have others
            lengths = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
            handle.seek(lengths, io.SEEK_CUR)
            return handle.read(min(max(0, info.compress_size), size))


class TooLarge(DataError):
    """The zip unpacks to more than any log would."""


SETTINGS = ("scorers", "task_version", "task_args")  # that two logs must share
# of what a model is called with: how often and how patiently, and what a draw is seeded with
_PLUMBING = {
    *("max_connections", "adaptive_connections", "max_retries", "timeout", "attempt_timeout", "cache", "cache_prompt"),
    *("batch", "seed", "modalities"),
}
_DRAWN = {"id", "tool_call_id", "source", "model"}  # of a message: new in every run
HEADER, START = "header.json", "_journal/start.json"
_SAMPLE = re.compile(r"^samples/.+\.json$")
_WORDS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
_YES_OR_NO = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


class Inspect(Reader):
    """Inspect evaluation log."""

    name = "inspect"
    reads = "Inspect .eval or .json log"

    def recognises(self, path: Path) -> bool:
        """A zip with Inspect's header or the start of a log that was not finished, half a log too, or a log in JSON."""
        if path.is_dir():
            return False
        if path.suffix == ".json":
            return _starts_as_json_log(path)
        if not zipfile.is_zipfile(path):
            return path.suffix == ".eval" and _starts_as_zip(path)
        try:
            with Archive(path) as archive:
                return HEADER in archive or START in archive
        except DataError:
            return False

    def read(self, path: Path, request: Request) -> Log:
        """Every scorer of every sample; a sample that failed has no score under any of them."""
        problems, shared = Problems(), SharedFields("metadata.")
        scores, failed = CollectedScores(problems), list[Row]()
        with _JsonLog(path) if path.suffix == ".json" else Archive(path) as log:
            header = log.json(HEADER if HEADER in log else START)  # one of them is what it was recognised by
            for name in filter(_SAMPLE.match, log):
                try:
                    sample = log.json(name)
                    item = _add(sample, request, scores, failed, f"{path.name}:{name}")
                    shared.add(item, sample.get("metadata"), sample.get("target"))
                except (MissingPackage, TooLarge):  # of the whole log, not of one sample
                    raise
                except DataError as error:
                    problems.add(f"{path.name}:{name}: {error}")
        scores.report()
        metrics = sorted({row.metric for row in scores.rows})
        status, about = str(header.get("status", "started"))[:40], header.get("eval")
        known = about if isinstance(about, dict) else {}
        return log_of(
            self,
            path,
            scores.rows + [row._replace(metric=metric) for row in failed for metric in metrics],
            problems,
            settings=_settings(known, header.get("plan")),
            facts={name: str(known[name])[:200] for name in ("task", "model", "created") if name in known},
            unfinished=_unfinished(header, status),
            shared_fields=shared.names(),
        )


class _JsonLog:
    """A log in one JSON, as the archive that it would be. Raises DataError for one that is too long, or none."""

    def __init__(self, path: Path) -> None:
        if path.stat().st_size > LARGEST_TOTAL:
            raise TooLarge(
                f"{str(path)!r} is larger than {LARGEST_TOTAL >> 20} MB; convert it: inspect log convert --to eval "
                f"{path.name} --output-dir logs"
            )
        try:
            self._log = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{str(path)!r} is no whole JSON log of Inspect ({one_line(error)})") from None
        samples = self._log.get("samples") if isinstance(self._log, dict) else None
        if not isinstance(samples, list):
            raise DataError(f"{str(path)!r} is the header of an Inspect log, without its samples; give the whole log")
        self._members = {f"samples/{number}.json": sample for number, sample in enumerate(samples, start=1)}

    def __enter__(self) -> _JsonLog:
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to close."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __contains__(self, name: str) -> bool:
        return name == HEADER

    def json(self, name: str) -> dict[str, Any]:
        """The header, or a sample; raises DataError for what is no object."""
        value = self._log if name == HEADER else self._members[name]
        if not isinstance(value, dict):
            raise DataError("not a JSON object")
        return value


def _starts_as_json_log(path: Path) -> bool:
    with path.open("rb") as handle:
        start = handle.read(_LOOKED_AT)
    return start.lstrip().startswith(b"{") and all(key in start for key in (b'"version"', b'"status"', b'"eval"'))


def _settings(about: Mapping[str, Any], plan: Any) -> dict[str, str]:
    """What two logs must share; a log that was not finished may have no plan."""
    found = {name: json.dumps(about.get(name), sort_keys=True) for name in SETTINGS}
    if isinstance(plan, dict):
        every = plan.get("steps")
        steps = [*every, plan.get("finish")] if isinstance(every, list) else [every]
        told = [[step.get("solver"), step.get("params")] if isinstance(step, dict) else step for step in steps]
        found["solvers"] = json.dumps(told, sort_keys=True)
        # what the task sets stands in the plan, what the model was made with in the header
        parts = [part for part in (about.get("model_generate_config"), plan.get("config")) if isinstance(part, dict)]
        asked = {name: value for part in parts for name, value in part.items() if name not in _PLUMBING}
        found["decoding"] = json.dumps({n: v for n, v in asked.items() if v is not None}, sort_keys=True)
    return found


def _unfinished(header: Mapping[str, Any], status: str) -> str:
    if header.get("invalidated"):
        return "it was invalidated"
    return "" if status == "success" else f"Inspect's status is {status!r}"


def _asked(messages: Any) -> Any:
    """A sample's input without what is drawn anew for every message of every run."""
    if isinstance(messages, list):
        return [_asked(part) for part in messages]
    if isinstance(messages, dict):
        return {key: _asked(value) for key, value in messages.items() if key not in _DRAWN}
    return messages


def _starts_as_zip(path: Path) -> bool:
    with path.open("rb") as handle:
        return handle.read(4) == b"PK\x03\x04"


def _add(sample: Mapping[str, Any], request: Request, scores: CollectedScores, failed: list[Row], where: str) -> str:
    """Every score of a sample; returns the item's name."""
    item, epoch = name_of(sample.get("id")), repeat_of(sample.get("epoch", 1))
    if item is None or epoch is None:
        raise DataError("no id or no epoch")
    metadata = sample.get("metadata")
    fields = {**metadata, **sample} if isinstance(metadata, dict) else sample  # the sample's own fields win
    row = Row(
        item,
        "",
        math.nan,
        cluster=request.cluster(fields, item) if request.cluster else None,
        sample=epoch,
        fingerprint=fingerprint_of([_asked(sample.get("input")), sample.get("choices"), sample.get("target")]),
    )
    found = sample.get("scores")
    if sample.get("error") or sample.get("invalidation") or not isinstance(found, dict) or not found:
        failed.append(row)
        return item
    for scorer, score in found.items():
        for metric, value in _values(scorer, score):
            scores.add(row._replace(metric=metric_name(metric)), value, where)
    return item


def _values(scorer: str, score: Any) -> Iterator[tuple[str, Any]]:
    value = score.get("value") if isinstance(score, dict) else None
    if isinstance(value, dict):
        yield from ((f"{scorer}.{name}", _number(inner)) for name, inner in value.items())
    else:
        yield scorer, _number(value)


def _number(value: Any) -> Any:
    """Inspect's own words for scores as numbers; anything else is left for the common check."""
    if not isinstance(value, str):
        return value
    if value in _WORDS:
        return _WORDS[value]
    word = value.strip().lower()
    if word in _YES_OR_NO:
        return _YES_OR_NO[word]
    try:
        return parse_number(word)
    except DataError:
        return value
