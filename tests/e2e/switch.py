"""A node whose plugin folder is replaced while its pods run: from the Go plugins to ours, and back."""

import socket
import subprocess

import networks
from containerd import Containerd
from libcni import Libcni
from node import BIN, CLIENT4, CLIENT6, GO, NODE4, NODE6, OURS, Pod, daemon, expect, hear, read, sh, wait
from second import GATEWAY, needs, outside, serve_leases
from traffic import Traffic
from verbs import mapping, sandbox, unname


def forget_connections(pod):
    """Go leaves the connections of a port mapping to time out."""
    for address in pod.addresses:
        family = "ipv6" if ":" in address else "ipv4"
        sh("conntrack", "-D", "-f", family, "--reply-src", address, check=False)


class Pods:
    """Some pods with their traffic."""

    def __init__(self, node, runtime, name, first_port, families, count=4):
        self.runtime, self.pods = runtime, {}
        for number in range(count):
            port, echo = first_port + number, first_port + 100 + number
            identifier = runtime.run_pod(f"{name}{number}", ("tcp", 80, port, ""), ("tcp", 7, echo, ""), ("udp", 53, echo, ""))
            pod = runtime.pod(identifier)
            pod.serve(53)
            node.prove(pod, port, families=families)
            self.pods[identifier] = pod, self.traffic(node, pod, echo, families)
        self.prove = lambda: [
            node.prove(pod, first_port + each, families=families) for each, (pod, _) in enumerate(self.pods.values())
        ]

    @staticmethod
    def traffic(node, pod, echo, families):
        """Out of the pod a ping, into it by its host port a TCP stream and datagrams, of each family."""
        outside = [(CLIENT4, NODE4), (CLIENT6, NODE6)][: len(families)]
        into = [(node.client, address, echo) for _, address in outside]
        return Traffic(pod, into, into, [(pod.netns, address) for address, _ in outside])

    def remove(self, folder):
        """Ends the traffic of each just before the pod goes. The plugins that remove it are in place already."""
        came_back = 0
        for identifier, (pod, traffic) in self.pods.items():
            came_back += traffic.end()
            self.runtime.stop_pod(identifier)
            self.runtime.remove_pod(identifier)
            if folder == GO:
                forget_connections(pod)
        return came_back


def switch(node, first, second, six=False):
    families = (4, 6) if six else (4,)
    node.use(first)
    node.configure("pods", networks.bridge(six=six), networks.portmap(), networks.tuning(), version="1.0.0")
    runtime = Containerd()
    old = Pods(node, runtime, "old", 8000, families)
    node.use(second)
    new = Pods(node, runtime, "new", 8200, families)
    old.prove()
    came_back = old.remove(second)
    new.prove()
    node.use(first)
    newest = Pods(node, runtime, "newest", 8400, families)
    new.prove()
    came_back += new.remove(first)
    newest.prove()
    node.use(second)
    came_back += newest.remove(second)
    if second == GO:
        # The links of reservations that Go has released go with the next call of host-local.
        expect([line for line in node.leftovers() if "/.cni/pods/links/" not in line], [], "left behind by Go")
        node.use(OURS)
        last = runtime.run_pod("last")
        runtime.stop_pod(last)
        runtime.remove_pod(last)
    return f"nothing; {came_back} pings, words and datagrams, none lost"


def scenario_from_go_to_ours_and_back(node):
    return switch(node, GO, OURS)


def scenario_from_ours_to_go_and_back_with_both_families(node):
    return switch(node, OURS, GO, six=True)


def listed(name, *plugins):
    return {"cniVersion": "1.0.0", "name": name, "plugins": plugins}


def host_local(network):
    return {"type": "host-local", "ranges": [[{"subnet": f"10.42.{network}.0/24"}]]}


def collect(node, networks):
    """What Go's DEL leaves is who owned an address (firewall), and which interface an attachment got (host-device). The
    GC takes it: the operator has raised the lists."""
    left = node.leftovers()
    records = [" -A CNI-FW-OWNERS ", "/run/cni/host-device/"]
    expect([line for line in left if not any(record in line for record in records)], [], "left behind")
    for network in networks:
        Libcni({**network.conf, "cniVersion": "1.1.0"}).gc()
    return len(left)


