//! `SHA256SUMS`, the list of programs to install. Each accepted name is a plain file name other
//! than `SHA256SUMS`, and no name occurs twice. An accepted list that is written again is read
//! unchanged.

use std::collections::BTreeSet;
use std::path::{Component, Path};

use cni_install::set::{SUMS, parse, text};

/// Runs the target with one input.
pub(crate) fn run(data: &[u8]) {
    let Ok(programs) = parse(&String::from_utf8_lossy(data)) else { return };
    let mut names = BTreeSet::new();
    for program in &programs {
        let path = Path::new(&program.name);
        let mut components = path.components();
        assert!(
            matches!(components.next(), Some(Component::Normal(name)) if name == path) && components.next().is_none(),
            "not a plain file name: {program:?}"
        );
        assert!(
            !program.name.starts_with('.') && program.name.len() <= 255 && program.name != SUMS,
            "invalid name: {program:?}"
        );
        assert!(program.name.bytes().all(|byte| byte.is_ascii_graphic()), "invalid character: {program:?}");
        assert_eq!(program.sum.len(), 64, "the length of the sum of {program:?}");
        assert!(names.insert(&program.name), "{program:?} twice");
    }
    assert_eq!(parse(&text(&programs)), Ok(programs));
}
