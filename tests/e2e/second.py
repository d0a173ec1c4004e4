"""A second interface of a pod, net1, as Multus adds it beside the first, which bridge, portmap and tuning have made.

It is on the wire that leads outside, or is a device of the node. Those outside know its address and talk to it without
the node in between; sbr leads the answers back there, and all else goes out by eth0 as before.
"""

import json
import os
import subprocess

from containerd import Containerd
from libcni import Libcni
from node import BIN, NODE4, Failed, Skip, daemon, expect, hear, read, sh, wait, write
from traffic import Traffic
from verbs import Left, attach, end, forget, interfaces, mapping, three_plugins

# On the wire; the first is who is outside, and what lies behind it.
GATEWAY, POD, BEHIND = "198.51.100.1", "198.51.100.10", "192.0.2.1"
STATIC = {
    "type": "static",
    "addresses": [{"address": POD + "/24", "gateway": GATEWAY}],
    "routes": [{"dst": "0.0.0.0/0", "gw": GATEWAY}],
}


def needs(*link):
    """The kernel has such links."""
    try:
        sh("ip", "link", "add", "probe", *link)
    except Failed as error:
        raise Skip(f"the kernel lacks {' '.join(link)}: {error}") from error
    sh("ip", "link", "delete", "probe")


def outside(device="eth0"):
    """Who is at the other end of the wire has an address there. The node drops answers that go astray, by eth0."""
    write("/proc/sys/net/ipv4/conf/all/rp_filter", "1")
    ip = ["ip", "-n", "client"]
    sh(*ip, "address", "add", GATEWAY + "/24", "dev", device)
    sh(*ip, "link", "set", device, "up")
    sh(*ip, "address", "replace", BEHIND + "/32", "dev", "lo")


def serve_leases(node, device, addresses):
    """Starts a DHCP server at the other end, with these addresses (first, last)."""
    try:
        words = f"--port=0 --no-daemon --conf-file=/dev/null --interface={device} --bind-interfaces --dhcp-broadcast"
        ours = f"--dhcp-range={addresses},1h --dhcp-leasefile=/run/leases --pid-file= --user=root --dhcp-authoritative"
        with node.client:
            daemon("dnsmasq", *words.split(), *ours.split())
    except FileNotFoundError as error:
        raise Skip(f"dnsmasq does not run here: {error}") from error
    wait(lambda: "sockets bound" in read("/run/dnsmasq.log"), "dnsmasq")


def leases(node, device="eth0"):
    """A DHCP server at the other end, and the daemon of the node."""
    serve_leases(node, device, f"{POD},{POD}")
    daemon(f"{BIN}/dhcp", "daemon")
    wait(lambda: os.path.exists("/run/cni/dhcp.sock"), "dhcp's daemon")
    return {"type": "dhcp"}


def reach(node, pod, name="net1"):
    """Both ways by net1, near and far, and by eth0 as before."""
    expect(sorted(interfaces(pod)), ["eth0", "lo", name], f"interfaces of {pod.name}")
    for source in [GATEWAY, BEHIND]:
        expect(hear(node.client, POD, 80, source=source), pod.name, f"{pod.name} from {source} by net1")
        expect(hear(pod.netns, source, 9000, source=POD), POD, f"whom {source} sees")
    node.prove(pod, 8080, families=(4, 6))


def wire(plugin, ipam):
    return Libcni({"cniVersion": "1.1.0", "name": "wire", "plugins": [{**plugin, "ipam": ipam}, {"type": "sbr"}]}, "net1")


def play(node, plugin, ipam):
    """The pod lives on while net1 comes and goes. Then both come to their end with it, which only GC learns of."""
    first, second = Libcni(three_plugins()), wire(plugin, ipam)
    second.status()
    pod = attach(first, "pod", mapping(8080), mapping(8007, 7))
    before = Left(node, pod)
    serve = subprocess.Popen(["nsenter", f"--net={pod.netns.path}", "busybox", "nc", "-ll", "-p", "7", "-e", "cat"])
    with Traffic(pod, [(node.client, NODE4, 8007)]) as traffic:
        for last in [False, True]:
            result = second.add("pod", pod.netns.path)
            expect([each["address"] for each in result["ips"]], [POD + "/24"], "the addresses of net1")
            reach(node, pod)
            for network in [first, second]:
                network.check("pod")
                network.gc("pod")
                network.status()
            reach(node, pod)
            if not last:
                second.delete("pod")
                expect(sorted(interfaces(pod)), ["eth0", "lo"], "interfaces after the DEL")
                expect(before.now(), [], "left by the DEL")
                expect(len(json.loads(sh("ip", "-n", "pod", "-j", "rule"))), 3, "routing rules after the DEL")
                node.prove(pod, 8080, families=(4, 6))
                first.check("pod")
    serve.kill()
    serve.wait()
    for network in [first, second]:
        forget(network, pod)
    end(pod)
    for network in [second, first]:
        network.gc()
    return f"nothing; {traffic.came_back} words came back by eth0"


MACVLAN = {"type": "macvlan", "master": "eth0"}


def scenario_macvlan_with_static(node):
    outside()
    return play(node, MACVLAN, STATIC)


def scenario_macvlan_with_dhcp(node):
    outside()
    return play(node, MACVLAN, leases(node))


def scenario_ipvlan_with_static(node):
    needs("link", "eth0", "type", "ipvlan")
    outside()
    return play(node, {"type": "ipvlan", "master": "eth0"}, STATIC)


def scenario_vlan_with_dhcp(node):
    needs("link", "eth0", "type", "vlan", "id", "7")
    sh("ip", "-n", "client", "link", "add", "link", "eth0", "name", "eth0.7", "type", "vlan", "id", "7")
    outside("eth0.7")
    return play(node, {"type": "vlan", "master": "eth0", "vlanId": 7}, leases(node, "eth0.7"))


def a_device():
    """A second card of the node, and its wire."""
    sh("ip", "link", "add", "nic0", "type", "veth", "peer", "nic0", "netns", "client")
    outside("nic0")
    return {"type": "host-device", "device": "nic0"}


def scenario_host_device_with_static(node):
    return play(node, a_device(), STATIC)


def scenario_host_device_with_dhcp(node):
    return play(node, a_device(), leases(node, "nic0"))


def scenario_macvlan_beside_the_interface_of_cri(node):
    """The DEL of net1 comes before StopPodSandbox, and once, of a pod that was removed before, after it."""
    node.configure("pods", *three_plugins()["plugins"])
    outside()
    runtime, network = Containerd(), wire(MACVLAN, leases(node))
    for removed_first in [False, True]:
        identifier = runtime.run_pod("pod", ("tcp", 80, 8080, ""))
        pod = runtime.pod(identifier)
        network.add(identifier, pod.netns.path)
        reach(node, pod)
        network.check(identifier)
        if not removed_first:
            network.delete(identifier)
            node.prove(pod, 8080, families=(4, 6))
        pod.close()
        runtime.stop_pod(identifier)
        runtime.remove_pod(identifier)
    network.delete(identifier)
