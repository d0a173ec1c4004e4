//! Creates TAP interfaces: Ethernet links whose other end is a program.
//!
//! Until [`Tap::keep`] makes a tap persistent, it exists only while its device file is open: the
//! kernel removes the tap if this process is killed. Owner, group and the number of queues are set
//! here. The program that attaches to the tap later chooses packet information and the virtio
//! header itself.

use std::fs::{File, OpenOptions};
use std::io;

use crate::error::{Error, Result};
use crate::netns::Netns;
use crate::sys::{self, TunSetting};

/// The device file. A program opens it and attaches the open file to a tap.
const DEVICE: &str = "/dev/net/tun";

/// How many open device files can be attached to a tap at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Queues {
    /// One.
    #[default]
    One,
    /// Several, each with the flag `IFF_MULTI_QUEUE`.
    Several,
}

/// The properties of a tap to create.
#[derive(Clone, Copy, Debug)]
pub struct TapSpec<'a> {
    /// The name.
    pub name: &'a str,
    /// The ID of the only user whose programs may attach to the tap; `None` for any user. Owner and
    /// group do not restrict a program with CAP_NET_ADMIN in the network namespace.
    pub owner: Option<u32>,
    /// The ID of the only group whose members may attach; `None` for any group. If `owner` is set
    /// too, a program must meet both conditions.
    pub group: Option<u32>,
    /// How many open device files can be attached at once.
    pub queues: Queues,
}

/// A tap. The kernel removes it when this value is dropped, unless [`keep`](Tap::keep) was called.
#[derive(Debug)]
pub struct Tap {
    device: File,
    name: String,
}

impl Tap {
    /// Creates a tap in `netns`, down, with a random hardware address and the virtio header.
    ///
    /// # Errors
    /// [`Error::is_exists`] if any interface has this name.
    pub fn create(netns: &Netns, spec: &TapSpec<'_>) -> Result<Tap> {
        netns
            .run(|| create(spec))?
            .map_err(|error| Error::new(format_args!("failed to create tap {}", spec.name), error))
    }

    /// Makes the tap persistent: it stays when this value is dropped.
    ///
    /// # Errors
    /// The kernel refuses the change.
    pub fn keep(&self) -> Result<()> {
        sys::set_tun(&self.device, TunSetting::Persist, 1)
            .map_err(|error| Error::new(format_args!("failed to make tap {} persistent", self.name), error))
    }
}

/// Checks that taps can be created.
///
/// # Errors
/// The device file cannot be opened.
pub fn probe() -> Result<()> {
    open().map(drop).map_err(|error| Error::new(format_args!("failed to open {DEVICE}"), error))
}

/// Opens the device file, which creates nothing yet.
fn open() -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(DEVICE)
}

/// Creates a tap in the calling thread's namespace. Fails with EEXIST if the name is in use.
fn create(spec: &TapSpec<'_>) -> io::Result<Tap> {
    let device = open()?;
    let queues = if spec.queues == Queues::Several { libc::IFF_MULTI_QUEUE } else { 0 };
    // IFF_TUN_EXCL: otherwise the kernel would attach to an existing tap with this name.
    // IFF_NO_CARRIER: the tap has no carrier until a program attaches to it. Kernels before 6.2
    // ignore this flag: the tap has a carrier while this process has it open, and up to a second
    // longer.
    let creation = libc::IFF_TUN_EXCL | libc::IFF_NO_CARRIER;
    // Frames without packet information, but with the virtio header.
    let frames = libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    let flags = libc::IFF_TAP | frames | creation | queues;
    sys::create_tun(&device, spec.name, flags).map_err(|error| match error.raw_os_error() {
        // With IFF_TUN_EXCL, EBUSY means that the name is in use.
        Some(libc::EBUSY) => io::Error::from_raw_os_error(libc::EEXIST),
        _ => error,
    })?;
    for (setting, value) in [(TunSetting::Owner, spec.owner), (TunSetting::Group, spec.group)] {
        if let Some(value) = value {
            sys::set_tun(&device, setting, value)?;
        }
    }
    Ok(Tap { device, name: spec.name.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Netlink;
    use crate::testing::{in_new_netns, new_netns, output};

    const SPEC: TapSpec<'_> = TapSpec { name: "tap0", owner: None, group: None, queues: Queues::One };

    #[test]
    fn a_tap_stays_only_if_it_is_kept() {
        in_new_netns(|| {
            let netns = new_netns();
            let container = Netlink::open().unwrap().open_in(&netns).unwrap();
            let tap = Tap::create(&netns, &SPEC).unwrap();
            let link = container.link("tap0").unwrap();
            assert_eq!((link.kind.to_string().as_str(), link.up), ("tun", false));
            drop(tap);
            assert_eq!(container.find_link("tap0").unwrap(), None);
            Tap::create(&netns, &SPEC).unwrap().keep().unwrap();
            assert!(container.find_link("tap0").unwrap().is_some());
        });
    }

    #[test]
    fn every_property_is_read_back() {
        in_new_netns(|| {
            let spec = TapSpec { owner: Some(1), group: Some(2), queues: Queues::Several, ..SPEC };
            let _tap = Tap::create(&Netns::current().unwrap(), &spec).unwrap();
            let shown = output("ip -d link show tap0");
            for word in ["tun type tap pi off vnet_hdr on", "persist off", "multi_queue", "user daemon", "group bin"] {
                assert!(shown.contains(word), "no {word:?} in {shown}");
            }
        });
    }

    #[test]
    fn an_existing_interface_of_that_name_is_left_alone() {
        in_new_netns(|| {
            let here = Netns::current().unwrap();
            let error = Tap::create(&here, &TapSpec { name: "lo", ..SPEC }).unwrap_err();
            assert!(error.is_exists(), "{error}");
            Tap::create(&here, &SPEC).unwrap().keep().unwrap();
            let error = Tap::create(&here, &SPEC).unwrap_err();
            assert!(error.is_exists(), "{error}");
            assert!(error.to_string().starts_with("failed to create tap tap0: "), "{error}");
            assert!(Netlink::open().unwrap().find_link("tap0").unwrap().is_some());
        });
    }
}