class Many:
    """A pod with many interfaces, and traffic of the first two: by a host port, and on the wire.

    In Go, CHECK of the plugin before sbr or vrf misses the routes that these have moved.
    """

    moved = "net1"

    def __init__(self, node, number):
        self.name, self.card, address = f"pod{number}", f"nic{number}", f"198.51.100.{10 + number}"
        static = {"type": "static", "addresses": [{"address": address + "/24", "gateway": GATEWAY}]}
        lists = self.lists(number, static)
        self.networks = [Libcni(conf, f"net{place}" if place else "eth0") for place, conf in enumerate(lists)]
        netns = sandbox(self.name)
        ports = [mapping(8080 + number), mapping(8180 + number, 7), mapping(8180 + number, 53, "udp")]
        results = [network.add(self.name, netns, ports) for network in self.networks]
        self.pod = Pod(self.name, netns, [results[0]["ips"][0]["address"].split("/")[0]])
        for port in [80, 53]:
            self.pod.serve(port)
        self.prove = lambda: node.prove(self.pod, 8080 + number)
        self.prove()
        self.echo = subprocess.Popen(["nsenter", f"--net={netns}", "busybox", "nc", "-ll", "-p", "7", "-e", "cat"])
        by_port, by_wire = (node.client, NODE4, 8180 + number), (node.client, address, 7)
        pings = [(self.pod.netns, CLIENT4), (node.client, address)]
        self.traffic = Traffic(self.pod, [by_port, by_wire], [by_port], pings)

    def lists(self, _number, static):
        sh("ip", "link", "add", self.card, "type", "veth", "peer", self.card, "netns", "client")
        bridge, portmap, firewall = networks.bridge(), networks.portmap(), networks.firewall()
        return [
            listed("pods", bridge, portmap, firewall, networks.bandwidth(), networks.tuning()),
            listed("wire", {"type": "macvlan", "master": "eth0", "ipam": static}, {"type": "sbr"}),
            listed("card", {"type": "host-device", "device": self.card, "ipam": host_local(1)}),
            listed("pair", {"type": "ptp", "ipMasq": True, "ipam": host_local(2)}, firewall),
            listed("tap", {"type": "tap", "ipam": host_local(3)}),
        ]

    def check(self, folder):
        for network in self.networks:
            if folder == OURS or network.ifname != self.moved:
                network.check(self.name)
        self.prove()

    def remove(self, folder):
        came_back = self.traffic.end()
        self.echo.kill()
        self.echo.wait()
        for network in reversed(self.networks):
            network.delete(self.name)
        if folder == GO:
            forget_connections(self.pod)
        unname(self.pod)
        self.end()
        return came_back

    def end(self):
        sh("ip", "link", "delete", self.card)


class Others(Many):
    """The same of links that this machine's kernel may lack."""

    moved = "net4"

    def lists(self, number, static):
        return [
            listed("pods", networks.bridge(), networks.portmap(), networks.tuning()),
            listed("wire", {"type": "ipvlan", "master": "eth0", "ipam": static}),
            listed("tag", {"type": "vlan", "master": "eth0", "vlanId": 7 + number, "ipam": host_local(1)}),
            listed("none", {"type": "dummy", "ipam": host_local(2)}),
            # Go's vrf loses the route to ptp's gateway.
            listed("red", networks.bridge("red0", ipam=host_local(3)), {"type": "vrf", "vrfname": "red"}),
        ]

    def end(self):
        """The node has no card of this pod."""


def many(node, kind):
    outside()
    node.use(GO)
    old = kind(node, 0)
    node.use(OURS)
    old.check(OURS)
    new = kind(node, 1)
    came_back = old.remove(OURS)
    new.check(OURS)
    node.use(GO)
    new.check(GO)
    newest = kind(node, 2)
    came_back += new.remove(GO)
    newest.prove()
    node.use(OURS)
    newest.check(OURS)
    came_back += newest.remove(OURS)
    owners = collect(node, newest.networks)
    return f"nothing; {came_back} pings, words and datagrams, none lost; {owners} owners went with a GC"


def scenario_pods_of_many_interfaces_from_go_to_ours_and_back(node):
    return many(node, Many)


