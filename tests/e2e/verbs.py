"""The verbs as containerd 2 and CRI-O send them, over the networks that projects document: conflists/*.conflist.

Each list plays twice: as documented, below 1.1.0, where libcni knows ADD, CHECK and DEL alone, and raised to 1.1.0, where
it sends STATUS and GC too. Lists with firewall also play with every rule in
nftables, and beside a firewalld. tc-redirect-tap is another
project's, not a package of Debian, and has a stand-in that says what it leaves out. What masquerades for k3s, RKE2 and
kind is left out, and so is flanneld: its file is there.
"""

import concurrent.futures
import json
import socket
import subprocess
import threading
import time

import firewalld
import networks
from libcni import KUBERNETES, NOMAD, Libcni, Refused
from node import BIN, NODE4, OURS, Failed, Pod, expect, read, sh, write
from traffic import Traffic

# What flannel's daemon says of the node.
SUBNET = "FLANNEL_NETWORK=10.42.0.0/16\nFLANNEL_SUBNET=10.42.0.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"
BOTH = (socket.SOCK_STREAM, socket.SOCK_DGRAM)


def conflist(name, **changed):
    return {**json.loads(read(f"/opt/e2e/conflists/{name}.conflist")), **changed}


def mapping(host_port, port=80, protocol="tcp"):
    return {"hostPort": host_port, "containerPort": port, "protocol": protocol}


def sandbox(name):
    """A namespace with a server for a pod. Returns its path."""
    sh("ip", "netns", "add", name)
    sh("ip", "-n", name, "link", "set", "lo", "up")
    return f"/run/netns/{name}"


def attach(network, name, *ports):
    netns = sandbox(name)
    result = network.add(name, netns, ports)
    pod = Pod(name, netns, [ip["address"].split("/")[0] for ip in result["ips"]])
    pod.serve(80)
    return pod


def forget(network, pod):
    """As a runtime that lost its memory: libcni has no DEL to send."""
    del network.attachments[pod.name]


def unname(pod):
    """Takes the namespace's name away; alive it stays as long as this process serves in it."""
    sh("ip", "netns", "delete", pod.name)


def end(pod):
    """Its namespace is gone, and with it the kernel takes the host's ends, a moment later."""
    before = ends()
    unname(pod)
    pod.close()
    deadline = time.monotonic() + 20
    while ends() == before:
        if time.monotonic() > deadline:
            raise Failed(f"the namespace of {pod.name} does not end")
        time.sleep(0.01)


def ends():
    """The host's ends of pairs."""
    return [name for _, name in socket.if_nameindex() if name.startswith("veth")]


def interfaces(pod):
    with pod.netns:
        return [name for _, name in socket.if_nameindex()]


def check(network, pod):
    """0.3.1 knows no CHECK."""
    if network.version() >= (0, 4, 0):
        network.check(pod.name)


class Left:
    """What is there that was not before. A connection of a pod that was there before comes and goes."""

    def __init__(self, node, *others):
        self.node, self.others = node, [address for pod in others for address in pod.addresses]
        self.before = node.leftovers()

    def now(self):
        found = [line for line in self.node.leftovers() if line not in self.before]
        return [line for line in found if not any(f"src={address} " in line for address in self.others)]


def prepare(node, conf):
    """The plugins that are not ours, and the list's network."""
    node.use("/opt/e2e/standins")
    write("/run/flannel/subnet.env", SUBNET)
    node.sysctls = {key: value for plugin in conf["plugins"] for key, value in plugin.get("sysctl", {}).items()}
    return Libcni(conf, args=NOMAD if conf["name"] == "nomad" else KUBERNETES)


def mappings(host_port, leave_out, port=80):
    return [] if "ports" in leave_out else [mapping(host_port, port), mapping(host_port, port, "udp")]


