"""Several processes, as torchrun starts them: which one this is, and what they tell each other.

Every process computes its share of each batch and of each pass over all images. Outputs of the
networks are gathered, and everything that follows from them (losses, mixtures, flags) is computed
by every process from the same values. Without torchrun there is one process, and nothing here does
anything.

Shapes: W processes, B rows of which each process has b, n rows in a chunk.
"""

import gc
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pseudoloss.errors import InputError, TrainingError

if TYPE_CHECKING:
    from torch import Tensor

TIMEOUT = timedelta(hours=1)  # of one process that waits for another
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PIECE = 2**28  # bytes that are sent at once
CLAIM = "pseudoloss-run"  # a file in the log folder of torchrun: which run this job has begun

_active = False  # inside `session`
_sessions = 0  # so far; each has keys of its own in the store
_store: Any = None  # where processes find each other; one for all sessions

# -------------------------------------------------------------------------- who this process is


def launched() -> bool:
    """Whether this process was started by torchrun, or in the same way."""
    return all(name in os.environ for name in VARIABLES)


def rank() -> int:
    return int(os.environ["RANK"]) if launched() else 0


def is_main() -> bool:
    """The process that prints and writes."""
    return rank() == 0


def active() -> bool:
    """Whether there is a group of processes, if only of one."""
    return _active


def size() -> int:
    """The number of processes that work on this."""
    return int(os.environ["WORLD_SIZE"]) if _active else 1


def processes_here() -> int:
    """The number of them on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size())) if _active else 1


@contextmanager
def session(device: str) -> Iterator[None]:
    """Join the other processes. `device`: as in the settings; on CUDA every process takes the GPU
    of its number. Does nothing without torchrun."""
    global _active
    if not launched() or _active:
        yield
        return
    _join(device)
    _active, failed = True, True
    try:
        yield
        failed = False
    except RuntimeError as error:
        if size() > 1 and _is_lost(error):
            raise TrainingError(
                "another process ended or could no longer be reached; start all processes again "
                "with --resume"
            ) from error
        raise
    finally:
        _active = False
        _leave(failed)


def _join(device: str) -> None:
    global _sessions, _store
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        raise InputError(
            "torch.distributed is in use already; call this before init_process_group, or after "
            "destroy_process_group"
        )
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if not on_gpu and device not in ("auto", "cpu"):
        raise InputError(
            f"--device {device}: with torchrun, use cuda (every process takes the GPU of its "
            "number) or cpu"
        )
    if _store is None:
        _store = next(dist.rendezvous("env://", timeout=TIMEOUT))[0]  # type: ignore[attr-defined]
    _sessions += 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store survives
    group: dict[str, Any] = {
        "store": dist.PrefixStore(f"pseudoloss/{attempt}/{_sessions}", _store),  # type: ignore[attr-defined]
        "rank": rank(),
        "world_size": int(os.environ["WORLD_SIZE"]),
        "timeout": TIMEOUT,
    }
    if not on_gpu:
        dist.init_process_group("gloo", **group)
        return
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= gpus:
        raise InputError(
            f"--device cuda: process {local + 1} of this machine has no GPU, there "
            f"{'is 1' if gpus == 1 else f'are {gpus}'}; start torchrun with "
            f"--nproc-per-node {max(gpus, 1)}"
        )
    torch.cuda.set_device(local)
    gpu = torch.device("cuda", local)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=gpu, **group)


def _leave(failed: bool) -> None:
    import torch.distributed as dist

    gc.collect()  # NCCL waits for the captured graphs that use it

    world = dist.group.WORLD
    if failed and world is not None and "nccl" in dist.get_backend_config(world):
        with suppress(RuntimeError, AttributeError):  # others may wait for what will not come
            world.abort()
    dist.destroy_process_group()


def _is_lost(error: RuntimeError) -> bool:
    """Whether it says that another process does not answer."""
    import torch.distributed as dist

    if isinstance(error, TrainingError):
        return False
    signs = ("Connection closed", "Connection reset", "Broken pipe", "Timed out", "gloo")
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)


def speaks() -> bool:
    """Whether this process prints its error: the first one that has one."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or not launched():
        return True
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return is_main()
    import torch.distributed as dist

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    with suppress(RuntimeError, ValueError):
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        wait = timedelta(seconds=10)
        store = dist.TCPStore(address, port, is_master=False, timeout=wait)  # type: ignore[attr-defined]
        return bool(store.add(f"pseudoloss/error/{attempt}", 1) == 1)
    return is_main()


def refuse_several(command: str, shared: Sequence[str]) -> None:
    """Of a command that would do the same thing in every process."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        raise InputError(
            f"{command}: works in one process; torchrun can start {' and '.join(shared)} on several"
        )


# ----------------------------------------------------------------------- restarts by torchrun


def claim(folder: Path) -> None:
    """Remember that this job of torchrun works on the run in `folder`."""
    path = _claim_file()
    if path is not None and is_main():
        with suppress(OSError):
            path.write_text(str(folder.absolute()), encoding="utf-8")


def restarted(folder: Path) -> bool:
    """Whether torchrun has restarted the processes of a job that works on the run in `folder`."""
    path = _claim_file()
    if path is None or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    try:
        return path.read_text(encoding="utf-8") == str(folder.absolute())
    except OSError:
        return False


def _claim_file() -> Path | None:
    """The folder of torchrun's logs is another one in every job, and the same after a restart."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # FOLDER/attempt_0/RANK/error.json
    return Path(error_file).parents[2] / CLAIM if launched() and error_file else None


