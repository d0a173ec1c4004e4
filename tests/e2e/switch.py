"""A node whose plugin folder is replaced while its pods run: from the Go plugins to ours, and back."""

import networks
from containerd import Containerd
from node import GO, OURS, sh
from traffic import Traffic

PLUGINS = ["bridge", "host-local", "loopback", "portmap", "tuning"]


class Pods:
    """Some pods with their traffic."""

    def __init__(self, node, runtime, name, first_port, count=4):
        self.runtime, self.pods = runtime, {}
        for number in range(count):
            ports = [("tcp", 80, first_port + number, ""), ("tcp", 7, first_port + 100 + number, "")]
            identifier = runtime.run_pod(f"{name}{number}", *ports)
            pod = runtime.pod(identifier)
            node.prove(pod, first_port + number)
            self.pods[identifier] = pod, Traffic(node, pod, first_port + 100 + number)
        self.prove = lambda: [node.prove(pod, first_port + each) for each, (pod, _) in enumerate(self.pods.values())]

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
    node.use(first, *PLUGINS)
    node.configure("pods", networks.bridge(six=six), networks.portmap(), networks.tuning(), version="1.0.0")
    runtime = Containerd()
    old = Pods(node, runtime, "old", 8000)
    node.use(second, *PLUGINS)
    new = Pods(node, runtime, "new", 8200)
    old.prove()
    came_back = old.remove(second)
    new.prove()
    node.use(first, *PLUGINS)
    newest = Pods(node, runtime, "newest", 8400)
    new.prove()
    came_back += new.remove(first)
    newest.prove()
    node.use(second, *PLUGINS)
    came_back += newest.remove(second)
    return f"nothing; {came_back} pings and echoes, none lost"


def scenario_from_go_to_ours_and_back(node):
    return switch(node, GO, OURS)


def scenario_from_ours_to_go_and_back_with_both_families(node):
    return switch(node, OURS, GO, six=True)
