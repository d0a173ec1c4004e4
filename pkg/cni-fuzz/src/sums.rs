//! `SHA256SUMS`, the list of a set of programs to be installed. Every name in what is read is a
//! plain file name, of a file beside the list that is not the list itself, and no name is there
//! twice; the list that is written from it is read as the same.

use std::collections::BTreeSet;
use std::path::{Component, Path};

use cni_install::set::{SUMS, parse, text};

/// The target.
pub fn run(data: &[u8]) {
    let Ok(programs) = parse(&String::from_utf8_lossy(data)) else { return };
    let mut names = BTreeSet::new();
    for program in &programs {
        let path = Path::new(&program.name);
        let mut components = path.components();
        assert!(
            matches!(components.next(), Some(Component::Normal(name)) if name == path) && components.next().is_none()
        );
        assert!(!program.name.starts_with('.') && program.name.len() <= 255 && program.name != SUMS, "{program:?}");
        assert!(program.name.bytes().all(|byte| byte.is_ascii_graphic()), "{program:?}");
        assert_eq!(program.sum.len(), 64);
        assert!(names.insert(&program.name), "{program:?} twice");
    }
    assert_eq!(parse(&text(&programs)), Ok(programs));
}
