//! Tests that the plans cost no more than the number of addresses. The rules are tested through the
//! plugin.

use super::*;
use crate::iptables::Table;
use cni::AttachmentId;
use cni::config::ValidAttachments;
use cni_linux::route::Family;

/// Returns the chains with the rules of this many addresses, each of a container of its own.
fn accepted(addresses: &[OwnedAddress]) -> String {
    let mut saved = format!(":{CNI_FORWARD} - [0:0]\n:{OWNERS} - [0:0]\n:{STAGE_1} - [0:0]\n");
    for owned in addresses {
        for rule in accept_rules(owned.address) {
            saved += &format!("-A {CNI_FORWARD} {}\n", rule.join(" "));
        }
        saved += &format!("-A {OWNERS} {}\n", record_rule(owned).join(" "));
    }
    saved
}

/// Returns this many addresses. `container` is that of each, from its number.
fn addresses(count: usize, container: impl Fn(usize) -> String) -> Vec<OwnedAddress> {
    let address = |i: usize| IpAddr::from([10, 1, u8::try_from(i / 250).unwrap(), u8::try_from(i % 250).unwrap()]);
    (0..count).map(|i| OwnedAddress::open(&format!("cni:net/{}/eth0", container(i)), address(i))).collect()
}

#[test]
fn gc_takes_time_in_proportion_to_the_addresses() {
    let sizes = [200, 800].map(|count| addresses(count, |i| format!("c{i}")));
    let [few, many] = sizes.each_ref().map(|addresses| accepted(addresses));
    let plan = |saved: &str, count: usize, valid: &[OwnedAddress]| {
        let containers: ValidAttachments = (0..valid.len()).map(|i| (format!("c{i}"), "eth0")).collect();
        let garbage = AttachmentFilter::Garbage { network: "net", valid: &containers };
        let edit = purge(&mut Chains::of_text(Table::Filter, Family::V4, saved), garbage, &Vec::new).unwrap();
        assert_eq!(edit.deleted.len(), 3 * (count - valid.len()));
    };
    cni_testkit::assert_cost_below(8, || plan(&few, 200, &[]), || plan(&many, 800, &[]));
    cni_testkit::assert_cost_below(8, || plan(&few, 200, &sizes[0]), || plan(&many, 800, &sizes[1]));
}

#[test]
fn add_and_del_take_time_in_proportion_to_the_addresses() {
    let sizes = [200, 800].map(|count| addresses(count, |_| "c".to_owned()));
    let [few, many] = sizes.each_ref().map(|addresses| accepted(addresses));
    let attachment = AttachmentId::new("net", "c", "eth0");
    let del = |saved: &str, addresses: &[OwnedAddress]| {
        let ips: Vec<IpAddr> = addresses.iter().map(|owned| owned.address).collect();
        let filter = AttachmentFilter::for_del(&attachment, &ips);
        let edit = purge(&mut Chains::of_text(Table::Filter, Family::V4, saved), filter, &Vec::new).unwrap();
        assert_eq!(edit.deleted.len(), 3 * addresses.len());
    };
    cni_testkit::assert_cost_below(8, || del(&few, &sizes[0]), || del(&many, &sizes[1]));
    let add = |saved: &str, addresses: &[OwnedAddress]| {
        let mut filter = Chains::of_text(Table::Filter, Family::V4, saved);
        let rules = ForwardRules {
            attachment: attachment.clone(),
            addresses: addresses.iter().map(|owned| owned.address).collect(),
            ingress: Ingress::Open,
            accepts_redirected: false,
            egress: None,
            iptables_admin_chain: ADMIN.to_owned(),
            nftables_admin_chain: None,
        };
        let edit = ensure(&mut filter, &rules, &mut Written::default()).unwrap();
        assert!(edit.deleted.is_empty() && !edit.rules.iter().any(|added| added.chain == OWNERS));
    };
    cni_testkit::assert_cost_below(8, || add(&few, &sizes[0]), || add(&many, &sizes[1]));
}
