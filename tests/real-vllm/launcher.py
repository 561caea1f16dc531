"""Imports vLLM once, which takes a minute, then forks a process for each command line it is given.

It listens on the Unix socket it is given once it is ready. Each connection brings one JSON line,
`{"arguments": [...], "environment": {...}, "log": path}`, and gets `{"pid": number}`. What it forked
leads a process group of its own and is ended by whoever asked for it.
"""

import importlib
import json
import multiprocessing
import os
import pkgutil
import signal
import socket
import sys
import traceback

# Said before anything is imported, because the libraries read it then.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Several engines share few cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # See `run.sh`: the delay of NIXL's progress thread in microseconds.
    "NIXL_PTHR_DELAY_US": "1000",
    "UCX_TLS": "tcp,self,sm",
    "UCX_NET_DEVICES": "lo",
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
}

# Imported by a server when it starts, and slow enough to be worth having already.
PACKAGES = (
    "vllm.entrypoints.scale_out",
    "vllm.entrypoints.generate",
    "vllm.entrypoints.openai",
    "vllm.entrypoints.serve",
    "vllm.entrypoints.anthropic",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
    "vllm.v1.metrics",
    "vllm.v1.structured_output",
    "vllm.reasoning",
    "vllm.tool_parsers",
)
MODULES = (
    "transformers.models.llama",
    "vllm.entrypoints.cli.serve",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)


def import_all():
    for name in MODULES:
        importlib.import_module(name)
    for name in PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if "grpc" in module.name or "run_batch" in module.name:
                continue
            try:
                importlib.import_module(module.name)
            except Exception:  # Optional parts, whose own dependencies are not installed.
                pass


def let_servers_fork():
    """vLLM would start helper processes afresh, each importing all of it again."""
    from vllm.utils import system_utils

    original = system_utils.get_mp_context

    def forking(*_args, **_kwargs):
        return multiprocessing.get_context("fork")

    for module in list(sys.modules.values()):
        if getattr(module, "get_mp_context", None) is original:
            module.get_mp_context = forking


def run(order: dict, cli) -> int:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(order.get("environment", {}))
    sys.argv = ["vllm", *order["arguments"]]
    try:
        cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def main(path: str):
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import torch

    # vLLM may ask for the current device of an accelerator; there is none here.
    torch.accelerator.current_device_index = lambda: 0
    import vllm.entrypoints.cli.main as cli

    import_all()
    let_servers_fork()
    # Children are not waited for here; the kernel forgets them when they end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as lines:
            order = json.loads(lines.readline())
            pid = os.fork()
            if pid == 0:
                listener.close()
                connection.close()
                begin(order, cli)
            print(json.dumps({"pid": pid}), file=lines, flush=True)


def begin(order: dict, cli):
    """The forked process's whole life."""
    code = 1
    try:
        code = run(order, cli)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
