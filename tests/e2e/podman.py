"""Podman 4 with its CNI backend: networks of bridge, portmap, firewall and tuning."""

import filecmp
import glob
import json
import os
import shutil
import signal
import socket
import subprocess

import firewalld
import image
import networks
from hold import Held
from node import BIN, GO, NODE4, OURS, Failed, Pod, Skip, expect, hear, read, sh, silent, write

CONTAINERS = """
[containers]
# A profile would be loaded into the machine's kernel.
apparmor_profile = "unconfined"
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "{runtime}"
[network]
network_backend = "cni"
cni_plugin_dirs = ["/opt/cni/bin"]
network_config_dir = "/etc/cni/net.d"
"""
STORAGE = """
[storage]
driver = "overlay"
graphroot = "/var/lib/containers/storage"
runroot = "/run/containers/storage"
"""
# cnitool is where the plugins under test are, and the commands that it prints are for a shell.
PATH = f"{OURS}:{os.environ['PATH']}"
BOTH = (socket.SOCK_STREAM, socket.SOCK_DGRAM)


def podman(*arguments):
    return sh("podman", *arguments).strip()


def prepare(runtime):
    """The files of Podman, with that OCI runtime."""
    write("/etc/containers/containers.conf", CONTAINERS.format(runtime=runtime))
    write("/etc/containers/storage.conf", STORAGE)
    write("/etc/containers/policy.json", '{"default": [{"type": "insecureAcceptAnything"}]}')


def start(node, runtime):
    """Podman with that OCI runtime, and the pod's image."""
    prepare(runtime)
    try:
        info = json.loads(sh("podman", "info", "--format", "json"))
        sh(runtime, "--version")
    except (FileNotFoundError, Failed) as error:
        raise Skip(f"podman with {runtime} does not run here: {error}") from error
    if info["host"].get("networkBackend") != "cni":
        raise Skip(f"podman {info['version']['Version']} has no CNI backend")
    podman("load", "-q", "-i", image.build())


def network(node, name, number, *more, sysctls=networks.SYSCTLS):
    """A network whose tuning sets sysctls, as who edits Podman's file can have it."""
    podman("network", "create", "--subnet", f"10.89.{number}.0/24", *more, name)
    path = f"/etc/cni/net.d/{name}.conflist"
    conf = json.loads(read(path))
    next(plugin for plugin in conf["plugins"] if plugin["type"] == "tuning")["sysctl"] = sysctls
    write(path, json.dumps(conf))
    node.sysctls = sysctls


def reload(node, name, port):
    """As after a firewall's restart, which flushes everybody's rules: the port is dead before and lives after it."""
    node.prove(pod(name), port)
    sh("nft", "flush", "ruleset")
    expect(silent(node.client, NODE4, port), True, "the port is dead without its rules")
    podman("network", "reload", name)
    node.prove(pod(name), port, BOTH)


def run(name, *arguments):
    podman("run", "-d", "--name", name, "-e", f"NAME={name}", *arguments, image.NAME)
    return pod(name)


def pod(name):
    """A running container as it is now: its namespace changes with each start."""
    seen = json.loads(podman("inspect", name))[0]
    addresses = []
    for each in seen["NetworkSettings"]["Networks"].values():
        addresses += [address for address in (each["IPAddress"], each["GlobalIPv6Address"]) if address]
    return Pod(name, f"/proc/{seen['State']['Pid']}/ns/net", addresses)


def published_ports(node, runtime):
    start(node, runtime)
    network(node, "one", 1, "--ipv6", "--subnet", "fd00:88:1::/64")
    ports = ["-p", "8080:80", "-p", "8080:53/udp", "-p", f"{NODE4}:8081:80"]
    seen = run("first", "--network", "one", *ports)
    seen.serve(53)
    node.prove(seen, 8080, BOTH)
    expect(hear(node.client, NODE4, 8081), "first", "the port of one host address")
    reload(node, "first", 8080)
    podman("restart", "-t", "0", "first")
    seen = pod("first")
    seen.serve(53)
    node.prove(seen, 8080, BOTH)
    podman("stop", "-t", "0", "first")
    expect(node.leftovers(), [], "left by podman stop")
    podman("start", "first")
    node.prove(pod("first"), 8080)
    podman("rm", "-f", "-t", "0", "first")


def scenario_published_ports_restart_and_reload_with_runc(node):
    published_ports(node, "runc")


def scenario_published_ports_restart_and_reload_with_crun(node):
    published_ports(node, "crun")


