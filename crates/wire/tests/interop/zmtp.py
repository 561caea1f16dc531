#!/usr/bin/env python3
"""The ZMTP codec against libzmq (needs pyzmq): zmtp.py path/to/examples/zmtp_peer

Each case runs our end as a process and holds the other with libzmq, in both directions of
connecting, with messages below and above the short-frame size.
"""

import struct
import subprocess
import sys

import zmq

PEER = sys.argv[1]
PATIENCE_MS = 20_000
COUNT = 8
context = zmq.Context()


def socket(kind):
    sock = context.socket(kind)
    sock.linger = 0
    sock.rcvtimeo = sock.sndtimeo = PATIENCE_MS
    sock.setsockopt(zmq.HEARTBEAT_IVL, 50)  # our end must answer pings
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2000)
    return sock


def start(kind, how, address, *rest):
    command = [PEER, kind, how, address, *map(str, rest)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def meet(kind, sock, our_end_binds, *rest):
    """Starts our end and connects it with the socket, either way."""
    if our_end_binds:
        process = start(kind, "bind", "127.0.0.1:0", *rest)
        sock.connect("tcp://" + process.stdout.readline().split()[1])
        return process
    port = sock.bind_to_random_port("tcp://127.0.0.1")
    return start(kind, "connect", f"127.0.0.1:{port}", *rest)


def printed(process):
    out, _ = process.communicate(timeout=PATIENCE_MS / 1000)
    assert process.returncode == 0, (process.args, process.returncode)
    return [[bytes.fromhex(frame) for frame in line.split(" ")] for line in out.splitlines()]


def subscriber(our_end_binds):
    sock = socket(zmq.XPUB)
    process = meet("sub", sock, our_end_binds, "kv", COUNT)
    assert sock.recv() == b"\x01kv"
    sent = [[b"kv@m", struct.pack(">Q", n), b"x" * (n * 100)] for n in range(COUNT)]
    for message in sent:
        sock.send_multipart([b"other", b"not subscribed to"])
        sock.send_multipart(message)
    assert printed(process) == sent


def publisher(our_end_binds):
    sock = socket(zmq.SUB)
    sock.subscribe(b"kv")
    process = meet("pub", sock, our_end_binds, "kv@m", COUNT)
    for number in range(COUNT):
        expected = [b"kv@m", struct.pack(">Q", number), b"p" * (number * 100)]
        assert sock.recv_multipart() == expected
    sock.close()
    assert printed(process) == []


def dealer(our_end_binds):
    sock = socket(zmq.ROUTER)
    process = meet("dealer", sock, our_end_binds, COUNT)
    identity, empty, question = sock.recv_multipart()
    assert (empty, question) == (b"", bytes(8))
    sent = [[b"", b"kv@m", struct.pack(">Q", n), b"y" * (n * 100)] for n in range(COUNT)]
    for message in sent:
        sock.send_multipart([identity, *message])
    assert printed(process) == sent


def router(kind, our_end_binds):
    sock = socket(kind)
    process = meet("router", sock, our_end_binds, COUNT)
    sent = [[struct.pack(">Q", n), b"z" * (n * 100)] for n in range(COUNT)]
    for message in sent:
        sock.send_multipart(message)
        assert sock.recv_multipart() == message
    sock.close()
    # A REQ socket puts an empty frame in front.
    front = [b""] if kind == zmq.REQ else []
    assert printed(process) == [front + message for message in sent]


def refused():
    """A pair that does not go together fails with the reason instead of waiting."""
    sock = socket(zmq.ROUTER)
    port = sock.bind_to_random_port("tcp://127.0.0.1")
    command = [PEER, "sub", "connect", f"127.0.0.1:{port}", "", "1"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_MS / 1000)
    assert process.returncode != 0
    assert "ROUTER" in process.stderr or "refused" in process.stderr or "closed" in process.stderr


for binds in (True, False):
    subscriber(binds)
    publisher(binds)
    dealer(binds)
    router(zmq.DEALER, binds)
    router(zmq.REQ, binds)
refused()
print(f"zmtp: all cases pass against libzmq {zmq.zmq_version()}")
