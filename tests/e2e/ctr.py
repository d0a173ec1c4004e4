"""containerd through `ctr run --cni`: no ports, and a DEL with an empty CNI_NETNS."""

import subprocess
import time

import image
import networks
from containerd import Containerd
from node import CLIENT4, NODE4, Failed, Pod, expect, hear, sh


def run(name):
    """A pod in the foreground, so that ctr removes its network at the end. Returns the process and the pod."""
    process = subprocess.Popen(
        ["ctr", "run", "--cni", "--env", f"NAME={name}", image.NAME, name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
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


def scenario_pods_come_and_go(node):
    Containerd()
    node.configure("ctr", networks.bridge(), networks.portmap(), networks.tuning())
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
