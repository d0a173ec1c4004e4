"""The DaemonSet of docs/kubernetes/daemonset-gc.yaml: its container beside a real containerd, run by Podman as the manifest says."""

import json
import os
import re
import time

import cri
import networks
import podman
from node import BIN, OURS, expect, read, sh, wait


def arguments():
    """The manifest as arguments of podman run, with the folders and files that kubelet makes, and the command."""
    text = read("/opt/e2e/daemonset-gc.yaml")
    volumes = dict(re.findall(r"- name: (\S+)\n +hostPath: { path: (\S+), type: \S+ }", text))
    mounts = re.findall(r"- { name: (\S+), mountPath: ([^ ,]+)(, readOnly: true)?(, mountPropagation: HostToContainer)? }", text)
    expect(sorted({mount[0] for mount in mounts}), sorted(volumes), "volumes of the manifest")
    words = ["--network", "host", "--pid", "host", "--read-only", "--read-only-tmpfs=false", "--cap-drop", "all"]
    for capability in json.loads(re.search(r"add: (\[.*\])", text)[1]):
        words += ["--cap-add", capability]
    for name, value in re.findall(r"- { name: (\S+), value: (\S+) }", text):
        words += ["-e", f"{name}={value}"]
    for name, path, read_only, slave in mounts:
        if f"path: {volumes[name]}, type: File" in text:
            open(volumes[name], "a", encoding="utf-8").close()
        else:
            os.makedirs(volumes[name], exist_ok=True)
        options = ["ro"] * bool(read_only) + ["rslave" if slave else "rprivate"]
        words += ["-v", f"{volumes[name]}:{path}:{','.join(options)}"]
    return words, json.loads(re.search(r"command: (\[.*\])", text)[1])


def lose(name):
    """Attaches a container that the runtime does not know."""
    sh("ip", "netns", "add", name)
    sh(f"{OURS}/cnitool", "add", "pods", f"/run/netns/{name}", "--container-id", name, CNI_PATH=BIN)


def scenario_the_container_of_the_daemonset_removes_what_a_storm_has_left(node):
    """It asks the containerd of the node, also a restarted one, enters namespaces that are newer than itself, and ends at SIGTERM."""
    # As systemd has it.
    sh("mount", "--make-rshared", "/")
    podman.start(node, "crun")
    podman.build_image()
    runtime = cri.start(node, networks.bridge(six=True), networks.portmap(), networks.firewall(), networks.tuning())
    kept = [runtime.run_pod(f"kept{each}", ("tcp", 80, 8000 + each, "")) for each in range(3)]
    in_use = node.leftovers()
    failed = cri.kill_among_adds(runtime, 50, 20)
    runtime.start()
    for identifier in set(runtime.pods()) - set(kept):
        runtime.stop_pod(identifier)
        runtime.remove_pod(identifier)
    # containerd knows most pods of the storm again. It never knew these: some are gone, some exist.
    for number in range(6):
        lose(f"lost{number}")
    for number in range(3):
        sh("ip", "netns", "delete", f"lost{number}")
    before = len(cri.left_of_attachments(node, in_use))

    words, command = arguments()
    # Nothing here is ten minutes old.
    command = [{"600": "1"}.get(word, word) for word in command] + ["--min-age", "0"]
    podman.podman("run", "-d", "--name", "gc", *words, "--entrypoint", command[0], "localhost/cni-plugins", *command[1:])
    wait(lambda: not cri.left_of_attachments(node, in_use), "the first run")

    # A new socket, and a namespace that is made after the container.
    runtime.kill()
    time.sleep(2)
    runtime.start()
    lose("newer")
    for name in ["lost3", "newer"]:
        wait(lambda: len(json.loads(sh("ip", "-n", name, "-j", "link"))) == 1, f"the run that removes the link of {name}")
    wait(lambda: not cri.left_of_attachments(node, in_use), "the run after the restart")
    for number, identifier in enumerate(kept):
        node.prove(runtime.pod(identifier), 8000 + number, families=(4, 6))
    log = podman.podman("logs", "gc")
    began = time.monotonic()
    podman.podman("stop", "-t", "30", "gc")
    expect(time.monotonic() - began < 5, True, "SIGTERM ends it at once")
    expect(podman.podman("inspect", "--format", "{{.State.ExitCode}}", "gc"), "0", f"its status, after the log\n{log}")
    podman.podman("rm", "gc")
    cri.finish(runtime, *runtime.pods())
    # Also those of pods that containerd has forgotten.
    sh("ip", "-all", "netns", "delete")
    expect(failed > 0 and before > 20, True, f"{failed} of the ADDs were cut off, and {before} things are left")
    return f"nothing; {failed} of 50 were cut off, {before} things went with the DaemonSet"
