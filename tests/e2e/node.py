"""The node that a scenario runs on, and what is looked at there: who reaches whom, and leftovers at the end.

A node is a process with its own mount, network, pid, ipc, uts and cgroup namespace. Its root is a tmpfs; /usr is this
machine's with the unpacked packages above it, read only, and /etc likewise, to be written to without this machine
seeing it. `eth0` leads to a second network namespace, the client, who is outside: it has no route to the pods.
"""

import contextlib
import ctypes
import glob
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time

NODE4, CLIENT4 = "203.0.113.1", "203.0.113.2"
NODE6, CLIENT6 = "2001:db8::1", "2001:db8::2"
# The subnets of every configuration here.
PODS = re.compile(r"10\.(4|42|8[89]|244)\.|172\.26\.|192\.168\.|fd00:88:|2001:db8:4860:")
GO = "/opt/plugins/go"
OURS = "/opt/plugins/ours"
BIN = "/opt/cni/bin"
CONTAINERD2 = "/opt/containerd2"

libc = ctypes.CDLL(None, use_errno=True)


class Skip(Exception):
    """This machine cannot serve the scenario; says why."""


class Failed(Exception):
    """A program failed; says which, and what it said."""


def sh(*command, check=True, timeout=120, **env):
    """Runs a program and returns its standard output."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
        env={**os.environ, **env},
    )
    if check and done.returncode != 0:
        raise Failed(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def write(path, content):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(content)


def read(path):
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def daemon(*words):
    """Starts a program that lives as long as the node, and returns its process. What it says is the end of a report of failure."""
    with open(f"/run/{os.path.basename(words[0])}.log", "w", encoding="utf-8") as log:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def wait(ready, name):
    deadline = time.monotonic() + 60
    while not ready():
        if time.monotonic() > deadline:
            raise Failed(f"{name} is not ready after 60 s")
        time.sleep(0.02)


# Each node has a control group in every hierarchy: the root of its cgroup namespace.


def hierarchies():
    """(mount point, type, options) of each hierarchy. crun refuses a mix of v1 and v2: of one, v2 is left out.

    There are none in a virtual machine of scripts/vm; scenarios that only need networks still run there.
    """
    found = []
    for line in read("/proc/self/mountinfo").splitlines():
        before, after = line.split(" - ")
        kind, _, options = after.split()
        if kind.startswith("cgroup"):
            found.append((before.split()[4], kind, options))
    v1 = [each for each in found if each[1] == "cgroup"]
    return v1 or found


def own_group(mount):
    """The group of this process, as a path."""
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        name = controllers.replace("name=", "").split(",")[0]
        if name == "" or os.path.basename(mount).replace("name=", "").split(",")[0] == name:
            return os.path.normpath(mount + path)
    return mount


def make_groups(name):
    for mount, _, _ in hierarchies():
        parent = own_group(mount)
        os.mkdir(f"{parent}/{name}")
        # A cpuset without CPUs takes no process.
        for file in ["cpuset.mems", "cpuset.cpus"]:
            if os.path.exists(f"{parent}/{name}/{file}") and read(f"{parent}/{file}").strip():
                write(f"{parent}/{name}/{file}", read(f"{parent}/{file}"))


def join_groups(name):
    for mount, _, _ in hierarchies():
        write(f"{own_group(mount)}/{name}/cgroup.procs", str(os.getpid()))


def remove_groups(name):
    """The processes are gone or dying: the pid namespace ended. An empty group can be removed."""
    deadline = time.monotonic() + 10
    for mount, _, _ in hierarchies():
        top = f"{own_group(mount)}/{name}"
        folders = [folder for folder, _, _ in os.walk(top, topdown=False)]
        while folders:
            try:
                os.rmdir(folders[0])
                folders.pop(0)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


def become(scratch, packages, plugins, go, containerd2):
    """Makes this process, which has new namespaces, a node."""
    sh("mount", "-t", "tmpfs", "-o", "mode=755", "node", scratch)
    root = f"{scratch}/root"
    folders = "usr etc proc sys dev run tmp root opt/cni/bin opt/old var/tmp var/lib/cni".split()
    for folder in [f"root/{each}" for each in folders] + ["upper", "work"]:
        os.makedirs(f"{scratch}/{folder}")
    sh("mount", "--bind", root, root)
    os.symlink("/run", f"{root}/var/run")
    try:
        sh("mount", "-t", "overlay", "-o", f"lowerdir={packages}/usr:/usr", "node", f"{root}/usr")
        layers = f"lowerdir={packages}/etc:/etc,upperdir={scratch}/upper,workdir={scratch}/work"
        sh("mount", "-t", "overlay", "-o", layers, "node", f"{root}/etc")
    except Failed as error:
        raise Skip(f"no overlay file system over this machine's: {error}") from error
    for name in ["bin", "sbin", "lib", "lib64"]:
        if os.path.islink("/" + name):
            os.symlink(os.readlink("/" + name), f"{root}/{name}")
    own = hierarchies()
    sh("mount", "-t", "proc", "proc", f"{root}/proc")
    sh("mount", "-t", "sysfs", "sysfs", f"{root}/sys")
    sh("mount", "--rbind", "/dev", f"{root}/dev")
    for folder in ["dev/shm", "etc/cni"]:
        os.makedirs(f"{root}/{folder}", exist_ok=True)
        sh("mount", "-t", "tmpfs", "-o", "mode=755", "node", f"{root}/{folder}")
    if not own or own[0][0] != "/sys/fs/cgroup":
        sh("mount", "-t", "tmpfs", "-o", "mode=755", "cgroup", f"{root}/sys/fs/cgroup")
    for mount, kind, options in own:
        os.makedirs(root + mount, exist_ok=True)
        options = ",".join(each for each in options.split(",") if each not in ("rw", "nsdelegate", "xattr"))
        options = "none," + options if options.startswith("name=") else options
        sh("mount", "-t", kind, *(["-o", options] if kind == "cgroup" else []), "cgroup", root + mount)
    if own and own[0][1] == "cgroup2":
        delegate(root + own[0][0])
    os.makedirs(f"{root}/etc/cni/net.d")
    shutil.copytree(os.path.dirname(os.path.abspath(__file__)), f"{root}/opt/e2e")
    for file in ["Containerfile", "README.md", "docs/recipes.md", "docs/kubernetes/daemonset-gc.yaml"]:
        shutil.copy(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..", file), f"{root}/opt/e2e/")
    sys.path.insert(0, "/opt/e2e")
    shutil.copytree(plugins, root + OURS)
    shutil.copytree(go, root + GO)
    if os.path.isdir(containerd2):
        os.makedirs(root + CONTAINERD2)
        sh("mount", "--bind", containerd2, root + CONTAINERD2)
    os.chdir(root)
    sh("pivot_root", root, f"{root}/opt/old")
    os.chdir("/")
    sh("umount", "-l", "/opt/old")
    os.environ["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
    for name in ["CNI_PATH", "NETCONFPATH", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"]:
        os.environ.pop(name, None)
    os.environ["HOME"] = "/root"


def delegate(top):
    """In v2 a group that hands controllers on must hold no process."""
    os.mkdir(f"{top}/init")
    for pid in read(f"{top}/cgroup.procs").split():
        write(f"{top}/init/cgroup.procs", pid)
    wanted = read(f"{top}/cgroup.controllers").split()
    write(f"{top}/cgroup.subtree_control", " ".join("+" + each for each in wanted))


class Netns:
    """A network namespace. As a context, the calling thread is in it; a socket made there stays there."""

    def __init__(self, path):
        self.path = path
        self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self):
        self.before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        enter(self.file)

    def __exit__(self, *_):
        enter(self.before)
        os.close(self.before)

    def routes(self):
        """The destinations of the IPv4 routes."""
        return [route["dst"] for route in json.loads(sh("nsenter", f"--net={self.path}", "ip", "-j", "route"))]

    def sysctl(self, key):
        with self:
            return read("/proc/sys/" + key.replace(".", "/")).strip()


def enter(file):
    if libc.setns(file, 0x40000000) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def hear(netns, address, port, kind=socket.SOCK_STREAM, source=""):
    """What a server says to a client in that namespace that connects, or sends one datagram, from that address."""
    deadline = time.monotonic() + 10
    while True:
        with netns:
            ours = socket.socket(family(address), kind)
        with ours:
            ours.settimeout(5)
            try:
                if source:
                    ours.bind((source, 0))
                ours.connect((address, port))
                if kind == socket.SOCK_DGRAM:
                    ours.send(b"?")
                    return ours.recv(100).decode().strip()
                heard = b""
                while not heard.endswith(b"\n"):
                    more = ours.recv(100)
                    if not more:
                        break
                    heard += more
                return heard.decode().strip()
            except ConnectionRefusedError:
                # Runtimes report a pod as up before its program listens.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
            except OSError as error:
                raise Failed(f"{address} port {port} from {netns.path}: {error}") from error


def silent(netns, address, port):
    """No server answers there. Podman keeps a published port taken by a socket that is not served."""
    with netns:
        ours = socket.socket(family(address), socket.SOCK_STREAM)
    with ours:
        ours.settimeout(0.5)
        try:
            ours.connect((address, port))
            return ours.recv(1) == b""
        except OSError:
            return True


class Server:
    """Sends each client in that namespace its own address, over TCP and UDP; `name` instead, if there is one."""

    def __init__(self, netns, port, name=None):
        self.name = name
        with netns:
            self.tcp = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=64)
            self.udp = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
            # The answer must come from the requested address, so a missing translation would show.
            self.udp.bind(("::", port))
        self.threads = [threading.Thread(target=serve, daemon=True) for serve in (self.serve_tcp, self.serve_udp)]
        for thread in self.threads:
            thread.start()

    def close(self):
        """Ends it: a socket keeps its namespace alive."""
        for ours in [self.tcp, self.udp]:
            try:
                ours.shutdown(socket.SHUT_RDWR)
            except OSError:
                # ENOTCONN for a socket without a peer; a process that waits in it is still woken.
                pass
        for thread in self.threads:
            thread.join()
        self.tcp.close()
        self.udp.close()

    def answer(self, peer):
        return ((self.name or peer[0].removeprefix("::ffff:")) + "\n").encode()

    def serve_tcp(self):
        while True:
            try:
                connection, peer = self.tcp.accept()
            except OSError:
                return
            with connection:
                connection.send(self.answer(peer))

    def serve_udp(self):
        while True:
            asked, peer = self.udp.recvfrom(100)
            if not asked:
                return
            self.udp.sendto(self.answer(peer), peer)


class Pod:
    """A running pod: its name, its namespace, and its addresses."""

    def __init__(self, name, netns, addresses):
        self.name = name
        self.netns = Netns(netns)
        self.addresses = addresses
        self.servers = []

    def serve(self, port):
        """This process answers in the pod's namespace; busybox, in the pods of runtimes, has no UDP server."""
        self.servers.append(Server(self.netns, port, self.name))

    def close(self):
        """Nothing of this process keeps the pod's namespace alive any more."""
        for server in self.servers:
            server.close()
        os.close(self.netns.file)