def as_documented(node, name, *leave_out):
    """Pods that go each in its own way; of two the first DEL has an empty CNI_NETNS, as ctr's."""
    network = prepare(node, conflist(name))
    valid = attach(network, "valid", *mappings(8080, leave_out))
    left = Left(node, valid)
    stale = attach(network, "stale", *mappings(8081, leave_out))
    for port, pod in [(8080, valid), (8081, stale)]:
        node.prove(pod, port, BOTH, leave_out=leave_out)
        check(network, pod)
    network.gc("valid")
    expect(list(network.attachments), ["valid"], "what is remembered after the DELs that libcni sends in a GC")
    unname(stale)
    expect(left.now(), [], "left by them")
    if "gone" not in leave_out:
        gone = attach(network, "gone", *mappings(8082, leave_out))
        node.prove(gone, 8082, BOTH, leave_out=leave_out)
        end(gone)
        network.delete("gone", netns="")
        expect(left.now(), [], "left by a DEL with an empty CNI_NETNS, whose namespace is gone")
    if "held" not in leave_out:
        held = attach(network, "held", *mappings(8083, leave_out))
        node.prove(held, 8083, BOTH, leave_out=leave_out)
        before = ends()
        unname(held)
        network.delete("held", netns="")
        expect((len(before) - len(ends()), "eth0" in interfaces(held)), (1, False), "pairs removed, the end inside")
        expect(left.now(), [], "left by a DEL with an empty CNI_NETNS, whose namespace lives on")
    node.prove(valid, 8080, BOTH, leave_out=leave_out)
    check(network, valid)
    network.delete("valid")
    unname(valid)


class Asked:
    """STATUS all the time, beside whatever else is done, as kubelet asks through the runtime (every 5 s): always ready."""

    def __init__(self, network, pause):
        self.network, self.pause = network, pause
        self.times, self.failures, self.stop = 0, [], threading.Event()
        self.thread = threading.Thread(target=self.ask, daemon=True)

    def ask(self):
        while not self.stop.wait(self.pause):
            try:
                self.network.status()
                self.times += 1
            except (Failed, OSError, ValueError, subprocess.SubprocessError) as error:
                self.failures.append(str(error))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, kind, *_):
        self.stop.set()
        self.thread.join()
        if kind is None:
            expect(self.failures, [], "STATUS")
            expect(self.times > 0, True, "STATUS was asked")


def flowing(node, pod, port, leave_out):
    """Streams into the pod that last: from the node, and by its host port from outside. The server is a process in it."""
    serve = ["nsenter", f"--net={pod.netns.path}", "busybox", "nc", "-ll", "-p", "7", "-e", "cat"]
    server = subprocess.Popen(serve)
    streams = [(node.home, address, 7) for address in pod.addresses]
    if not {"ports", "outside"} & set(leave_out):
        streams += [(node.client, NODE4, port)]
    return server, Traffic(pod, streams, pings=[(node.home, pod.addresses[0])])


NFTABLES = {"firewall": {"backend": "nftables"}, "portmap": {"backend": "nftables"}}


def behind(name):
    """The list for a firewall's other backend. Its pods have a way out, which is what firewall is for."""
    conf = conflist(name, cniVersion="1.1.0")
    for plugin in conf["plugins"]:
        plugin.pop("iptablesAdminChainName", None)
        if plugin["type"] == "ptp":
            plugin["ipam"]["routes"] = [{"dst": "0.0.0.0/0"}]
    return conf


def in_nftables(node, name, *leave_out):
    """The same with every rule in nftables, and not one in iptables."""
    conf = behind(name)
    for plugin in conf["plugins"]:
        plugin.update(NFTABLES.get(plugin["type"], {"ipMasqBackend": "nftables"} if plugin.get("ipMasq") else {}))
    said = play_1_1_0(node, conf, *leave_out)
    rules = [line for each in ["iptables-save", "ip6tables-save"] for line in sh(each).splitlines() if "CNI" in line]
    expect(rules, [], "rules in iptables")
    return said


def in_firewalld(node, name, *leave_out):
    """firewalld runs and lets through what firewall puts into its zone; the rules of the other plugins are iptables'."""
    conf = behind(name)
    for plugin in conf["plugins"]:
        plugin.update({"backend": "firewalld"} if plugin["type"] == "firewall" else {})
    firewalld.start()
    said = play_1_1_0(node, conf, *leave_out)
    expect("CNI-FORWARD" in sh("iptables-save"), False, "firewall has rules in iptables")
    expect(firewalld.trusted(), [], "sources of the trusted zone")
    return said


def in_1_1_0(node, name, *leave_out):
    return play_1_1_0(node, conflist(name, cniVersion="1.1.0"), *leave_out)


