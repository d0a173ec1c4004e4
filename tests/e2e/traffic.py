"""Traffic of a pod that must not be interrupted: a ping out of the pod, and a TCP stream into it by its host port."""

import re
import signal
import socket
import subprocess
import threading
import time

from node import CLIENT4, NODE4, Failed, expect

# One lost packet costs a ping. A connection that was broken or led elsewhere stays silent far longer than this.
PATIENCE = 5


class Traffic:
    """Runs from its making until `end`."""

    def __init__(self, node, pod, echo_port):
        self.name = pod.name
        self.ping = subprocess.Popen(
            ["nsenter", f"--net={pod.netns.path}", "ping", "-q", "-i", "0.02", CLIENT4],
            stdout=subprocess.PIPE,
            text=True,
        )
        with node.client:
            self.stream = socket.socket()
        self.stream.settimeout(PATIENCE)
        self.stream.connect((NODE4, echo_port))
        self.echoes, self.error, self.stop = 0, None, threading.Event()
        self.thread = threading.Thread(target=self.speak, daemon=True)
        self.thread.start()

    def speak(self):
        try:
            while not self.stop.wait(0.01):
                word = b"%8d" % self.echoes
                self.stream.send(word)
                expect(self.stream.recv(8, socket.MSG_WAITALL), word, "echo")
                self.echoes += 1
        except (OSError, Failed) as error:
            self.error = error

    def end(self):
        """Stops, and returns how many words and pings came back; fails if anything was lost."""
        self.stop.set()
        self.thread.join()
        self.stream.close()
        if self.error or self.echoes == 0:
            raise Failed(f"the stream into {self.name} broke after {self.echoes} echoes: {self.error}")
        self.ping.send_signal(signal.SIGINT)
        out = self.ping.communicate(timeout=10)[0]
        sent, received = map(int, re.search(r"(\d+) packets transmitted, (\d+) received", out).groups())
        # The signal may come while the last one is on its way.
        if received == 0 or sent - received > 1:
            raise Failed(f"pings out of {self.name}: {out}")
        return self.echoes + received
