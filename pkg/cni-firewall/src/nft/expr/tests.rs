//! Tests of the expressions that match prefixes and interface names.

use super::build::{equal, payload};
use super::*;

#[test]
fn a_prefix_becomes_a_mask_or_a_shorter_load() {
    let exprs = masked(daddr("10.1.2.3".parse().unwrap()), 20);
    assert_eq!(exprs[1], Expr::Bitwise { reg: Reg::R1, mask: vec![255, 255, 240, 0], xor: vec![0; 4] });
    assert_eq!(exprs[2], Expr::Cmp { op: CmpOp::EQ, reg: Reg::R1, data: vec![10, 1, 0, 0] });
    assert_eq!(masked(daddr("10.1.2.3".parse().unwrap()), 32), daddr("10.1.2.3".parse().unwrap()));
    let whole_bytes = equal(payload(Base::NETWORK, 24, 6), vec![0xfd, 0, 0, 0, 0, 0]);
    assert_eq!(masked(daddr("fd00::1".parse().unwrap()), 48), whole_bytes);
    let everything = masked(daddr("fd00::1".parse().unwrap()), 0);
    assert_eq!(everything[1], Expr::Bitwise { reg: Reg::R1, mask: vec![0; 16], xor: vec![0; 16] });
}

#[test]
fn an_interface_name_is_compared_whole() {
    let exprs = iifname("veth0").unwrap();
    assert_eq!(exprs[1], Expr::Cmp { op: CmpOp::EQ, reg: Reg::R1, data: b"veth0\0\0\0\0\0\0\0\0\0\0\0".to_vec() });
    assert_eq!(iifname_of(&exprs).as_deref(), Some("veth0"));
    assert_eq!(iifname_of(&iifname("exactly15bytes_").unwrap()).as_deref(), Some("exactly15bytes_"));
    assert_eq!(iifname("sixteen_bytes_xx"), None);
}
