"""All verbs as containerd 2 and CRI-O send them, over the networks that projects document: conflists/*.conflist.

ptp, firewall and bandwidth are Go's. What no package of Debian brings has a stand-in that says what it leaves out: flannel
and tc-redirect-tap (standins/). What masquerades for k3s and kind is left out.
"""

import concurrent.futures
import json
import threading

import networks
from libcni import Libcni, Refused
from node import BIN, GO, OURS, Failed, Pod, Server, expect, read, sh, write

# What flannel's daemon says of the node.
SUBNET = "FLANNEL_NETWORK=10.42.0.0/16\nFLANNEL_SUBNET=10.42.0.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"
GO_PLUGINS = ["ptp", "firewall", "bandwidth"]


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
    Server(pod.netns, 80, name)
    return pod


def check(network, pod):
    """Debian's bandwidth crashes at a CHECK without limits, and 0.3.1 knows no CHECK."""
    if network.version() >= (0, 4, 0) and network.conf["plugins"][-1]["type"] != "bandwidth":
        network.check(pod.name)


def every_verb(node, conf, *leave_out):
    """Two pods: all verbs for both, then a GC that names but one of them."""
    node.use(GO, *GO_PLUGINS)
    node.use("/opt/e2e/standins")
    write("/run/flannel/subnet.env", SUBNET)
    network = Libcni(conf)
    network.status()
    pods = [attach(network, name, mapping(8080 + number)) for number, name in enumerate(["valid", "stale"])]
    for number, pod in enumerate(pods):
        node.prove(pod, 8080 + number, leave_out=leave_out)
        check(network, pod)
    network.status()
    network.gc("valid")
    expect(list(network.attachments), ["valid"], "what is remembered")
    expect([line for line in node.leftovers() if "stale" in line], ["namespace /run/netns/stale"], "left by the GC")
    node.prove(pods[0], 8080, leave_out=leave_out)
    check(network, pods[0])
    remembered = dict(network.attachments)
    network.delete("valid")
    network.attachments = remembered
    network.delete("valid", netns="")
    network.gc()
    network.status()
    sh("ip", "netns", "delete", "valid")
    sh("ip", "netns", "delete", "stale")


def scenario_containerds_default(node):
    every_verb(node, conflist("containerd"), "itself")


def scenario_containerds_default_in_1_1_0(node):
    every_verb(node, conflist("containerd", cniVersion="1.1.0"), "itself")


def scenario_k3s(node):
    every_verb(node, conflist("k3s"), "egress")


def scenario_kind(node):
    every_verb(node, conflist("kind"), "egress")


def scenario_podman(node):
    every_verb(node, conflist("podman"))


def scenario_nomad(node):
    every_verb(node, conflist("nomad"))


def scenario_firecracker_containerd(node):
    every_verb(node, conflist("firecracker"), "ports")


def scenario_firecracker_go_sdk(node):
    every_verb(node, conflist("firecracker-sdk"), "ports", "egress")


def three_plugins(**bridge):
    plugins = [networks.bridge(six=True, **bridge), networks.portmap(), networks.tuning()]
    return {"cniVersion": "1.1.0", "name": "pods", "plugins": plugins}


def scenario_gc_removes_what_a_runtime_forgot_and_nothing_else(node):
    """A runtime starts again without its memory, as after a crash: its list of valid attachments is all it has."""
    network = Libcni(three_plugins())
    other = Libcni({**three_plugins(name="cni0"), "name": "others"})
    other.conf["plugins"][0]["ipam"]["ranges"] = [[{"subnet": "10.89.0.0/24"}]]
    other.conf["plugins"][0]["bridge"] = "cni1"
    kept = [attach(network, f"kept{each}", mapping(8000 + each)) for each in range(3)]
    for each in range(5):
        attach(network, f"lost{each}", mapping(8100 + each), mapping(8100 + each, 53, "udp"))
    foreign = attach(other, "foreign", mapping(8200))
    for each in range(5):
        sh("ip", "netns", "delete", f"lost{each}")
    network.attachments = {}
    network.gc(*[pod.name for pod in kept])
    expect([line for line in node.leftovers() if "lost" in line], [], "left by the GC")
    for each, pod in enumerate(kept):
        node.prove(pod, 8000 + each, families=(4, 6))
    node.prove(foreign, 8200)
    network.gc()
    node.prove(foreign, 8200)
    other.delete("foreign")
    for name in [pod.name for pod in kept] + ["foreign"]:
        sh("ip", "netns", "delete", name)


def scenario_status_beside_many_adds(node):
    """kubelet asks every 5 s, here it asks all the time, and is never told that the node is not ready."""
    network = Libcni(three_plugins())
    stop, asked, failures = threading.Event(), [], []

    def ask():
        while not stop.is_set():
            try:
                network.status()
                asked.append(1)
            except Failed as error:
                failures.append(str(error))

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        names = [f"pod{each}" for each in range(20)]
        adds = [pool.submit(network.add, name, sandbox(name), [mapping(8000 + n)]) for n, name in enumerate(names)]
        for done in adds:
            done.result()
        for done in [pool.submit(network.delete, name) for name in names]:
            done.result()
    stop.set()
    asker.join()
    expect(failures, [], "STATUS")
    for name in names:
        sh("ip", "netns", "delete", name)
    return f"nothing; STATUS was asked {len(asked)} times"


def scenario_status_tells_of_a_full_range(node):
    """No address is left: 50, and the ADD that comes all the same fails and leaves nothing."""
    network = Libcni(three_plugins())
    network.conf["plugins"][0]["ipam"]["ranges"] = [[{"subnet": "10.88.0.0/30"}]]
    attach(network, "only")
    for verb, call in [("STATUS", network.status), ("ADD", lambda: network.add("second", sandbox("second")))]:
        try:
            call()
        except Refused as error:
            expect(error.code, 50 if verb == "STATUS" else 11, f"the code of {verb}")
        else:
            raise Failed(f"{verb} succeeds without an address left")
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
    Server(pod.netns, 80, "pod")
    node.prove(pod, 8080, families=(4, 6), leave_out=("itself",))
    cnitool("check", netns)
    cnitool("gc")
    node.prove(pod, 8080, leave_out=("itself",))
    sh("ip", "netns", "delete", "pod")
    cnitool("gc", "--all")
    cnitool("del", netns)
    cnitool("status")
