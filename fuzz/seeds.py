"""Makes seeds for the fuzz targets from the captured messages: `python3 fuzz/seeds.py DIRECTORY`.

Of each captured KV-event message one file in DIRECTORY/kv_events, its bytes, and of each capture one
in DIRECTORY/index, its events as a script of fuzz_targets/index/script.rs.
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


def main(directory):
    events_dir, index_dir = directory / "kv_events", directory / "index"
    for made in (events_dir, index_dir):
        made.mkdir(parents=True, exist_ok=True)
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
