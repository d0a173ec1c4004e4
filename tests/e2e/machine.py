"""A program that opens a tap as a virtual machine does: it answers ARP, and sends echo requests."""

import fcntl
import os
import select
import socket
import struct
import time

from node import Failed

TUNSETIFF, SIOCGIFHWADDR = 0x400454CA, 0x8927
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x2, 0x1000, 0x4000
# The virtio header before each frame: no offload.
HEADER = bytes(10)
MAC = bytes.fromhex("02000a400102")
BROADCAST = b"\xff" * 6
ARP, IPV4 = b"\x08\x06", b"\x08\x00"


def checksum(content):
    total = sum(struct.unpack(f"!{len(content) // 2}H", content))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", ~total & 0xFFFF)


class Machine:
    """The virtual machine at a tap in that namespace, with that address."""

    def __init__(self, netns, tap, address):
        self.netns, self.address = netns, socket.inet_aton(address)
        with netns:
            # The namespace in which the device is opened is the one of its interfaces.
            self.file = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
            fcntl.ioctl(self.file, TUNSETIFF, struct.pack("16sH22x", tap.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
            with socket.socket() as query:
                request = fcntl.ioctl(query, SIOCGIFHWADDR, struct.pack("16s24x", tap.encode()))
        # The gateway's MAC, which is the tap's.
        self.gateway = request[18:24]

    def send(self, to, kind, content):
        os.write(self.file, HEADER + to + MAC + kind + content)

    def ping(self, to):
        """Sends an echo request each second until one is answered."""
        deadline = time.monotonic() + 10
        to = socket.inet_aton(to)
        while time.monotonic() < deadline:
            echo = struct.pack("!BxHHH", 8, 0, 1, 1)
            echo = echo[:2] + checksum(echo) + echo[4:]
            packet = struct.pack("!BBHHHBBH", 0x45, 0, 28, 0, 0, 64, 1, 0) + self.address + to
            packet = packet[:10] + checksum(packet) + packet[12:] + echo
            self.send(self.gateway, IPV4, packet)
            if self.is_answered(to):
                return
        raise Failed(f"no answer to the pings of the machine at {socket.inet_ntoa(self.address)}")

    def is_answered(self, by):
        """Answers ARP for a second, or until the echo's answer comes."""
        until = time.monotonic() + 1
        while select.select([self.file], [], [], max(0, until - time.monotonic()))[0]:
            frame = os.read(self.file, 2048)[len(HEADER) :]
            kind, content = frame[12:14], frame[14:]
            if kind == ARP and content[6:8] == b"\0\1" and content[24:28] == self.address:
                reply = content[:6] + b"\0\2" + MAC + self.address + content[8:18]
                self.send(frame[6:12], ARP, reply)
            if kind == IPV4 and content[9] == 1 and content[12:16] == by and content[20] == 0:
                return True
        return False

    def close(self):
        os.close(self.file)