def play_1_1_0(node, conf, *leave_out):
    """STATUS before, beside and after; and a GC that finds two attachments of which libcni knows nothing any more.

    Of one the namespace is gone, of the other a process lives on in it. A third is remembered, and libcni's DEL removes it
    before the plugins are asked. The fourth is valid.
    """
    network = prepare(node, conf)
    network.status()
    with Asked(network, 0.05) as asked:
        valid = attach(network, "valid", *mappings(8080, leave_out), *mappings(8007, leave_out, 7))
        node.prove(valid, 8080, BOTH, leave_out=leave_out)
        server, traffic = flowing(node, valid, 8007, leave_out)
        left = Left(node, valid)
        stale = attach(network, "stale", *mappings(8081, leave_out))
        gone = attach(network, "gone", *mappings(8082, leave_out))
        held = attach(network, "held", *mappings(8083, leave_out))
        for port, pod in [(8081, stale), (8082, gone), (8083, held)]:
            node.prove(pod, port, BOTH, leave_out=leave_out)
            check(network, pod)
        forget(network, gone)
        forget(network, held)
        if "gone" not in leave_out:
            end(gone)
        network.gc("valid")
        expect(list(network.attachments), ["valid"], "what is remembered after the GC")
        for pod in [stale, held, gone] if "gone" in leave_out else [stale, held]:
            expect("eth0" in interfaces(pod), False, f"{pod.name}'s interface is there after the GC")
            unname(pod)
        expect(left.now(), [], "left by the GC")
        traffic.end()
        server.kill()
        server.wait()
        node.prove(valid, 8080, BOTH, leave_out=leave_out)
        check(network, valid)
        # Nothing is valid any more, and of nothing libcni knows.
        forget(network, valid)
        network.gc()
        unname(valid)
    network.status()
    return f"nothing; STATUS was asked {asked.times} times, and {traffic.came_back} words and pings came back"


# What a list does not promise is left out: `itself` (hairpin), `egress`, `ports`.
def scenario_containerds_default(node):
    return as_documented(node, "containerd", "itself")


def scenario_containerds_default_in_1_1_0(node):
    return in_1_1_0(node, "containerd", "itself")


def scenario_k3s(node):
    return as_documented(node, "k3s", "egress")


def scenario_k3s_in_1_1_0(node):
    return in_1_1_0(node, "k3s", "egress")


def scenario_rke2(node):
    return as_documented(node, "rke2", "egress")


def scenario_rke2_in_1_1_0(node):
    return in_1_1_0(node, "rke2", "egress")


def scenario_kind(node):
    return as_documented(node, "kind", "egress")


def scenario_kind_in_1_1_0(node):
    return in_1_1_0(node, "kind", "egress")


def scenario_podman(node):
    return as_documented(node, "podman")


def scenario_podman_in_1_1_0(node):
    return in_1_1_0(node, "podman")


def scenario_podman_in_nftables(node):
    return in_nftables(node, "podman")


def scenario_podman_in_firewalld(node):
    return in_firewalld(node, "podman")


def scenario_nerdctl(node):
    return as_documented(node, "nerdctl")


def scenario_nerdctl_in_1_1_0(node):
    return in_1_1_0(node, "nerdctl")


def scenario_nerdctl_in_nftables(node):
    return in_nftables(node, "nerdctl")


def scenario_nerdctl_in_firewalld(node):
    return in_firewalld(node, "nerdctl")


def scenario_nomad(node):
    return as_documented(node, "nomad", "itself")


def scenario_nomad_in_1_1_0(node):
    return in_1_1_0(node, "nomad", "itself")


def scenario_nomad_in_nftables(node):
    return in_nftables(node, "nomad", "itself")


def scenario_nomad_in_firewalld(node):
    return in_firewalld(node, "nomad", "itself")


def scenario_firecracker_containerd(node):
    return as_documented(node, "firecracker", "ports")


def scenario_firecracker_containerd_in_1_1_0(node):
    return in_1_1_0(node, "firecracker", "ports")


def scenario_firecracker_go_sdk(node):
    return as_documented(node, "firecracker-sdk", "ports", "egress")


def scenario_firecracker_go_sdk_in_1_1_0(node):
    return in_1_1_0(node, "firecracker-sdk", "ports", "egress")


def scenario_firecracker_go_sdk_in_nftables(node):
    return in_nftables(node, "firecracker-sdk", "ports")


def scenario_firecracker_go_sdk_in_firewalld(node):
    return in_firewalld(node, "firecracker-sdk", "ports")


