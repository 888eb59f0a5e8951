"""Simulate cases in this process or in several, with the same figures. Used by bench.calibration."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context

from bench.calibration.case import Case, Simulated

Progress = Callable[[int, str], None]  # cases finished, name of the last
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def simulate(cases: Sequence[Case], *, seed: int, workers: int, progress: Progress) -> list[Simulated]:
    """Return the outcomes in the order of the cases."""
    if workers == 1:
        outcomes = []
        for done, case in enumerate(cases):
            progress(done, case.name)
            outcomes.append(_outcome(case, seed))
        return outcomes
    # in this order: numpy reads the number of threads once, when a new process imports it
    with _one_thread_each(), ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return _collect(pool, cases, seed, progress)


def _collect(pool: ProcessPoolExecutor, cases: Sequence[Case], seed: int, progress: Progress) -> list[Simulated]:
    futures = {pool.submit(_outcome, case, seed): number for number, case in enumerate(cases)}
    try:
        for done, future in enumerate(as_completed(futures), start=1):
            progress(done, future.result().case.name)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    return [future.result() for future in futures]


def _outcome(case: Case, seed: int) -> Simulated:
    started = time.process_time()
    rates = case.rates(seed)
    return Simulated(case, rates, time.process_time() - started)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Give processes started in the block one thread each for linear algebra, unless the user set another number."""
    added = [name for name in _THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