def scenario_two_networks_disconnect_and_connect(node):
    start(node, "crun")
    # A namespace has each sysctl once: it goes with the network that set it.
    network(node, "one", 1, sysctls={})
    network(node, "two", 2, sysctls={})
    # Two networks in one command are attached in any order, and the first has the default route.
    run("both", "--network", "one", "-p", "8080:80")
    podman("network", "connect", "two", "both")
    both = pod("both")
    other = run("other", "--network", "two", "-p", "8081:80")
    node.prove(both, 8080)
    expect(len(both.addresses), 2, "addresses")
    podman("network", "disconnect", "two", "both")
    one = pod("both")
    expect(len(one.addresses), 1, "addresses after the disconnect")
    node.prove(one, 8080)
    node.prove(other, 8081)
    podman("network", "connect", "two", "both")
    node.prove(pod("both"), 8080)
    # The default route of the first network goes with it. That of the second one was behind it.
    podman("network", "disconnect", "one", "both")
    two = pod("both")
    expect(two.netns.routes(), ["default", "10.89.2.0/24"], "routes")
    expect(hear(node.home, two.addresses[0], 80), "both", "the pod by its own address")
    # After a restart the remaining network gives the default route.
    podman("restart", "-t", "0", "both")
    node.prove(pod("both"), 8080)
    podman("rm", "-f", "-t", "0", "both")
    node.prove(other, 8081)
    podman("rm", "-f", "-t", "0", "other")
    podman("network", "rm", "one", "two")


def scenario_a_reload_of_firewalld(node):
    """Podman puts its containers into the zone of the firewalld that runs, which forgets them, and all rules, at a reload."""
    firewalld.start()
    start(node, "crun")
    network(node, "one", 1, "--ipv6", "--subnet", "fd00:88:1::/64")
    seen = run("first", "--network", "one", "-p", "8080:80")
    node.prove(seen, 8080)
    expect(len(firewalld.trusted()), 2, "sources of the trusted zone")
    firewalld.command("--reload")
    expect(silent(node.client, NODE4, 8080), True, "the port is dead without its rules")
    expect(firewalld.trusted(), [], "sources of the trusted zone after the reload")
    sh("cnitool", "rules", "restore", CNI_PATH=BIN, PATH=PATH)
    expect(len(firewalld.trusted()), 2, "sources of the trusted zone after cnitool rules restore")
    node.prove(seen, 8080)
    podman("rm", "-f", "-t", "0", "first")
    expect(firewalld.trusted(), [], "sources of the trusted zone at the end")


def scenario_egress_through_a_forward_drop_policy(node):
    start(node, "crun")
    network(node, "one", 1)
    for program in ["iptables", "ip6tables"]:
        sh(program, "-P", "FORWARD", "DROP")
    # The firewall plugin opens the way out and for answers, not for published ports.
    node.prove(run("first", "--network", "one", "-p", "8080:80"), 8080, leave_out=("outside",))
    podman("rm", "-f", "-t", "0", "first")


def scenario_kill_9_of_conmon_and_the_container(node):
    """conmon would have called DEL at the container's end; `podman rm` has to."""
    start(node, "crun")
    network(node, "one", 1)
    seen = run("first", "--network", "one", "-p", "8080:80")
    node.prove(seen, 8080)
    state = json.loads(podman("inspect", "first"))[0]["State"]
    for pid in [state["ConmonPid"], state["Pid"]]:
        os.kill(pid, signal.SIGKILL)
    try:
        podman("rm", "-f", "-t", "0", "first")
    except Failed:
        # crun refuses to signal a process that has just died; then the removal is repeated.
        podman("rm", "-f", "-t", "0", "first")
    expect(node.leftovers(), [], "left by podman rm")
    node.prove(run("first", "--network", "one", "-p", "8080:80"), 8080)
    podman("rm", "-f", "-t", "0", "first")


