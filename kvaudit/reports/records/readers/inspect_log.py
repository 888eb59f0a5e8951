"""Inspect's logs: ``.eval``, a zip of JSON with one member per sample and epoch, and ``.json``, a single file.

Scores become numbers as in Inspect: C 1, P 0.5, I and N 0, yes and true 1, no and false 0. A scorer with several values
is one metric per value, SCORER.VALUE. An epoch is a repeat of its item. Logs compressed with Zstandard, as Inspect
writes them now, need the package zstandard. A zip is read in memory and within limits, whatever its directory declares.
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
from contextlib import nullcontext
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
    SharedFields,
    fingerprint_of,
    log_of,
    metric_name,
    name_of,
    parse_number,
    question_key,
    repeat_of,
)

LARGEST_MEMBER = 64 * 2**20  # bytes of JSON in one member
LARGEST_TOTAL = 256 * 2**20  # bytes that any zip may unpack to; a larger zip may unpack to LARGEST_RATIO times its size
LARGEST_RATIO = 400
MOST_MEMBERS = 2_000_000
ZSTANDARD, ENCRYPTED = 93, 0x1  # a method and a flag of the zip format
PLAIN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # methods that Python unpacks only as far as it is asked to
_START = 4096  # bytes at the beginning of a log in JSON
_LOCAL_HEADER = 30  # bytes before the name of a member
_DAMAGED = (  # what reading a damaged zip raises
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, NotImplementedError),
    *(MemoryError, OverflowError, RuntimeError),
)


class MissingPackage(DataError):
    """The error for a zip that cannot be unpacked because the package that can do it is not installed."""


class Archive:
    """An open ``.eval`` log, which is a zip; raises DataError for a file that is no zip."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = zipfile.ZipFile(path)
        except _DAMAGED as error:
            raise DataError(f"{str(path)!r} cannot be read as a zip ({error}); copy the file again") from None
        self._members = {info.filename: info for info in self._file.infolist()}  # a duplicate replaces the first
        self._bytes_left = max(LARGEST_TOTAL, LARGEST_RATIO * path.stat().st_size)
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
        """Return a member's JSON object; raises DataError if it is damaged, encrypted, too long or no object."""
        info = self._members[name]
        if info.flag_bits & ENCRYPTED:
            raise DataError("the member is encrypted")
        if info.compress_type not in (*PLAIN, ZSTANDARD):
            raise DataError(f"the member is packed by method {info.compress_type}; deflate, Zstandard or none are read")
        raw = self._zstandard(info) if info.compress_type == ZSTANDARD else self._plain(info)
        if len(raw) > LARGEST_MEMBER:
            raise DataError(f"the member unpacks to more than {LARGEST_MEMBER >> 20} MB")
        self._bytes_left -= len(raw)
        if self._bytes_left < 0:
            raise TooLarge(f"{str(self.path)!r} unpacks to more than {LARGEST_RATIO} times its size; that is not a log")
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
                # one more byte than is allowed shows that it is too long
                return stream.read(LARGEST_MEMBER + 1)
        except _DAMAGED as error:
            raise DataError(f"the member is damaged ({error})") from None

    def _zstandard(self, info: zipfile.ZipInfo) -> bytes:
        """Return a member unpacked by the package zstandard, since Python's zipfile can do so only from 3.14 on."""
        try:
            import zstandard
        except ImportError:
            raise MissingPackage(
                f"{str(self.path)!r} is compressed with Zstandard; install the package: pip install zstandard"
            ) from None
        # a frame declares the memory that it needs; the limit is checked before any is allocated
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
            # lengths of name and extra field by the local header: the directory may have others
            lengths = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
            handle.seek(lengths, io.SEEK_CUR)
            return handle.read(min(max(0, info.compress_size), size))


class TooLarge(DataError):
    """The error for a zip that unpacks to more bytes than any log has."""