def scenario_pods_of_other_interfaces_from_go_to_ours_and_back(node):
    for link in [("type", "dummy"), ("type", "vrf", "table", "10"), ("link", "eth0", "type", "ipvlan")]:
        needs(*link)
    needs("link", "eth0", "type", "vlan", "id", "7")
    return many(node, Others)


def address_is_leased(address):
    """Whether the DHCP server has a lease of that address."""
    return any(line.split()[2] == address for line in read("/run/leases").splitlines())


class Leased:
    """A pod of the runtime with an address of the DHCP server, and traffic from outside to that address."""

    def __init__(self, node, runtime, name):
        self.node, self.runtime, self.identifier = node, runtime, runtime.run_pod(name)
        self.pod = runtime.pod(self.identifier)
        (self.address,) = self.pod.addresses
        # Go announces no leased address; a pod that had it before is still in this table.
        sh("ip", "-n", "client", "neighbour", "flush", "dev", "eth0")
        expect(hear(node.client, self.address, 80), name, f"{name} from outside")
        expect(address_is_leased(self.address), True, f"the server has a lease of {self.address}")
        self.traffic = Traffic(self.pod, [(node.client, self.address, 7)], pings=[(self.pod.netns, GATEWAY)])

    def keeps_its_address(self):
        out = sh("nsenter", f"--net={self.pod.netns.path}", "ip", "-4", "-o", "address", "show", "dev", "eth0")
        expect(out.split()[3].split("/")[0], self.address, f"the address of {self.pod.name}")
        expect(hear(self.node.client, self.address, 80), self.pod.name, f"{self.pod.name} from outside")

    def remove(self, released):
        """Removes the pod. `released` is whether the server then has its lease no more."""
        wait(lambda: all(words.echoes for words in self.traffic.words), "the first echo")
        came_back = self.traffic.end()
        self.pod.close()
        self.runtime.stop_pod(self.identifier)
        self.runtime.remove_pod(self.identifier)
        if released:
            wait(lambda: not address_is_leased(self.address), f"the release of {self.address}")
        else:
            expect(address_is_leased(self.address), True, f"the server has a lease of {self.address}")
        return came_back


class Daemon:
    """The daemon of dhcp whose plugins are in use."""

    def __init__(self):
        self.process = daemon(f"{BIN}/dhcp", "daemon")
        wait(self.answers, "dhcp's daemon")

    @staticmethod
    def answers():
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect("/run/cni/dhcp.sock")
            return True
        except OSError:
            return False

    def stop(self):
        self.process.terminate()
        self.process.wait()


def scenario_leases_from_go_to_ours_and_back(node):
    """Each daemon takes over from the other, as docs/plugins/dhcp.md says; containers keep their addresses."""
    outside()
    serve_leases(node, "eth0", f"{GATEWAY[:-1]}10,{GATEWAY[:-1]}19")
    node.configure("pods", {"type": "macvlan", "master": "eth0", "ipam": {"type": "dhcp"}})
    node.use(GO)
    running = Daemon()
    runtime = Containerd()
    old, removed_by_go = [Leased(node, runtime, name) for name in ("old0", "old1")]
    # Go's release comes from 0.0.0.0, so the server keeps the lease.
    came_back = removed_by_go.remove(released=False)

    running.stop()
    node.use(OURS)
    running = Daemon()
    # The socket exists before the adopted lease is confirmed.
    wait(lambda: old.address in sh(f"{OURS}/cnitool", "ipam", "dhcp", "--json"), "the adopted lease")
    old.keeps_its_address()
    new, released = [Leased(node, runtime, name) for name in ("new0", "new1")]
    came_back += old.remove(released=True) + released.remove(released=True)

    running.stop()
    node.use(GO)
    running = Daemon()
    new.keeps_its_address()
    newest = Leased(node, runtime, "newest")
    # Go's daemon does not know this lease.
    came_back += new.remove(released=False)

    running.stop()
    node.use(OURS)
    running = Daemon()
    wait(lambda: newest.address in sh(f"{OURS}/cnitool", "ipam", "dhcp", "--json"), "the adopted lease")
    newest.keeps_its_address()
    came_back += newest.remove(released=True)
    # Go's daemon did not know the lease of `new`, so its record was still there.
    wait(lambda: not node.leftovers(), "the removal of the last record")
    running.stop()
    return f"nothing; {came_back} pings and words, none lost"
