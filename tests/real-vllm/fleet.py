"""Processes under test: real vLLM engines, and routers in front of them.

Everything listens on the loopback device, or on a socket in the run's own directory. What is started
here is ended here, each engine with the whole process group that it leads.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from wire import Answer, metrics, send, until

HERE = Path(__file__).parent
BINARY = os.environ["POINTSMAN_BIN"]

MODEL = "real"
BLOCK_TOKENS = 32
BLOCKS = 1024
MAX_MODEL_LEN = 8192
MAX_BATCHED_TOKENS = 2048
SEQUENCES = 16

# How long a prefill engine keeps KV that nobody fetches. Short, because tests wait for its end.
LEASE_SECONDS = 6

# Importing vLLM on a slow machine, and starting an engine or a router. Nothing waits that long unless
# it has failed.
IMPORT_SECONDS = 400
START_SECONDS = 180

PREFILL, DECODE = "prefill", "decode"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Launcher:
    """The process that has vLLM imported and forks engines; one that runs already serves as well."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._socket = os.environ.get("REAL_VLLM_LAUNCHER")
        self._process = None
        if self._socket:
            return
        self._socket = str(directory / "launcher.sock")
        log = directory / "launcher.log"
        with log.open("wb") as out:
            command = [sys.executable, str(HERE / "launcher.py"), self._socket]
            self._process = subprocess.Popen(command, stdout=out, stderr=out)

        def ready():
            assert self._process.poll() is None, f"vLLM cannot be imported:\n{log.read_text()}"
            return Path(self._socket).exists()

        until("vLLM is imported", ready, IMPORT_SECONDS)

    def run(self, log: Path, arguments: list[str], environment: dict | None = None) -> int:
        """Forks a `vllm` command; its process id."""
        order = {"arguments": arguments, "environment": environment or {}, "log": str(log)}
        with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rw") as lines:
            connection.connect(self._socket)
            print(json.dumps(order), file=lines, flush=True)
            return json.loads(lines.readline())["pid"]

    def stop(self) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait()


