"""The networks that scenarios configure. Every pod subnet lies in what node.PODS matches."""


def bridge(name="cni0", six=False, **more):
    ranges = [[{"subnet": "10.88.0.0/24"}]] + ([[{"subnet": "fd00:88::/64"}]] if six else [])
    routes = [{"dst": "0.0.0.0/0"}] + ([{"dst": "::/0"}] if six else [])
    return {
        "type": "bridge",
        "bridge": name,
        "isGateway": True,
        "ipMasq": True,
        "hairpinMode": True,
        "ipam": {"type": "host-local", "ranges": ranges, "routes": routes},
        **more,
    }


def portmap(**more):
    return {"type": "portmap", "capabilities": {"portMappings": True}, **more}


SYSCTLS = {"net.core.somaxconn": "517", "net.ipv4.conf.eth0.arp_ignore": "1"}


def tuning(**more):
    return {"type": "tuning", "sysctl": SYSCTLS, **more}


def firewall():
    return {"type": "firewall"}


def bandwidth():
    """More than any scenario sends; only the objects that the limit makes matter."""
    fast = {"Rate": 10**10, "Burst": 10**9}
    return {"type": "bandwidth", **{way + key: value for way in ("ingress", "egress") for key, value in fast.items()}}