SETTINGS = ("scorers", "task_version", "task_args")  # that two logs must share
# options of model calls that two compared logs need not share
_IGNORED_OPTIONS = {
    *("max_connections", "adaptive_connections", "max_retries", "timeout", "attempt_timeout", "cache", "cache_prompt"),
    *("batch", "seed", "modalities"),
}
_RANDOM_KEYS = {"id", "tool_call_id", "source", "model"}  # of a message: they differ in every run
HEADER, START = "header.json", "_journal/start.json"
_SAMPLE = re.compile(r"^samples/.+\.json$")
_GRADES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
_YES_OR_NO = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


class Inspect(Reader):
    """Inspect evaluation log."""

    name = "inspect"
    reads = "Inspect .eval or .json log"

    def recognises(self, path: Path) -> bool:
        """Return whether the file is a zip with Inspect's header or journal, even truncated, or a log in JSON."""
        if path.is_dir():
            return False
        if path.suffix == ".json":
            return _starts_as_json_log(path)
        if not zipfile.is_zipfile(path):
            with path.open("rb") as handle:
                return path.suffix == ".eval" and handle.read(4) == b"PK\x03\x04"
        try:
            with Archive(path) as archive:
                return HEADER in archive or START in archive
        except DataError:
            return False

    def read(self, path: Path, request: Request) -> Log:
        """Return every score of every sample; a failed sample has no score under any scorer."""
        problems, shared = Problems(), SharedFields("metadata.")
        scores, failed, edited = CollectedScores(problems), list[Row](), 0
        with nullcontext(_JsonLog(path)) if path.suffix == ".json" else Archive(path) as log:
            header = log.json(HEADER if HEADER in log else START)  # a recognised log has one of them
            for name in filter(_SAMPLE.match, log):
                try:
                    sample = log.json(name)
                    item = _add(sample, request, scores, failed, f"{path.name}:{name}")
                    shared.add(item, sample.get("metadata"), sample.get("target"))
                    edited += _count_edits(sample)
                except (MissingPackage, TooLarge):  # they concern the whole log
                    raise
                except DataError as error:
                    problems.add(f"{path.name}:{name}: {error}")
        scores.report()
        metrics = sorted({row.metric for row in scores.rows})
        status, about = str(header.get("status", "started"))[:40], header.get("eval")
        about = about if isinstance(about, dict) else {}
        return log_of(
            self,
            path,
            scores.rows + [row._replace(metric=metric) for row in failed for metric in metrics],
            problems,
            settings=_settings(about, header.get("plan")),
            facts={name: str(about[name])[:200] for name in ("task", "model", "created") if name in about},
            unfinished=_unfinished(header, status),
            shared_fields=shared.names(),
            notes=(f"{edited} scores were edited after the run, and are compared as edited",) if edited else (),
        )


