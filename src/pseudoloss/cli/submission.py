"""Workers of `pseudoloss experiments run --submit`: jobs of SLURM, or processes of this machine."""

import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pseudoloss.errors import InputError, TrainingError, first_line

POLL_SECONDS = 1.0


class Worker:
    """A worker trains cells that no other worker has claimed. When its time in the queue is over,
    it is put back into the queue and resumes."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)

    def __call__(self) -> int:
        from pseudoloss.cli import main

        code = main(["experiments", "run", *self.arguments])
        if code:
            raise RuntimeError(f"pseudoloss ended with exit code {code}")
        return code

    def checkpoint(self) -> Any:
        """Called by submitit before the job is stopped."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


def check(cluster: str) -> None:
    """Refuse a cluster that is not there. Writes nothing."""
    try:
        import submitit  # noqa: F401
    except ImportError:
        raise InputError(
            f"--submit {cluster}: needs submitit: pip install 'pseudoloss[slurm]'"
        ) from None
    if cluster == "slurm" and shutil.which("srun") is None:
        raise InputError("--submit slurm: there is no SLURM on this machine (srun is missing)")


def open_executor(cluster: str, folder: Path, parameters: Mapping[str, Any]) -> Any:
    """An executor of submitit, which writes to the folder."""
    import submitit

    try:
        executor = submitit.AutoExecutor(folder, cluster=cluster)
        executor.update_parameters(name="pseudoloss", **parameters)
    except (OSError, RuntimeError, ValueError, TypeError, AssertionError, NameError) as error:
        raise InputError(f"--submit {cluster}: {first_line(error)}") from None
    return executor


def submit(
    executor: Any,
    arguments: Sequence[str],
    workers: int,
    say: Callable[[str], None],
) -> None:
    """Start the workers. Those of this machine are waited for."""
    is_local = executor.cluster == "local"
    worker = Worker(arguments)
    try:
        if is_local:
            jobs = [executor.submit(worker) for _ in range(workers)]
        else:
            with executor.batch():  # one job array
                jobs = [executor.submit(worker) for _ in range(workers)]
    except Exception as error:  # sbatch refuses it
        raise InputError(f"--submit {executor.cluster}: {first_line(error)}") from None
    for job in jobs:
        say(f"worker {job.job_id}: writes {job.paths.stdout}")
    states = shlex.join(["pseudoloss", "experiments", "run", *arguments, "--dry-run"])
    if not is_local:
        say(f"Next: {states}")
        return
    try:
        _wait(jobs, say)
    except KeyboardInterrupt:
        for job in jobs:
            job.cancel()
        raise


def _wait(jobs: Sequence[Any], say: Callable[[str], None]) -> None:
    waiting, failed = list(jobs), []
    while waiting:
        time.sleep(POLL_SECONDS)
        for job in [job for job in waiting if job.done()]:
            waiting.remove(job)
            if job.exception() is None:
                say(f"worker {job.job_id}: done")
                continue
            lines = (job.stderr() or "").strip().splitlines()
            why = next((line for line in reversed(lines) if "pseudoloss: error" in line), "")
            failed.append(f"worker {job.job_id} failed{f' ({why})' if why else ''}")
            say(failed[-1])
    if failed:
        raise TrainingError(f"{'; '.join(failed)}; the files that they wrote say more")
