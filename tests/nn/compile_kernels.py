"""Compile every kernel for GPUs, with the arguments of our networks, and print the results as JSON.

This is a separate program because Triton must not interpret here. The networks run on the CPU; each
launch of a kernel is recorded and not executed.
"""

import json
import sys

import torch
from triton import compiler
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pseudoloss.config import OWN
from pseudoloss.nn import kernels
from pseudoloss.nn.networks import build

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64"}
CAPABILITIES = (80, 90)
CALLED_BY_KERNELS = {"_means", "_linear_moments"}

calls = {}


def record(self, *values, grid, warmup=False, num_warps=4, launch_pdl=False, **constants):
    named = dict(zip(self.arg_names, values, strict=False)) | constants
    fixed = {p.name: named[p.name] for p in self.params if p.is_constexpr or named[p.name] is None}
    types = {
        name: "constexpr" if name in fixed else type_of(value) for name, value in named.items()
    }
    aligned = {name for name, value in named.items() if name not in fixed and is_aligned(value)}
    call = self, types, fixed, aligned, num_warps, launch_pdl
    calls[self.fn.__name__, str(types), str(fixed), *sorted(aligned), num_warps, launch_pdl] = call


def is_aligned(value):
    """Whether Triton assumes an alignment of 16, with which it loads several values at once."""
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def type_of(value):
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return {int: "i32", float: "fp32"}[type(value)]


def run(name, precision):
    sizes = {"channels": 3, "size": (16, 16), "classes": 4, "projection": 3}
    network = build(name, **sizes, precision=precision)
    network.fused = True
    views = [torch.zeros(4, 3, 16, 16) for _ in range(4)]
    outputs = network.forward_views(*views, no_grad=2)[2:]
    sum(logits.sum() + projected.sum() for logits, projected in outputs).backward()
    with torch.no_grad(), network.frozen():
        network(views[0])


def compile_for(capability, kernel, types, fixed, aligned, warps, ahead):
    places = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    made = compiler.compile(
        compiler.ASTSource(kernel, types, places, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps} | ({"launch_pdl": True} if ahead else {}),
    )
    return {
        "kernel": kernel.fn.__name__,
        "capability": capability,
        "bytes": len(made.asm["cubin"]),
        "shared": made.metadata.shared,
    }


if __name__ == "__main__":
    JITFunction.run = record
    found = []
    for capability in CAPABILITIES:
        calls.clear()
        kernels.can_launch_ahead = lambda device, able=capability >= 90: able
        for precision in (torch.bfloat16, torch.float32):
            for name in OWN:
                run(name, precision)
        found += [compile_for(capability, *call) for call in calls.values()]
    every = {name for name, value in vars(kernels).items() if isinstance(value, JITFunction)}
    never = every - {entry["kernel"] for entry in found} - CALLED_BY_KERNELS
    json.dump({"found": found, "never": sorted(never)}, sys.stdout)