class _JsonLog:
    """A log in one JSON file, read like an ``Archive``; raises DataError if it is too long or no log."""

    def __init__(self, path: Path) -> None:
        if path.stat().st_size > LARGEST_TOTAL:
            raise TooLarge(
                f"{str(path)!r} is larger than {LARGEST_TOTAL >> 20} MB; convert it: inspect log convert --to eval "
                f"{path.name} --output-dir logs"
            )
        try:
            self._log = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{str(path)!r} is not a complete JSON log of Inspect ({one_line(error)})") from None
        samples = self._log.get("samples") if isinstance(self._log, dict) else None
        if not isinstance(samples, list):
            raise DataError(f"{str(path)!r} is the header of an Inspect log, without its samples; give the whole log")
        self._members = {f"samples/{number}.json": sample for number, sample in enumerate(samples, start=1)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __contains__(self, name: str) -> bool:
        return name == HEADER

    def json(self, name: str) -> dict[str, Any]:
        """Return the JSON object called ``name``, the header or a sample; raises DataError if it is no object."""
        value = self._log if name == HEADER else self._members[name]
        if not isinstance(value, dict):
            raise DataError("not a JSON object")
        return value


def _starts_as_json_log(path: Path) -> bool:
    with path.open("rb") as handle:
        start = handle.read(_START)
    return start.lstrip().startswith(b"{") and all(key in start for key in (b'"version"', b'"status"', b'"eval"'))


def _settings(about: Mapping[str, Any], plan: Any) -> dict[str, str]:
    """Return the settings that two compared logs must share; an unfinished log may have no plan."""
    settings = {name: json.dumps(about.get(name), sort_keys=True) for name in SETTINGS}
    if isinstance(plan, dict):
        steps = plan.get("steps")
        steps = [*steps, plan.get("finish")] if isinstance(steps, list) else [steps]
        solvers = [[step.get("solver"), step.get("params")] if isinstance(step, dict) else step for step in steps]
        settings["solvers"] = json.dumps(solvers, sort_keys=True)
        # options of the model are in the header, those of the task in the plan
        configs = [c for c in (about.get("model_generate_config"), plan.get("config")) if isinstance(c, dict)]
        options = {name: value for c in configs for name, value in c.items() if name not in _IGNORED_OPTIONS}
        settings["decoding"] = json.dumps({n: v for n, v in options.items() if v is not None}, sort_keys=True)
    return settings


def _unfinished(header: Mapping[str, Any], status: str) -> str:
    if header.get("invalidated"):
        return "it was invalidated"
    return "" if status == "success" else f"Inspect's status is {status!r}"


def _without_random_keys(messages: Any) -> Any:
    if isinstance(messages, list):
        return [_without_random_keys(message) for message in messages]
    if isinstance(messages, dict):
        return {key: _without_random_keys(value) for key, value in messages.items() if key not in _RANDOM_KEYS}
    return messages


def _add(sample: Mapping[str, Any], request: Request, scores: CollectedScores, failed: list[Row], place: str) -> str:
    """Add every score of a sample to ``scores``; return the name of the sample's item.

    If the sample failed or has no score at all, a row for it is added to ``failed``. ``place`` is the sample's place in
    the log, for errors.
    """
    item, epoch = name_of(sample.get("id")), repeat_of(sample.get("epoch", 1))
    if item is None or epoch is None:
        raise DataError("no id or no epoch")
    metadata = sample.get("metadata")
    fields = {**metadata, **sample} if isinstance(metadata, dict) else sample  # the sample's own fields win
    question = [_without_random_keys(sample.get("input")), sample.get("choices"), sample.get("target")]
    row = Row(
        item,
        "",
        math.nan,
        cluster=request.cluster(fields, item) if request.cluster else None,
        sample=epoch,
        fingerprint=fingerprint_of(question) if sample.get("input") else "",
        question=question_key(question) if sample.get("input") else "",
    )
    sample_scores = sample.get("scores")
    if sample.get("error") or sample.get("invalidation") or not isinstance(sample_scores, dict) or not sample_scores:
        failed.append(row)
        return item
    for scorer, score in sample_scores.items():
        for metric, value in _values(scorer, score):
            scores.add(row._replace(metric=metric_name(metric)), value, place)
    return item


def _count_edits(sample: Mapping[str, Any]) -> int:
    """Return how many scores of a sample have a history, which Inspect writes when somebody edits a score."""
    scores = sample.get("scores")
    every = scores.values() if isinstance(scores, dict) else ()
    return sum(isinstance(score, dict) and bool(score.get("history")) for score in every)


def _values(scorer: str, score: Any) -> Iterator[tuple[str, Any]]:
    value = score.get("value") if isinstance(score, dict) else None
    if isinstance(value, dict):
        yield from ((f"{scorer}.{name}", _number(inner)) for name, inner in value.items())
    else:
        yield scorer, _number(value)


def _number(value: Any) -> Any:
    """Return the number that Inspect's word for a score stands for; any other value unchanged, to be checked later."""
    if not isinstance(value, str):
        return value
    if value in _GRADES:
        return _GRADES[value]
    word = value.strip().lower()
    if word in _YES_OR_NO:
        return _YES_OR_NO[word]
    try:
        return parse_number(word)
    except DataError:
        return value
