"""Makes seeds for the fuzz targets from the captured messages: `python3 fuzz/seeds.py DIRECTORY`.

Of each captured KV-event message one file in DIRECTORY/kv_events, its bytes, and of each capture one
in DIRECTORY/index, its events as a script of fuzz_targets/index/script.rs. Of each captured exchange
its request in DIRECTORY/requests and its answer in DIRECTORY/engines or DIRECTORY/sse; before both
stand the bytes that choose how the target takes them. The example configuration, whole and by its parts.
"""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
STORE, REMOVE, CLEAR, FLUSH = 0, 6, 10, 15
HAS_PARENT = 2
MOST_BLOCKS = 12


def messages(value):
    """Every message in a fixture, wherever it stands."""
    if isinstance(value, dict):
        if "frames_hex" in value:
            yield value
        for inside in value.values():
            yield from messages(inside)
    elif isinstance(value, list):
        for inside in value:
            yield from messages(inside)


def field(event, name, place):
    if isinstance(event, dict):
        return event.get(name)
    return event[place] if place < len(event) else None


class Script:
    """Events as a script; names become bytes in the order in which they come up."""

    def __init__(self):
        self.names, self.out = {}, bytearray()

    def name(self, name):
        return self.names.setdefault(str(name), len(self.names)) & 0xFF

    def event(self, event):
        kind = field(event, "type", 0)
        names = [self.name(name) for name in field(event, "block_hashes", 1) or []][:MOST_BLOCKS]
        if kind == "BlockStored":
            parent = field(event, "parent_block_hash", 2)
            size, tokens = field(event, "block_size", 4), field(event, "token_ids", 3)
            contents = [tokens[i * size] & 0xFF for i in range(len(names))]
            flags = 0 if parent is None else HAS_PARENT
            self.out += bytes([STORE, flags, 0 if parent is None else self.name(parent), len(names)])
            self.out += bytes(byte for block in zip(names, contents) for byte in block)
        elif kind == "BlockRemoved":
            self.out += bytes([REMOVE, len(names), *names])
        elif kind == "AllBlocksCleared":
            self.out.append(CLEAR)


# The places of fuzz_targets/requests.rs.
APIS = {"/v1/completions": 0, "/v1/chat/completions": 1, "/generate": 2}

# A request that has what engines read of one, and forges what only the router may say.
FORGED = {
    "model": "m", "prompt": [1, 2], "text": "a", "messages": [], "stream": True, "n": 1, "stop": ["a"],
    "max_tokens": 1.0, "kv_transfer_params": {}, "kv_transfer_params ": 1, "seed": 12345678901234567890,
    "vllm_xargs": {"kv_transfer_params": 1, "a": 1}, "stream_options": {"include_usage": True},
    "sampling_params": {"extra_args": {"disaggregated_params": 1}, "n": 1}, "bootstrap_room": 1,
    "disaggregated_params": {"multimodal_hashes": [1]},
}

# What TensorRT-LLM answers; there is no capture of it.
TRTLLM = [
    {"choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "length",
                  "disaggregated_params": {"request_type": "context_only", "ctx_request_id": 7,
                                           "first_gen_tokens": [5], "ctx_usage": None}}],
     "prompt_token_ids": [[1, 2]], "usage": {"prompt_tokens": 2, "completion_tokens": 1}},
    {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}], "usage": {"prompt_tokens": 2}},
    [{"event_id": 0, "window_size": 64, "data": {"type": "created", "num_blocks_per_cache_level": [9, 0]}},
     {"event_id": 1, "data": {"type": "stored", "parent_hash": None, "blocks": [
         {"block_hash": -3, "cache_level": 0, "cache_salt": "s",
          "tokens": [{"token_id": 1, "token_extra_id": 0}, {"token_id": 2, "token_extra_id": 0}]}]}},
     {"event_id": 2, "data": {"type": "updated", "block_hash": 3,
                              "cache_level": {"old_value": 0, "new_value": 1}}},
     {"event_id": 3, "data": {"type": "removed", "block_hashes": [3, "ab"]}}],
    [{"numActiveRequests": 1, "numQueuedRequests": 0,
      "kvCacheStats": {"usedNumBlocks": 1, "maxNumBlocks": 9, "tokensPerBlock": 32}}],
    {"0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": "", "buffer_steps": 9}},
    {"0": {"engine_id": "a_dp0", "worker_addr": {}}},
]


def exchanges(value):
    """Every request and answer in a fixture, wherever they stand."""
    if isinstance(value, dict):
        answer = value.get("response")
        if isinstance(answer, dict) and isinstance(answer.get("body_raw"), str):
            request = value.get("request")
            yield request if isinstance(request, dict) else {}, answer["body_raw"]
        for inside in value.values():
            yield from exchanges(inside)
    elif isinstance(value, list):
        for inside in value:
            yield from exchanges(inside)


