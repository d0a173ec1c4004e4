"""containerd, as ctr.py, cri.py and switch.py use it: one daemon, the pod's image in it, and CRI v1 over gRPC."""

import glob
import json
import os
import signal
import subprocess
import time

import image
from node import Failed, Pod, Skip, read, sh, write

CONFIG = """
version = 2
disabled_plugins = [
    "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
    "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.aufs",
    "io.containerd.internal.v1.opt", "io.containerd.tracing.processor.v1.otlp"
]
[plugins."io.containerd.grpc.v1.cri"]
    sandbox_image = "localhost/pod:1"
    # Without CAP_SYS_RESOURCE, as in many a CI machine, a score cannot be lowered.
    restrict_oom_score_adj = true
    # A profile would be loaded into the machine's kernel.
    disable_apparmor = true
[plugins."io.containerd.grpc.v1.cri".cni]
    # Debian's containerd 2 takes /usr/lib/cni.
    bin_dir = "/opt/cni/bin"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
    BinaryName = "{runtime}"
"""


class Containerd:
    """A running daemon, and what it runs pods with."""

    def __init__(self, runtime="runc"):
        try:
            sh("containerd", "--version")
            sh(runtime, "--version")
        except (FileNotFoundError, Failed) as error:
            raise Skip(f"containerd does not run here: {error}") from error
        write("/etc/containerd/config.toml", CONFIG.replace("{runtime}", runtime))
        self.start()
        self.import_image("default")
        self.import_image("k8s.io")

    def start(self):
        self.log = open("/run/containerd.log", "a", encoding="utf-8")
        self.daemon = subprocess.Popen(["containerd"], stdout=self.log, stderr=self.log)
        import grpc

        self.grpc = grpc
        self.channel = grpc.insecure_channel("unix:///run/containerd/containerd.sock")
        try:
            grpc.channel_ready_future(self.channel).result(timeout=30)
        except grpc.FutureTimeoutError as error:
            raise Failed("containerd does not answer:\n" + read("/run/containerd.log")) from error
        # It answers before CRI knows the pods of the one before.
        deadline = time.monotonic() + 30
        while True:
            try:
                self.pods()
                return
            except Failed as error:
                if "not initialized" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.02)

    def kill(self):
        self.channel.close()
        self.daemon.send_signal(signal.SIGKILL)
        self.daemon.wait()

    def import_image(self, namespace):
        if not os.path.exists(image.PATH):
            image.build()
        sh("ctr", "-n", namespace, "image", "import", image.PATH)
        # CRI reports it later.
        deadline = time.monotonic() + 10
        while namespace == "k8s.io" and not self.call("ImageStatus", {1: {1: "localhost/pod:1"}}, "Image").get(1):
            if time.monotonic() > deadline:
                raise Failed("CRI does not know localhost/pod:1")
            time.sleep(0.02)

    # CRI

    def call(self, method, message=None, service="Runtime"):
        """One call of a service. Messages are dicts of field numbers."""
        call = self.channel.unary_unary(f"/runtime.v1.{service}Service/{method}")
        try:
            return decode(call(encode(message or {}), timeout=100))
        except self.grpc.RpcError as error:
            raise Failed(f"{method}: {error.details()}") from error

    def wait_for_network(self):
        """containerd reads the network's configuration again by itself; until then it would use the old one."""
        wanted = json.loads(read(glob.glob("/etc/cni/net.d/*")[0]))
        deadline = time.monotonic() + 10
        while True:
            info = {decode_text(pair[1]): decode_text(pair[2]) for pair in map(decode, self.call("Status", {1: 1})[2])}
            networks = json.loads(info["cniconfig"])["Networks"] or []
            if any(json.loads(network["Config"]["Source"]) == wanted for network in networks):
                return
            if time.monotonic() > deadline:
                raise Failed(f"containerd has not read the new configuration: {info['lastCNILoadStatus']}")
            time.sleep(0.02)

    def network_is_ready(self):
        """The condition NetworkReady, of which kubelet makes the node's."""
        conditions = [decode(each) for each in decode(self.call("Status")[1][0])[1]]
        return next(each.get(2, [0])[-1] == 1 for each in conditions if decode_text(each[1]) == "NetworkReady")

    def run_pod(self, name, *ports):
        """RunPodSandbox; ports are (protocol, container port, host port, host IP). Returns its id."""
        mappings = [{1: {"tcp": 0, "udp": 1}[port[0]], 2: port[1], 3: port[2], 4: port[3]} for port in ports]
        config = {1: {1: name, 2: name, 3: "default"}, 2: name, 3: "/tmp/logs", 5: mappings, 8: {1: ""}}
        return decode_text(self.call("RunPodSandbox", {1: config})[1])

    def pod(self, identifier):
        """PodSandboxStatus, as a Pod."""
        answer = self.call("PodSandboxStatus", {1: identifier, 2: 1})
        status = decode(answer[1][0])
        network = decode(status[5][0])
        addresses = [decode_text(network[1])] + [decode_text(decode(more)[1]) for more in network.get(2, [])]
        info = {decode_text(pair[1]): decode_text(pair[2]) for pair in map(decode, answer[2])}
        spec = json.loads(info["info"])["runtimeSpec"]
        netns = next(each["path"] for each in spec["linux"]["namespaces"] if each["type"] == "network")
        return Pod(spec["hostname"], netns, addresses)

    def stop_pod(self, identifier):
        self.call("StopPodSandbox", {1: identifier})

    def remove_pod(self, identifier):
        self.call("RemovePodSandbox", {1: identifier})

    def pods(self):
        return [decode_text(decode(item)[1]) for item in self.call("ListPodSandbox").get(1, [])]


# The wire format of protocol buffers, as far as CRI's messages need it.


def varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def encode(message):
    out = b""
    for number, value in message.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int):
                out += varint(number << 3) + varint(each)
                continue
            content = encode(each) if isinstance(each, dict) else each.encode()
            out += varint(number << 3 | 2) + varint(len(content)) + content
    return out


def decode(content):
    """The fields of a message: number to a list of numbers or bytes."""
    at, fields = 0, {}

    def take():
        nonlocal at
        value = shift = 0
        while True:
            byte = content[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(content):
        key = take()
        value = take()
        if key & 7 == 2:
            value, at = content[at : at + value], at + value
        fields.setdefault(key >> 3, []).append(value)
    return fields


def decode_text(values):
    return values[-1].decode()
