"""Stands in for `vllm-rs frontend`: takes over its sockets, waits for an engine, answers /health.

What it was told is in the answer to /told. On GET /die it ends with code 7; on /ask it sends the
engine the request in the file that FAKE_REQUEST names, on /answer it waits for a message of its. It
is run as a program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
from pathlib import Path

import zmq


def main() -> None:
    if sys.argv[1] == "--version":
        sys.stdout.write("vllm-rs 0.33.0-fake\n")
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    for name in ("--listen-fd", "--input-listener-fd", "--output-listener-fd", "--engine-count"):
        parser.add_argument(name, type=int)
    parser.add_argument("--args-json", type=json.loads)
    args = parser.parse_args()
    if args.args_json["model"] == "broken":
        sys.exit("no such model")
    context = zmq.Context()
    router = adopt(context, zmq.ROUTER, args.input_listener_fd)
    pull = adopt(context, zmq.PULL, args.output_listener_fd)
    identity, _ready = router.recv_multipart()
    serve(socket.socket(fileno=args.listen_fd), args.args_json, router, identity, pull)


def adopt(context: zmq.Context[zmq.Socket[bytes]], kind: int, fd: int) -> zmq.Socket[bytes]:
    with socket.socket(fileno=os.dup(fd)) as listener:
        path = listener.getsockname()
    adopted = context.socket(kind)
    adopted.setsockopt(zmq.USE_FD, fd)
    adopted.bind(f"ipc://{path}")
    return adopted


def serve(
    listener: socket.socket,
    arguments: object,
    router: zmq.Socket[bytes],
    identity: bytes,
    pull: zmq.Socket[bytes],
) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            path = connection.recv(65536).split(b" ")[1].decode()
            body = b"{}"
            match path:
                case "/told":
                    body = json.dumps(arguments | {"env": dict(os.environ)}).encode()  # type: ignore[operator]
                case "/die":
                    os._exit(7)
                case "/ask":
                    request = Path(os.environ["FAKE_REQUEST"]).read_bytes()
                    router.send_multipart([identity, b"\x00", request])
                case "/answer":
                    body = json.dumps(len(pull.recv_multipart())).encode()
            head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            with contextlib.suppress(OSError):  # whoever asked has not waited
                connection.sendall(head.encode() + body)


if __name__ == "__main__":
    main()