def is_alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@dataclass
class Engine:
    """One vLLM server under the name that the router knows it by."""

    launcher: Launcher
    name: str
    role: str
    model: Path
    lease_seconds: int = LEASE_SECONDS
    # What it is told to publish its KV events on; `ipc` binds, so that the router finds it by itself.
    events: str = ""
    extra: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    side_port: int = field(default_factory=free_port)
    replay_port: int = field(default_factory=free_port)
    pid: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.launcher.directory / f"{self.name}.log"

    def start(self) -> "Engine":
        assert not self.pid
        events = self.events or f"ipc://{self.launcher.directory}/{self.name}.events"
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_producer" if self.role == PREFILL else "kv_consumer",
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"kv_lease_duration": self.lease_seconds},
        }
        publisher = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": events,
            "replay_endpoint": f"tcp://127.0.0.1:{self.replay_port}",
        }
        arguments = [
            *("serve", str(self.model), "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(SEQUENCES)),
            *("--max-num-batched-tokens", str(MAX_BATCHED_TOKENS), "--enforce-eager"),
            # CPUs without bfloat16 are ten times slower at it.
            *("--dtype", "float32"),
            *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS)),
            *("--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)),
            *("--kv-events-config", json.dumps(publisher)),
            *self.extra,
        ]
        environment = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port),
            # For `/reset_prefix_cache`.
            "VLLM_SERVER_DEV_MODE": "1",
        }
        self.pid = self.launcher.run(self.log, arguments, environment)
        return self

    def wait(self) -> "Engine":
        def healthy():
            assert is_alive(self.pid), f"{self.name} did not start:\n{self.tail()}"
            return self.is_healthy()

        until(f"{self.name} is up", healthy, START_SECONDS)
        self._unpin()
        return self

    def _unpin(self) -> None:
        """Lets it run on all cores: NixlConnector on a CPU ties every engine to the machine's last one."""
        cores = range(os.cpu_count() or 1)
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError, FileNotFoundError):
                if os.getpgid(int(process.name)) == self.pid:
                    for thread in process.glob("task/*"):
                        os.sched_setaffinity(int(thread.name), cores)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def is_healthy(self) -> bool:
        with suppress(OSError):
            return send(self.url, "/health").status == 200
        return False

    def kill(self) -> None:
        """Ends it as a crash does."""
        self._signal(signal.SIGKILL)
        until(f"{self.name} is dead", lambda: not is_alive(self.pid))
        self.pid = 0

    def stop(self) -> None:
        if self.pid:
            self._signal(signal.SIGTERM)
            with suppress(AssertionError):
                until(f"{self.name} has ended", lambda: not is_alive(self.pid), 20)
            self._signal(signal.SIGKILL)
            self.pid = 0

    def freeze(self, on: bool) -> None:
        self._signal(signal.SIGSTOP if on else signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self.pid, f"{self.name} does not run"
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def forget(self) -> None:
        """Makes its prefix cache cold."""
        assert send(self.url, "/reset_prefix_cache", method="POST").status == 200

    def metric(self, name: str) -> float:
        return sum(v for key, v in metrics(self.url).items() if key.split("{")[0] == name)

    def pinned(self) -> float:
        """The share of its blocks that are in use."""
        return self.metric("vllm:kv_cache_usage_perc")

    def is_at_rest(self) -> bool:
        seen = metrics(self.url)
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        return not any(v for key, v in seen.items() if key.split("{")[0] in names)

    def sources(self) -> dict[str, int]:
        """Where the KV of all prompt tokens so far came from, by the engine's own count."""
        found = {}
        for key, value in metrics(self.url).items():
            if key.startswith("vllm:prompt_tokens_by_source_total{"):
                source = key.split('source="')[1].split('"')[0]
                found[source] = found.get(source, 0) + int(value)
        return found


class Router:
    """One `pointsman serve`."""

    def __init__(self, directory: Path, config: dict):
        self._directory = directory
        self.file = directory / "pointsman.yaml"
        self.file.write_text(json.dumps(config))
        self.log = directory / "router.log"
        # Whatever the environment of the tests holds is no setting of this router.
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("POINTSMAN__", "DYN"))}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [BINARY, "serve", "--port", "0", "--config", str(self.file)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=kept,
            )
        line = self._process.stdout.readline()
        assert " is ready on " in line, f"{line}\n{self.log.read_text()}"
        self.url = line.rsplit(" ", 1)[1].strip()

    def send(self, endpoint: str, body: dict, **headers) -> Answer:
        return send(self.url, endpoint, body, named(headers))

    def explain(self, body: dict) -> dict:
        answer = send(self.url, "/v1/pointsman/explain", body)
        assert answer.status == 200, answer
        return answer.json

    def status(self) -> dict:
        return send(self.url, "/v1/pointsman/status").json

    def workers(self) -> list[dict]:
        return send(self.url, "/v1/pointsman/workers").json["workers"]

    def metric(self, start: str) -> float:
        return sum(value for key, value in metrics(self.url).items() if key.startswith(start))

    def unrest(self) -> list:
        """What is still going on in it."""
        status = self.status()
        bad = [m for m in status["models"] if m["live_bookings"] or m["ledger"] != "sound"]
        return bad + ([status["requests_in_flight"]] if status["requests_in_flight"] else [])

    def freeze(self, on: bool) -> None:
        self._process.send_signal(signal.SIGSTOP if on else signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            code = self._process.wait(START_SECONDS)
            self._process.stdout.close()
            assert code == 0, f"the router ended with {code}:\n{self.log.read_text()}"


def named(headers: dict) -> dict:
    return {f"x-pointsman-{name}": value for name, value in headers.items()}


def worker(engine: Engine, **more) -> dict:
    """The engine as the router's file names it."""
    told = {
        "name": engine.name,
        "role": engine.role,
        "url": engine.url,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "kv_lease": f"{engine.lease_seconds}s",
    }
    if engine.events:
        # It connects out to publish, so the router has to bind.
        replay = f"tcp://127.0.0.1:{engine.replay_port}"
        told["kv_events"] = {"endpoint": engine.events, "replay_endpoint": replay, "mode": "bind"}
    return {**told, **more}


def configuration(model: Path, workers: list[dict], **more) -> dict:
    return {
        "models": [{"name": MODEL, "tokenizer": {"dir": str(model)}, "workers": workers}],
        # Lets each request choose its path by a header.
        "routing": {"policy": "always_remote", "allow_path_override": True},
        "health": {"interval": "500ms"},
        **more,
    }