# ---------------------------------------------------------------------------------- small values


def from_main(value: Any) -> Any:
    """The value of the first process, in every process. It must be JSON."""
    return all_values(value if is_main() else None)[0] if _active else value


def agree(value: bool) -> bool:
    """What the first process says. For decisions that depend on time."""
    return bool(from_main(value))


def all_values(value: Any) -> list[Any]:
    """The values of all processes, in order. They must be JSON."""
    if not _active:
        return [value]
    import torch
    import torch.distributed as dist

    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = torch.empty(size(), dtype=torch.long)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(text)]))
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    padded[: len(text)] = text
    found = torch.empty(size() * len(padded), dtype=torch.uint8)
    dist.all_gather_into_tensor(found, padded)
    rows = found.view(size(), -1)
    return [json.loads(rows[r, : int(sizes[r])].numpy().tobytes()) for r in range(size())]


def check_same(facts: dict[str, Any], where: str) -> None:
    """Raise an InputError if the processes have different facts."""
    found = all_values(facts)
    for other, theirs in enumerate(found):
        for name, value in found[0].items():
            if theirs[name] != value:
                raise InputError(
                    f"{where}: {name} differs between process 1 ({value}) and process {other + 1} "
                    f"({theirs[name]}); all processes must be started with the same command and "
                    "see the same files"
                )


def wait_for_all() -> None:
    all_values(None)


# --------------------------------------------------------------------------------------- tensors


def own(rows: int) -> slice:
    """The rows of this process, of a batch that can be divided evenly."""
    each = rows // size()
    return slice(rank() * each, (rank() + 1) * each) if _active else slice(0, rows)


def part(rows: int, process: int | None = None) -> slice:
    """The rows of a process, of a table that cannot be divided evenly."""
    process = _number(process)
    return slice(rows * process // size(), rows * (process + 1) // size())


def share(rows: int, process: int | None = None) -> slice:
    """The rows of a chunk that a process computes: equally many in every process, so some rows are
    computed twice where they cannot be divided evenly."""
    process = _number(process)
    each = -(-rows // size())
    start = min(process * each, rows - each)
    return slice(start, start + each)


def whole(found: "Tensor", rows: int) -> "Tensor":
    """The results of all processes for a chunk of so many rows, each row once and in order; `found`
    are those for `share` of it."""
    gathered = gather(found).view(size(), *found.shape)
    parts = []
    for process in range(size()):
        each = len(found)
        first, last = min(process * each, rows), min((process + 1) * each, rows)
        start = share(rows, process).start
        parts.append(gathered[process, first - start : last - start])
    import torch

    return torch.cat(parts)


def _number(process: int | None) -> int:
    return process if process is not None else rank() if _active else 0


def gather(x_b: "Tensor") -> "Tensor":
    """The rows of all processes, in order; without gradients."""
    import torch
    import torch.distributed as dist

    out_B = torch.empty((size() * len(x_b), *x_b.shape[1:]), dtype=x_b.dtype, device=x_b.device)
    dist.all_gather_into_tensor(out_B, x_b.detach().contiguous())
    return out_B


def exchange_parts(table: "Tensor") -> None:
    """Fill a table of which every process has its `part`."""
    for process in range(size()):
        spread([table[part(len(table), process)]], process)


def add_up(tensor: "Tensor") -> None:
    """Replace a tensor by the sum over all processes: the same bits in each."""
    if _active:
        import torch.distributed as dist

        dist.all_reduce(tensor)


def add_up_gradients(parameters: Iterable["Tensor"]) -> None:
    """Replace the gradients by their sums over all processes, in one transfer."""
    if not _active:
        return
    import torch

    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    add_up(flat)
    sums = flat.split([gradient.numel() for gradient in gradients])
    pairs = zip(sums, gradients, strict=True)
    torch._foreach_copy_(gradients, [part.view(gradient.shape) for part, gradient in pairs])


def average(tensors: Sequence["Tensor"]) -> None:
    """Replace tensors by their means over all processes."""
    for tensor in tensors if _active else ():
        add_up(tensor)
        tensor /= size()


def spread(tensors: Iterable["Tensor"], source: int = 0) -> None:
    """Replace tensors by those of one process, bit by bit."""
    if not _active or size() == 1:
        return
    import torch
    import torch.distributed as dist

    for tensor in tensors:
        if tensor.numel():
            raw = tensor.detach().contiguous().flatten().view(torch.uint8)
            for piece in raw.split(PIECE):
                dist.broadcast(piece, source)
            if raw.data_ptr() != tensor.data_ptr():  # it was not contiguous
                tensor.detach().copy_(raw.view(tensor.dtype).view(tensor.shape))
