"""pyzmq: blocking REQ and REP. The payload is sent without a copy and received into the buffer,
which pyzmq fills from the message that libzmq has assembled.
"""

from __future__ import annotations

import threading
from typing import Any

import zmq

from adapters.plain import ASK, ECHO, PlainConsumer, PlainOwner


class Owner(PlainOwner):
    version = zmq.__version__

    async def open(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.REP)
        port = self.socket.bind_to_random_port(f"tcp://{self.args.host}")
        self.offer = f"tcp://{self.args.host}:{port}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            asked = self.socket.recv()
            if len(asked) == ASK.size:
                (nbytes,) = ASK.unpack(asked)
                self.socket.send(self.payload[:nbytes], copy=False)
            else:
                self.socket.send(asked)


class Consumer(PlainConsumer):
    version = zmq.__version__

    async def connect(self, offer: Any) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.REQ)
        self.socket.connect(offer)

    async def pull(self, nbytes: int) -> None:
        self.socket.send(ASK.pack(nbytes))
        self.socket.recv_into(self.memory[:nbytes])

    async def round_trip(self) -> None:
        self.socket.send(ECHO)
        self.socket.recv()
