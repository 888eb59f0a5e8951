"""The run folder, on which any number of processes work, and which can be resumed after a kill; it holds one spec.

    spec.yaml  provenance.json  checkpoints/<arm>/seed-<n>/  records/<unit>.jsonl + <unit>.done.json  report/

Processes divide the units by locking them (``kvaudit.audit.runs.claims``).
"""

from __future__ import annotations

import errno
import hashlib
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from kvaudit.audit.runs.names import NAMES
from kvaudit.core.errors import DataError, RunError, SpecError
from kvaudit.core.files import LARGEST_FILE, mutex, write_json, write_whole
from kvaudit.core.provenance import (
    ENDED,
    INPUTS,
    LOOKS,
    MINUTES,
    PROVENANCE,
    TIME_SPENT,
    Digests,
    check_inputs,
    item_counts,
    read_provenance,
    seal_looks,
    table_of,
)
from kvaudit.core.spec import RunSpec, dump_spec, load_spec

SPEC = "spec.yaml"
_PACKAGES = ("kvaudit", "torch", "transformers", "tokenizers", "numpy")
_IMPOSSIBLE = {errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP}


class RunFolder:
    """The folder of a run with its spec, opened by ``open_run`` or ``existing_run``."""

    def __init__(self, path: Path, spec: RunSpec) -> None:
        self.path, self.spec = path, spec

    @property
    def sized(self) -> RunSpec:
        """The spec with the numbers of items that the pilot fixed or the rounds have reached, if any are stored."""
        return self.spec.sized(item_counts(self.provenance()))

    @property
    def records(self) -> Path:
        """The folder of the record files."""
        return self.path / "records"

    def checkpoint(self, arm: str, seed: int) -> Path:
        """Return the checkpoint folder of a trained arm and seed."""
        return self.path / "checkpoints" / arm / f"seed-{seed}"

    def provenance(self) -> dict[str, Any]:
        """Return the content of provenance.json."""
        return read_provenance(self.path)

    def note(self, **entries: Any) -> None:
        """Add entries to provenance.json, or replace them; mappings are merged one level deep.

        Safe between processes.
        """
        with mutex(self.path / ".provenance.lock"):
            provenance = self.provenance() if (self.path / PROVENANCE).exists() else {}
            for key, value in entries.items():
                provenance[key] = {**provenance.get(key, {}), **value} if isinstance(value, Mapping) else value
            write_json(self.path / PROVENANCE, seal_looks(provenance))

    def keep(self, table: str, key: str, value: Any) -> Any:
        """Store ``value`` in provenance.json under ``table`` and ``key`` if there is none yet; return the stored one.

        Safe between processes: all of them get the value of the first one.
        """
        with mutex(self.path / ".provenance.lock"):
            provenance = self.provenance()
            entries = provenance.setdefault(table, {})
            if not isinstance(entries, dict):
                raise DataError(
                    f"{str(self.path / PROVENANCE)!r}: {table} is a {type(entries).__name__}, wanted an object"
                )
            if key not in entries:
                entries[key] = value
                write_json(self.path / PROVENANCE, seal_looks(provenance))
            return entries[key]


def noted_value(run: RunFolder, *keys: str) -> Any:
    """Return the value under nested keys of provenance.json, outermost first; raise DataError if it is missing."""
    value: Any = run.provenance()
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            raise DataError(
                f"{str(run.path / PROVENANCE)!r} lacks {'.'.join(keys)}, which the run wrote there; restore the file, "
                "or start another run with --out"
            )
        value = value[key]
    return value


def check_inputs_unchanged(run: RunFolder, kind: str, digests: Digests) -> None:
    """Store the hashes of one kind of the run's inputs, such as public rows; raise RunError if others are stored."""
    check_inputs(kind, run.keep(INPUTS, kind, dict(digests)), digests)


def check_folder(path: Path, spec: RunSpec, *, resume: bool) -> bool:
    """Return whether ``path`` holds this run already; write nothing.

    Raises RunError if the folder holds another spec or other files, or holds this run although ``resume`` is not
    given.
    """
    with _explain_path_errors(path):
        if not (path / SPEC).exists():
            begun = {PROVENANCE, "records", "spec.yaml.partial"}  # traces of an interrupted start
            if path.exists() and not path.is_dir():
                raise RunError(f"{str(path)!r} is a file, no folder of a run; give another --out")
            if path.exists() and any(file.name[0] != "." and file.name not in begun for file in path.iterdir()):
                raise RunError(f"{str(path)!r} is not empty and holds no run; give another --out")
            if (size := len(dump_spec(spec).encode())) > LARGEST_FILE:
                raise SpecError(
                    f"the spec has {size} bytes with its defaults written out, but may have at most {LARGEST_FILE}; "
                    "use fewer policies or suites in one run"
                )
            return False
    _check_same(path, spec)
    if not resume:
        raise RunError(f"folder {str(path)!r} already holds this run; add --resume to go on, or give another --out")
    return True


