"""Policies beside each other on one prefill and one decode engine: `tests/real-vllm/run.sh --bench`.

The load: conversations whose turns bring a few words each, and between them long prompts that nobody
has seen before. Each policy has a router of its own, all of them alive for the whole run, and takes
turns with the others at the same requests, arriving at the same times, on engines whose caches are
cold. The first round is not counted: `predicted` learns in it what the engines are like.
"""

import argparse
import json
import os
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from fleet import DECODE, MODEL, PREFILL, Engine, Launcher, Router, configuration, worker
from prompts import CHAT, WORDS
from wire import Exchange, until

POLICIES = {
    "always_remote": {},
    "always_local": {},
    "isl_bounding": {},
    "predicted": {},
}

# Words are about as long as tokens here.
COLD_WORDS = 1000
COLD_EVERY_SECONDS = 4.0
COLD_ANSWER = 32

TALKS = 3
TURNS = 6
OPENING_WORDS = 400
FURTHER_WORDS = 40
ANSWER = 32
PAUSE_SECONDS = 1.0

# What an operator would promise of engines like these; every router is told.
SLO = {"ttft_ms": 2500, "itl_ms": 100}


@dataclass
class Sample:
    """One request as its client saw it; times in seconds."""

    kind: str
    path: str
    ttft: float
    gaps: list[float]
    predicted: float | None

    @property
    def itl(self) -> float:
        return statistics.fmean(self.gaps)

    @property
    def is_in_time(self) -> bool:
        return 1000 * self.ttft <= SLO["ttft_ms"] and 1000 * self.itl <= SLO["itl_ms"]