def write_exchanges(directory):
    requests, engines, sse = (directory / name for name in ("requests", "engines", "sse"))
    count = 0
    for path in sorted(ROOT.glob("crates/wire/tests/fixtures/**/*.json")):
        for request, answer in exchanges(json.loads(path.read_text())):
            name = f"{path.stem}-{count:04}"
            count += 1
            if request.get("body") is not None:
                api = APIS.get(request.get("path"), 3)
                body = json.dumps(request["body"]).encode()
                (requests / name).write_bytes(bytes([api]) + body)
            if answer.startswith(("data:", "event:", ":")):
                (sse / name).write_bytes(bytes([7, 1, 64]) + answer.encode())
            else:
                (engines / name).write_bytes(answer.encode())
    assert count > 20, "the captures are not where they were"
    for api in range(4):
        for flags in (0, 0x7C):
            body = json.dumps(FORGED).encode()
            (requests / f"forged-{api}-{flags}").write_bytes(bytes([api | flags]) + body)
    for number, answer in enumerate(TRTLLM):
        (engines / f"trtllm-{number}").write_text(json.dumps(answer))
    for path in ROOT.glob("crates/wire/tests/fixtures/metrics/*.txt"):
        # The lines that are read; a whole page is longer than what fuzzing tries.
        lines = [line for line in path.read_text().splitlines() if "num_requests" in line
                 or "cache_usage" in line or "cache_config" in line or "prompt_tokens_by" in line]
        (engines / path.stem).write_text("\n".join(lines) + "\n")
    for number, stream in enumerate([
        b"event: error\r\ndata: {\"message\":\"m\"}\r\n\r\n",
        b": ping\n\nevent: response.completed\ndata: {}\n\n",
        b"data: {\"error\":\ndata: {\"code\":1}}\r\rdata: [DONE]\n\n",
    ]):
        (sse / f"by-hand-{number}").write_bytes(bytes([3, 1, 9]) + stream)


def write_zmtp(directory):
    """A peer's greeting, READY and a message, for each kind of peer."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    for kind, peer in enumerate([b"SUB", b"PUB", b"ROUTER", b"DEALER"]):
        ready = b"\x05READY\x0bSocket-Type" + len(peer).to_bytes(4, "big") + peer
        frames = bytes([4, len(ready)]) + ready + b"\x01\x02kv\x02" + (3).to_bytes(8, "big") + b"abc"
        frames += b"\x00\x03\x01kv\x04\x07\x04PING\x00\x01"
        (directory / "zmtp" / peer.decode()).write_bytes(bytes([kind, 5]) + greeting + frames)


def write_config(directory):
    example = (ROOT / "docs/examples/pointsman.yaml").read_text()
    lines = [line for line in example.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    lines = [line for line in lines if "_file" not in line]
    sections = []
    for line in lines:
        if not line.startswith((" ", "-")):
            sections.append([])
        sections[-1].append(line)
    flags = "limits.max_in_flight=1\nmodels[0].name=a\nlisten={port: 1}"
    variables = "POINTSMAN__LIMITS__MAX_IN_FLIGHT=9\nPOINTSMAN__MODELS__0__NAME=b\nDYN_ROUTER_MODE=kv"
    model = "models: [{name: m, workers: [{role: unified, url: 'http://127.0.0.1:1'}]}]"
    joining = json.dumps({"model": "m", "name": "d", "role": "decode", "url": "http://127.0.0.1:1"})
    texts = ["\n".join(lines), joining, *("\n".join(section) for section in sections)]
    texts.append("\x1e".join([model, flags, variables]))
    for number, text in enumerate(texts):
        (directory / "config" / f"{number:02}").write_text(text)


def main(directory):
    for name in ("kv_events", "index", "requests", "engines", "sse", "zmtp", "config", "snapshot"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    write_exchanges(directory)
    (directory / "snapshot" / "chains").write_bytes(bytes([7]))
    (directory / "snapshot" / "empty").write_bytes(bytes([0, 1]) + bytes(8))
    write_zmtp(directory)
    write_config(directory)
    events_dir, index_dir = directory / "kv_events", directory / "index"
    count = 0
    for path in sorted(ROOT.glob("crates/*/tests/fixtures/**/*.json")):
        script = Script()
        for message in messages(json.loads(path.read_text())):
            name = f"{path.stem}-{count:04}"
            (events_dir / name).write_bytes(bytes.fromhex(message["frames_hex"][-1]))
            count += 1
            for event in (message.get("decoded") or [0, []])[1]:
                script.event(event)
            script.out.append(FLUSH)
        if script.names:
            (index_dir / path.stem).write_bytes(script.out)
    print(f"{count} messages and {len(list(index_dir.iterdir()))} scripts")
    assert count > 50, "the captures are not where they were"


main(pathlib.Path(sys.argv[1]))
