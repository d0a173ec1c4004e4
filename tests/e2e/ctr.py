"""containerd through `ctr run --cni`: no ports, and a DEL with an empty CNI_NETNS."""

import glob
import os
import shutil
import subprocess
import time

import image
import networks
from containerd import Containerd
from hold import Held
from node import BIN, CLIENT4, NODE4, OURS, Failed, Pod, expect, hear, read, sh, write


def command(name):
    words = ["ctr", "run", "--cni", "--env", f"NAME={name}", image.NAME, name]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(name):
    """A pod in the foreground, so that ctr removes its network at the end. Returns the process and the pod."""
    process = command(name)
    deadline = time.monotonic() + 30
    while True:
        tasks = [line.split() for line in sh("ctr", "task", "ls").splitlines()]
        pid = next((task[1] for task in tasks if task[0] == name and task[2] == "RUNNING"), None)
        if pid:
            break
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise Failed(f"ctr run {name}: {process.communicate()[0]}")
        time.sleep(0.02)
    netns = f"/proc/{pid}/ns/net"
    out = sh("nsenter", f"--net={netns}", "ip", "-4", "-o", "address", "show", "dev", "eth0")
    return process, Pod(name, netns, [out.split()[3].split("/")[0]])


def listen(plugin):
    """From now on each call of that plugin leaves a line: verb, container and namespace."""
    aside = f"/opt/plugins/{plugin}-listened"
    shutil.copy(f"{BIN}/{plugin}", aside)
    write(f"{BIN}/.{plugin}", f"""#!/bin/sh
echo "$CNI_COMMAND $CNI_CONTAINERID [$CNI_NETNS]" >>/run/calls
exec {aside}
""")
    os.chmod(f"{BIN}/.{plugin}", 0o755)
    os.rename(f"{BIN}/.{plugin}", f"{BIN}/{plugin}")


def scenario_pods_come_and_go(node):
    Containerd()
    node.configure("ctr", networks.bridge(), networks.portmap(), networks.tuning())
    listen("bridge")
    pods = [run(f"pod{each}") for each in range(3)]
    for _, pod in pods:
        expect(hear(node.home, pod.addresses[0], 80), pod.name, "the pod from the node")
        expect(hear(pods[0][1].netns, pod.addresses[0], 80), pod.name, "a pod from the first")
        expect(hear(pod.netns, CLIENT4, 9000), NODE4, "egress")
        for key, value in networks.SYSCTLS.items():
            expect(pod.netns.sysctl(key), value, key)
    for process, pod in pods:
        sh("ctr", "task", "kill", "-s", "KILL", pod.name)
        out, _ = process.communicate(timeout=30)
        if "level=error" in out or "failed" in out:
            raise Failed(f"ctr said: {out}")
    dels = [line.split()[2] for line in read("/run/calls").splitlines() if line.startswith("DEL ")]
    expect(dels, ["[]"] * 3, "CNI_NETNS of the DELs, which ctr leaves empty")


def scenario_kill_9_of_ctr(node):
    """In the middle of an ADD and of a DEL. The operator ends the tasks, raises the list, and runs a GC."""
    Containerd()
    plugins = networks.bridge(six=True), networks.portmap(), networks.tuning()
    node.configure("ctr", *plugins)
    keeper, kept = run("kept")
    before = node.leftovers()
    held_at = ["host-local", "bridge", "portmap", "tuning"]
    for number, plugin in enumerate(held_at):
        with Held("ADD", plugin) as held:
            held.kill(command(f"add{number}"))
    for number, plugin in enumerate(held_at):
        process, _ = run(f"del{number}")
        with Held("DEL", plugin) as held:
            sh("ctr", "task", "kill", "-s", "KILL", f"del{number}")
            held.kill(process)
    for name in [f"{verb}{number}" for verb in ["add", "del"] for number in range(len(held_at))]:
        sh("ctr", "task", "rm", "-f", name, check=False)
        sh("ctr", "container", "rm", name)
    left = [line for line in node.leftovers() if line not in before]
    node.configure("ctr", *plugins, version="1.1.0")
    # Its libcni records no namespace, so a pod may be alive and is kept: the dead ones are named.
    for path in glob.glob("/var/lib/cni/results/ctr-default-del*"):
        name = path.split("-")[2]
        sh(f"{OURS}/cnitool", "del", "ctr", "--container-id", f"default-{name}", "--ifname", "eth0", CNI_PATH=BIN)
    sh(f"{OURS}/cnitool", "gc", "ctr", "--keep", "default-kept/eth0", CNI_PATH=BIN)
    expect([line for line in node.leftovers() if line not in before], [], "left by the GC")
    expect(hear(node.home, kept.addresses[0], 80), "kept", "the pod that was kept")
    sh("ctr", "task", "kill", "-s", "KILL", "kept")
    keeper.communicate(timeout=30)
    return f"nothing; {len(left)} things went with cnitool's DEL and GC"