@dataclass
class Segment:
    """One policy's turn at the load."""

    router: Router
    seed: int
    seconds: float
    samples: "queue.Queue[Sample]" = field(default_factory=queue.Queue)
    failures: "queue.Queue[str]" = field(default_factory=queue.Queue)

    def run(self) -> list[Sample]:
        end = time.monotonic() + self.seconds
        threads = [threading.Thread(target=self._cold, args=(end,))]
        threads += [threading.Thread(target=self._talks, args=(n, end)) for n in range(TALKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert self.failures.empty(), self.failures.get()
        return list(self.samples.queue)

    def _cold(self, end: float) -> None:
        """Long prompts, whether those before are answered or not."""
        chance = random.Random(f"cold {self.seed}")
        asked = []
        while True:
            pause = chance.expovariate(1 / COLD_EVERY_SECONDS)
            messages = [{"role": "user", "content": words(chance, COLD_WORDS)}]
            if time.monotonic() + pause > end:
                break
            time.sleep(pause)
            asked.append(threading.Thread(target=self._ask, args=("cold", messages, COLD_ANSWER)))
            asked[-1].start()
        for thread in asked:
            thread.join()

    def _talks(self, number: int, end: float) -> None:
        """Conversations one after the other."""
        chance = random.Random(f"talk {self.seed} {number}")
        while True:
            messages = [{"role": "system", "content": words(chance, OPENING_WORDS)}]
            for turn in range(TURNS):
                pause = chance.expovariate(1 / PAUSE_SECONDS)
                messages.append({"role": "user", "content": words(chance, FURTHER_WORDS)})
                if time.monotonic() + pause > end:
                    return
                time.sleep(pause)
                said = self._ask("further" if turn else "opening", messages, ANSWER)
                messages.append({"role": "assistant", "content": said})

    def _ask(self, kind: str, messages: list, answer: int) -> str:
        body = {"model": MODEL, "messages": messages, "max_tokens": answer, "temperature": 0}
        sent = time.monotonic()
        exchange = Exchange(self.router.url, CHAT, {**body, "ignore_eos": True, "stream": True})
        if exchange.head() != 200:
            self.failures.put(repr(exchange.rest()))
            return ""
        headers, times, said = exchange.headers, [], ""
        for event in exchange.stream():
            if event == "[DONE]":
                break
            if "error" in (chunk := json.loads(event)):
                self.failures.put(event)
                return ""
            content = "".join(c["delta"].get("content") or "" for c in chunk["choices"])
            if content:
                times.append(time.monotonic())
                said += content
        exchange.leave()
        predicted = headers.get("x-pointsman-predicted-ttft-ms")
        gaps = [later - earlier for earlier, later in zip(times, times[1:])]
        self.samples.put(
            Sample(
                kind,
                headers["x-pointsman-path"],
                times[0] - sent,
                gaps,
                float(predicted) / 1000 if predicted else None,
            )
        )
        return said


def words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(count))


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def milliseconds(values: list[float], *shares: float) -> str:
    return " / ".join(f"{1000 * percentile(values, share):.0f}" for share in shares)


def row(policy: str, samples: list[Sample]) -> str:
    def ttft(*kinds):
        return milliseconds([s.ttft for s in samples if s.kind in kinds], 0.5, 0.9, 0.99)

    gaps = [gap for sample in samples for gap in sample.gaps]
    errors = [abs(s.predicted - s.ttft) / s.ttft for s in samples if s.predicted]
    error = " / ".join(f"{100 * percentile(errors, share):.0f} %" for share in (0.5, 0.9))
    cells = [
        policy,
        str(len(samples)),
        f"{100 * statistics.fmean(s.path == 'local' for s in samples):.0f} %",
        f"{100 * statistics.fmean(s.is_in_time for s in samples):.0f} %",
        ttft("cold", "opening", "further"),
        ttft("cold"),
        ttft("further"),
        milliseconds(gaps, 0.5, 0.99),
        milliseconds([s.itl for s in samples], 0.5, 0.9, 0.99),
        error if policy == "predicted" else "",
    ]
    return f"| {' | '.join(cells)} |"


HEAD = """\
| policy | requests | local | in time | TTFT, all (ms) | TTFT, cold | TTFT, further turns | ITL, gaps | mean ITL | TTFT error |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm-up", type=float, default=45, help="seconds of the first round")
    parser.add_argument("--seconds", type=float, default=45, help="seconds of each other round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--samples", type=Path, help="where to write each request, as JSON lines")
    asked = parser.parse_args()
    model = Path(os.environ["REAL_VLLM_MODEL"])
    with tempfile.TemporaryDirectory(prefix="real-vllm-") as place:
        directory = Path(place)
        launcher = Launcher(directory)
        engines = [Engine(launcher, name, role, model) for name, role in (("p", PREFILL), ("d", DECODE))]
        routers, found = {}, {policy: [] for policy in asked.policies}
        try:
            for engine in engines:
                engine.start()
            for engine in engines:
                engine.wait()
            for policy in asked.policies:
                own = directory / policy
                own.mkdir()
                routing = {"policy": policy, **POLICIES[policy]}
                config = configuration(model, [worker(e) for e in engines], routing=routing)
                config["models"][0]["slo"] = SLO
                routers[policy] = Router(own, config)
            for turn in range(asked.rounds + 1):
                for policy, router in routers.items():
                    for engine in engines:
                        until(f"{engine.name} is at rest", engine.is_at_rest)
                        engine.forget()
                    seconds = asked.seconds if turn else asked.warm_up
                    samples = Segment(router, turn, seconds).run()
                    print(f"round {turn}: {row(policy, samples)}", file=sys.stderr, flush=True)
                    if turn:
                        found[policy] += samples
        finally:
            for router in routers.values():
                router.stop()
            for engine in engines:
                engine.stop()
            launcher.stop()
    if asked.samples:
        lines = (json.dumps({"policy": p, **vars(s)}) for p, all_of in found.items() for s in all_of)
        asked.samples.write_text("\n".join(lines) + "\n")
    print(HEAD)
    for policy, samples in found.items():
        print(row(policy, samples))


if __name__ == "__main__":
    main()