class Node:
    """The node that this process has become."""

    def __init__(self):
        self.home = Netns("/proc/self/ns/net")
        # What the network sets in every pod.
        self.sysctls = {}
        self.use(OURS)
        sh("ip", "netns", "add", "client")
        self.client = Netns("/run/netns/client")
        sh("ip", "link", "set", "lo", "up")
        sh("ip", "link", "add", "eth0", "type", "veth", "peer", "eth0", "netns", "client")
        for place, four, six in [([], NODE4, NODE6), (["-n", "client"], CLIENT4, CLIENT6)]:
            ip = ["ip", *place]
            sh(*ip, "link", "set", "lo", "up")
            sh(*ip, "link", "set", "eth0", "up")
            sh(*ip, "address", "add", four + "/24", "dev", "eth0")
            sh(*ip, "address", "add", six + "/64", "dev", "eth0", "nodad")
        sh("ip", "route", "add", "default", "via", CLIENT4)
        sh("ip", "-6", "route", "add", "default", "via", CLIENT6)
        Server(self.client, 9000)

    def use(self, folder, *plugins):
        """Puts the plugins of that folder (all, or those named) into place, each in one step, as an installer does."""
        for name in plugins or os.listdir(folder):
            shutil.copy(f"{folder}/{name}", f"{BIN}/.{name}")
            os.rename(f"{BIN}/.{name}", f"{BIN}/{name}")

    def configure(self, name, *plugins, version="1.0.0", **more):
        """The node's only network."""
        conf = {"cniVersion": version, "name": name, "plugins": plugins, **more}
        self.sysctls = {key: value for plugin in plugins for key, value in plugin.get("sysctl", {}).items()}
        # In place: containerd 1.6 does not see a file that is renamed into the folder it watches.
        write("/etc/cni/net.d/10-network.conflist", json.dumps(conf))

    def prove(self, pod, host_port, kinds=(socket.SOCK_STREAM,), families=None, leave_out=()):
        """The pod is reached by its host port from everywhere, goes out under the node's address, and has its sysctls.

        The families are those of its addresses, if not given. A network that does not promise all of it names what to leave out: ports, outside, itself (hairpin), egress.
        """
        own_families = {6 if ":" in address else 4 for address in pod.addresses}
        for kind in kinds if "ports" not in leave_out else []:
            for ip in families or own_families:
                address = NODE4 if ip == 4 else NODE6
                places = [(self.home, address, "the node")]
                places += [(self.client, address, "outside")] if "outside" not in leave_out else []
                places += [(pod.netns, address, "itself")] if "itself" not in leave_out else []
                # Linux has no route_localnet for IPv6.
                places += [(self.home, "127.0.0.1", "the node")] if ip == 4 else []
                for netns, address, who in places:
                    expect(hear(netns, address, host_port, kind), pod.name, f"{pod.name} from {who} by {address}")
        for address in pod.addresses:
            client, node = (CLIENT6, NODE6) if ":" in address else (CLIENT4, NODE4)
            expect(hear(self.home, address, 80), pod.name, f"{pod.name} from the node by its own address {address}")
            if "egress" not in leave_out:
                expect(hear(pod.netns, client, 9000), node, f"whom those outside see for {address}")
            expect(silent(self.client, address, 80), True, f"{address} is not to be reached from outside")
        for key, value in self.sysctls.items():
            expect(pod.netns.sysctl(key), value, f"{key} of {pod.name}")

    def leftovers(self):
        """What no pod should leave: a line for each.

        Of the kernel's connections that is what a port mapping made: they would lead the next packet of the same
        source to a pod that is no more. Others, of the pod's own, end by themselves and do no harm.
        """
        links = json.loads(sh("ip", "-j", "-d", "link"))
        keep = ("bridge", None)
        left = [f"link {link['ifname']}" for link in links if kind(link) not in keep and link["ifname"] != "eth0"]
        for folder in ["/var/lib/cni", "/run/cni", "/run/cni-ipam-state"]:
            for path in files(folder):
                if not SHARED_FILE.search(path):
                    # A GC that runs meanwhile may have removed it.
                    with contextlib.suppress(FileNotFoundError):
                        left.append(f"file {path}: {' '.join(read(path).split())[:80]}")
        left += [f"namespace {path}" for path in files("/run/netns") if path != "/run/netns/client"]
        for program in ["iptables", "ip6tables"]:
            for line in sh(program + "-save").splitlines():
                rule = re.sub(r" \[.*| *$", "", line)
                if rule[0] in ":-" and not any(shape.fullmatch(rule) for shape in SHARED_RULES):
                    left.append(f"{program}: {rule}")
        objects = json.loads(sh("nft", "-j", "list", "ruleset"))["nftables"]
        for each in [each["set"] for each in objects if "set" in each]:
            if each["table"].startswith("cni_"):
                left += [f"nft: {each['table']} {each['name']} {element}" for element in each.get("elem", [])]
        for rule in [each["rule"] for each in objects if "rule" in each]:
            # In the plugins' own tables what has no comment is shared, and so is the way there.
            if rule["table"].startswith("cni_") and rule["chain"] not in ("postrouting", "forward") and "comment" in rule:
                left.append(f"nft: {rule['table']} {rule['chain']} {rule['comment']}")
            # firewalld's table has a rule for each source of a zone.
            for address in re.findall(r'"([0-9a-f.:]+)"', json.dumps(rule["expr"])) if rule["table"] == "firewalld" else []:
                left += [f"firewalld: {rule['chain']} {address}"] if PODS.match(address) else []
        for line in sh("conntrack", "-L", "-o", "extended").splitlines():
            (asked, answering) = re.findall(r"dst=(\S+).*? src=(\S+)", line)[0]
            if PODS.match(answering) and asked != answering:
                left.append(f"conntrack: {line}")
        return left


