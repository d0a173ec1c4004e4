"""Calls plugins as containerd 2 and CRI-O do, through their libcni: order, environment, and what is put into stdin.

Those releases are not in Debian, so this stands for them. The attachments that it remembers are the runtime's cache.
"""

import json
import os
import subprocess

from node import BIN, Failed


# What the callers of libcni put into CNI_ARGS.
KUBERNETES = "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={name};K8S_POD_INFRA_CONTAINER_ID={name}"
NOMAD = (
    "IgnoreUnknown=true;NOMAD_REGION=global;NOMAD_NAMESPACE=default;NOMAD_JOB_ID=web;NOMAD_GROUP_NAME=front;NOMAD_ALLOC_ID={name}"
)


class Refused(Failed):
    """A plugin's error: `code` is the specification's."""

    def __init__(self, verb, plugin, code, message):
        super().__init__(f"{verb} of {plugin}: code {code}: {message}")
        self.code = code


class Libcni:
    """One network list, and what its interface is called in every container."""

    def __init__(self, conf, ifname="eth0", args=KUBERNETES):
        self.conf, self.ifname, self.args = conf, ifname, args
        self.attachments = {}

    def version(self):
        return tuple(map(int, self.conf["cniVersion"].split(".")))

    def execute(self, verb, plugin, attachment=None, **injected):
        """One plugin. Variables that a verb does not use are in the environment, and empty."""
        attachment = attachment or {"id": "", "netns": "", "ifname": "", "args": ""}
        env = {
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": attachment["id"],
            "CNI_NETNS": attachment["netns"],
            "CNI_IFNAME": attachment["ifname"],
            "CNI_ARGS": attachment["args"],
            "CNI_PATH": BIN,
        }
        conf = {**plugin, "name": self.conf["name"], "cniVersion": self.conf["cniVersion"], **injected}
        capabilities = conf.pop("capabilities", {})
        if "ports" in attachment and capabilities.get("portMappings") and attachment["ports"]:
            conf["runtimeConfig"] = {"portMappings": attachment["ports"]}
        done = subprocess.run(
            [f"{BIN}/{plugin['type']}"],
            input=json.dumps(conf),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, **env},
        )
        if done.returncode != 0:
            error = json.loads(done.stdout or "{}")
            raise Refused(verb, plugin["type"], error.get("code"), error.get("msg", done.stderr))
        return json.loads(done.stdout or "null")

    def add(self, name, netns, ports=()):
        """ADD in order, each with the result of the one before. A list that fails gets a DEL, as from the runtimes."""
        args = self.args.format(name=name)
        attachment = {"id": name, "netns": netns, "ifname": self.ifname, "args": args, "ports": list(ports), "result": None}
        try:
            for plugin in self.conf["plugins"]:
                before = {"prevResult": attachment["result"]} if attachment["result"] else {}
                attachment["result"] = self.execute("ADD", plugin, attachment, **before)
        except Refused:
            self.attachments[name] = attachment
            self.delete(name)
            raise
        self.attachments[name] = attachment
        return attachment["result"]

    def before(self, attachment):
        """The result that CHECK, and from 0.4.0 on DEL, are given."""
        return {"prevResult": attachment["result"]} if attachment["result"] and self.version() >= (0, 4, 0) else {}

    def check(self, name):
        attachment = self.attachments[name]
        for plugin in self.conf["plugins"]:
            self.execute("CHECK", plugin, attachment, **self.before(attachment))

    def delete(self, name, netns=None):
        attachment = self.attachments[name]
        if netns is not None:
            attachment = {**attachment, "netns": netns}
        for plugin in reversed(self.conf["plugins"]):
            self.execute("DEL", plugin, attachment, **self.before(attachment))
        del self.attachments[name]

    def status(self):
        """Asked every 5 s by kubelet, through the runtime; only plugins of 1.1.0 know it."""
        if self.version() >= (1, 1, 0):
            for plugin in self.conf["plugins"]:
                self.execute("STATUS", plugin)

    def gc(self, *valid):
        """A DEL for each remembered attachment that is not valid, then GC in order, with what is valid."""
        for name in [name for name in self.attachments if name not in valid]:
            self.delete(name)
        if self.version() >= (1, 1, 0):
            named = [{"containerID": name, "ifname": self.ifname} for name in valid]
            for plugin in self.conf["plugins"]:
                self.execute("GC", plugin, **{"cni.dev/valid-attachments": named, "cni.dev/attachments": named})
