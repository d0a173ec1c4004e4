"""A node whose plugin folder is replaced while its pods run: from the Go plugins to ours, and back."""

import networks
from containerd import Containerd
from node import CLIENT4, CLIENT6, GO, NODE4, NODE6, OURS, sh
from traffic import Traffic

PLUGINS = ["bridge", "host-local", "loopback", "portmap", "tuning"]


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

    def remove(self, plugins):
        """Ends the traffic of each just before the pod goes. The plugins that remove it are in place already."""
        came_back = 0
        for identifier, (pod, traffic) in self.pods.items():
            came_back += traffic.end()
            self.runtime.stop_pod(identifier)
            self.runtime.remove_pod(identifier)
            if plugins == GO:
                # Go leaves the connections of a port mapping to time out.
                for address in pod.addresses:
                    family = "ipv6" if ":" in address else "ipv4"
                    sh("conntrack", "-D", "-f", family, "--reply-src", address, check=False)
        return came_back


def switch(node, first, second, six=False):
    families = (4, 6) if six else (4,)
    node.use(first, *PLUGINS)
    node.configure("pods", networks.bridge(six=six), networks.portmap(), networks.tuning(), version="1.0.0")
    runtime = Containerd()
    old = Pods(node, runtime, "old", 8000, families)
    node.use(second, *PLUGINS)
    new = Pods(node, runtime, "new", 8200, families)
    old.prove()
    came_back = old.remove(second)
    new.prove()
    node.use(first, *PLUGINS)
    newest = Pods(node, runtime, "newest", 8400, families)
    new.prove()
    came_back += new.remove(first)
    newest.prove()
    node.use(second, *PLUGINS)
    came_back += newest.remove(second)
    return f"nothing; {came_back} pings, words and datagrams, none lost"


def scenario_from_go_to_ours_and_back(node):
    return switch(node, GO, OURS)


def scenario_from_ours_to_go_and_back_with_both_families(node):
    return switch(node, OURS, GO, six=True)