def killed(verb, plugin, *arguments):
    """Podman is killed when it has just called that plugin; the plugin goes on, and its answer is not read."""
    with Held(verb, plugin) as held:
        process = subprocess.Popen(["podman", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        # conmon runs a Podman of its own that cleans up after a container.
        held.kill(process, "/usr/bin/podman")


def tidied(node, kept, port, before):
    """`podman rm`, then the operator: what `cnitool inspect` calls left over goes by the commands that it prints.

    Returns how many commands it took.
    """
    names = [name for name in podman("ps", "-a", "--format", "{{.Names}}").split() if name != kept.name]
    seen = json.loads(podman("inspect", kept.name))[0]
    for mount in [line.split()[4] for line in read("/proc/self/mountinfo").splitlines()]:
        # What it has mounted for a container that was never started, Podman forgets.
        if "/overlay-containers/" in mount and seen["Id"] not in mount:
            # conmon's own clean-up may have come first.
            sh("umount", mount, check=False)
            expect(f" {mount} " in read("/proc/self/mountinfo"), False, f"{mount} is mounted")
    if names:
        podman("rm", "-f", "-t", "0", *names)
    for path in glob.glob("/run/netns/netns-*"):
        if path != seen["NetworkSettings"]["SandboxKey"]:
            sh("ip", "netns", "delete", os.path.basename(path))
    commands = 0
    while True:
        left = json.loads(sh("cnitool", "inspect", "--json", check=False, CNI_PATH=BIN, PATH=PATH))["leftOver"]
        if not left:
            break
        sh("sh", "-c", left[0]["command"], CNI_PATH=BIN, PATH=PATH)
        commands += 1
        expect(commands < 100, True, f"the commands have an end; the last: {left[0]}")
    found = [line for line in node.leftovers() if line not in before]
    expect(found, [], "left by podman rm and cnitool")
    node.prove(pod(kept.name), port)
    return commands


def scenario_kill_9_of_podman_in_the_middle_of_run(node):
    start(node, "crun")
    network(node, "one", 1, "--ipv6", "--subnet", "fd00:88:1::/64")
    kept = run("kept", "--network", "one", "-p", "8080:80")
    before = node.leftovers()
    for number, plugin in enumerate(["host-local", "bridge", "portmap", "firewall", "tuning"]):
        ports = ["-p", f"{8081 + number}:80", "-p", f"{8081 + number}:53/udp"]
        killed("ADD", plugin, "run", "-d", "--name", f"pod{number}", "--network", "one", *ports, image.NAME)
    commands = tidied(node, kept, 8080, before)
    # The ports and the addresses are free again.
    for number in range(5):
        node.prove(run(f"pod{number}", "--network", "one", "-p", f"{8081 + number}:80"), 8081 + number)
    podman("rm", "-f", "-t", "0", "-a")
    return f"nothing; {commands} commands of cnitool inspect were needed"


def scenario_kill_9_of_podman_in_the_middle_of_rm(node):
    start(node, "crun")
    network(node, "one", 1, "--ipv6", "--subnet", "fd00:88:1::/64")
    kept = run("kept", "--network", "one", "-p", "8080:80")
    before = node.leftovers()
    plugins = ["tuning", "firewall", "portmap", "bridge", "host-local"]
    for number in range(5):
        run(f"pod{number}", "--network", "one", "-p", f"{8081 + number}:80", "-p", f"{8081 + number}:53/udp")
    for number, plugin in enumerate(plugins):
        killed("DEL", plugin, "rm", "-f", "-t", "0", f"pod{number}")
    commands = tidied(node, kept, 8080, before)
    podman("rm", "-f", "-t", "0", "kept")
    return f"nothing; {commands} commands of cnitool inspect were needed"


def build_image():
    """Builds the image of the DaemonSets from what its two archives contain."""
    plugins = [line.split()[1] for line in read(f"{OURS}/SHA256SUMS").splitlines()]
    for folder, files in [("plugins", [*plugins, "SHA256SUMS", "cni-install"]), ("cnitool", ["cnitool"])]:
        os.makedirs(f"/opt/image/{folder}")
        for file in files:
            shutil.copy(f"{OURS}/{file}", f"/opt/image/{folder}/")
    podman("build", "-q", "-f", "/opt/e2e/Containerfile", "-t", "localhost/cni-plugins", "/opt/image")


def scenario_the_image_of_the_containerfile_installs_on_a_node_and_goes_back(node):
    """As docs/kubernetes/daemonset.yaml runs it, and with the command that the image has of its own."""
    start(node, "crun")
    build_image()
    shutil.copytree(GO, "/opt/node")
    rights = "--network host --cap-drop all --security-opt no-new-privileges --read-only".split()
    run_image = ["podman", "run", *rights, "-v", "/opt/node:/host/opt/cni/bin"]
    command = [*run_image, "--name", "install", "localhost/cni-plugins"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as pod_of_the_node:
        said = pod_of_the_node.stdout.readline()
        expect("are now in" in said, True, f"installed, it said {said!r}")
        podman("exec", "install", "/plugins/cni-install", "status", "--dest", "/host/opt/cni/bin")
        plugins = [line.split()[1] for line in read(f"{OURS}/SHA256SUMS").splitlines()]
        expect(len(plugins), 23, "plugins of the image")
        for plugin in plugins:
            same = filecmp.cmp(f"{OURS}/{plugin}", f"/opt/node/{plugin}", shallow=False)
            expect(same, True, f"the node has our {plugin}")
            answer = podman("exec", "-e", "CNI_COMMAND=VERSION", "install", f"/plugins/{plugin}")
            expect('"1.1.0"' in answer, True, f"VERSION of {plugin} in the image, {answer!r}")
        podman("stop", "-t", "10", "install")
        expect(pod_of_the_node.wait(), 0, "its status after the stop")
    sh(*run_image, "--rm", "localhost/cni-plugins", "rollback", "--dest", "/host/opt/cni/bin")
    names = sorted(os.listdir(GO))
    expect(sorted(os.listdir("/opt/node")), names, "the node's programs afterwards")
    expect(filecmp.cmpfiles(GO, "/opt/node", names, shallow=False)[0], names, "programs that are as before")
    podman("rm", "install")
