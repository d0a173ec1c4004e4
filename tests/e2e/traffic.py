"""Traffic of a pod that must not be interrupted: pings, TCP streams and UDP datagrams, each of one connection."""

import re
import signal
import socket
import subprocess
import threading
import time

from node import Failed, expect, family

# A lost packet costs one ping. A connection that was broken or led elsewhere stays silent longer.
PATIENCE = 5


class Words:
    """One connection to a pod that says back what it hears, or, asked by a datagram, its name."""

    def __init__(self, netns, address, port, kind, name):
        self.what = f"{'TCP' if kind == socket.SOCK_STREAM else 'UDP'} to {name} by {address} port {port}"
        self.name = name
        self.echoes, self.error = 0, None
        deadline = time.monotonic() + 10
        while True:
            with netns:
                self.socket = socket.socket(family(address), kind)
            self.socket.settimeout(PATIENCE)
            try:
                self.socket.connect((address, port))
                break
            except ConnectionRefusedError:
                # Perhaps its program does not listen yet.
                self.socket.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def speak(self, stop):
        try:
            while not stop.wait(0.02):
                word = b"%8d" % self.echoes
                self.socket.send(word)
                if self.socket.type == socket.SOCK_DGRAM:
                    expect(self.socket.recv(100).decode().strip(), self.name, "who answers")
                else:
                    expect(self.socket.recv(8, socket.MSG_WAITALL), word, "echo")
                self.echoes += 1
        except (OSError, Failed) as error:
            self.error = error


class Traffic:
    """Runs from its making until `end`, or as a context.

    `streams` and `datagrams` are namespace, address and port of who says back what it hears, `pings` namespace and
    address.
    """

    def __init__(self, pod, streams=(), datagrams=(), pings=()):
        self.name = pod.name
        self.pings = [
            subprocess.Popen(
                ["nsenter", f"--net={netns.path}", "ping", "-q", "-i", "0.02", address],
                stdout=subprocess.PIPE,
                text=True,
            )
            for netns, address in pings
        ]
        kinds = [(each, socket.SOCK_STREAM) for each in streams] + [(each, socket.SOCK_DGRAM) for each in datagrams]
        self.words = [Words(*where, kind, pod.name) for where, kind in kinds]
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=words.speak, args=[self.stop], daemon=True) for words in self.words]
        for thread in self.threads:
            thread.start()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.end()

    def end(self):
        """Stops, and returns how many words and pings came back; fails if anything was lost."""
        self.stop.set()
        for thread in self.threads:
            thread.join()
        came_back = 0
        for words in self.words:
            words.socket.close()
            if words.error or words.echoes == 0:
                raise Failed(f"{words.what} broke after {words.echoes} echoes: {words.error}")
            came_back += words.echoes
        for ping in self.pings:
            ping.send_signal(signal.SIGINT)
        for ping in self.pings:
            out = ping.communicate(timeout=10)[0]
            sent, received = map(int, re.search(r"(\d+) packets transmitted, (\d+) received", out).groups())
            # The signal may come while the last one is on its way.
            if received == 0 or sent - received > 1:
                raise Failed(f"pings out of {self.name}: {out}")
            came_back += received
        self.came_back = came_back
        return came_back
