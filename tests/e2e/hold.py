"""Stops a plugin just before its work, so that a runtime can be killed at that very moment."""

import os
import select
import shutil
import signal
import time

from node import BIN, Failed, programs, write

HERE, GO_ON = "/run/hold/here", "/run/hold/go-on"
ASIDE = "/opt/plugins/held"
# mkdir: only the first call waits.
WAIT = f"""#!/bin/sh
if [ "$CNI_COMMAND" = VERB ] && mkdir /run/hold/once 2>/dev/null; then
    echo $$ >{HERE}
    read -r _ <{GO_ON}
fi
exec {ASIDE}/PLUGIN
"""


class Held:
    """As a context: the plugin's first call of that verb is held."""

    def __init__(self, verb, plugin):
        self.verb, self.plugin = verb, plugin

    def __enter__(self):
        os.makedirs(ASIDE, exist_ok=True)
        os.makedirs("/run/hold")
        for fifo in [HERE, GO_ON]:
            os.mkfifo(fifo)
        self.here = os.open(HERE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.program = f"{BIN}/{self.plugin}"
        shutil.copy(self.program, f"{ASIDE}/{self.plugin}")
        write(f"{BIN}/.held", WAIT.replace("VERB", self.verb).replace("PLUGIN", self.plugin))
        os.chmod(f"{BIN}/.held", 0o755)
        os.rename(f"{BIN}/.held", self.program)
        return self

    def __exit__(self, *_):
        os.close(self.here)
        os.rename(f"{ASIDE}/{self.plugin}", self.program)
        shutil.rmtree("/run/hold")

    def kill(self, runtime, *others):
        """Kills the runtime's process as soon as the plugin is held, and then all of those programs.

        What the plugin does after that, it does alone.
        """
        poll = select.poll()
        poll.register(self.here, select.POLLIN)
        if not poll.poll(30_000):
            runtime.kill()
            raise Failed(f"{self.verb} of {self.plugin} is never called: {runtime.communicate()[0]}")
        plugin = os.read(self.here, 20).decode().strip()
        for pid in [runtime.pid] + [pid for pid, program in programs() if program in others]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        runtime.communicate()
        write(GO_ON, "\n")
        deadline = time.monotonic() + 30
        while os.path.exists(f"/proc/{plugin}"):
            if time.monotonic() > deadline:
                raise Failed(f"{self.verb} of {self.plugin} does not end without its runtime")
            time.sleep(0.005)
