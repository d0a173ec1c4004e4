"""What README.md and docs/recipes.md say about an archive and about runtimes, run line by line."""

import json
import os
import re
import shutil
import subprocess
import tarfile

import image
import podman
from containerd import Containerd
from machine import Machine
from node import BIN, CLIENT4, NODE4, OURS, Failed, Netns, expect, hear, read, sh, write

MARK = "norun=tests/e2e/documents.py-runs-these-lines"
VARIABLES = {"image": image.NAME, "CNI_PATH": BIN}


class Page:
    """A document: its blocks by the heading that they follow."""

    def __init__(self, path):
        self.path, self.blocks = path, []
        heading = ""
        for part in re.finditer(r"^#+ (.*)$|^```(.*)\n((?:(?!```).*\n)*)```$", read(path), re.MULTILINE):
            if part[1]:
                heading = part[1]
            else:
                self.blocks.append((heading, part[2], part[3]))

    def files(self, heading):
        """Writes the files of a section."""
        found = [(info.split()[1], text) for at, info, text in self.blocks if at == heading and re.match(r"(json|toml) /", info)]
        for path, text in found:
            write(path, text)
        return [path for path, _ in found]

    def commands(self, heading):
        """The blocks of commands of a section that this machine is to run: marked ones, and those that scripts/test runs too."""
        return [text for at, info, text in self.blocks if at == heading and info in ("sh", f"sh {MARK}")]

    def run(self, text):
        """Runs a block, in the folder into which the archives were downloaded. A failing line ends it."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd="/root",
            env={**os.environ, **VARIABLES, "PATH": f"/usr/local/bin:{os.environ['PATH']}"},
        )
        if done.returncode != 0:
            raise Failed(f"{self.path}: status {done.returncode} of\n{text}{done.stdout}{done.stderr}")
        return done.stdout


def archives():
    """Writes the archives of a release, of the plugins under test, to the folder in which a user has downloaded them."""
    plugins = [line.split()[1] for line in read(f"{OURS}/SHA256SUMS").splitlines()]
    for name, files in [("cni-plugins", [*plugins, "SHA256SUMS", "cni-install"]), ("cnitool", ["cnitool"])]:
        with tarfile.open(f"/root/{name}-linux-amd64-v0.0.0.tgz", "w:gz", compresslevel=1) as archive:
            for file in files:
                archive.add(f"{OURS}/{file}", f"./{file}")
    return plugins


def lines_of(command):
    """Splits off a block's last line, which ends what the lines before have started."""
    start, _, end = command.rstrip("\n").rpartition("\n")
    return start, end


def run_podman(node, recipes):
    """Runs the section on Podman, with a container that answers through its published port."""
    podman.prepare("runc")
    # What a node of the tests needs besides the page's part.
    of_the_tests = read("/etc/containers/containers.conf").split("[network]")[0]
    (path,) = recipes.files("Podman")
    write(path, of_the_tests + read(path))
    sh("podman", "load", "-q", "-i", image.build())
    (block,) = recipes.commands("Podman")
    start, end = lines_of(block)
    out = recipes.run(start)
    expect(out.splitlines()[0], "cni", "Podman's backend")
    expect("host port" in out, True, f"cnitool inspect shows the host port: {out}")
    for source in (node.home, node.client):
        hear(source, NODE4, 8080)
    recipes.run(end)


def run_containerd(recipes):
    """Runs the section on containerd."""
    configure, use = recipes.commands("containerd")
    # Debian's file. The one of this node's containerd is the tests'.
    write("/etc/containerd/config.toml", '[plugins."io.containerd.grpc.v1.cri".cni]\n  bin_dir = "/usr/lib/cni"\n')
    recipes.run(configure)
    expect('bin_dir = "/opt/cni/bin"' in read("/etc/containerd/config.toml"), True, "the folder in config.toml")
    Containerd()
    out = recipes.run(use)
    expect(bool(re.search(r"inet 10\.61\.0\.\d+/24", out)), True, f"the container's address: {out}")
    expect("0 attachments; nothing is left over." in out, True, f"attachments after ctr has ended: {out}")


def run_firecracker(node, recipes):
    """Runs the section on Firecracker, with a program at the tap that stands for the virtual machine."""
    recipes.files("Firecracker")
    attach, detach = recipes.commands("Firecracker")
    recipes.run(attach)
    machine = Machine(Netns("/run/netns/vm1"), "tap0", "10.64.1.2")
    machine.ping(CLIENT4)
    machine.close()
    os.close(machine.netns.file)
    recipes.run(detach)


def scenario_archive_podman_containerd_and_firecracker(node):
    """From the archive to the runtimes, and back to a node without plugins."""
    shutil.rmtree(BIN)
    # /usr is read only here.
    sh("mount", "-t", "tmpfs", "node", "/usr/local/bin")
    os.symlink("/bin/busybox", "/usr/local/bin/ping")
    readme, recipes = Page("/opt/e2e/README.md"), Page("/opt/e2e/recipes.md")
    plugins = archives()
    readme.run(readme.commands("Install")[0])
    expect(sorted(os.listdir(BIN)), sorted([".cni-install", *plugins]), "what the archive has installed")
    readme.files("Install")
    for text in readme.commands("Install")[2:]:
        readme.run(text)
    run_podman(node, recipes)
    run_containerd(recipes)
    run_firecracker(node, recipes)
    (remove,) = recipes.commands("Remove everything")
    recipes.run(remove)
    expect(os.listdir(BIN), [], "what is in the folder of plugins after the removal")
    links = [link["ifname"] for link in json.loads(sh("ip", "-j", "link"))]
    expect(links, ["lo", "eth0"], "links after the removal")
