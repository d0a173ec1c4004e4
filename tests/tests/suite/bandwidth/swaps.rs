//! Limits that one implementation adds, and the other one checks, replaces and deletes.

use cni_testkit::{Attachment, Node, bin_dir, go_bin_dir, probe, require};
use serde_json::json;

use super::world::{both, config, ifbs, pod, unplug};

#[test]
fn what_one_side_added_the_other_checks_and_deletes() {
    require!(probe::go_plugins());
    let node = Node::new();
    let (ours, go) = (bin_dir(), go_bin_dir());
    let numbers =
        [(8, 8), (16, 8), (8000, 80), (12_345_678, 1_234_567), (999_999_999, 77_777_777), (40_000_000_001, 3_000_017)];
    let numbers = numbers.into_iter().chain([(100_000_000_000_u64, 4_294_967_295_u64)]);
    for (number, (rate, burst)) in numbers.enumerate() {
        let host = format!("host{number}");
        let (container, prev) = pod(&node, &host);
        let limits = json!({"ingressRate": rate, "ingressBurst": burst, "egressRate": rate, "egressBurst": burst});
        let attachment = Attachment::new(&node, &container, config(limits));
        for (adds, deletes) in [(&ours, &go), (&go, &ours)] {
            let result = attachment.clone().by(adds).add_after(&prev).success();
            attachment.clone().by(deletes).check(&result).success();
            attachment.clone().by(adds).check(&result).success();
            attachment.clone().by(deletes).del_with(&result).success();
            assert_eq!(ifbs(&node), [""; 0]);
            for place in ["root", "ingress"] {
                node.exec(&["tc", "qdisc", "del", "dev", &host, place]);
            }
        }
        unplug(&node, &host);
    }
}

#[test]
fn limits_of_go_are_replaced_and_their_overflow_accepted() {
    require!(probe::go_plugins());
    let node = Node::new();
    let (container, prev) = pod(&node, "host0");
    let attachment = Attachment::new(&node, &container, config(both()));
    attachment.clone().by(go_bin_dir()).add_after(&prev).success();
    let result = attachment.add_after(&prev).success();
    attachment.check(&result).success();
    attachment.del().success();
    unplug(&node, "host0");
    let (container, prev) = pod(&node, "host1");
    let limits = json!({"egressRate": 10_000_000, "egressBurst": 34_359_738_359_u64});
    let attachment = Attachment::new(&node, &container, config(limits));
    let result = attachment.clone().by(go_bin_dir()).add_after(&prev).success();
    attachment.check(&result).success();
    attachment.del_with(&result).success();
    unplug(&node, "host1");
}