def three_plugins(**bridge):
    plugins = [networks.bridge(six=True, **bridge), networks.portmap(), networks.tuning()]
    return {"cniVersion": "1.1.0", "name": "pods", "plugins": plugins}


def scenario_gc_removes_what_a_runtime_forgot_and_nothing_else(node):
    """A runtime starts again without its memory, as after a crash: its list of valid attachments is all it has."""
    network = Libcni(three_plugins())
    other = Libcni({**three_plugins(name="cni0"), "name": "others"})
    other.conf["plugins"][0]["ipam"]["ranges"] = [[{"subnet": "10.89.0.0/24"}]]
    other.conf["plugins"][0]["bridge"] = "cni1"
    node.sysctls = networks.SYSCTLS
    kept = [attach(network, f"kept{each}", mapping(8000 + each)) for each in range(3)]
    foreign = attach(other, "foreign", mapping(8200))
    left = Left(node, *kept, foreign)
    lost = [attach(network, f"lost{each}", mapping(8100 + each), mapping(8100 + each, protocol="udp")) for each in range(5)]
    for each, pod in enumerate(lost):
        node.prove(pod, 8100 + each, BOTH)
        # Of some a process lives on.
        (unname if each % 2 else end)(pod)
    network.attachments = {}
    network.gc(*[pod.name for pod in kept])
    expect(left.now(), [], "left by the GC")
    for each, pod in enumerate(kept):
        node.prove(pod, 8000 + each, families=(4, 6))
    node.prove(foreign, 8200)
    network.gc()
    node.prove(foreign, 8200)
    other.delete("foreign")
    for name in [pod.name for pod in kept] + ["foreign"]:
        sh("ip", "netns", "delete", name)


def scenario_status_beside_many_adds(node):
    """kubelet asks every 5 s, here it asks all the time, and the node is never reported as not ready."""
    network = Libcni(three_plugins())
    with Asked(network, 0) as asked:
        names = [f"pod{each}" for each in range(20)]
        with concurrent.futures.ThreadPoolExecutor(10) as pool:
            adds = [pool.submit(network.add, name, sandbox(name), [mapping(8000 + n)]) for n, name in enumerate(names)]
            for done in adds:
                done.result()
            for done in [pool.submit(network.delete, name) for name in names]:
                done.result()
    for name in names:
        sh("ip", "netns", "delete", name)
    return f"nothing; STATUS was asked {asked.times} times"


def refused(call, code, what):
    """The call fails with this code."""
    try:
        call()
    except Refused as error:
        expect(error.code, code, f"the code of {what}")
    else:
        raise Failed(f"{what} succeeds")


def scenario_status_tells_of_a_full_range(node):
    """No address is left: the node stays ready (50 would evict its pods), and an ADD fails and leaves nothing."""
    network = Libcni(three_plugins())
    ipam = network.conf["plugins"][0]["ipam"]
    ipam["ranges"] = [[{"subnet": "10.88.0.0/30"}]]
    attach(network, "only")
    network.status()
    refused(lambda: network.add("second", sandbox("second")), 11, "an ADD without an address left")
    ipam["fullIsUnavailable"] = True
    refused(network.status, 50, "a STATUS that is to fail without an address left")
    network.delete("only")
    network.status()
    sh("ip", "netns", "delete", "only")
    sh("ip", "netns", "delete", "second")


def scenario_cnitool(node):
    """The same by hand, and from a folder of configurations."""
    conf = conflist("containerd", cniVersion="1.1.0")
    node.configure(conf["name"], *conf["plugins"], version="1.1.0")
    netns = sandbox("pod")

    def cnitool(verb, *arguments):
        ports = json.dumps({"portMappings": [mapping(8080)]})
        return sh(f"{OURS}/cnitool", verb, conf["name"], *arguments, CNI_PATH=BIN, CAP_ARGS=ports)

    cnitool("status")
    result = json.loads(cnitool("add", netns))
    pod = Pod("pod", netns, [ip["address"].split("/")[0] for ip in result["ips"]])
    pod.serve(80)
    node.prove(pod, 8080, families=(4, 6), leave_out=("itself",))
    cnitool("check", netns)
    cnitool("gc")
    node.prove(pod, 8080, leave_out=("itself",))
    sh("ip", "netns", "delete", "pod")
    cnitool("gc", "--all")
    cnitool("del", netns)
    cnitool("status")
