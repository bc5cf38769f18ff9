"""Real processes for the tests of kills, Ctrl-C and full disks."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

# A PLS run of six epochs that takes less than a second.
FLAGS = ["--network=small-cnn", "--batch-size=16", "--epochs=6", "--warmup=2", "--lr=0.05"]
FLAGS += ["--pad=1", "--corrupt=symmetric:0.4", "--device=cpu"]


@dataclass
class Process:
    pid: int
    log: Path
    server: "CommandServer"

    def wait(self, block=True):
        """The exit code; with block=False None if it is still running. -9: killed."""
        return self.server.ask({"wait": self.pid, "block": block})

    @property
    def output(self):
        return self.log.read_text()


class CommandServer:
    """Starts `pseudoloss` commands as processes; see command_server.py."""

    def __init__(self, folder):
        self.folder, self.started = folder, 0
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("command_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.server.stdout.readline() == "ready\n"

    def ask(self, request):
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def start(self, *arguments, most_bytes=None, environment=()):
        self.started += 1
        log = self.folder / f"{self.started}.txt"
        request = {"arguments": [str(a) for a in arguments], "log": str(log)}
        request |= {"most_bytes": most_bytes, "environment": dict(environment)}
        return Process(self.ask(request), log, self)

    def run(self, *arguments, **options):
        """Start a command and wait; the exit code and the output."""
        process = self.start(*arguments, **options)
        return process.wait(), process.output

    def start_group(self, *arguments, processes=2, environment=()):
        """Start a command as torchrun does, in so many processes."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes)}
        shared |= {"LOCAL_WORLD_SIZE": str(processes)} | dict(environment)
        return [
            self.start(*arguments, environment=shared | {"RANK": str(i), "LOCAL_RANK": str(i)})
            for i in range(processes)
        ]

    def run_group(self, *arguments, **options):
        """... and wait; their exit codes and outputs."""
        group = self.start_group(*arguments, **options)
        return [process.wait() for process in group], [process.output for process in group]

    def close(self):
        self.server.stdin.close()
        self.server.wait(timeout=60)


def wait_for_address(process, seconds=60):
    """The address that `pseudoloss review` prints once it listens."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        output = process.output if process.log.exists() else ""
        found = re.search(r"Review at (http://\S+)\n", output)
        if found:
            return found[1]
        time.sleep(0.02)
    raise AssertionError(f"no address: {process.output}")
