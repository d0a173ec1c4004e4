use super::*;
use proptest::collection::vec;
use proptest::prelude::*;

fn conf(subnet: &str, start: &str, end: &str, gateway: &str) -> RangeConf {
    let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    RangeConf { subnet: text(subnet), range_start: text(start), range_end: text(end), gateway: text(gateway) }
}

fn refusal(subnet: &str, start: &str, end: &str) -> String {
    let error = conf(subnet, start, end, "").check().unwrap_err();
    assert_eq!(error.code(), cni::Code::INVALID_CONFIG);
    error.msg().to_owned()
}

fn sets(text: &[&[&str]]) -> Vec<Vec<RangeConf>> {
    text.iter().map(|set| set.iter().map(|subnet| conf(subnet, "", "", "")).collect()).collect()
}

fn check(text: &[&[&str]]) -> Result<RangeSets> {
    RangeSets::check(&[], &RangeConf::default(), &sets(text))
}

#[test]
fn a_bad_range_is_refused_with_gos_text() {
    for (subnet, start, end, text) in [
        ("", "", "", "IP <nil> not v4 nor v6"),
        ("10.0.0.0", "", "", "invalid CIDR address: 10.0.0.0"),
        ("10.0.0.0/31", "", "", "Network 10.0.0.0/31 too small to allocate from"),
        ("fd00::/127", "", "", "Network fd00::/127 too small to allocate from"),
        (
            "10.0.0.3/24",
            "",
            "",
            "Network has host bits set. For a subnet mask of length 24 the network address is 10.0.0.0",
        ),
        ("10.0.0.0/24", "10.0.1.2", "", "RangeStart 10.0.1.2 not in network 10.0.0.0/24"),
        ("10.0.0.0/24", "fd00::1", "", "RangeStart fd00::1 not in network 10.0.0.0/24"),
        ("10.0.0.0/24", "", "10.0.1.10", "RangeEnd 10.0.1.10 not in network 10.0.0.0/24"),
        ("10.0.0.0/24", "10.0.0.20", "10.0.0.10", "RangeStart 10.0.0.20 not in network 10.0.0.0/24"),
        ("10.0.0.0/24", "x", "", "invalid IP address: x"),
        ("10.0.0.0/24", "010.0.0.1", "", "invalid IP address: 010.0.0.1"),
    ] {
        assert_eq!(refusal(subnet, start, end), text);
    }
}

#[test]
fn defaults_exclude_the_network_and_ipv4_broadcast_address() {
    let v4 = conf("10.0.0.0/24", "", "", "").check().unwrap();
    assert_eq!((v4.to_string(), v4.gateway().to_string()), ("10.0.0.1-10.0.0.254".into(), "10.0.0.1".into()));
    let v6 = conf("fd00::/64", "", "", "").check().unwrap();
    assert_eq!(v6.to_string(), "fd00::1-fd00::ffff:ffff:ffff:ffff");
    let odd = conf("10.0.0.0/24", "10.0.0.0", "10.0.0.255", "10.99.9.9").check().unwrap();
    assert_eq!((odd.to_string(), odd.gateway().to_string()), ("10.0.0.0-10.0.0.255".into(), "10.99.9.9".into()));
    assert_eq!(conf("10.0.0.0/24", "::ffff:10.0.0.7", "", "").check().unwrap().first().to_string(), "10.0.0.7");
}

#[test]
fn bad_sets_are_refused_with_gos_text() {
    for (text, msg) in [
        (&[&[][..]][..], "invalid range set 0: empty range set"),
        (&[&["10.0.0.0/24", "fd00::/64"]], "invalid range set 0: mixed address families"),
        (
            &[&["10.0.0.0/24"], &["10.1.0.0/24", "10.1.0.0/25"]],
            "invalid range set 1: subnets 10.1.0.1-10.1.0.254 and 10.1.0.1-10.1.0.126 overlap",
        ),
        (&[], "no IP ranges specified"),
    ] {
        assert_eq!(check(text).unwrap_err().msg(), msg);
    }
    let overlapping = check(&[&["10.0.0.0/24"], &["10.2.0.0/24"], &["10.0.0.0/25"]]).unwrap();
    assert_eq!(overlapping.require_disjoint().unwrap_err().msg(), "range set 0 overlaps with 2");
}