def existing_run(path: Path) -> RunFolder:
    """Open the run of a folder; raise DataError if there is none, or if its spec was changed."""
    if not (path / SPEC).is_file():
        raise DataError(f"{str(path / SPEC)!r} is missing; give the folder of a run (kvaudit run SPEC --out DIR)")
    run = RunFolder(path, load_spec(path / SPEC, NAMES))
    began = run.provenance().get("spec_sha256")
    if began != run.spec.sha256:  # perhaps a spec of an earlier version, which gave public rows a context length
        spec = load_spec(path / SPEC)
        grid = spec.evaluate
        if any(NAMES.lengths(name) == "none" and any(grid.contexts_of(name)) for name in grid.suites):
            run = RunFolder(path, spec)
    if began != run.spec.sha256:
        raise DataError(
            f"{str(path / SPEC)!r} has hash {run.spec.sha256[:12]}, the run began with {str(began)[:12]}; "
            "restore the first one"
        )
    return run


def open_run(path: Path, spec: RunSpec, *, resume: bool, entries: Mapping[str, Any] | None = None) -> RunFolder:
    """Start or resume a run in ``path``; raise RunError as ``check_folder`` does.

    ``entries`` are further entries for the provenance of a new run, such as its gate.
    """
    folder = RunFolder(path, spec)
    if check_folder(path, spec, resume=resume):
        return folder
    make_folder(path)
    folder.note(
        format=1,
        name=spec.name,
        spec_sha256=spec.sha256,
        spec_file_sha256=hashlib.sha256(dump_spec(spec).encode()).hexdigest(),
        versions=_versions(),
        host={"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()},
        started=utc_now(),
        finished=None,
        **(entries or {}),
    )
    folder.records.mkdir(exist_ok=True)
    # the spec is written last: a folder with a spec is complete, and one without may be started over
    with mutex(path / ".provenance.lock"):
        if not (path / SPEC).exists():
            write_whole(path / SPEC, dump_spec(spec))
    _check_same(path, spec)  # another process may have started a run here at the same time
    return folder


def allow_more_minutes(path: Path, spec: RunSpec) -> RunSpec:
    """Let a run in rounds take the larger time limit of ``spec``, if nothing else differs; return the stored spec.

    Rounds that ended because their time was spent then go on. If the folder holds no such run, nothing is changed and
    ``spec`` is returned.
    """
    if not (path / SPEC).exists():
        return spec
    stored = load_spec(path / SPEC, NAMES)
    rounds, longer = stored.evaluate.rounds, spec.evaluate.rounds
    if rounds is None or longer is None or longer.minutes <= rounds.minutes:
        return spec
    evaluate = spec.evaluate.model_copy(update={"rounds": rounds})
    if spec.model_copy(update={"evaluate": evaluate}).sha256 != stored.sha256:
        return spec
    run = RunFolder(path, stored)
    with mutex(path / ".provenance.lock"):
        provenance = run.provenance()
        looks = dict(table_of(provenance, LOOKS))
        if looks.get(ENDED) == TIME_SPENT and longer.minutes > float(looks.get(MINUTES, 0.0)):
            del looks[ENDED]
        looks[MINUTES] = max(longer.minutes, float(looks.get(MINUTES, 0.0)))
        write_json(path / PROVENANCE, seal_looks({**provenance, LOOKS: looks}))
    return stored


def make_folder(path: Path) -> None:
    """Make a folder and its parents; raise RunError if the path cannot be a folder."""
    with _explain_path_errors(path):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def _explain_path_errors(path: Path) -> Iterator[None]:
    """Turn the system's error about an impossible path into a RunError; let other errors, such as a full disk, pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _IMPOSSIBLE:
            raise
        raise RunError(f"{str(path)!r} cannot be a folder ({error.strerror}); give another --out") from None


def _check_same(path: Path, spec: RunSpec) -> None:
    present = load_spec(path / SPEC, NAMES)
    if present.sha256 != spec.sha256:
        raise RunError(
            f"folder {str(path)!r} holds another spec ({present.name} {present.sha256[:12]}, yours is {spec.name} "
            f"{spec.sha256[:12]}); give another --out"
        )


def versions_line() -> str:
    """Return the versions of Python and of the packages that answers depend on, as one line."""
    versions = {**_versions(), "python": platform.python_version()}
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # running from a source tree that is not installed
            versions[name] = "not installed"
    return versions


def utc_now() -> str:
    """Return the UTC time in ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
