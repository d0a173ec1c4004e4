"""The image of every pod: a docker archive of one layer, made of busybox alone.

A pod says its name ($NAME, else its host name) to each client of port 80, and says back what it hears on port 7.
"""

import hashlib
import io
import json
import platform
import subprocess
import tarfile

NAME = "localhost/pod:1"
PATH = "/tmp/pod.tar"
SERVE = "#!/bin/sh\nnc -ll -p 7 -e cat &\nexec nc -ll -p 80 -e answer\n"
ANSWER = "#!/bin/sh\nexec echo ${NAME:-$(hostname)}\n"


def put(archive, name, content, mode=0o755):
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))


def build():
    """Writes the archive and returns its path."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        # /usr/bin/busybox of busybox-static, which the packages bring.
        with open("/bin/busybox", "rb") as program:
            put(archive, "bin/busybox", program.read())
        for name in subprocess.check_output(["/bin/busybox", "--list"], text=True).split():
            if name != "busybox":
                entry = tarfile.TarInfo(f"bin/{name}")
                entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
                archive.addfile(entry)
        put(archive, "bin/serve", SERVE.encode())
        put(archive, "bin/answer", ANSWER.encode())
        put(archive, "etc/passwd", b"root:x:0:0:root:/:/bin/sh\n", 0o644)
    layer = layer.getvalue()
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Cmd": ["/bin/serve"], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]},
    }
    config = json.dumps(config).encode()
    digest = hashlib.sha256(config).hexdigest()
    manifest = json.dumps([{"Config": f"{digest}.json", "RepoTags": [NAME], "Layers": ["layer.tar"]}]).encode()
    with tarfile.open(PATH, "w") as archive:
        put(archive, "layer.tar", layer)
        put(archive, f"{digest}.json", config)
        put(archive, "manifest.json", manifest)
    return PATH