proptest! {
    /// The search in sorted ranges names the pair that comparing each range with each finds first.
    #[test]
    fn the_first_overlapping_pair_is_named(all in vec(vec((any::<bool>(), 0u8..40, 0u8..5), 1..4), 1..6)) {
        let conf = |(v4, first, more): &(bool, u8, u8)| {
            let base = if *v4 { "10.0.0." } else { "fd00::" };
            let [first, last] = [*first, *first + *more].map(|host| match v4 {
                true => format!("{base}{host}"),
                false => format!("{base}{host:x}"),
            });
            conf(if *v4 { "10.0.0.0/24" } else { "fd00::/64" }, &first, &last, "")
        };
        let confs: Vec<Vec<RangeConf>> = all.iter().map(|set| set.iter().map(conf).collect()).collect();
        let mut sets = Vec::new();
        for confs in &confs {
            let ranges: Vec<Range> = confs.iter().map(|conf| conf.check().unwrap()).collect();
            let mut pairs = ranges.iter().enumerate().flat_map(|(at, one)| ranges[at + 1..].iter().map(move |other| (one, other)));
            let one_family = ranges.iter().all(|range| range.first.is_ipv4() == ranges[0].first.is_ipv4());
            let expected = pairs.find(|(one, other)| one.overlaps(other)).map(|(one, other)| format!("subnets {one} and {other} overlap"));
            match RangeSet::check(confs) {
                Ok(set) => {
                    prop_assert_eq!(expected, None);
                    sets.push(set);
                }
                Err(error) if one_family => prop_assert_eq!(Some(error.msg()), expected.as_deref()),
                Err(error) => prop_assert_eq!(error.msg(), "mixed address families"),
            }
        }
        let pairs = (0..sets.len()).flat_map(|i| (i + 1..sets.len()).map(move |j| (i, j)));
        let share = |(i, j): &(usize, usize)| sets[*i].0.iter().any(|one| sets[*j].0.iter().any(|other| one.overlaps(other)));
        let expected = pairs.into_iter().find(share).map(|(i, j)| format!("range set {i} overlaps with {j}"));
        let found = RangeSets(sets.clone()).require_disjoint().err();
        prop_assert_eq!(found.as_ref().map(|error| error.msg()), expected.as_deref());
    }
}

#[test]
fn the_cost_of_many_ranges_is_not_quadratic() {
    let range = |n: usize| conf(&format!("10.{}.{}.{}/30", n >> 14, n >> 6 & 255, n << 2 & 255), "", "", "");
    let confs: Vec<RangeConf> = (0..6000).map(range).collect();
    let check = |confs: &[RangeConf]| {
        let set = RangeSet::check(confs).unwrap();
        assert_eq!(set.capacity(), confs.len() as u128);
        let apart = set.0.iter().map(|range| RangeSet(vec![range.clone()]));
        assert!(RangeSets(apart.collect()).require_disjoint().is_ok());
    };
    // 4 times as many: 16 times the work if each were compared with each.
    cni_testkit::assert_cost_below(8, || check(&confs[..1500]), || check(&confs));
}

#[test]
fn two_ranges_of_one_subnet_may_share_it_if_they_do_not_overlap() {
    let halves =
        [conf("10.0.0.0/24", "10.0.0.10", "10.0.0.20", ""), conf("10.0.0.0/24", "10.0.0.21", "10.0.0.30", "10.0.0.15")];
    let set = RangeSet::check(&halves).unwrap();
    assert_eq!(set.to_string(), "10.0.0.10-10.0.0.20,10.0.0.21-10.0.0.30");
    assert_eq!((set.capacity(), set.inner_gateways().len()), (20, 1), "only the second gateway is inside");
}

#[test]
fn runtime_ranges_come_first_then_the_single_one() {
    let (runtime, ranges) = (sets(&[&["10.3.0.0/24"]]), sets(&[&["10.5.0.0/24"]]));
    let all = RangeSets::check(&runtime, &conf("10.4.0.0/24", "", "", ""), &ranges).unwrap();
    let order: Vec<String> = all.sets().iter().map(|set| set.ranges()[0].subnet().to_string()).collect();
    assert_eq!(order, ["10.3.0.0/24", "10.4.0.0/24", "10.5.0.0/24"]);
    assert!(RangeSets::check(&[], &conf("", "10.0.0.1", "", ""), &[]).is_err(), "no subnet: ignored");
}

#[test]
fn old_versions_have_one_address_per_family() {
    let both = check(&[&["10.0.0.0/24"], &["fd00::/64"]]).unwrap();
    assert!(both.require_one_per_family("0.2.0").is_ok());
    let two = check(&[&["10.0.0.0/24"], &["10.1.0.0/24"]]).unwrap();
    let error = two.require_one_per_family("0.2.0").unwrap_err();
    assert_eq!(error.msg(), "CNI version 0.2.0 does not support more than 1 address per family");
}

#[test]
fn the_capacity_of_the_whole_internet_does_not_overflow() {
    let all = RangeSet::check(&[conf("::/0", "::", "", "")]).unwrap();
    assert_eq!(all.capacity(), u128::MAX - 1);
    assert_eq!(RangeSet::check(&[conf("0.0.0.0/0", "", "", "")]).unwrap().capacity(), (1 << 32) - 3);
}