def programs():
    """All running programs: process and file."""
    found = []
    for link in glob.glob("/proc/[0-9]*/exe"):
        try:
            found.append((int(link.split("/")[2]), os.readlink(link)))
        except OSError:
            pass
    return found


def kind(link):
    return link.get("linkinfo", {}).get("info_kind")


def files(folder):
    return sorted(os.path.join(at, name) for at, _, names in os.walk(folder) for name in names)


# Locks, the last address, the boot of host-local, and dhcp's socket; no temporary file.
SHARED_FILE = re.compile(r"^/run/cni/dhcp\.sock$|/(lock|last_reserved_ip\.\d+)$|^/run/cni/[^/]*\.lock$|/\.cni/[^/]+/boot$")
# What pods share, so it stays: built-in chains, and the chains of portmap with what leads to them.
SHARED_RULES = [
    re.compile(shape)
    for shape in [
        r":[A-Z]+ (ACCEPT|DROP)",
        r":CNI-HOSTPORT-(DNAT|SETMARK|MASQ) -",
        r"-A (PREROUTING|OUTPUT) -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT",
        r"-A POSTROUTING .*-j CNI-HOSTPORT-MASQ",
        r"-A CNI-HOSTPORT-SETMARK .*-j MARK --set-xmark 0x2000/0x2000",
        # firewall's.
        r":(CNI-ADMIN|CNI-FORWARD|NOMAD-ADMIN|CNI-FW-OWNERS|CNI-ISOLATION-STAGE-[12]) -",
        r"-A (CNI-)?FORWARD .*-j (CNI-ADMIN|CNI-FORWARD|NOMAD-ADMIN|CNI-ISOLATION-STAGE-1)",
        r"-A CNI-ISOLATION-STAGE-[12] .*-j RETURN",
        r"-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE",
    ]
]


def expect(seen, wanted, what):
    if seen != wanted:
        raise Failed(f"{what}: {seen!r} and not {wanted!r}")
